"""The runtime Core ML. On other systems than macOS the file is read back and evaluated, without a speed.

The tests do not run on macOS, so running a file in Core ML itself is untested.
"""

import sys
from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime


def describe_evaluation() -> str:
    """Explain why files are evaluated on this machine and not run; "" on macOS."""
    if sys.platform == "darwin":
        return ""
    return "Core ML runs only on macOS: the file was not run, but read back and evaluated in float32"


COREML = Runtime(
    name="coreml",
    package="coremltools",
    child=Path(__file__).with_name("child.py"),
    formats=("coreml",),
    summary="Core ML on macOS; on other systems the file is read back and evaluated",
    install=install_hint("coreml"),
    check_platform=describe_evaluation,
)
