"""A deploy runs without the POSIX modules and functions, which Windows does not have.

Windows itself was not tried. `without_posix.py` hides what it does not have, in the process and in those of runtimes.
"""

import subprocess
import sys
from pathlib import Path

HIDDEN = '''
"""Hide what Windows does not have, then run a program: python without_posix.py PROGRAM ARGUMENTS"""

import importlib.abc
import mmap
import os
import runpy
import select
import signal
import sys

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
NAMES = {
    os: (
        "sysconf", "geteuid", "getuid", "register_at_fork", "sched_getaffinity", "killpg", "O_NONBLOCK", "O_CLOEXEC",
        "fork", "forkpty", "statvfs", "mkfifo", "chown", "nice", "getloadavg", "O_NOFOLLOW", "O_DIRECTORY",
    ),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MADV_DONTNEED"),
    select: ("poll", "epoll"),
    signal: ("SIGHUP", "SIGALRM", "SIGPIPE", "SIGBUS", "SIGUSR1", "pthread_sigmask", "setitimer"),
}


class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Hide())
    for name in MODULES:
        sys.modules.pop(name, None)
    if "import torch" in open(sys.argv[1]).read():
        import torch  # its build for Linux needs some of the names below
    for module, names in NAMES.items():
        for name in names:
            vars(module).pop(name, None)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
'''
DEPLOY = """
import os, sys
from pathlib import Path

import torch
from torch import nn

import scalepoint
from scalepoint.checkpoints.paged_tensors import PagedTensors
from scalepoint.runtimes import process

shipped = process.child_command


def hidden_too(runtime):
    python, isolated, *program = shipped(runtime)
    return [python, isolated, "without_posix.py", *program]


process.child_command = hidden_too
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
data = [torch.randn(2, 3, 8, 8) for _ in range(2)]
done = scalepoint.deploy(model, data[0], data, output="out", placement="int8", progress=False)
assert done.verification.holds and done.verification.latency is not None
scalepoint.deploy(model, data[0], data, output="out", placement="int8", progress=False, force=True)
print(sorted(path.name for path in Path("out").iterdir()))
pages = PagedTensors()
weight = pages.make((4, 4))
pages.fill(weight, torch.ones(4, 4))
assert weight.sum() == 16
pages.drop(weight)
assert weight.sum() == 0
present = [name for name in ("fcntl", "resource", "termios") if name in sys.modules]
assert not present, present
assert not hasattr(os, "sysconf")
"""


def run_hidden(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "without_posix.py").write_text(HIDDEN)
    (folder / "program.py").write_text(program)
    command = [sys.executable, "without_posix.py", "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_a_deploy_needs_no_posix_module(tmp_path) -> None:
    done = run_hidden(tmp_path, DEPLOY)
    assert done.returncode == 0, done.stderr
    assert "model.onnx" in done.stdout


def test_hidden_modules_cannot_be_imported(tmp_path) -> None:
    done = run_hidden(tmp_path, "import resource")
    assert "No module named 'resource'" in done.stderr


def test_the_command_line_runs_without_posix_modules(tmp_path) -> None:
    done = run_hidden(tmp_path, "import torch; from scalepoint.cli.app import run; raise SystemExit(run(['targets']))")
    assert (done.returncode, "onnxruntime" in done.stdout) == (0, True), done.stderr
