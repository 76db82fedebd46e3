"""The packages that are published: same bytes in every build, and the wheel works in an empty environment."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
EPOCH = "1700000000"

pytestmark = pytest.mark.slow  # builds packages, and installs torch


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, SOURCE_DATE_EPOCH=EPOCH)
    return folder


@pytest.fixture(scope="module")
def python(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel and what it depends on, without the tools of developers."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    executable = folder / "bin" / "python"
    run(executable, "-m", "pip", "install", *PIP_OPTIONS, next(packages.glob("*.whl")))
    return executable


def test_two_builds_give_the_same_bytes(packages, tmp_path):
    run(sys.executable, "-m", "build", "--outdir", tmp_path, SOURCE_DATE_EPOCH=EPOCH)
    first = {path.name: path.read_bytes() for path in packages.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]


def test_the_metadata_can_be_published(packages):
    pytest.importorskip("twine")
    output = run(sys.executable, "-m", "twine", "check", "--strict", *packages.iterdir())
    assert output.count("PASSED") == 2


def test_the_installed_packages_fit_together(python):
    assert "No broken requirements" in run(python, "-m", "pip", "check")
    assert "mkdocs" not in run(python, "-m", "pip", "list")


def test_the_extras_can_be_installed_together(python):
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = ",".join(name for name in names if name != "dev")
    run(python, "-m", "pip", "install", *PIP_OPTIONS, "--dry-run", f"{ROOT}[{extras}]")


def test_the_example_of_the_readme_runs_with_the_wheel_alone(python, tmp_path):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        (tmp_path / f"block{number}.py").write_text(block)
        output = run(python, "-I", f"block{number}.py", cwd=tmp_path)
        assert "checked   ONNX Runtime gives the simulated values" in output
    run(python, "-I", "out/use.py", cwd=tmp_path)
    run(python.with_name("scalepoint"), "gate", "out", "--max-size", "30MB", cwd=tmp_path)
