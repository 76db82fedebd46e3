"""Number formats: one row a dtype. A new dtype is a new row; nothing else in the arithmetic changes.

integer   n bits, signed [-2^(n-1), 2^(n-1) - 1] or unsigned [0, 2^n - 1]
float     m mantissa bits, exponents from min_exponent to max_exponent, largest value `high`, no infinities used
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

import torch

from scalepoint.errors import SpecError


class QuantizationScheme(StrEnum):
    """How a range becomes a scale: symmetric around zero, symmetric with clipped limits, or affine."""

    SYMMETRIC = "symmetric"
    SYMMETRIC_WITH_CLIPPING = "symmetric_with_clipping"
    ASYMMETRIC = "asymmetric"


class QuantizationFormulation(StrEnum):
    """What a code is relative to: an integer zero point, or the float minimum (minval)."""

    ZP = "zp"
    MINVAL = "minval"


class ScaleRounding(StrEnum):
    """How a power-of-two (e8m0) scale is rounded; see `power_of_two_scale` for the formulas."""

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RNE = "rne"
    RCEIL = "rceil"


class Float6(Enum):
    """The 6-bit floats of OCP MX v1.0, which torch has no dtype for: sign, exponent and mantissa bits, no infinity."""

    E2M3 = "float6_e2m3fn"
    E3M2 = "float6_e3m2fn"

    def __str__(self) -> str:
        return self.value


CodeType = torch.dtype | Float6  # what codes can be


@dataclass(frozen=True)
class Format:
    """A number format: its width, its limits, and the torch dtype that stores its codes."""

    name: str
    bits: int
    low: float
    high: float
    storage: torch.dtype
    mantissa: int | None = None
    min_exponent: int = 0
    max_exponent: int = 0

    @property
    def is_float(self) -> bool:
        return self.mantissa is not None

    @property
    def is_signed(self) -> bool:
        return self.low < 0

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype whose cast rounds to this format, if torch has one."""
        return self.storage if self.is_float and self.bits == 8 else None

    def limits(self, scheme: QuantizationScheme) -> tuple[float, float]:
        """The codes in use; clipping drops the lowest one of a signed integer, so that both ends weigh the same."""
        if scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING and self.is_signed:
            if not self.high:
                raise SpecError(f"{self.name} with {scheme} has one code only: use qscheme='symmetric'")
            return -self.high, self.high
        return self.low, self.high


def _integer_format(name: str, bits: int, storage: torch.dtype) -> Format:
    signed = name.startswith("int")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return Format(name, bits, low, high, storage)


def _integer_formats() -> dict[CodeType, Format]:
    rows: dict[CodeType, Format] = {}
    for prefix, narrow, wide in (("int", torch.int8, torch.int16), ("uint", torch.uint8, torch.uint16)):
        for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16):
            name = f"{prefix}{bits}"
            rows[getattr(torch, name)] = _integer_format(name, bits, narrow if bits <= 8 else wide)
    return rows


E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2

FORMATS: dict[CodeType, Format] = {
    **_integer_formats(),
    E4M3: Format("float8_e4m3fn", 8, -448.0, 448.0, E4M3, mantissa=3, min_exponent=-6, max_exponent=8),
    E5M2: Format("float8_e5m2", 8, -57344.0, 57344.0, E5M2, mantissa=2, min_exponent=-14, max_exponent=15),
    Float6.E2M3: Format("float6_e2m3fn", 6, -7.5, 7.5, E4M3, mantissa=3, min_exponent=0, max_exponent=2),
    Float6.E3M2: Format("float6_e3m2fn", 6, -28.0, 28.0, E4M3, mantissa=2, min_exponent=-2, max_exponent=4),
    FP4: Format("float4_e2m1fn_x2", 4, -6.0, 6.0, E4M3, mantissa=1, min_exponent=0, max_exponent=2),
}

ALIASES = {
    "float4_e2m1fn": "float4_e2m1fn_x2",
    "float6_e2m3": "float6_e2m3fn",
    "float6_e3m2": "float6_e3m2fn",
    "float8_e4m3": "float8_e4m3fn",
    "float8_e8m0": "float8_e8m0fnu",
}


def dtype_name(dtype: CodeType) -> str:
    """Return the name of a dtype, such as "int8" or "float8_e4m3fn".

    Args:
        dtype: A torch dtype, or one of the 6-bit floats that torch does not have.
    """
    return str(dtype).removeprefix("torch.")


def get_format(dtype: CodeType) -> Format:
    """Return the properties of a dtype: bits, range, mantissa.

    Args:
        dtype: A torch dtype, or one of the 6-bit floats that torch does not have.
    """
    try:
        return FORMATS[dtype]
    except KeyError:
        known = ", ".join(dtype_name(known) for known in FORMATS)
        raise SpecError(f"no arithmetic for {dtype_name(dtype)}. Formats: {known}") from None


@dataclass(frozen=True)
class Grid:
    """What the arithmetic needs of a spec, without the blocks: format, limits, scheme, formulation, scale type."""

    format: Format
    low: float
    high: float
    scheme: QuantizationScheme = QuantizationScheme.SYMMETRIC
    formulation: QuantizationFormulation = QuantizationFormulation.ZP
    scale_dtype: torch.dtype | None = None
    scale_rounding: ScaleRounding = ScaleRounding.FLOOR
    exact_zero: bool = False
    least_range: float | None = None  # the narrowest range; None floors the scale at float32 epsilon instead

    @property
    def is_symmetric(self) -> bool:
        return self.scheme != QuantizationScheme.ASYMMETRIC

    @property
    def span(self) -> float:
        return self.high - self.low

    @property
    def middle(self) -> int:
        """The zero point of the symmetric schemes: 0 for signed integers, 2^(n-1) for unsigned ones."""
        return int(self.low + self.high + 1) // 2
