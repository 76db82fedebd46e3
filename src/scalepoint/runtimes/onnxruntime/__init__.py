"""The runtime ONNX Runtime on CPUs."""

from pathlib import Path

from scalepoint.runtimes.runtime import ExecutedNodes, Runtime, Variant

ROUNDED = (
    "MatMulNBits rounds activations to int8 at its default accuracy level 4; "
    "session.qdq_matmulnbits_accuracy_level=1 keeps them float and is slower"
)


def rounds_activations(executed: ExecutedNodes) -> bool:
    """Whether a layer has integer weights and float activations."""
    return any(node["op"] == "MatMulNBits" for node in executed)


ONNXRUNTIME = Runtime(
    name="onnxruntime",
    package="onnxruntime",
    child=Path(__file__).with_name("child.py"),
    formats=("onnx",),
    summary="ONNX Runtime on CPUs",
    variants=(
        Variant("unoptimized", {"optimize": False}),
        Variant("exact", {"session": {"session.qdq_matmulnbits_accuracy_level": "1"}}, rounds_activations, ROUNDED),
    ),
    profiles=True,
    shows_codes=True,
)
