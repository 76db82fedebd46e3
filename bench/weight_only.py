"""Narrow weights alone on a Llama of three blocks, one word at a time, beside ONNX Runtime's own MatMulNBits quantizer.

One thread; all speeds are against the float file, interleaved in one process. The float model has random weights, so
dB against float shows the arithmetic, not the loss of a trained model. A limit is a least speed or a largest size.
"""

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import scalepoint
from llama import Sizes, llama
from scalepoint.formats.onnx import ONNX
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.verification import RuntimeModel

OUT = Path(__file__).parent.parent / "out"
SIZES = Sizes(hidden=1024, mlp=4096, layers=3, heads=16, words=512)
FORMATS = {
    "onnxruntime": (("int4", 32), ("int4", 128), ("uint4", 128), ("int8", None), ("int2", 32)),
    "openvino": (("int4", 32), ("int4", 128), ("int8", None)),
}
LEAST_SPEED, LARGEST_SIZE = 3.0, 0.17  # of int4


@dataclass(frozen=True)
class Result:
    runtime: str
    how: str
    format: str
    speed: float
    size: float
    narrow: str
    agreement: float | None  # with the simulation, dB
    agreement_level_1: float | None
    against_float: float


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def ours(model: Any, words: Tensor, folder: Path, runtime: str) -> Iterator[Result]:
    expected = model(words)
    for dtype, block in FORMATS[runtime]:
        quantized = quantize(model, words, QuantConfig.weight_only(dtype, block), target=runtime)
        path, plain = folder / "model.onnx", folder / "float.onnx"
        scalepoint.export(quantized, path, words, float_path=None if plain.exists() else plain)
        found = scalepoint.verify(path, quantized, words, runtime=runtime, float_path=plain)
        assert found.latency is not None
        yield Result(
            runtime,
            "scalepoint",
            f"{dtype}, {'a scale a channel' if block is None else f'blocks of {block}'}",
            found.latency.ratio,
            found.size / ONNX.about(plain).size,
            f"{found.low_precision} of {found.low_precision + len(found.fallbacks)}",
            found.sqnr,
            found.exact[0].sqnr if found.exact else None,
            sqnr(expected, quantized(words)),
        )


def theirs(model: Any, words: Tensor, folder: Path) -> Iterator[Result]:
    """ONNX Runtime's own tool on the same float file."""
    import onnx  # noqa: PLC0415
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: PLC0415

    plain, path = folder / "float.onnx", folder / "theirs.onnx"
    expected = model(words)
    for block in (32, 128):
        logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.WARNING)
        quantizer = MatMulNBitsQuantizer(onnx.load(plain), block_size=block, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))
        feeds = {RuntimeModel(plain, threads=1).served.inputs[0]: words.numpy()}
        speed = scalepoint.benchmark(plain, path, feeds)
        found = RuntimeModel(path, threads=1)(words)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        narrow = kinds.count("MatMulNBits")
        yield Result(
            "onnxruntime",
            "its own MatMulNBitsQuantizer",
            f"int4, blocks of {block}",
            speed.ratio,
            ONNX.about(path).size / ONNX.about(plain).size,
            f"{narrow} of {7 * SIZES.layers + 1}",
            None,
            None,
            sqnr(expected, found),
        )


def missed(results: list[Result]) -> list[str]:
    return [
        f"{result.format}: {result.speed:.2f}x the speed, {result.size:.3f}x the size"
        for result in results
        if (result.runtime, result.how, result.format[:4]) == ("onnxruntime", "scalepoint", "int4")
        if result.speed < LEAST_SPEED or result.size > LARGEST_SIZE
    ]


@torch.no_grad()
def main() -> int:
    warnings.simplefilter("ignore")
    model = llama(SIZES)
    words = torch.randint(0, SIZES.words, (1, 1), generator=torch.Generator().manual_seed(0))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results += ours(model, words, folder, "onnxruntime")
        results += theirs(model, words, folder)
        results += ours(model, words, folder, "openvino")
    table = Table(title="weights alone, one word at a time, one thread")
    for column in asdict(results[0]):
        table.add_column(column)
    for result in results:
        table.add_row(
            *(f"{cell:.2f}" if isinstance(cell, float) else str(cell or "") for cell in vars(result).values())
        )
    Console(width=150).print(table)
    OUT.mkdir(exist_ok=True)
    (OUT / "weight_only.json").write_text(json.dumps([asdict(result) for result in results], indent=2))
    for line in missed(results):
        print(f"missed ({LEAST_SPEED}x the speed, {LARGEST_SIZE}x the size): {line}")
    return int(bool(missed(results)))


if __name__ == "__main__":
    sys.exit(main())
