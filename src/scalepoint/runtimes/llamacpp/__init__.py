"""The runtime llama.cpp on CPUs: the library of the npm package node-llama-cpp. Node.js is not needed to run it."""

import platform
from pathlib import Path

from scalepoint.runtimes.llamacpp.child import DEFAULT_FOLDER, FOLDER_VARIABLE, NPM_PACKAGES, find_library
from scalepoint.runtimes.runtime import Runtime, Variant

PACKAGE = f"@node-llama-cpp/{NPM_PACKAGES.get(platform.machine(), 'linux-x64')}@3.22"


def is_library_installed() -> bool:
    """Whether the library is in its folder; nothing is loaded."""
    return find_library() is not None


LLAMACPP = Runtime(
    name="llamacpp",
    package="llamacpp",
    child=Path(__file__).with_name("child.py"),
    formats=("gguf",),
    summary="llama.cpp on CPUs",
    variants=(Variant("exact", {"exact": True}),),
    detect=is_library_installed,
    install=f"npm install --prefix {DEFAULT_FOLDER} {PACKAGE} (or in another folder, named by {FOLDER_VARIABLE})",
)
