"""The runtime LiteRT on CPUs, with the XNNPACK delegate; its variant runs only LiteRT's own kernels."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime, Variant

LITERT = Runtime(
    name="litert",
    package="ai_edge_litert",
    child=Path(__file__).with_name("child.py"),
    formats=("litert",),
    summary="LiteRT (TensorFlow Lite) on CPUs, with XNNPACK",
    install=install_hint("litert"),
    variants=(Variant("unoptimized", {"delegate": False}),),
)
