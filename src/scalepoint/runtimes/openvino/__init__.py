"""The runtime OpenVINO on CPUs."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import ExecutedNodes, Runtime, Variant

FLOAT16_SUFFIXES = ("_bf16", "_f16")
INT8_SUFFIXES = ("_i8", "_u8")
ROUNDED = (
    "OpenVINO computes float layers in 16 bits if the CPU supports it, and rounds activations to int8 if only the "
    "weights are quantized; EXECUTION_MODE_HINT=ACCURACY keeps float32 and is slower"
)


def rounds_floats(executed: ExecutedNodes) -> bool:
    """Whether a primitive computes in 16 bits, or a layer has integer weights and float activations."""
    for node in executed:
        primitive = str(node["op"]).lower()
        is_weight_only = node["low"] and not primitive.endswith(INT8_SUFFIXES)
        if primitive.endswith(FLOAT16_SUFFIXES) or is_weight_only:
            return True
    return False


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
