"""A process from `tests.warm` behaves like one started with sys.executable."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm import warm

SHOW_PROCESS = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), __name__, sys.path[0]]))
print("a word", file=sys.stderr)
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="warm() is sys.executable here")


def run_both(*arguments: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return [subprocess.run([*start, *arguments], check=False, **options) for start in (warm(), [sys.executable])]


def as_tuple(process: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return process.returncode, process.stdout, process.stderr


def test_it_has_its_own_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SHOW_PROCESS)
    env = {**os.environ, "GIVEN": "here"}
    forked, usual = run_both("-m", "program", "one", "two words", cwd=tmp_path, env=env, input="lines\n")
    assert as_tuple(forked) == as_tuple(usual)
    assert '"lines\\n"' in forked.stdout


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a word')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import atexit; atexit.register(print, 'done')", 0),
    ],
    ids=["number", "message", "signal", "atexit"],
)
def test_it_has_the_exit_code_of_the_program(code: str, exit_code: int) -> None:
    forked, usual = run_both("-c", code)
    assert as_tuple(forked) == as_tuple(usual)
    assert forked.returncode == exit_code


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["handled", "ignored"])
def test_interrupts_are_handled_as_in_the_parent_process(handler: signal.Handlers) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    forked, usual = run_both("-c", code, preexec_fn=lambda: signal.signal(signal.SIGINT, handler))
    assert as_tuple(forked) == as_tuple(usual) == (0, f"{handler == signal.SIG_IGN}\n", "")


def test_an_error_ends_with_its_traceback() -> None:
    forked, usual = run_both("-c", "1 / 0")
    assert (forked.returncode, forked.stdout) == (usual.returncode, usual.stdout) == (1, "")
    assert forked.stderr.splitlines()[-1] == usual.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([*warm(), "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        process = int(started.stdout.readline())
        descriptor = os.pidfd_open(process)
        started.kill()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_nothing_of_the_tests_is_loaded() -> None:
    code = "import sys; print('torch' in sys.modules, [name for name in sys.modules if name.startswith('tests')])"
    process = subprocess.run([*warm(), "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "True []\n"
