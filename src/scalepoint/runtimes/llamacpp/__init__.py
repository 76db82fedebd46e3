"""llama.cpp on CPUs, the library that npm's node-llama-cpp brings: no compiler and no node is needed to run it."""

import platform
from pathlib import Path

from scalepoint.runtimes.llamacpp.child import DEFAULT, PACKAGES, PLACE, library
from scalepoint.runtimes.runtime import Runtime, Variant

PACKAGE = f"@node-llama-cpp/{PACKAGES.get(platform.machine(), 'linux-x64')}@3.22"


def is_here() -> bool:
    return library() is not None


LLAMACPP = Runtime(
    name="llamacpp",
    package="llamacpp",
    child=Path(__file__).with_name("child.py"),
    formats=("gguf",),
    summary="llama.cpp on CPUs",
    variants=(Variant("exact", {"exact": True}),),
    found=is_here,
    install=f"npm install --prefix {DEFAULT} {PACKAGE} (or another folder, named by {PLACE})",
)
