"""A CPU that announces AMX and cannot run it is detected in a child process, and the instruction set is limited."""

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
    AmxResult,
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
sys.addaudithook(lambda event, arguments: started.append(arguments[3]) if event == "subprocess.Popen" else None)
"""


@pytest.fixture
def dying(tmp_path: Path) -> Path:
    """A program that dies of SIGILL, like a product on a CPU that announces AMX and does not have it."""
    path = tmp_path / "dying.py"
    path.write_text(DIES)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the result of the probe of this test run."""
    for name in (AMX_RESULT_VARIABLE, PROBE_VARIABLE, *ISA_CAP):
        monkeypatch.delenv(name, raising=False)


def python(code: str, *arguments: str, **environment: str) -> str:
    """Return the output of a new process, which does not inherit the result of the probe."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in (AMX_RESULT_VARIABLE, PROBE_VARIABLE, *ISA_CAP)
    }
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("library", cpu.PROBED_LIBRARIES)
def test_the_probe_computes_a_product_in_each_library(library: str) -> None:
    pytest.importorskip(library)
    done = subprocess.run([sys.executable, "-I", str(PROBE), library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # ISA_CAP is inherited if this machine needs it


def test_a_dying_child_is_detected_and_the_cap_keeps_it_alive(dying: Path, bare: None) -> None:
    result = probe_amx(dying)
    assert result.signals["torch"] == "SIGILL"
    assert result.works_with_cap
    assert str(result).startswith("announced, but torch dies of SIGILL")
    assert str(result).endswith("runs with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")


def test_a_cap_that_does_not_help_is_reported(tmp_path: Path, bare: None) -> None:
    (tmp_path / "dies.py").write_text(DIES_ANYWAY)
    result = probe_amx(tmp_path / "dies.py")
    assert (result.signals["torch"], result.works_with_cap) == ("SIGSEGV", False)
    assert "does not help" in str(result)


@pytest.mark.parametrize("code", ["", "raise ImportError"], ids=["runs", "cannot be tried"])
def test_a_child_that_exits_by_itself_needs_no_cap(code: str, tmp_path: Path, bare: None) -> None:
    (tmp_path / "lives.py").write_text(code)
    assert str(probe_amx(tmp_path / "lives.py")) == "announced, and runs"


def test_cpu_flags_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert read_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_tile"}
    assert read_cpu_flags(tmp_path / "none") == set()
    assert str(AmxResult()) == "not announced"


def test_a_processor_without_amx_starts_no_process_and_imports_nothing() -> None:
    output = python(
        WATCHED + "from scalepoint.support.cpu import cap_instruction_set, read_cpu_flags\ncap_instruction_set()\n"
        "print(bool(started), any(name.startswith('amx') for name in read_cpu_flags()), 'torch' in sys.modules)"
    ).split()
    assert output[0] == output[1]
    assert output[2] == "False"


CHILDREN = (
    WATCHED
    + """
import os
from scalepoint.support.cpu import probe_amx_once, cap_instruction_set
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import run_task
probes = 2 * len(probe_amx_once().signals)  # without the cap and with it
run_task(find_runtime("onnxruntime"), {"task": "run"})
print(len(started) == probes + 1, started[-1]["ONEDNN_MAX_CPU_ISA"], "ONEDNN_MAX_CPU_ISA" in os.environ)
cap_instruction_set()
print(os.environ["ONEDNN_MAX_CPU_ISA"])
"""
)


def test_the_child_of_a_runtime_is_capped_and_this_process_on_request(dying: Path) -> None:
    """Checks the environment of the child by an audit hook of Python."""
    capped = ISA_CAP["ONEDNN_MAX_CPU_ISA"]
    assert python(CHILDREN, **{PROBE_VARIABLE: str(dying)}).split() == ["True", capped, "False", capped]


def test_child_processes_inherit_the_result_of_the_probe(dying: Path) -> None:
    code = (
        "import os\nfrom scalepoint.support.cpu import probe_amx_once\n"
        "probe_amx_once()\nprint(os.environ['SCALEPOINT_AMX'])"
    )
    known = python(code, **{PROBE_VARIABLE: str(dying)}).strip()
    output = python(
        WATCHED + "from scalepoint.support.cpu import probe_amx_once\nprint(probe_amx_once(), len(started))",
        **{AMX_RESULT_VARIABLE: known},
    )
    assert "torch dies of SIGILL" in output
    assert output.split()[-1] == "0"


@pytest.mark.parametrize("text", ["", "yes", "[]", '{"died": 3, "mended": true}', '{"died": {}}'])
def test_an_invalid_inherited_result_is_ignored(text: str) -> None:
    assert cpu._parse_result(text) is None


REPORT_AMX = """
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


@pytest.mark.parametrize("works_with_cap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_line_caps_itself_and_doctor_and_report_show_it(works_with_cap: bool, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "dies.py").write_text(DIES if works_with_cap else DIES_ANYWAY)
    built, line, reported = json.loads(python(REPORT_AMX, str(tmp_path), **{PROBE_VARIABLE: str(tmp_path / "dies.py")}))
    assert built == ISA_CAP["ONEDNN_MAX_CPU_ISA"]  # before the user's code could multiply
    assert line["state"] == ("ok" if works_with_cap else "missing")
    assert f"torch dies of {'SIGILL' if works_with_cap else 'SIGSEGV'}" in line["detail"]
    assert reported == line["detail"]
    assert ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" if works_with_cap else "another machine") in line["way_out"]


TESTS = """
import os, signal
def test_before(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGILL)
def test_after(): pass
"""


def test_a_dying_test_does_not_end_the_test_run(tmp_path: Path) -> None:
    """Started like in `make test`."""
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
    [
        (-4, "SIGILL"),
        (-11, "SIGSEGV"),
        (132, "SIGILL"),
        (134, "SIGABRT"),
        (137, "SIGKILL"),
        (0xC0000005, "exception 0xC0000005"),  # of Windows
        (0, None),
        (1, None),
    ],
)
def test_an_exit_code_names_its_signal(code: int, name: str | None) -> None:
    assert signal_name(code) == name
