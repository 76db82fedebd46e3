"""ONNX: real integer weights, activations between QuantizeLinear and DequantizeLinear."""

from scalepoint.formats.format import FileFormat
from scalepoint.formats.onnx.choices import show_choices
from scalepoint.formats.onnx.file_info import about
from scalepoint.formats.onnx.float_baseline import write_plain
from scalepoint.formats.onnx.save import files_of
from scalepoint.formats.onnx.write import write

ONNX = FileFormat(
    name="onnx",
    suffix=".onnx",
    write=write,
    files=files_of,
    read_info=about,
    summary="ONNX with QuantizeLinear and DequantizeLinear",
    write_baseline=write_plain,
    show_choices=show_choices,
)
