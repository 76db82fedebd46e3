"""Analysis: which layers lose accuracy, and what a target would quantize."""

from scalepoint.analysis.compare import Comparison, OutputError, compare
from scalepoint.analysis.histograms import histograms
from scalepoint.analysis.inspect import inspect
from scalepoint.analysis.sensitivity import Sensitivity, sensitivity
from scalepoint.results import LayerError, TensorHistogram

__all__ = [
    "Comparison",
    "LayerError",
    "OutputError",
    "Sensitivity",
    "TensorHistogram",
    "compare",
    "histograms",
    "inspect",
    "sensitivity",
]
