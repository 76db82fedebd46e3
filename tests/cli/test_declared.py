"""What is looked up without torch: kept as data, and the same as what is declared."""

import subprocess
import sys
from typing import Annotated, get_args, get_origin

import pytest

from scalepoint.cli import declared, options
from tests.cli.conftest import child

CHEAP = ("targets", "targets tensorrt", "targets --json", "report out", "report out --json", "doctor", "config schema")
PROGRAM = """
import sys
from scalepoint.cli.app import run
codes = [run(line.split()) for line in sys.argv[1:]]
print(codes, "torch" in sys.modules, file=sys.stderr)
"""


def test_the_data_is_what_is_declared() -> None:
    assert declared.read() == declared.made(), "run: python docs/generate.py"


def test_commands_that_only_look_something_up_do_not_load_torch(deployed) -> None:
    command = [sys.executable, "-c", PROGRAM, *CHEAP]
    done = subprocess.run(command, cwd=deployed.folder, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == f"{[0] * len(CHEAP)} False"


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_targets_are_told_for_the_processor(monkeypatch, cpu) -> None:
    monkeypatch.setattr("scalepoint.targets.cpu.instruction_set", lambda: cpu)
    rows = declared.own_targets()["onnxruntime"]["sections"][0]["rows"]
    assert ["made with cpu=", cpu] in rows


def test_a_package_still_gives_all_its_names() -> None:
    done = child("targets", "nowhere")
    known = "onnxruntime, openvino, ort-genai, reference, tensorrt"
    assert (done.returncode, known in " ".join(done.stderr.split())) == (2, True)
    for package in ("targets", "verification"):
        module = sys.modules[f"scalepoint.{package}"]
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
            module.nowhere  # noqa: B018


def test_what_is_for_language_models_stands_together_in_the_help() -> None:
    told = [get_args(each)[1] for each in vars(options).values() if get_origin(each) is Annotated]
    panels = {each.rich_help_panel for each in told if (each.help or "").startswith("Language models:")}
    assert panels == {"Language models"}
