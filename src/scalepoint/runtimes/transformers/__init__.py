"""The runtime transformers on CPUs. It unpacks the weights to float, so it verifies values but not speed."""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime

TRANSFORMERS = Runtime(
    name="transformers",
    package="transformers",
    child=Path(__file__).with_name("child.py"),
    formats=("compressed-tensors", "gptq", "awq"),
    summary="transformers on CPUs: weights are unpacked to float",
    install=install_hint("transformers"),
)
