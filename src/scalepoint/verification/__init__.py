"""Verification in the real runtime: agreement with the simulation, what really runs in low precision, speed."""

from scalepoint.runtimes import Status
from scalepoint.verification.agreement import Agreement
from scalepoint.verification.layers import LayerAgreement, LayerVerification, verify_layers
from scalepoint.verification.result import Benchmark, Departure, Verification
from scalepoint.verification.runner import RuntimeModel
from scalepoint.verification.running import verify
from scalepoint.verification.timing import benchmark

__all__ = [
    "Agreement",
    "Benchmark",
    "Departure",
    "LayerAgreement",
    "LayerVerification",
    "RuntimeModel",
    "Status",
    "Verification",
    "benchmark",
    "verify",
    "verify_layers",
]
