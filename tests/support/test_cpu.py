"""A processor that announces what it cannot run: found in a child that dies of it, and mended before it kills us."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalepoint.support import cpu
from scalepoint.support.cpu import (
    AMX_RESULT_VARIABLE,
    ISA_CAP,
    PROBE_VARIABLE,
    Amx,
    probe_amx,
    read_cpu_flags,
    signal_name,
)

PROBE = Path(cpu.__file__).with_name("amx_probe.py")
DIES = "import os, signal\nif 'ONEDNN_MAX_CPU_ISA' not in os.environ: os.kill(os.getpid(), signal.SIGILL)\n"
DIES_ANYWAY = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
WATCHED = """
import sys
started = []
sys.addaudithook(lambda event, given: started.append(given[3]) if event == "subprocess.Popen" else None)
"""


@pytest.fixture
def dying(tmp_path: Path) -> Path:
    """A program that really dies of SIGILL, as a product does where AMX is announced and not there."""
    path = tmp_path / "dying.py"
    path.write_text(DIES)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the run of the tests itself has found."""
    for name in (AMX_RESULT_VARIABLE, PROBE_VARIABLE, *ISA_CAP):
        monkeypatch.delenv(name, raising=False)


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a process of its own prints; it knows nothing of what was found here."""
    own = {
        name: value for name, value in os.environ.items() if name not in (AMX_RESULT_VARIABLE, PROBE_VARIABLE, *ISA_CAP)
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("library", cpu.PROBED_LIBRARIES)
def test_the_product_of_each_library_is_really_tried(library: str) -> None:
    pytest.importorskip(library)
    done = subprocess.run([sys.executable, "-I", str(PROBE), library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # this process is capped where it must be, and so is its child


def test_a_child_that_dies_is_found_and_the_cap_keeps_it_alive(dying: Path, bare: None) -> None:
    found = probe_amx(dying)
    assert found.died["torch"] == "SIGILL"
    assert found.is_mended
    assert str(found).startswith("announced, but torch dies of SIGILL")
    assert str(found).endswith("runs with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")


def test_a_cap_that_does_not_help_is_said(tmp_path: Path, bare: None) -> None:
    (tmp_path / "dies.py").write_text(DIES_ANYWAY)
    found = probe_amx(tmp_path / "dies.py")
    assert (found.died["torch"], found.is_mended) == ("SIGSEGV", False)
    assert "does not help" in str(found)


@pytest.mark.parametrize("code", ["", "raise ImportError"], ids=["runs", "cannot be tried"])
def test_a_child_that_ends_by_itself_needs_no_cap(code: str, tmp_path: Path, bare: None) -> None:
    (tmp_path / "lives.py").write_text(code)
    assert str(probe_amx(tmp_path / "lives.py")) == "announced, and runs"


def test_flags_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert read_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_tile"}
    assert read_cpu_flags(tmp_path / "none") == set()
    assert str(Amx()) == "not announced"


def test_a_processor_without_amx_starts_no_process_and_imports_nothing() -> None:
    said = python(
        WATCHED + "from scalepoint.support.cpu import cap_instruction_set, read_cpu_flags\ncap_instruction_set()\n"
        "print(bool(started), any(name.startswith('amx') for name in read_cpu_flags()), 'torch' in sys.modules)"
    ).split()
    assert said[0] == said[1]
    assert said[2] == "False"


CHILDREN = (
    WATCHED
    + """
import os
from scalepoint.support.cpu import amx, cap_instruction_set
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import run_task
probes = 2 * len(amx().died)  # without the cap and with it
run_task(find_runtime("onnxruntime"), {"task": "run"})
print(len(started) == probes + 1, started[-1]["ONEDNN_MAX_CPU_ISA"], "ONEDNN_MAX_CPU_ISA" in os.environ)
cap_instruction_set()
print(os.environ["ONEDNN_MAX_CPU_ISA"])
"""
)


def test_the_child_of_a_runtime_is_capped_and_this_process_when_asked(dying: Path) -> None:
    """The environment that the child really gets, by Python's own audit of what is started."""
    capped = ISA_CAP["ONEDNN_MAX_CPU_ISA"]
    assert python(CHILDREN, **{PROBE_VARIABLE: str(dying)}).split() == ["True", capped, "False", capped]


def test_processes_that_are_started_know_without_trying_again(dying: Path) -> None:
    code = "from scalepoint.support.cpu import amx\nimport os\namx()\nprint(os.environ['SCALEPOINT_AMX'])"
    known = python(code, **{PROBE_VARIABLE: str(dying)}).strip()
    said = python(
        WATCHED + "from scalepoint.support.cpu import amx\nprint(amx(), len(started))", **{AMX_RESULT_VARIABLE: known}
    )
    assert "torch dies of SIGILL" in said
    assert said.split()[-1] == "0"


@pytest.mark.parametrize("text", ["", "yes", "[]", '{"died": 3, "mended": true}', '{"died": {}}'])
def test_what_another_wrote_there_is_not_believed(text: str) -> None:
    assert cpu._parse_result(text) is None


TOLD = """
import contextlib, io, json, os, sys
os.chdir(sys.argv[1])
from scalepoint.cli import load_objects
from scalepoint.cli.app import run
from scalepoint.pipeline.build_report import describe_environment
from scalepoint.targets import find_target
load_objects.load_model("nets:net", load_objects.ObjectLoader(trust=True))
with contextlib.redirect_stdout(io.StringIO()) as said:
    run(["doctor", "--json"])
lines = {line["name"]: line for line in json.loads(said.getvalue())["lines"]}
print(json.dumps([os.environ.get("BUILT_WITH"), lines["AMX"], describe_environment(find_target("onnxruntime"))["amx"]]))
"""
NETS = """
import os
from torch import nn
def net():
    os.environ["BUILT_WITH"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return nn.Linear(4, 4)
"""


@pytest.mark.parametrize("is_mended", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_line_caps_itself_and_the_doctor_and_the_report_say_it(is_mended: bool, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "dies.py").write_text(DIES if is_mended else DIES_ANYWAY)
    built, line, reported = json.loads(python(TOLD, str(tmp_path), **{PROBE_VARIABLE: str(tmp_path / "dies.py")}))
    assert built == ISA_CAP["ONEDNN_MAX_CPU_ISA"]  # before the user's code could multiply
    assert line["state"] == ("ok" if is_mended else "missing")
    assert f"torch dies of {'SIGILL' if is_mended else 'SIGSEGV'}" in line["detail"]
    assert reported == line["detail"]
    assert ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" if is_mended else "another machine") in line["way_out"]


TESTS = """
import os, signal
def test_before(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGILL)
def test_after(): pass
"""


def test_a_test_that_dies_does_not_take_the_run_down(tmp_path: Path) -> None:
    """As `make test` starts it."""
    (tmp_path / "test_some.py").write_text(TESTS)
    spread = re.search(r"^SPREAD := (.*)$", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE)
    assert spread is not None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *spread[1].split(), "-c", os.devnull, str(tmp_path / "test_some.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "crashed while running" in done.stdout


@pytest.mark.parametrize(
    ("code", "name"),
    [(-4, "SIGILL"), (-11, "SIGSEGV"), (132, "SIGILL"), (134, "SIGABRT"), (137, "SIGKILL"), (0, None), (1, None)],
)
def test_an_exit_code_names_its_signal(code: int, name: str | None) -> None:
    assert signal_name(code) == name
