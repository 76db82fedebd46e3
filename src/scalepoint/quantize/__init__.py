"""Quantized models: placement of quantizers, calibration, training, saving and loading."""

from scalepoint.migration_report import MigrationReport, MigrationRow
from scalepoint.operation_coverage import Coverage
from scalepoint.quantize.calibrate import calibrate, freeze
from scalepoint.quantize.config import CalibrationMethod, Override, QuantConfig, SmoothQuantConfig, TensorQuantConfig
from scalepoint.quantize.insert import insert_qdq
from scalepoint.quantize.override_matches import find_override_matches
from scalepoint.quantize.qat import (
    QATSchedule,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    freeze_bn_stats,
    prepare_qat,
)
from scalepoint.quantize.quantize_model import quantize
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize
from scalepoint.quantize.record import Record, coverage, record_of
from scalepoint.quantize.smooth import SmoothQuantObserver
from scalepoint.quantize.store import load, save
from scalepoint.quantize.weight_size import BitsPerWeightResult, bits_per_weight

__all__ = [
    "BitsPerWeightResult",
    "CalibrationMethod",
    "Coverage",
    "MigrationReport",
    "MigrationRow",
    "Override",
    "QATSchedule",
    "QuantConfig",
    "QuantStub",
    "Record",
    "SmoothQuantConfig",
    "SmoothQuantObserver",
    "TensorQuantConfig",
    "WeightFakeQuantize",
    "bits_per_weight",
    "calibrate",
    "coverage",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "find_override_matches",
    "freeze",
    "freeze_bn_stats",
    "insert_qdq",
    "load",
    "prepare_qat",
    "quantize",
    "record_of",
    "save",
]
