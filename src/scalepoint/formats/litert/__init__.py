"""LiteRT (.tflite): integer operators with our own codes and scales, written by the public schema."""

from scalepoint.errors import install_hint
from scalepoint.formats.format import FileFormat
from scalepoint.formats.litert.file_info import about, files_of
from scalepoint.formats.litert.write import check, write, write_exposed

LITERT = FileFormat(
    name="litert",
    suffix=".tflite",
    write=write,
    files=files_of,
    read_info=about,
    summary="LiteRT models (TensorFlow Lite): int8 operators, channels last inside",
    write_with_layer_outputs=write_exposed,
    check=check,
    package="ai_edge_litert",
    install=install_hint("litert"),
)
