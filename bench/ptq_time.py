"""What post-training quantization costs: CPU seconds and peak memory, ours beside other tools.

ResNet-18 at 224, calibrated with 4 batches of 8. Each tool runs in a process of its own, from the float model to the
calibrated one (ONNX Runtime from the float file to the int8 file); importing and building are not counted. A tool
that is not installed is skipped, and said so. Then calibration alone, as a multiple of the float forwards over the same
batches, side by side in one process: min-max (the default), and the ranges that are searched in a histogram.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from measure import Row, interleave, peak_extra_bytes, report
from resnet18 import resnet18

OUT = Path(__file__).parent.parent / "out"
SKIPPED = 3
CALIBRATION = "calibration alone"
LIMITS = {"min-max": 1.3, "least squared error": 1.8}


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 3, 224, 224, generator=generator) for _ in range(4)]


def scalepoint() -> Callable[[], Any]:
    from scalepoint.quantize import quantize  # noqa: PLC0415

    model, batches = resnet18(), data()
    return lambda: quantize(model, batches[0][:2], forward_loop=batches, target="tensorrt")


def scalepoint_searched() -> Callable[[], Any]:
    from scalepoint.quantize import quantize  # noqa: PLC0415

    model, batches = resnet18(), data()
    return lambda: quantize(model, batches[0][:2], searched(), forward_loop=batches)


def searched() -> Any:
    """Symmetric int8 with the least squared error over all batches."""
    from scalepoint.quantize import CalibrationMethod, QuantConfig, TensorQuantConfig  # noqa: PLC0415

    activation = TensorQuantConfig(calibration_method=CalibrationMethod.MSE)
    return QuantConfig(activation=activation, weight=TensorQuantConfig(per_channel=True))


def torchao() -> Callable[[], Any]:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: PLC0415
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: PLC0415

    model, batches = resnet18(), data()

    def run() -> Any:
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(torch.export.export(model, (batches[0],)).module(), quantizer)
        with torch.no_grad():
            for batch in batches:
                prepared(batch)
        return convert_pt2e(prepared)

    return run


def onnxruntime() -> Callable[[], Any]:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp())
    batches = data()
    torch.onnx.export(resnet18(), (batches[0],), str(folder / "float.onnx"), input_names=["x"], dynamo=False)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[torch.Tensor] = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.left, None)
            return None if batch is None else {"x": batch.numpy()}

    return lambda: quantize_static(folder / "float.onnx", folder / "int8.onnx", Reader(), per_channel=True)


def modelopt() -> Callable[[], Any]:
    import modelopt.torch.quantization as mtq  # noqa: PLC0415

    model, batches = resnet18(), data()

    def loop(each: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in batches:
                each(batch)

    return lambda: mtq.quantize(model, mtq.INT8_DEFAULT_CFG, loop)


TOOLS = {
    "scalepoint, min-max (default)": scalepoint,
    "scalepoint, least squared error": scalepoint_searched,
    "ONNX Runtime quantize_static, min-max": onnxruntime,
    "torchao PT2E, histogram": torchao,
    "ModelOpt, max": modelopt,
}


def measure(name: str) -> int:
    """In the child: prepare the tool, then run it once and say what it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        run = TOOLS[name]()
    except ImportError as error:
        print(error, file=sys.stderr)
        return SKIPPED
    start = time.process_time()
    peak = peak_extra_bytes(run)
    print(json.dumps({"seconds": time.process_time() - start, "bytes": peak}))
    return 0


def calibration() -> int:
    """In the child: calibrate beside the float forwards that it needs."""
    from scalepoint import transform  # noqa: PLC0415
    from scalepoint.quantize import calibrate, insert_qdq  # noqa: PLC0415

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, batches = resnet18(), data()
    result = transform(model, batches[0][:2], target="tensorrt")
    plain, histogram = (insert_qdq(result.model, result.matches, config) for config in (None, searched()))

    def forwards() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    taken = interleave(
        {
            "forwards": forwards,
            "min-max": lambda: calibrate(plain, batches, progress=False),
            "least squared error": lambda: calibrate(histogram, batches, progress=False),
        },
        repeats=5,
    )
    print(json.dumps({name: taken[name] / taken["forwards"] for name in LIMITS}))
    return 0


def main() -> int:
    if sys.argv[1:] == [CALIBRATION]:
        return calibration()
    if len(sys.argv) > 1:
        return measure(sys.argv[1])
    table = Table(title="ResNet-18 @224, 4 batches of 8, one thread")
    for column in ("tool", "CPU seconds", "against ours", "peak memory beyond the model"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    results: dict[str, dict[str, float] | str] = {}
    for name in TOOLS:
        command = [sys.executable, __file__, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            results[name] = ("not installed: " if done.returncode == SKIPPED else "failed: ") + lines[-1]
            table.add_row(name, "", "", str(results[name]))
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        results[name] = found
        own = results[next(iter(TOOLS))]
        ratio = found["seconds"] / own["seconds"] if isinstance(own, dict) else float("nan")
        table.add_row(name, f"{found['seconds']:.1f}", f"{ratio:.2f}", f"{found['bytes'] / 2**20:.0f} MB")
    Console(width=110).print(table)
    OUT.mkdir(exist_ok=True)
    (OUT / "ptq_time.json").write_text(json.dumps(results, indent=2))
    command = [sys.executable, __file__, CALIBRATION]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ratios = json.loads(done.stdout.strip().splitlines()[-1])
    rows = [Row(name, ratios[name], limit, "the float forwards") for name, limit in LIMITS.items()]
    return 0 if report("Calibrating ResNet-18", rows, OUT / "calibration_time.json") else 1


if __name__ == "__main__":
    sys.exit(main())
