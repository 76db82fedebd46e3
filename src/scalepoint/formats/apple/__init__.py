"""Core ML: an .mlpackage with weights as codes in constant expressions, activations between quantize and dequantize."""

from scalepoint.errors import install_hint
from scalepoint.formats.apple.compare import differences
from scalepoint.formats.apple.file_info import about, files_of
from scalepoint.formats.apple.write import write
from scalepoint.formats.format import FileFormat

COREML = FileFormat(
    name="coreml",
    suffix=".mlpackage",
    write=write,
    files=files_of,
    read_info=about,
    summary="Core ML programs: weights as constexpr, activations between quantize and dequantize",
    compare=differences,
    package="coremltools",
    install=install_hint("coreml"),
)
