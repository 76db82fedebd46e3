"""The formulas of contract A3 in numpy, slow and simple: the reference for the package's arithmetic.

No arithmetic is shared with the package; only `grid_of` uses its classes. All values are float32, as the contract says.
A dtype is its torch name, and a parameter array has one value per block.
"""

import math

import numpy as np
import torch

from scalepoint.numerics import Grid, QuantizationFormulation, QuantizationScheme, get_format
from scalepoint.spec.spec import to_code_type

F32 = np.float32
EPS = np.finfo(F32).eps

SCHEMES = ("symmetric", "symmetric_with_clipping", "asymmetric")
FORMULATIONS = ("zp", "minval")
INTEGERS = tuple(f"{sign}{bits}" for sign in ("int", "uint") for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16))
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn_x2")
E8M0 = "float8_e8m0fnu"

# (dtype, scheme, formulation, scale_dtype); one code alone is left of an int1 that is clipped: no grid.
INTEGER_CASES = tuple(
    (name, scheme, formulation, None)
    for name in INTEGERS
    for scheme in SCHEMES
    for formulation in FORMULATIONS
    if (name, scheme) != ("int1", "symmetric_with_clipping")
)
FLOAT_CASES = (
    ("float8_e4m3fn", "symmetric", "zp", None),
    ("float8_e4m3fn", "symmetric", "zp", E8M0),
    ("float8_e5m2", "symmetric", "zp", None),
    ("float8_e5m2", "symmetric", "zp", E8M0),
    ("float6_e2m3fn", "symmetric", "zp", E8M0),
    ("float6_e3m2fn", "symmetric", "zp", E8M0),
    ("float4_e2m1fn_x2", "symmetric", "zp", E8M0),
)
CASES = INTEGER_CASES + FLOAT_CASES

# A tensor's shape and the extent of a block on every axis.
LAYOUTS = {
    "per_tensor": ((6, 10), (6, 10)),
    "channel_0": ((6, 10, 3), (1, 10, 3)),
    "channel_1": ((6, 10, 3), (6, 1, 3)),
    "channel_last": ((6, 10, 3), (6, 10, 1)),
    "block_8_on_1": ((4, 24, 3), (1, 8, 3)),
    "block_8_on_0": ((16, 5), (8, 1)),
    "tile_4x3": ((8, 12), (4, 3)),
    "each_element": ((4, 5), (1, 1)),
    "ragged_block_8": ((5, 20), (1, 8)),
    "ragged_tile_4x3": ((7, 10), (4, 3)),
}
RAGGED = ("ragged_block_8", "ragged_tile_4x3")


def case_id(case):
    return "-".join(part for part in case if part)


def grid_of(name, scheme="symmetric", formulation="zp", scale_dtype=None, **options):
    """The package's Grid of a case, with the limits of this file."""
    return Grid(
        get_format(to_code_type(name)),
        *limits(name, scheme),
        QuantizationScheme(scheme),
        QuantizationFormulation(formulation),
        scale_dtype=getattr(torch, scale_dtype) if scale_dtype else None,
        **options,
    )


def limits(name, scheme="symmetric"):
    if name in FLOATS:
        largest = max(positive_values(name))
        return -largest, largest
    bits = int(name.removeprefix("u").removeprefix("int"))
    if name.startswith("uint"):
        return 0, 2**bits - 1
    high = 2 ** (bits - 1) - 1
    return (-high if scheme == "symmetric_with_clipping" else -(2 ** (bits - 1))), high


def positive_values(name):
    """Every value of a float format that is not negative, in the order of its codes; no infinity, no NaN."""
    if name == "float4_e2m1fn_x2":
        return [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    mantissa_bits, bias, codes = {
        "float8_e4m3fn": (3, 7, 0x7F),
        "float8_e5m2": (2, 15, 0x7C),
        "float6_e2m3fn": (3, 1, 0x20),
        "float6_e3m2fn": (2, 3, 0x20),
    }[name]
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))
    return values


