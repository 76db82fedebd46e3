"""What the processor announces, and whether it can run it: some virtual machines announce AMX and die of it (SIGILL).

oneDNN, inside torch and OpenVINO, takes the widest instructions that are announced. A child process tries them, once;
where it dies, ONEDNN_MAX_CPU_ISA caps them in every process that has it before its first product. Nothing of torch is
imported here, and a processor that announces no AMX pays nothing.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalepoint.errors import TargetError, UsageError, did_you_mean

# ONNX Runtime sends events to Microsoft by default from 1.29 on, also on Linux, and writes $TMPDIR/.ses for it
TELEMETRY_OFF = {"ORT_DISABLE_TELEMETRY": "1", "ORT_GENAI_TELEMETRY_DISABLED": "1"}
ISA_CAP = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"
}  # not below it: OpenVINO would still choose bfloat16, without kernels
AMX_RESULT_VARIABLE = "SCALEPOINT_AMX"  # what was found, for the processes that this one starts
PROBE_VARIABLE = "SCALEPOINT_PROBE"  # another program to try, on any processor
PROBED_LIBRARIES = ("torch", "openvino")
PROBE_SECONDS = 120
CPUINFO = Path("/proc/cpuinfo")

CPU_CHOICES = ("auto", "vnni", "avx2")
# Printed when cpu="auto" made the choice.
AUTOMATIC_CHOICE_NOTES = {
    "vnni": "cpu: this CPU has VNNI, so weights use all 8 bits; on a CPU without VNNI the file can saturate. "
    "cpu='avx2' (--cpu avx2) makes a file for both",
    "avx2": "cpu: this CPU has no VNNI, so weights are scaled to be exact without it, on every CPU. "
    "cpu='vnni' (--cpu vnni) uses all 8 bits, for CPUs with VNNI only",
}


def check_threads(threads: int) -> None:
    """Refuse more threads than four times the CPUs: a runtime would start them all, and be slower with each."""
    most = 4 * (os.cpu_count() or 1)
    if threads > most:
        raise UsageError(f"threads={threads}: this machine has {os.cpu_count()} CPUs; give at most {most} threads")


def read_cpu_flags(path: Path = CPUINFO) -> set[str]:
    """The flags of the first processor; none where the system does not tell, which is the safe answer."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


def instruction_set(cpu: str = "auto") -> str:
    """Return "vnni" where int8 products are summed exactly (VNNI, AMX, ARM), else "avx2".

    Without VNNI, products of uint8 and int8 are added in pairs that saturate at 16 bits.
    """
    if cpu not in CPU_CHOICES:
        raise TargetError(f"cpu={cpu!r}: {did_you_mean(str(cpu), CPU_CHOICES)}")
    if cpu != "auto":
        return cpu
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "vnni"
    return "vnni" if read_cpu_flags() & {"avx512_vnni", "avx_vnni", "amx_int8"} else "avx2"


@dataclass(frozen=True)
class Amx:
    """Whether AMX is announced, which libraries die of it and by which signal, and whether the cap keeps them alive."""

    is_announced: bool = False
    died: Mapping[str, str] = field(default_factory=dict)
    is_mended: bool = True

    def __str__(self) -> str:
        if not self.is_announced:
            return "not announced"
        if not self.died:
            return "announced, and runs"
        dead = " and ".join(f"{name} dies of {each}" for name, each in self.died.items())
        named = "".join(f"{name}={value}" for name, value in ISA_CAP.items())
        return f"announced, but {dead}: " + (f"runs with {named}" if self.is_mended else f"{named} does not help")


@cache
def amx() -> Amx:
    """What a child process found, once for this process and those that it starts."""
    program = os.environ.get(PROBE_VARIABLE)
    known = _parse_result(os.environ.get(AMX_RESULT_VARIABLE, ""))
    if known is not None:
        return known
    if not program and not any(name.startswith("amx") for name in read_cpu_flags()):
        return Amx()
    found = probe_amx(Path(program) if program else Path(__file__).with_name("amx_probe.py"))
    os.environ[AMX_RESULT_VARIABLE] = json.dumps({"died": dict(found.died), "mended": found.is_mended})
    return found


def probe_amx(program: Path) -> Amx:
    """Run the program for every library that is here, and again with the cap where it dies."""
    here = [name for name in PROBED_LIBRARIES if find_spec(name) is not None]
    died = {name: end for name in here if (end := _run_probe(program, name, {}))}
    return Amx(is_announced=True, died=died, is_mended=not any(_run_probe(program, name, ISA_CAP) for name in died))


def cap_instruction_set() -> None:
    """Cap this process and those that it starts, where AMX does not run: before the first product, or too late."""
    os.environ.update(ISA_CAP if amx().died else {})


def child_environment() -> dict[str, str]:
    """The environment for a process that may multiply, with the telemetry of runtimes off unless the user set it."""
    return {**TELEMETRY_OFF, **os.environ, **(ISA_CAP if amx().died else {})}


def signal_name(code: int) -> str | None:
    """The name of the signal that ended a process, as its exit code tells; None where it ended by itself."""
    number = -code if code < 0 else code - 128
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number) if code < 0 or number in (4, 6, 7, 8, 9, 11) else None


def _run_probe(program: Path, library: str, more: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  # our own file, or the user's; no shell
            [sys.executable, "-I", str(program), library],
            env={**TELEMETRY_OFF, **os.environ, **more},
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return signal_name(done.returncode)


def _parse_result(text: str) -> Amx | None:
    try:
        data: Any = json.loads(text)
        return Amx(True, {str(name): str(end) for name, end in data["died"].items()}, bool(data["mended"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
