"""Which int8 instructions a CPU has. Without VNNI, u8 x s8 products are added in pairs that saturate at 16 bits."""

import platform
from pathlib import Path

from scalepoint.errors import TargetError, nearest

CHOICES = ("auto", "vnni", "avx2")


def instruction_set(cpu: str = "auto") -> str:
    """ "vnni" where int8 products add up exactly (VNNI, AMX, ARM), else "avx2"."""
    if cpu not in CHOICES:
        raise TargetError(f"cpu={cpu!r}: {nearest(str(cpu), CHOICES)}")
    if cpu != "auto":
        return cpu
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "vnni"
    return "vnni" if _flags() & {"avx512_vnni", "avx_vnni", "amx_int8"} else "avx2"


def _flags() -> set[str]:
    """The flags of the first processor; none where the system does not tell, which is the safe answer."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())
