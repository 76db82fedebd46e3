"""Accuracy below 8 bits: codes, scales and bias shifts are chosen from data, in one pass over it."""

from scalepoint.results import TunedLayer, TuneReport
from scalepoint.tuning.config import TuneConfig
from scalepoint.tuning.steps import register
from scalepoint.tuning.tune import tune

__all__ = ["TuneConfig", "TuneReport", "TunedLayer", "register", "tune"]
