"""The runtime ONNX Runtime GenAI on CPUs. It generates text; logits are computed with ONNX Runtime itself."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime, Variant

ORT_GENAI = Runtime(
    name="ort-genai",
    package="onnxruntime_genai",
    child=Path(__file__).with_name("child.py"),
    formats=("ort-genai",),
    summary="ONNX Runtime GenAI on CPUs",
    install=install_hint("genai"),
    variants=(
        Variant("unoptimized", {"optimize": False}),
        Variant("exact", {"exact": True}),
    ),
)
