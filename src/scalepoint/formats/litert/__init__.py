"""LiteRT (.tflite): integer operators with our own codes and scales, written by the public schema."""

from scalepoint.errors import install_hint
from scalepoint.formats.format import FileFormat
from scalepoint.formats.litert.about import about, files_of
from scalepoint.formats.litert.writing import check, write, write_exposed

LITERT = FileFormat(
    name="litert",
    suffix=".tflite",
    write=write,
    files=files_of,
    about=about,
    summary="LiteRT models (TensorFlow Lite): int8 operators, channels last inside",
    exposed=write_exposed,
    check=check,
    package="ai_edge_litert",
    install=install_hint("litert"),
)