def nearest(value, name):
    """The nearest value of a float format; of two equally near ones, that with the even code."""
    values = positive_values(name)
    size = abs(float(value))
    if math.isnan(size):
        return F32(np.nan)
    code = 0
    while code + 1 < len(values):
        middle = (values[code] + values[code + 1]) / 2
        if size < middle or (size == middle and code % 2 == 0):
            break
        code += 1
    return F32(math.copysign(values[code], value))


def counts(shape, block):
    return tuple(-(-size // extent) for size, extent in zip(shape, block, strict=True))


def extremes(x, block):
    """The smallest and the largest value of every block."""
    low, high = np.empty(counts(x.shape, block), F32), np.empty(counts(x.shape, block), F32)
    for index in np.ndindex(low.shape):
        part = x[tuple(slice(i * extent, (i + 1) * extent) for i, extent in zip(index, block, strict=True))]
        low[index], high[index] = part.min(), part.max()
    return low, high


def spread(params, shape, block):
    """The parameter of every element."""
    return params[np.ix_(*(np.arange(size) // extent for size, extent in zip(shape, block, strict=True)))]


def qparams(low, high, name, scheme="symmetric", scale_dtype=None):
    """(scale, zero_point, minval) of every block; the last two are None for a float format."""
    hi, lo = np.maximum(high, F32(0)).astype(F32), np.minimum(low, F32(0)).astype(F32)
    max_abs = np.maximum(hi, -lo)
    qmin, qmax = limits(name, scheme)
    if name in FLOATS:
        if scale_dtype == E8M0:
            return e8m0_scale(max_abs, name), None, None
        return np.maximum(max_abs / F32(qmax), EPS), None, None
    if scheme == "asymmetric":
        with np.errstate(over="ignore"):
            width = hi - lo
        span = F32(qmax - qmin)
        scale = np.maximum(np.where(np.isinf(width), hi / span - lo / span, width / span), EPS)
        zero_point = np.clip(qmin - np.rint(lo / scale), qmin, qmax).astype(np.int32)
        return scale, zero_point, lo
    scale = np.maximum(max_abs / F32((qmax - qmin) / 2), EPS)
    middle = 2 ** (int(name.removeprefix("uint")) - 1) if name.startswith("uint") else 0
    return scale, np.full(scale.shape, middle, np.int32), -max_abs


def e8m0_scale(max_abs, name):
    """2^(floor(log2 max_abs) - p), a normal float32."""
    p = {"float4_e2m1fn_x2": 2, "float6_e2m3fn": 2, "float6_e3m2fn": 4, "float8_e4m3fn": 8, "float8_e5m2": 15}[name]
    scale = np.empty(max_abs.shape, F32)
    for index in np.ndindex(max_abs.shape):
        floor_of_log = math.frexp(max_abs[index])[1] - 1 if max_abs[index] > 0 else -math.inf
        scale[index] = 2.0 ** min(max(floor_of_log - p, -126), 127)
    return scale


def quantize(x, params, name, scheme, formulation, block):
    """The codes, as float32."""
    scale, zero_point, minval = (None if p is None else spread(p, x.shape, block) for p in params)
    qmin, qmax = limits(name, scheme)
    if name in FLOATS:
        inside = np.clip(x / scale, F32(qmin), F32(qmax))
        return np.array([nearest(value, name) for value in inside.ravel()], F32).reshape(x.shape)
    if formulation == "minval":
        return np.clip(np.rint((x - minval) / scale) + F32(qmin), qmin, qmax).astype(F32)
    return np.clip(np.rint(x / scale) + zero_point.astype(F32), qmin, qmax).astype(F32)


def dequantize(codes, params, name, scheme, formulation, block):
    scale, zero_point, minval = (None if p is None else spread(p, codes.shape, block) for p in params)
    if name in FLOATS:
        return codes * scale
    if formulation == "minval":
        return (codes - F32(limits(name, scheme)[0])) * scale + minval
    return (codes - zero_point.astype(F32)) * scale
