"""The runtime Core AI: Apple's own runtime in the package coreai-core, which also runs on Linux.

There it runs on the CPU and writes quantize and dequantize as float operations. So it shows that a program computes
what the simulation computes. It says nothing about the speed, or about the kernels of the Neural Engine or the GPU.
"""

from pathlib import Path

from scalepoint.errors import install_hint
from scalepoint.runtimes.runtime import Runtime

COREAI = Runtime(
    name="coreai",
    package="coreai",
    child=Path(__file__).with_name("child.py"),
    formats=("coreai",),
    summary="Core AI's own runtime, on the CPU of this machine",
    shows_codes=True,
    shows_products=True,
    retries_smaller=True,
    install=install_hint("coreai"),
    no_speed_reason="Core AI's own runtime ran the file on a CPU, not on a device: its speed was not measured",
)
