"""ONNX: real integer weights, activations between QuantizeLinear and DequantizeLinear."""

from scalepoint.formats.format import FileFormat
from scalepoint.formats.onnx.about import about
from scalepoint.formats.onnx.choosing import show_choices
from scalepoint.formats.onnx.plain import write_plain
from scalepoint.formats.onnx.saving import files_of
from scalepoint.formats.onnx.writing import write

ONNX = FileFormat(
    name="onnx",
    suffix=".onnx",
    write=write,
    files=files_of,
    about=about,
    summary="ONNX with QuantizeLinear and DequantizeLinear",
    plain=write_plain,
    show_choices=show_choices,
)
