"""LiteRT (.tflite): integer operators with our own codes and scales, written by the public schema."""

from scalepoint.errors import install_hint
from scalepoint.formats.format import FileFormat
from scalepoint.formats.litert.file_info import list_files, read_info
from scalepoint.formats.litert.write import check, write, write_with_layer_outputs

LITERT = FileFormat(
    name="litert",
    suffix=".tflite",
    write=write,
    files=list_files,
    about=read_info,
    summary="LiteRT models (TensorFlow Lite): int8 operators, channels last inside",
    write_with_layer_outputs=write_with_layer_outputs,
    check=check,
    package="ai_edge_litert",
    install=install_hint("litert"),
)
