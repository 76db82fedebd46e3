"""What post-training quantization costs: CPU seconds and peak memory, ours beside other tools.

ResNet-18 at 224, calibrated with 4 batches of 8. Each tool runs in a process of its own, from the float model to the
calibrated one (ONNX Runtime from the float file to the int8 file); importing and building are not counted. A tool
that is not installed is skipped, and said so.
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

from measure import peak_extra_bytes
from resnet18 import resnet18

OUT = Path(__file__).parent.parent / "out"
SKIPPED = 3


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 3, 224, 224, generator=generator) for _ in range(4)]


def scalepoint() -> Callable[[], Any]:
    from scalepoint.quantize import quantize  # noqa: PLC0415

    model, batches = resnet18(), data()
    return lambda: quantize(model, batches[0][:2], forward_loop=batches, target="tensorrt")


def scalepoint_minmax() -> Callable[[], Any]:
    from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize  # noqa: PLC0415

    model, batches = resnet18(), data()
    config = QuantConfig(activation=TensorQuantConfig(), weight=TensorQuantConfig(per_channel=True))
    return lambda: quantize(model, batches[0][:2], config, forward_loop=batches)


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
    "scalepoint, MSE ranges (default)": scalepoint,
    "scalepoint, min-max": scalepoint_minmax,
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


def main() -> int:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
