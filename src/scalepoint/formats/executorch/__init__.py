"""ExecuTorch programs (.pte): int8 and int4 weights, Q/DQ as XNNPACK's partitioner takes them for its kernels."""

from scalepoint.errors import install_hint
from scalepoint.formats.executorch.file_info import about, files_of
from scalepoint.formats.executorch.layer_outputs import write_exposed
from scalepoint.formats.executorch.write import write
from scalepoint.formats.format import FileFormat

EXECUTORCH = FileFormat(
    name="executorch",
    suffix=".pte",
    write=write,
    files=files_of,
    read_info=about,
    summary="an ExecuTorch program, lowered to XNNPACK",
    write_with_layer_outputs=write_exposed,
    package="executorch",
    install=install_hint("executorch"),
)
