"""A folder with the model, data and metric of a user, and helpers that run commands."""

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

def exits():
    sys.exit(0)

def raises_error():
    raise ValueError("no \\x1b[31mweights")

def batches():
    for _ in range(3):
        yield torch.randn(2, 3, 8, 8)

def fixed_batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(3)]

def slow_metric(run):
    """A metric that takes a minute on the file in the first run."""
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

def score_of_float(run):
    """A metric by which every file is worse than the float model."""
    return 1.0 if isinstance(run, nn.Module) else 0.0

def batches_with_nan():
    batches = fixed_batches()
    batches[1][0, 0, 0, 0] = float("nan")
    return batches

def nan_metric(run):
    return float("nan")

def metric_without_result(run):
    pass

def failing_metric(run):
    raise ValueError("no labels")

instance = Net()
number = 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with nets.py in it. Modules imported from it are removed afterwards."""
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
    """A deployment by a child process; the attribute `folder` is its current folder."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "nets.py").write_text(NETS)
    arguments = ("--data", "nets:batches", "--evaluate", "nets:score", "--max-drop", "0.1", "--json", "-o", "out")
    done = child("deploy", "nets:net", *arguments, cwd=folder, python=warm())
    done.folder = folder  # type: ignore[attr-defined]
    return done


@pytest.fixture
def output_folder(deployed: subprocess.CompletedProcess[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output folder of the deployment, relative to the current folder."""
    monkeypatch.chdir(deployed.folder)  # type: ignore[attr-defined]
    return Path("out")


@pytest.fixture
def call(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Function that runs a command in this process and returns exit code, stdout and stderr."""

    def run_command(*arguments: object, trust: bool = True) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(add_trust(*arguments) if trust else list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def add_trust(*arguments: object) -> list[str]:
    """Add --trust if an argument is the name of an object or a config."""
    texts = [str(argument) for argument in arguments]
    has_flag = bool(texts) and texts[0] in ("deploy", "sweep", "verify", "inspect", "compare")
    needs_trust = any(text == "-c" or re.fullmatch(r"[\w./ ]+:[\w.]+", text) for text in texts)
    return [*texts, "--trust"] if has_flag and needs_trust and "--trust" not in texts else texts


def child(
    *arguments: object, cwd: Path | None = None, python: Sequence[str] = (sys.executable,), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a child process. For a command that loads torch, `python` may be `warm()`."""
    return subprocess.run(
        [*python, "-m", "scalepoint.cli", *add_trust(*arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        timeout=120,
        check=False,
    )
