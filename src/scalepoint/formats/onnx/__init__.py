"""The ONNX format: integer weights, and activations between QuantizeLinear and DequantizeLinear."""

from scalepoint.formats.format import FileFormat
from scalepoint.formats.onnx.choices import show_choices
from scalepoint.formats.onnx.file_info import read_info
from scalepoint.formats.onnx.float_baseline import write_baseline
from scalepoint.formats.onnx.save import list_files
from scalepoint.formats.onnx.write import write

ONNX = FileFormat(
    name="onnx",
    suffix=".onnx",
    write=write,
    files=list_files,
    about=read_info,
    summary="ONNX with QuantizeLinear and DequantizeLinear",
    write_baseline=write_baseline,
    show_choices=show_choices,
)
