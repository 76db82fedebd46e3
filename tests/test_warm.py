"""A process that is forked from a warm Python is to its starter what one of the usual kind is."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm import warm

SEEN = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), __name__, sys.path[0]]))
print("a word", file=sys.stderr)
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the usual kind is all there is here")


def both(*arguments: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return [subprocess.run([*start, *arguments], check=False, **options) for start in (warm(), [sys.executable])]


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_arguments_folder_environment_and_streams_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEEN)
    env = {**os.environ, "GIVEN": "here"}
    found, usual = both("-m", "program", "one", "two words", cwd=tmp_path, env=env, input="lines\n")
    assert told(found) == told(usual)
    assert '"lines\\n"' in found.stdout


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a word')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import atexit; atexit.register(print, 'done')", 0),
    ],
    ids=["a number", "a word", "a signal", "what is left to do"],
)
def test_it_ends_as_the_program_does(code: str, ends: int) -> None:
    found, usual = both("-c", code)
    assert told(found) == told(usual)
    assert found.returncode == ends


@pytest.mark.parametrize("way", [signal.SIG_DFL, signal.SIG_IGN], ids=["heeded", "ignored"])
def test_interrupts_are_heeded_where_its_starter_does(way: signal.Handlers) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    found, usual = both("-c", code, preexec_fn=lambda: signal.signal(signal.SIGINT, way))
    assert told(found) == told(usual) == (0, f"{way == signal.SIG_IGN}\n", "")


def test_an_error_ends_with_its_traceback() -> None:
    found, usual = both("-c", "1 / 0")
    assert (found.returncode, found.stdout) == (usual.returncode, usual.stdout) == (1, "")
    assert found.stderr.splitlines()[-1] == usual.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_with_its_starter_it_ends(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([*warm(), "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = int(started.stdout.readline())
        descriptor = os.pidfd_open(process)
        started.kill()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_nothing_of_the_tests_is_loaded() -> None:
    code = "import sys; print('torch' in sys.modules, [each for each in sys.modules if each.startswith('tests')])"
    done = subprocess.run([*warm(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
