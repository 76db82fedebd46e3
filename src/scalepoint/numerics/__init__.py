"""Pure functions on tensors: the one implementation of the arithmetic that everything else calls."""

from scalepoint.numerics.affine import Steps, steps_of
from scalepoint.numerics.blocks import as_blocks, block_counts, block_view, check_divides
from scalepoint.numerics.fake import fake_quantize, straight_through
from scalepoint.numerics.folded import Lines, can_fold, fold_and_back, round_trip_folded
from scalepoint.numerics.format import (
    ALIASES,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP4,
    CodeType,
    Float6,
    Format,
    Grid,
    QuantizationFormulation,
    QuantizationScheme,
    ScaleRounding,
    dtype_name,
    format_of,
)
from scalepoint.numerics.kept import keeping
from scalepoint.numerics.qparams import (
    EPS,
    QParams,
    block_scale,
    choose_qparams,
    min_max,
    power_of_two_scale,
    tensor_scale,
)
from scalepoint.numerics.quantize import dequantize, quantize
from scalepoint.numerics.rounding import round_to_float
from scalepoint.numerics.traced import is_traced

__all__ = [
    "ALIASES",
    "E4M3",
    "E5M2",
    "E8M0",
    "EPS",
    "FORMATS",
    "FP4",
    "CodeType",
    "Float6",
    "Format",
    "Grid",
    "Lines",
    "QParams",
    "QuantizationFormulation",
    "QuantizationScheme",
    "ScaleRounding",
    "Steps",
    "as_blocks",
    "block_counts",
    "block_scale",
    "block_view",
    "can_fold",
    "check_divides",
    "choose_qparams",
    "dequantize",
    "dtype_name",
    "fake_quantize",
    "fold_and_back",
    "format_of",
    "is_traced",
    "keeping",
    "min_max",
    "power_of_two_scale",
    "quantize",
    "round_to_float",
    "round_trip_folded",
    "steps_of",
    "straight_through",
    "tensor_scale",
]
