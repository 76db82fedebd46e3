"""Write int8 ONNX files with scalepoint and with the runtimes' own tools, run them, and time them interleaved."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import calibrate
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import WeightFakeQuantize
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import Status, TaskResult, count_low_precision, exchange_files, run_task
from scalepoint.spec import QuantizationSpec
from scalepoint.spec.range_calculator import MinMaxRangeCalculator, RangeCalculatorBase
from scalepoint.verification.simulation import build_feeds


@dataclass(frozen=True)
class File:
    """One file of a network. Decibels; speed and size are ratios to the float file."""

    how: str
    int8: str
    against_float: float
    agreement: float | None
    speed: float
    size: float
    left: int = 0  # operations that stay float for speed


def sqnr(expected: Tensor, output: Tensor) -> float:
    noise = (expected - output).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@torch.no_grad()
def run(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(**batch) if isinstance(batch, dict) else model(batch)
    return result


def arrays(model: Any, batch: Any) -> dict[str, np.ndarray]:
    """A batch as a runtime takes it."""
    return build_feeds(model, as_inputs(batch, None))


def share(low: int, float_layers: Sequence[str]) -> str:
    return f"{low} of {low + len(float_layers)}"


def require_answer(answer: TaskResult, runtime: str) -> Mapping[str, Any]:
    if answer.status != Status.OK or answer.data is None:
        raise SystemExit(f"{runtime}: {answer.status.value}: {answer.message}")
    return answer.data


def ran(path: Path, feeds: Mapping[str, np.ndarray], runtime: str) -> tuple[Tensor, str]:
    """The output of a file, and how many of its operations with weights ran in int8."""
    with exchange_files(feeds) as files:
        request = {"task": "run", "path": str(path), "options": {"threads": 1}, "executed": True, **files.paths}
        answer = run_task(find_runtime(runtime), request)
        executed = require_answer(answer, runtime)["executed"]
        output = next(iter(files.outputs(answer).values()))
    return torch.from_numpy(output), share(*count_low_precision(executed))


def speeds(paths: Sequence[Path], feeds: Mapping[str, np.ndarray], runtime: str, repeats: int = 60) -> list[float]:
    """How many times faster than the first file each one is: medians of interleaved runs in one process."""
    with exchange_files(feeds) as files:
        request = {"task": "benchmark", "paths": [str(path) for path in paths], "options": {"threads": 1}}
        answer = run_task(
            find_runtime(runtime), {**request, **files.paths, "repeats": repeats, "seconds": 60}, seconds=1200
        )
    medians = require_answer(answer, runtime)["medians"]
    return [medians[0] / quartiles for quartiles in medians]


def size_of(path: Path) -> int:
    """Return the bytes of a file and of the weights in the file next to it."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if weights.exists() else 0)


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
    copied = copy.deepcopy(quantized)
    for module in copied.modules():
        if isinstance(module, QuantizedLayer) and not module.computes_in_float:
            old = module.weight_quant
            module.weight_quant = WeightFakeQuantize(old.consumers, spec=change(old.spec)).eval()
            module.weight_quant.name = old.name
    calibrate(copied, batches, freeze_weights=True, correct_bias=True, progress=False)
    return copied


CALIBRATION_METHODS = ("MinMax", "Entropy", "Percentile")  # of quantize_static


def preprocess(plain: Path, path: Path) -> Path:
    """The float file after quantize_static's own preprocessing: optimized, with inferred shapes.

    Its symbolic shape inference fails for some graphs; then that part is left out, as its documentation says.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    with chdir(path.parent):  # where it leaves files if it fails
        try:
            quant_pre_process(str(plain), str(path))
        except Exception:  # it raises plain exceptions and assertions
            quant_pre_process(str(plain), str(path), skip_symbolic_shape=True)
    return path


def quantize_static(
    plain: Path,
    path: Path,
    batches: list[dict[str, np.ndarray]],
    *,
    method: str = "MinMax",
    reduce_range: bool = False,
) -> None:
    """ONNX Runtime's own tool on a float file: u8 activations, s8 weights per channel, its other defaults."""
    import onnxruntime  # noqa: PLC0415
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType  # noqa: PLC0415
    from onnxruntime.quantization import quantize_static as run  # noqa: PLC0415

    names = [model_input.name for model_input in onnxruntime.InferenceSession(plain).get_inputs()]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.remaining = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.remaining, None)
            return None if batch is None else dict(zip(names, batch.values(), strict=True))

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    run(
        plain,
        path,
        Reader(),
        per_channel=True,
        calibrate_method=CalibrationMethod[method],
        reduce_range=reduce_range,
        **types,
    )


NNCF_PRESETS = ("default", "accuracy")


def nncf_quantize(
    plain: Path, path: Path, batches: list[dict[str, np.ndarray]], *, is_transformer: bool, preset: str = "default"
) -> None:
    """NNCF on the same float file, as a file."""
    import openvino  # noqa: PLC0415

    quantized = nncf_quantized(plain, batches, is_transformer=is_transformer, preset=preset)
    openvino.save_model(quantized, path, compress_to_fp16=False)


def nncf_quantized(
    plain: Path, batches: list[dict[str, np.ndarray]], *, is_transformer: bool, preset: str = "default"
) -> Any:
    """NNCF on a float file: its defaults, or its settings for accuracy; and its own setting for transformers."""
    import nncf  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    model = openvino.Core().read_model(plain)
    names = [model_input.get_any_name() for model_input in model.inputs]
    dataset = nncf.Dataset([dict(zip(names, batch.values(), strict=True)) for batch in batches])
    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    settings = {} if preset == "default" else {"preset": nncf.QuantizationPreset.MIXED, "fast_bias_correction": False}
    return nncf.quantize(model, dataset, model_type=kind, **settings)
