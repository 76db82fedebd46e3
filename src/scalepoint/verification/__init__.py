"""Verification of exported files in their runtime: agreement with the simulation, precision of the kernels, speed."""

# Where to look:
#
# verify_file.py    the public function `verify`; runtime_run.py runs the file, simulation.py the model in PyTorch
# result.py         the result as data, with agreement.py (SQNR of an output) and layer_times.py
# layers.py         `verify_layers`: every layer by itself; extraction.py writes one that differs as a small file
# benchmarking.py   `benchmark`, `throughput`; profiling.py: `profile`, the time of every layer
# runtime_model.py  a file that is called like the model, for metrics

from typing import TYPE_CHECKING

from scalepoint.runtimes import Status
from scalepoint.support.plugins import lazy_attributes

if TYPE_CHECKING:
    from scalepoint.verification.agreement import Agreement
    from scalepoint.verification.benchmarking import benchmark, throughput
    from scalepoint.verification.extraction import extract_failing
    from scalepoint.verification.layer_times import LayerTime
    from scalepoint.verification.layers import LayerAgreement, LayerVerification, verify_layers
    from scalepoint.verification.profiling import profile
    from scalepoint.verification.result import Benchmark, Choice, Departure, Verification
    from scalepoint.verification.runtime_model import RuntimeModel
    from scalepoint.verification.verify_file import verify

__all__ = [
    "Agreement",
    "Benchmark",
    "Choice",
    "Departure",
    "LayerAgreement",
    "LayerTime",
    "LayerVerification",
    "RuntimeModel",
    "Status",
    "Verification",
    "benchmark",
    "extract_failing",
    "profile",
    "throughput",
    "verify",
    "verify_layers",
]

_MODULES = {
    "Agreement": "agreement",
    "Benchmark": "result",
    "Choice": "result",
    "Departure": "result",
    "LayerAgreement": "layers",
    "LayerTime": "layer_times",
    "LayerVerification": "layers",
    "RuntimeModel": "runtime_model",
    "Verification": "result",
    "benchmark": "benchmarking",
    "extract_failing": "extraction",
    "profile": "profiling",
    "throughput": "benchmarking",
    "verify": "verify_file",
    "verify_layers": "layers",
}
__getattr__ = lazy_attributes(__name__, _MODULES)
