"""Core ML: run on macOS; elsewhere the program is read back and evaluated, which proves the file but not the speed.

The way over macOS has not been tried by our tests: they run where Core ML does not.
"""

import sys
from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime


def stand_in() -> str:
    """Why a file is not run here; "" where it is."""
    if sys.platform == "darwin":
        return ""
    return (
        "Core ML runs on macOS alone: the file was read back and evaluated operation by operation in float32, not run"
    )


COREML = Runtime(
    name="coreml",
    package="coremltools",
    child=Path(__file__).with_name("child.py"),
    formats=("coreml",),
    summary="Core ML on macOS; elsewhere the program is read back and evaluated",
    install=install_hint("coreml"),
    stand_in=stand_in,
)
