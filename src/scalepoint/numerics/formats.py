"""Number formats: a new dtype is a new row of FORMATS, nothing else in the arithmetic changes.

integer   n bits, signed [-2^(n-1), 2^(n-1) - 1] or unsigned [0, 2^n - 1]
float     m mantissa bits, exponents from min_exponent to max_exponent, largest value `high`, infinities are not used
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

import torch

from scalepoint.errors import SpecError


class QuantizationScheme(StrEnum):
    """How a scale is computed from a range: symmetric around zero, symmetric with clipped limits, or affine."""

    SYMMETRIC = "symmetric"
    SYMMETRIC_WITH_CLIPPING = "symmetric_with_clipping"
    ASYMMETRIC = "asymmetric"


class QuantizationFormulation(StrEnum):
    """Whether codes are relative to an integer zero point or to the float minimum (minval)."""

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
    """The 6-bit floats of OCP MX v1.0, for which torch has no dtype. They have no infinity."""

    E2M3 = "float6_e2m3fn"
    E3M2 = "float6_e3m2fn"

    def __str__(self) -> str:
        return self.value


CodeType = torch.dtype | Float6  # the dtype of codes


@dataclass(frozen=True)
class Format:
    """A number format: its width, its limits, and the torch dtype that stores its codes.

    `mantissa` is the number of mantissa bits, None for integers.
    """

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
        """Return lowest and highest code. SYMMETRIC_WITH_CLIPPING does not use the lowest code of a signed integer."""
        if scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING and self.is_signed:
            if not self.high:
                raise SpecError(f"{self.name} with {scheme} has only one code: use qscheme='symmetric'")
            return -self.high, self.high
        return self.low, self.high


def _integer_format(name: str, bits: int, storage: torch.dtype) -> Format:
    signed = name.startswith("int")
    low, high = 0, 2**bits - 1
    if signed:
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
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
        names = ", ".join(dtype_name(supported) for supported in FORMATS)
        raise SpecError(f"dtype {dtype_name(dtype)} is not supported: use one of {names}") from None


@dataclass(frozen=True)
class Grid:
    """The part of a spec that the arithmetic needs, apart from the blocks.

    Attributes:
        low: Lowest code.
        high: Highest code.
        exact_zero: With minval, round minval to a multiple of the scale, so that 0 is exact.
        least_range: The narrowest range. None: the scale is at least float32 epsilon.
    """

    format: Format
    low: float
    high: float
    scheme: QuantizationScheme = QuantizationScheme.SYMMETRIC
    formulation: QuantizationFormulation = QuantizationFormulation.ZP
    scale_dtype: torch.dtype | None = None
    scale_rounding: ScaleRounding = ScaleRounding.FLOOR
    exact_zero: bool = False
    least_range: float | None = None

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
