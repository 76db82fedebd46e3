"""Which int8 instructions a CPU has. Without VNNI, u8 x s8 products are added in pairs that saturate at 16 bits."""

import platform

from scalepoint.errors import TargetError, nearest
from scalepoint.processor import flags

CHOICES = ("auto", "vnni", "avx2")
AUTOMATIC = {
    "vnni": "cpu: this CPU has VNNI, so weights use all 8 bits; on a CPU without VNNI the file can saturate. "
    "cpu='avx2' (--cpu avx2) makes a file for both",
    "avx2": "cpu: this CPU has no VNNI, so weights are scaled to be exact without it, on every CPU. "
    "cpu='vnni' (--cpu vnni) uses all 8 bits, for CPUs with VNNI only",
}  # printed when cpu="auto" made the choice


def instruction_set(cpu: str = "auto") -> str:
    """ "vnni" where int8 products add up exactly (VNNI, AMX, ARM), else "avx2"."""
    if cpu not in CHOICES:
        raise TargetError(f"cpu={cpu!r}: {nearest(str(cpu), CHOICES)}")
    if cpu != "auto":
        return cpu
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "vnni"
    return "vnni" if flags() & {"avx512_vnni", "avx_vnni", "amx_int8"} else "avx2"
