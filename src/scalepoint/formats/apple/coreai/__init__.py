"""Core AI programs (.aimodel): weights as codes with scales or tables, activations as quantize and dequantize."""

from scalepoint.errors import install_hint
from scalepoint.formats.apple.coreai.compare import compare_with_model
from scalepoint.formats.apple.coreai.file_info import list_files, read_info
from scalepoint.formats.apple.coreai.write import check, write
from scalepoint.formats.format import FileFormat

COREAI = FileFormat(
    name="coreai",
    suffix=".aimodel",
    write=write,
    files=list_files,
    about=read_info,
    summary="Core AI programs: weights as codes, activations between quantize and dequantize",
    check=check,
    compare=compare_with_model,
    package="coreai_torch",
    install=install_hint("coreai"),
)
