"""Core ML: an .mlpackage with weights as codes in constant expressions, activations between quantize and dequantize."""

from scalepoint.errors import install_hint
from scalepoint.formats.coreml.about import about, files_of
from scalepoint.formats.coreml.comparing import differences
from scalepoint.formats.coreml.writing import write
from scalepoint.formats.format import FileFormat

COREML = FileFormat(
    name="coreml",
    suffix=".mlpackage",
    write=write,
    files=files_of,
    about=about,
    summary="Core ML programs: weights as constexpr, activations between quantize and dequantize",
    compare=differences,
    package="coremltools",
    install=install_hint("coreml"),
)
