"""Verification in the real runtime: agreement with the simulation, what really runs in low precision, speed."""

from scalepoint.runtimes.process import Status
from scalepoint.verification.layers import LayerAgreement, LayerVerification, verify_layers
from scalepoint.verification.verification import Agreement, Benchmark, Departure, Verification, benchmark, verify

__all__ = [
    "Agreement",
    "Benchmark",
    "Departure",
    "LayerAgreement",
    "LayerVerification",
    "Status",
    "Verification",
    "benchmark",
    "verify",
    "verify_layers",
]
