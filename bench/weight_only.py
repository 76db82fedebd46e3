"""Narrow weights alone on a Llama of three blocks, one word at a time, beside ONNX Runtime's own MatMulNBits quantizer.

One thread; the float file, ours and theirs are timed in turns in one process. The float model has random weights, so
dB against float shows the arithmetic, not the loss of a trained model. A limit is a least speed or a largest size; int4
is also to be as fast as their file of the same blocks, but for noise.
"""

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import scalepoint
from onnx_files import speeds
from plain_models import Sizes, llama
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
NOISE = 0.95  # of the speed of their file
OURS, THEIRS = "scalepoint", "its own MatMulNBitsQuantizer"


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


def sqnr(expected: Tensor, output: Tensor) -> float:
    noise = (expected - output).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def ours(model: Any, words: Tensor, folder: Path, runtime: str) -> Iterator[tuple[Path, Result]]:
    expected, plain = model(words), folder / "float.onnx"
    for dtype, block in FORMATS[runtime]:
        quantized = quantize(model, words, QuantConfig.weight_only(dtype, block), target=runtime)
        path = folder / f"{runtime}-{dtype}-{block}.onnx"
        scalepoint.export(quantized, path, words, float_path=None if plain.exists() else plain)
        verification = scalepoint.verify(path, quantized, words, runtime=runtime)
        yield (
            path,
            Result(
                runtime,
                OURS,
                f"{dtype}, {'a scale a channel' if block is None else f'blocks of {block}'}",
                0.0,
                verification.size / ONNX.about(plain).size,
                f"{verification.low_precision} of {verification.low_precision + len(verification.fallbacks)}",
                verification.sqnr,
                verification.exact[0].sqnr if verification.exact else None,
                sqnr(expected, quantized(words)),
            ),
        )


def theirs(model: Any, words: Tensor, folder: Path) -> Iterator[tuple[Path, Result]]:
    """ONNX Runtime's own tool on the same float file."""
    import onnx  # noqa: PLC0415
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: PLC0415

    plain, expected = folder / "float.onnx", model(words)
    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.WARNING)
    for block in (32, 128):
        path = folder / f"theirs-{block}.onnx"
        quantizer = MatMulNBitsQuantizer(onnx.load(plain), block_size=block, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path))
        narrow = [node.op_type for node in onnx.load(path).graph.node].count("MatMulNBits")
        size = ONNX.about(path).size / ONNX.about(plain).size
        coverage, error = f"{narrow} of {7 * SIZES.layers + 1}", sqnr(expected, RuntimeModel(path, threads=1)(words))
        yield path, Result("onnxruntime", THEIRS, f"int4, blocks of {block}", 0.0, size, coverage, None, None, error)


def timed(files: list[tuple[Path, Result]], words: Tensor, plain: Path) -> list[Result]:
    """The same rows with the speed of each file, all of a runtime in turns in one process."""
    feeds = {RuntimeModel(plain, threads=1).session.inputs[0]: words.numpy()}
    ratios = speeds([plain, *(path for path, _ in files)], feeds, files[0][1].runtime)
    return [replace(row, speed=speed) for (_, row), speed in zip(files, ratios[1:], strict=True)]


def missed(results: list[Result]) -> list[str]:
    peer_speeds = {result.format: result.speed for result in results if result.how == THEIRS}
    lines = []
    for row in results:
        if (row.runtime, row.how, row.format[:4]) != ("onnxruntime", OURS, "int4"):
            continue
        least = max(LEAST_SPEED, NOISE * peer_speeds[row.format])
        if row.speed < least or row.size > LARGEST_SIZE:
            lines.append(f"{row.format}: {row.speed:.2f}x the speed of {least:.2f}x, {row.size:.3f}x the size")
    return lines


@torch.no_grad()
def main() -> int:
    warnings.simplefilter("ignore")
    model = llama(SIZES)
    words = torch.randint(0, SIZES.words, (1, 1), generator=torch.Generator().manual_seed(0))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [*ours(model, words, folder, "onnxruntime"), *theirs(model, words, folder)]
        results += timed(files, words, folder / "float.onnx")
        results += timed([*ours(model, words, folder, "openvino")], words, folder / "float.onnx")
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
        print(f"missed: {line}; at most {LARGEST_SIZE}x the size")
    return int(bool(missed(results)))


if __name__ == "__main__":
    sys.exit(main())
