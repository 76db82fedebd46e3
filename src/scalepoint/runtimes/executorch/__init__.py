"""The runtime ExecuTorch with XNNPACK on CPUs."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime

EXECUTORCH = Runtime(
    name="executorch",
    package="executorch",
    child=Path(__file__).with_name("child.py"),
    formats=("executorch",),
    summary="ExecuTorch with XNNPACK on CPUs",
    install=install_hint("executorch"),
)
