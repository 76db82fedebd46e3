"""A seam for file formats: what a quantizer becomes while another program's exporter records it.

`torch.onnx.export(model.eval(), ..)` of a quantized model must give Q/DQ, and has no table of operators that a package
could fill: the quantizer itself has to give them. The tensor layer knows no format; the format registers its form.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from scalepoint.numerics import Grid, QParams
from scalepoint.spec.granularity import QuantizationGranularity

Form = Callable[[Tensor, QParams, Grid, QuantizationGranularity, str], Tensor]
FORMS: dict[str, Form] = {}
ROOM = "scalepoint.formats.onnx.qdq"  # which registers its form when it is imported


def in_onnx_export() -> bool:
    """Also where torch.compile traces: it takes torch's own function for False, also inside of torch.onnx.export."""
    is_recording = torch.onnx.is_in_onnx_export()
    if is_recording and "onnx" not in FORMS:
        import_module(ROOM)
    return is_recording


# What torch.compiler.assume_constant_result sets; that decorator imports all of torch._dynamo, as long as torch itself.
in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]
