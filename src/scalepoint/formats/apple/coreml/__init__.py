"""Core ML packages (.mlpackage): weights as codes in constant expressions, activations as quantize and dequantize."""

from scalepoint.errors import install_hint
from scalepoint.formats.apple.coreml.compare import compare_with_model
from scalepoint.formats.apple.coreml.file_info import list_files, read_info
from scalepoint.formats.apple.coreml.write import write
from scalepoint.formats.format import FileFormat

COREML = FileFormat(
    name="coreml",
    suffix=".mlpackage",
    write=write,
    files=list_files,
    about=read_info,
    summary="Core ML programs: weights as constexpr, activations between quantize and dequantize",
    compare=compare_with_model,
    package="coremltools",
    install=install_hint("coreml"),
)
