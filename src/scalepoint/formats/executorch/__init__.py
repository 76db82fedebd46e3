"""ExecuTorch programs (.pte) for XNNPACK: int8 and int4 weights, Q/DQ where its partitioner expects them."""

from scalepoint.errors import install_hint
from scalepoint.formats.executorch.file_info import list_files, read_info
from scalepoint.formats.executorch.layer_outputs import write_with_layer_outputs
from scalepoint.formats.executorch.write import write
from scalepoint.formats.format import FileFormat

EXECUTORCH = FileFormat(
    name="executorch",
    suffix=".pte",
    write=write,
    files=list_files,
    about=read_info,
    summary="an ExecuTorch program, lowered to XNNPACK",
    write_with_layer_outputs=write_with_layer_outputs,
    package="executorch",
    install=install_hint("executorch"),
)
