"""OpenVINO on CPUs: the child tells the primitive of every node in its compiled graph."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import ExecutedNodes, Runtime, Variant

HALVES = ("_bf16", "_f16")
INTEGERS = ("_i8", "_u8")
ROUNDED = (
    "OpenVINO computes what is float in 16 bits where the CPU has them, and rounds activations of products with narrow "
    "weights to int8; EXECUTION_MODE_HINT=ACCURACY leaves them float32, and is slower"
)


def rounds_floats(executed: ExecutedNodes) -> bool:
    """Whether a primitive computes in 16 bits, or a product has narrow weights and float activations."""
    primitives = [(str(each["op"]).lower(), each["low"]) for each in executed]
    return any(op.endswith(HALVES) or (low and not op.endswith(INTEGERS)) for op, low in primitives)


OPENVINO = Runtime(
    name="openvino",
    package="openvino",
    child=Path(__file__).with_name("child.py"),
    formats=("onnx",),
    summary="OpenVINO on CPUs",
    install=install_hint("openvino"),
    variants=(Variant("exact", {"accurate": True}, rounds_floats, ROUNDED),),
    profiles=True,
)
