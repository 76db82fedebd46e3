"""Ways to make an int8 file: ours, other answers to u8 x s8 products without VNNI, the runtimes' own tools."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, fx

from scalepoint.quantize import calibrate
from scalepoint.quantize.stubs import WeightFakeQuantize
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import QuantizationSpec
from scalepoint.spec.range_calculator import MinMaxRangeCalculator, RangeCalculatorBase

OURS, OURS_VNNI = "scalepoint, pair-safe", "scalepoint"
NAIVE, SEVEN_BITS, UNSIGNED = "naive u8 x s8", "7-bit weights", "u8 x u8"
QUANTIZE_STATIC = "ONNX Runtime quantize_static"
NNCF = "NNCF quantize"


@RangeCalculatorBase.register("seven_bits")
class SevenBitRangeCalculator(MinMaxRangeCalculator):
    """A range of twice the weights, of which they fill the codes from -63 to 63."""

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super()._generate_min_max(tensor)
        return low * (127 / 63), high * (127 / 63)


# all with the same activations as ours; 7 bits for all weights, as the runtime's reduce_range has it
ANSWERS: dict[str, Callable[[QuantizationSpec], QuantizationSpec]] = {
    NAIVE: lambda spec: spec.replace(range_calculator_cls="minmax"),
    SEVEN_BITS: lambda spec: spec.replace(range_calculator_cls="seven_bits"),
    UNSIGNED: lambda spec: spec.replace(dtype="uint8", qscheme="symmetric", range_calculator_cls="minmax"),
}


def with_weights(
    quantized: fx.GraphModule, change: Callable[[QuantizationSpec], QuantizationSpec], batches: list[Any]
) -> fx.GraphModule:
    """The same quantized model with other quantizers on its weights, and biases corrected for those."""
    made = copy.deepcopy(quantized)
    for module in made.modules():
        if isinstance(module, QuantizedWeighted) and not module.is_unpacked:
            old = module.weight_quant
            module.weight_quant = WeightFakeQuantize(old.consumers, spec=change(old.spec)).eval()
            module.weight_quant.name = old.name
    calibrate(made, batches, freeze_weights=True, correct_bias=True, progress=False)
    return made


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


def nncf_quantize(plain: Path, path: Path, batches: list[dict[str, np.ndarray]], *, is_transformer: bool) -> None:
    """NNCF on the same float file, as a file."""
    import openvino  # noqa: PLC0415

    made = nncf_quantized(plain, batches, is_transformer=is_transformer)
    openvino.save_model(made, path, compress_to_fp16=False)


def nncf_quantized(plain: Path, batches: list[dict[str, np.ndarray]], *, is_transformer: bool) -> Any:
    """NNCF on a float file: its defaults, and its own setting for transformers."""
    import nncf  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    model = openvino.Core().read_model(plain)
    names = [each.get_any_name() for each in model.inputs]
    dataset = nncf.Dataset([dict(zip(names, batch.values(), strict=True)) for batch in batches])
    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    return nncf.quantize(model, dataset, model_type=kind)
