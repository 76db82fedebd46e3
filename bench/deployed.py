"""The deployed files in ONNX Runtime: agreement, error against float, speed, beside its own quantize_static.

Three networks: ResNet-18 (random weights, real-looking statistics), EfficientNet-Lite0 (trained, depthwise) and
all-MiniLM-L6-v2 (trained, a transformer). "naive" is our placement with all 8 bits of the weights, which saturates on
CPUs without VNNI. All speeds are against the float file, interleaved in one process, one thread.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scalepoint
from resnet18 import resnet18
from scalepoint.quantize import quantize
from scalepoint.targets import onnxruntime_target
from scalepoint.verification.runner import RuntimeModel

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
import lite0
import sentences

OUT = Path(__file__).parent.parent / "out"


@dataclass(frozen=True)
class Result:
    model: str
    how: str
    sqnr_against_float: float
    agreement: float | None
    int8: str
    speed: float
    size: float


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def run(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**batch) if isinstance(batch, dict) else model(batch)
    return result


def ours(name: str, model: nn.Module, data: list[Any], folder: Path) -> Iterator[Result]:
    expected = run(model, data[0])
    for how, cpu in (("scalepoint", "avx2"), ("naive u8 x s8", "vnni")):
        quantized = quantize(model, data[0], forward_loop=data, target=onnxruntime_target(cpu))
        path, plain = folder / f"{cpu}.onnx", folder / "float.onnx"
        scalepoint.export(quantized, path, data[0], float_path=plain)
        found = scalepoint.verify(path, quantized, data[0], float_path=plain, layers=False)
        assert found.latency is not None
        assert found.float_size is not None
        weighted = found.low_precision + len(found.fallbacks)
        yield Result(
            name,
            how,
            sqnr(expected, run(RuntimeModel(path, threads=1), data[0])),
            found.sqnr,
            f"{found.low_precision} of {weighted}",
            found.latency.ratio,
            found.size / found.float_size,
        )


def theirs(name: str, model: nn.Module, data: list[Any], folder: Path) -> Iterator[Result]:
    """ONNX Runtime's own tool on the same float file."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static  # noqa: PLC0415

    plain, path = folder / "float.onnx", folder / "theirs.onnx"
    names = RuntimeModel(plain).names

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(data)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            if batch is None:
                return None
            values = list(batch.values()) if isinstance(batch, dict) else [batch]
            return {each: value.numpy() for each, value in zip(names, values, strict=True)}

    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(plain, path, Reader(), per_channel=True, **types)
    feeds = Reader().get_next()
    speed = scalepoint.benchmark(plain, path, feeds)
    size = path.stat().st_size / plain.stat().st_size
    found = sqnr(run(model, data[0]), run(RuntimeModel(path, threads=1), data[0]))
    yield Result(name, "ONNX Runtime quantize_static", found, None, "", speed.ratio, size)


def subjects() -> Iterator[tuple[str, nn.Module, list[Any]]]:
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.randn(2, 3, 224, 224, generator=generator) for _ in range(2)]
    yield "ResNet-18 @224", resnet18(), pictures
    yield "EfficientNet-Lite0 @224", lite0.trained(), [picture.clamp(-1, 1) for picture in pictures]
    encoder, tokenizer = sentences.load()
    texts, _ = sentences.sentences()
    yield "MiniLM-L6", encoder, sentences.batches(tokenizer, texts[:64])


def main() -> int:
    warnings.simplefilter("ignore")
    table = Table(title="deployed in ONNX Runtime on this CPU, one thread")
    columns = ("model", "how", "dB against float", "dB against simulation", "int8 operations", "speed", "size")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "how") else "right")
    results: list[Result] = []
    for name, model, data in subjects():
        with tempfile.TemporaryDirectory() as folder:
            for result in (*ours(name, model, data, Path(folder)), *theirs(name, model, data, Path(folder))):
                results.append(result)
                agreement = "" if result.agreement is None else f"{result.agreement:.1f}"
                table.add_row(
                    name,
                    result.how,
                    f"{result.sqnr_against_float:.1f}",
                    agreement,
                    result.int8,
                    f"{result.speed:.2f}x",
                    f"{result.size:.2f}x",
                )
    Console(width=140).print(table)
    OUT.mkdir(exist_ok=True)
    (OUT / "deployed.json").write_text(json.dumps([asdict(result) for result in results], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
