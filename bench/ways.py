"""Ways to make an int8 file for ONNX Runtime: ours, other answers to u8 x s8 without VNNI, the runtime's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.graph.capture import as_inputs
from scalepoint.spec import PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.spec.range_calculator import MinMaxRangeCalculator, RangeCalculatorBase
from scalepoint.targets import Facts, Target, onnxruntime_target
from scalepoint.targets.target import Accepted
from scalepoint.verification.verification import feeds_of

OURS = "scalepoint, pair-safe"
NAIVE, SEVEN_BITS, UNSIGNED = "naive u8 x s8", "7-bit weights", "u8 x u8"
ANSWERS = (NAIVE, SEVEN_BITS, UNSIGNED, OURS)
THEIRS = "ONNX Runtime quantize_static"
NNCF = "NNCF quantize"


@RangeCalculatorBase.register("seven_bits")
class SevenBitRangeCalculator(MinMaxRangeCalculator):
    """A range of twice the weights, of which they fill the codes from -63 to 63."""

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super()._generate_min_max(tensor)
        return low * (127 / 63), high * (127 / 63)


def seven_bits(spec: QuantizationSpec, facts: Facts) -> QuantizationSpec:
    """All weights, as ONNX Runtime's reduce_range does it."""
    scheme = QuantizationScheme.SYMMETRIC_WITH_CLIPPING
    return spec.replace(range_calculator_cls="seven_bits", qscheme=scheme)


def unsigned_weights(target: Target) -> Target:
    """u8 weights around 128: exact in slower kernels."""
    weight = QuantizationSpec(
        dtype="uint8", qscheme="symmetric", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
    )
    return replace(target, weight=weight, accepts=(*target.accepts, Accepted("weight", (torch.uint8,))))


def targets() -> dict[str, Target]:
    plain = onnxruntime_target("vnni")
    return {
        OURS: onnxruntime_target("avx2"),
        NAIVE: plain,
        SEVEN_BITS: replace(plain, adapt_weight=seven_bits),
        UNSIGNED: unsigned_weights(plain),
    }


def arrays(model: Any, batch: Any) -> dict[str, np.ndarray]:
    """A batch as a runtime takes it."""
    return feeds_of(model, as_inputs(batch, None))


def quantize_static(plain: Path, path: Path, batches: list[dict[str, np.ndarray]]) -> None:
    """ONNX Runtime's own tool on the same float file: u8 activations, s8 weights per channel, its other defaults."""
    import onnxruntime  # noqa: PLC0415
    from onnxruntime.quantization import CalibrationDataReader, QuantType  # noqa: PLC0415
    from onnxruntime.quantization import quantize_static as run  # noqa: PLC0415

    names = [each.name for each in onnxruntime.InferenceSession(plain).get_inputs()]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            return None if batch is None else dict(zip(names, batch.values(), strict=True))

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    run(plain, path, Reader(), per_channel=True, **types)
