"""A folder with a small model, its data and its metric, as a user has them; and the commands as child processes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scalepoint.cli.app import run
from tests.warm import warm

NETS = '''
"""A user's module."""
import sys, time
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16, 16)
    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))

class Idle(nn.Module):
    def forward(self, x):
        return torch.relu(x)

class Branching(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

def net():
    return Net(), torch.randn(2, 3, 8, 8)

def leaves():
    sys.exit(0)

def breaks():
    raise ValueError("no \\x1b[31mweights")

def batches():
    for _ in range(3):
        yield torch.randn(2, 3, 8, 8)

def same():
    made = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 8, 8, generator=made) for _ in range(3)]

def waiting(run):
    """A metric that takes long on the file, the first time."""
    if type(run).__name__ == "RuntimeModel" and not Path("judging").exists():
        Path("judging").touch()
        time.sleep(60)
    return 0.5

def wrong_shape():
    return [torch.randn(2, 5, 8, 8)]

def broken_batches():
    yield torch.randn(2, 3, 8, 8)
    raise OSError("the disk went away")

def sleeping():
    Path("started").touch()
    time.sleep(60)

class Other(Net):
    def __init__(self):
        super().__init__()
        self.head.weight.data.mul_(2)

def score(run):
    return 0.5

def holed():
    batches = same()
    batches[1][0, 0, 0, 0] = float("nan")
    return batches

def undefined(run):
    return float("nan")

def says_nothing(run):
    pass

def breaks_metric(run):
    raise ValueError("no labels")

instance = Net()
number = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with nets.py in it; what is imported from it goes with it."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("nets", "deploy"):
        sys.modules.pop(name, None)
    yield tmp_path
    for name in ("nets", "deploy"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A real deployment, made by a real process; its folder is `.folder`."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "nets.py").write_text(NETS)
    arguments = ("--data", "nets:batches", "--evaluate", "nets:score", "--max-drop", "0.1", "--json", "-o", "out")
    done = child("deploy", "nets:net", *arguments, cwd=folder, python=warm())
    done.folder = folder  # type: ignore[attr-defined]
    return done


@pytest.fixture
def made(deployed: subprocess.CompletedProcess[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the deployment in out/, as the current one."""
    monkeypatch.chdir(deployed.folder)  # type: ignore[attr-defined]
    return Path("out")


@pytest.fixture
def call(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command in this process: exit code, stdout, stderr."""

    def called(*arguments: object, trust: bool = True) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(trusting(*arguments) if trust else [str(each) for each in arguments])
        found = capsys.readouterr()
        return code, found.out, found.err

    return called


def trusting(*arguments: object) -> list[str]:
    """The arguments, with --trust where a command is given a name of a module or a config that may hold one."""
    texts = [str(each) for each in arguments]
    takes = bool(texts) and texts[0] in ("deploy", "sweep", "verify", "inspect", "compare")
    names = any(text == "-c" or re.fullmatch(r"[\w./ ]+:[\w.]+", text) for text in texts)
    return [*texts, "--trust"] if takes and names and "--trust" not in texts else texts


def child(
    *arguments: object, cwd: Path | None = None, python: Sequence[str] = (sys.executable,), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; of one that loads torch, `python` may be `warm()`."""
    return subprocess.run(
        [*python, "-m", "scalepoint.cli", *trusting(*arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        timeout=120,
        check=False,
    )
