"""OpenVINO on CPUs: the child tells the primitive of every node in its compiled graph."""

from pathlib import Path

from scalepoint.runtimes.runtime import Runtime

OPENVINO = Runtime(
    name="openvino",
    package="openvino",
    child=Path(__file__).with_name("child.py"),
    formats=("onnx",),
    summary="OpenVINO on CPUs",
    profiles=True,
)
