"""The arithmetic of quantization as pure functions on tensors. All other packages call it."""

from scalepoint.numerics.affine import Steps, make_steps
from scalepoint.numerics.blocks import as_blocks, block_counts, block_view, check_divides
from scalepoint.numerics.bn_folding import LineExtremes, can_fold, fake_quantize_folded, round_trip_folded
from scalepoint.numerics.fake_quantize import fake_quantize, fake_quantize_by_steps
from scalepoint.numerics.formats import (
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
    get_format,
)
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
from scalepoint.numerics.saved_codes import save_codes_for_backward
from scalepoint.numerics.small_tensors import max_prepared_elements, prepare_round_trip
from scalepoint.numerics.tracing import is_traced

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
    "LineExtremes",
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
    "fake_quantize_by_steps",
    "fake_quantize_folded",
    "get_format",
    "is_traced",
    "make_steps",
    "max_prepared_elements",
    "min_max",
    "power_of_two_scale",
    "prepare_round_trip",
    "quantize",
    "round_to_float",
    "round_trip_folded",
    "save_codes_for_backward",
    "tensor_scale",
]
