"""CPU features, and a check of AMX: some virtual machines announce AMX, but processes that use it die with SIGILL.

oneDNN (in torch and OpenVINO) uses the widest instruction set that the CPU announces. A child process tries AMX once.
If it dies, ONEDNN_MAX_CPU_ISA limits the instruction set in all processes that set it before their first product. This
module does not import torch, and without announced AMX no process is started.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalepoint.errors import TargetError, UsageError, did_you_mean

# ONNX Runtime 1.29 and later sends events to Microsoft by default, also on Linux, and writes $TMPDIR/.ses
TELEMETRY_OFF = {"ORT_DISABLE_TELEMETRY": "1", "ORT_GENAI_TELEMETRY_DISABLED": "1"}
# Not below AVX512_CORE_BF16: OpenVINO would still choose bfloat16, but without kernels for it.
ISA_CAP = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
AMX_RESULT_VARIABLE = "SCALEPOINT_AMX"  # passes the result of the probe to child processes
PROBE_VARIABLE = "SCALEPOINT_PROBE"  # path of another probe program, which runs on any CPU; for tests
PROBED_LIBRARIES = ("torch", "openvino")
PROBE_SECONDS = 120
CPUINFO = Path("/proc/cpuinfo")
FIRST_WINDOWS_EXCEPTION = 0xC000_0000  # as exit code

CPU_CHOICES = ("auto", "vnni", "avx2", "arm")
# Printed with cpu="auto"
AUTOMATIC_CHOICE_NOTES = {
    "vnni": "cpu: this CPU has VNNI, so weights use all 8 bits; on a CPU without VNNI the file can saturate. "
    "cpu='avx2' (--cpu avx2) makes a file for both",
    "avx2": "cpu: this CPU has no VNNI, so weights are scaled to be exact without it, on every CPU. "
    "cpu='vnni' (--cpu vnni) uses all 8 bits, for CPUs with VNNI only",
    "arm": "cpu: this CPU is an ARM, so weights use all 8 bits; on an x86 CPU without VNNI the file can saturate. "
    "cpu='avx2' (--cpu avx2) makes a file for both",
}


def check_threads(threads: int) -> None:
    """Raise UsageError for more than four threads per CPU: a runtime would start them all and become slower."""
    limit = 4 * (os.cpu_count() or 1)
    if threads > limit:
        raise UsageError(f"threads={threads}: must be at most {limit}, because this machine has {os.cpu_count()} CPUs")


def read_cpu_flags(path: Path = CPUINFO) -> set[str]:
    """Return the flags of the first CPU; an empty set if the system does not provide them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    line = next((line for line in lines if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


@cache
def describe_cpu() -> str:
    """Return the model of this CPU, precise enough that two CPUs with the same text have equally fast kernels."""
    fields = {"model name": platform.processor() or "CPU", "cpu family": "", "model": "", "stepping": ""}
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name in fields:
                fields[name] = value
    numbers = "-".join(filter(None, (fields["cpu family"], fields["model"], fields["stepping"])))
    return " ".join(filter(None, (platform.machine(), fields["model name"], numbers)))


def instruction_set(cpu: str = "auto") -> str:
    """Return "arm", "vnni" (x86 with VNNI or AMX) or "avx2".

    ARM and VNNI sum int8 products exactly. With "avx2", products of uint8 and int8 are added in pairs that saturate at
    16 bits.
    """
    if cpu not in CPU_CHOICES:
        raise TargetError(f"cpu={cpu!r}: {did_you_mean(str(cpu), CPU_CHOICES)}")
    if cpu != "auto":
        return cpu
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "arm"
    return "vnni" if read_cpu_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"} else "avx2"


@dataclass(frozen=True)
class AmxResult:
    """Result of the AMX probe.

    Attributes:
        is_announced: Whether the CPU announces AMX.
        signals: Library -> signal, for the libraries that die when they use AMX.
        works_with_cap: Whether these libraries run with ISA_CAP.
    """

    is_announced: bool = False
    signals: Mapping[str, str] = field(default_factory=dict)
    works_with_cap: bool = True

    def __str__(self) -> str:
        if not self.is_announced:
            return "not announced"
        if not self.signals:
            return "announced, and runs"
        dead = " and ".join(f"{name} dies of {signal_name}" for name, signal_name in self.signals.items())
        variables = "".join(f"{name}={value}" for name, value in ISA_CAP.items())
        return f"announced, but {dead}: " + (
            f"runs with {variables}" if self.works_with_cap else f"{variables} does not help"
        )


@cache
def probe_amx_once() -> AmxResult:
    """Probe AMX in child processes, once for this process and its child processes."""
    program = os.environ.get(PROBE_VARIABLE)
    inherited = _parse_result(os.environ.get(AMX_RESULT_VARIABLE, ""))
    if inherited is not None:
        return inherited
    if not program and not any(name.startswith("amx") for name in read_cpu_flags()):
        return AmxResult()
    result = probe_amx(Path(program) if program else Path(__file__).with_name("amx_probe.py"))
    os.environ[AMX_RESULT_VARIABLE] = json.dumps({"died": dict(result.signals), "mended": result.works_with_cap})
    return result


def probe_amx(program: Path) -> AmxResult:
    """Run the probe for every installed library, and again with ISA_CAP if it dies."""
    installed = [name for name in PROBED_LIBRARIES if find_spec(name) is not None]
    signals = {name: signal_text for name in installed if (signal_text := _run_probe(program, name, {}))}
    return AmxResult(
        is_announced=True,
        signals=signals,
        works_with_cap=not any(_run_probe(program, name, ISA_CAP) for name in signals),
    )


def cap_instruction_set() -> None:
    """Limit the instruction set of this process and its child processes if AMX does not run.

    Must be called before the first product of torch or OpenVINO.
    """
    os.environ.update(ISA_CAP if probe_amx_once().signals else {})


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that runs a model.

    Telemetry of runtimes is off unless the user has set these variables.
    """
    return {**TELEMETRY_OFF, **os.environ, **(ISA_CAP if probe_amx_once().signals else {})}


def signal_name(code: int) -> str | None:
    """Return the name of the signal that ended a process, from its exit code; None if it exited by itself.

    Windows has exceptions instead of signals, such as 0xC0000005 for an access violation.
    """
    if code >= FIRST_WINDOWS_EXCEPTION:
        return f"exception 0x{code:X}"
    number = -code if code < 0 else code - 128
    names = {entry.value: entry.name for entry in signal.Signals}
    return names.get(number) if code < 0 or number in (4, 6, 7, 8, 9, 11) else None


def _run_probe(program: Path, library: str, extra_environment: Mapping[str, str]) -> str | None:
    try:
        process = subprocess.run(  # noqa: S603  # our own program, or that of the user; no shell
            [sys.executable, "-I", str(program), library],
            env={**TELEMETRY_OFF, **os.environ, **extra_environment},
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return signal_name(process.returncode)


def _parse_result(text: str) -> AmxResult | None:
    try:
        data: Any = json.loads(text)
        return AmxResult(True, {str(name): str(end) for name, end in data["died"].items()}, bool(data["mended"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
