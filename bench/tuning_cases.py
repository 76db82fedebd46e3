"""Trained networks quantized in several ways: calibration and judging data, result rows, and the limits they must keep.

`StoredMatrix` writes the rows to a JSON file after each one, so that a stopped run can continue.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from scalepoint.pipeline.accuracy import choose_tuning
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune

NEAREST, AWQ, GPTQ, GPTQ_INTERCEPT = "nearest", "awq", "gptq", "gptq + intercept"
BALANCED, BEST = "balanced", "best"
WAYS = (NEAREST, AWQ, GPTQ, GPTQ_INTERCEPT, BALANCED, BEST)
Measure = Literal["score", "decibels", "seconds"]


@dataclass(frozen=True)
class Row:
    """One way to quantize one network; `score` is an accuracy, or a perplexity, which is better when it is lower."""

    model: str
    precision: str
    how: str
    score: float
    error: float  # of the difference to float
    decibels: float | None
    seconds: float
    is_perplexity: bool = False
    limits: str = ""
    missed: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.how}: {self.missed}"

    @property
    def holds(self) -> bool:
        return not self.missed


@dataclass(frozen=True)
class Limit:
    """A measure of a tuned row against a number, or against another row of the same precision."""

    of: Measure
    by: float
    than: str = ""  # "float", or how another row was made
    how: str = ""  # the only way that it binds

    def text(self) -> str:
        names: dict[Measure, str] = {"score": "score", "decibels": "dB", "seconds": "CPU s"}
        if not self.than:
            return f"{names[self.of]} {'below' if self.of == 'seconds' else 'at least'} {self.by:g}"
        if self.by == 0:
            return f"{names[self.of]} ahead of {self.than}"
        if self.by < 0:
            return f"{names[self.of]} within {-self.by:g} of {self.than}"
        return f"{self.by:g} {names[self.of]} above {self.than}"

    def is_kept(self, row: Row, other_rows: Sequence[Row]) -> bool:
        sign = -1 if self.of == "seconds" or (self.of == "score" and row.is_perplexity) else 1
        base = 0.0
        if self.than:
            other = next((row_of_peer for row_of_peer in other_rows if row_of_peer.how == self.than), None)
            value = None if other is None else getattr(other, self.of)
            if value is None:
                return False
            base = value
        measured = getattr(row, self.of)
        return measured is not None and sign * measured >= sign * base + (self.by if self.than else sign * self.by)


class RowStore:
    """Rows by network, precision and method. The file is written after each row, so an interrupted run continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._saved()

    def add(self, row: Row) -> None:
        """Another run may have added rows since."""
        self.rows = self._saved() | self.rows | {(row.model, row.precision, row.how): row}
        self._write()

    def ordered(self) -> list[Row]:
        """By network and precision as they came, float first, and ways in the order of `WAYS`."""
        models, precisions = (list(dict.fromkeys(key[order] for key in self.rows)) for order in (0, 1))
        precisions = sorted(precisions, key=lambda precision: precision != "float")
        known = {how: order for order, how in enumerate(WAYS)}

        def order(row: Row) -> tuple[int, int, int]:
            return models.index(row.model), precisions.index(row.precision), known.get(row.how, len(known))

        return sorted(self.rows.values(), key=order)

    def forget(self, part: str) -> None:
        self.rows = {key: row for key, row in self.rows.items() if part not in " ".join(key)}
        self._write()

    def _saved(self) -> dict[tuple[str, str, str], Row]:
        entries = json.loads(self.path.read_text()) if self.path.exists() else []
        rows = [Row(**{key: value for key, value in entry.items() if key != "holds"}) for entry in entries]
        return {(row.model, row.precision, row.how): row for row in rows}

    def _write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps([{**asdict(row), "holds": row.holds} for row in self.ordered()], indent=2))


def rows_table(rows: Sequence[Row]) -> Table:
    table = Table(title="below 8 bits, calibrated and judged on different data")
    for column in ("network", "", "how", "score", "+-", "dB", "CPU s", "limits"):
        table.add_column(column)
    for row in rows:
        level = "" if row.decibels is None or math.isinf(row.decibels) else f"{row.decibels:.1f}"
        numbers = (f"{row.score:.2f}", f"{row.error:.2f}", level, f"{row.seconds:.1f}", row.missed or row.limits)
        table.add_row(row.model, row.precision, row.how, *numbers, style=None if row.holds else "bold red")
    return table


COMPARED = 60_000_000  # values of the float outputs that are kept, to tell dB by
STEPS = {
    NEAREST: None,
    AWQ: None,
    GPTQ: TuneConfig(steps=("scale", "gptq")),
    GPTQ_INTERCEPT: TuneConfig(steps=("intercept", "scale", "gptq")),
}
PRESETS = (BALANCED, BEST)  # as deploy's accuracy= has them
MIGRATIONS = {AWQ: ("awq",)}
Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """`marks` gives a number a sample (1 when it is right, or a loss of each token) from outputs and answers."""

    name: str
    model: nn.Module
    calibration: Sequence[Any]
    judging: Callable[[], Iterable[tuple[Any, Tensor]]]
    marks: Callable[[Tensor, Tensor], Tensor]
    limits: Mapping[str, tuple[Limit, ...]]  # by precision; its keys are what is measured
    ends: Mapping[str, int | None] = field(default_factory=dict)  # layers with other bits; None leaves them float
    ways: tuple[str, ...] = (NEAREST, GPTQ_INTERCEPT, BALANCED)
    best: tuple[str, ...] = ()  # precisions that `best`, which takes long, is measured at too
    is_perplexity: bool = False


def config(precision: str, ends: Mapping[str, int | None] | None = None) -> QuantConfig:
    """Of "W4A8", "W4A4", "int3 blocks of 128" (weights alone) or "int4 per channel"."""
    if both := re.fullmatch(r"W(\d)A(\d)", precision):
        weight, bits = TensorQuantConfig(n_bits=int(both[1]), per_channel=True), int(both[2])
        method: Any = "minmax" if bits == 8 else "mse"
        activation: Any = TensorQuantConfig(n_bits=bits, symmetric=False, calibration_method=method)
    else:
        alone = re.fullmatch(r"int(\d) (?:blocks of (\d+)|per channel)", precision)
        assert alone, precision
        block = int(alone[2]) if alone[2] else None
        weight = TensorQuantConfig(n_bits=int(alone[1]), per_channel=block is None, block_size=block)
        activation = "float"
    overrides = [
        Override(name=name, weight="float" if bits is None else TensorQuantConfig(n_bits=bits, per_channel=True))
        for name, bits in (ends or {}).items()
    ]
    return QuantConfig(activation=activation, weight=weight, overrides=tuple(overrides))


def prepared(subject: Subject, precision: str, how: str) -> tuple[nn.Module, float]:
    """The quantized network and the seconds of the CPU that it took."""
    start = time.process_time()
    settings = config(precision, subject.ends).model_copy(update={"migrate": MIGRATIONS.get(how, ())})
    model = quantize(subject.model, subject.calibration[0], settings, forward_loop=subject.calibration, progress=False)
    steps = choose_tuning(model, how, has_data=True) if how in PRESETS else STEPS[how]
    if steps is not None:
        tune(model, subject.calibration, steps, progress=False)
    return model, time.process_time() - start


@dataclass
class Plain:
    """What the float network makes of the judging data."""

    marks: Tensor
    outputs: list[Tensor]


@torch.no_grad()
def score_run(subject: Subject, run: Callable[..., Tensor], plain: Plain | None = None) -> tuple[Plain, float | None]:
    """Marks of all samples, and dB against the outputs of the float network where it is given."""
    parts, outputs, signal, noise, room = [], [], 0.0, 0.0, COMPARED
    for index, (inputs, answers) in enumerate(subject.judging()):
        output = run(**inputs) if isinstance(inputs, dict) else run(inputs)
        parts.append(subject.marks(output, answers))
        if plain is None and output.numel() <= room:
            outputs.append(output)
            room -= output.numel()
        elif plain is not None and index < len(plain.outputs):
            signal += float(plain.outputs[index].double().square().sum())
            noise += float((plain.outputs[index] - output).double().square().sum())
    level = None if plain is None or not signal else 10 * math.log10(signal / max(noise, 1e-300))
    return Plain(torch.cat(parts), outputs), level


def score(subject: Subject, marks: Tensor) -> float:
    mean = float(marks.double().mean())
    return math.exp(mean) if subject.is_perplexity else 100 * mean


def error(subject: Subject, marks: Tensor, plain: Tensor) -> float:
    """The standard error of the difference to float; tokens of a text are not independent, so texts are counted."""
    apart = (marks.double() - plain.double()).flatten(1).mean(1) if marks.ndim > 1 else marks.double() - plain.double()
    spread = float(apart.std()) / math.sqrt(len(apart))
    return spread * score(subject, marks) if subject.is_perplexity else 100 * spread


def rows(subject: Subject, store: RowStore, part: str = "", only: Sequence[str] = ()) -> Iterator[Row]:
    """All rows of a network that are not there yet, or those of some precisions and ways."""
    pairs = [(precision, how) for precision in subject.limits for how in subject.ways]
    pairs += [(precision, BEST) for precision in subject.best]
    pairs = [(precision, how) for precision, how in pairs if part in precision and (not only or how in only)]
    if all((subject.name, *pair) in store.rows for pair in pairs):
        return
    plain, _ = score_run(subject, subject.model)
    first = Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0, subject.is_perplexity)
    store.add(first)
    yield first
    for precision, how in pairs:
        if (subject.name, precision, how) in store.rows:
            continue
        model, seconds = prepared(subject, precision, how)
        scores, level = score_run(subject, model, plain)
        reached, apart = score(subject, scores.marks), error(subject, scores.marks, plain.marks)
        row = Row(subject.name, precision, how, reached, apart, level, seconds, subject.is_perplexity)
        if how in PRESETS:
            row = with_limits(row, subject.limits[precision], list(store.rows.values()))
        store.add(row)
        yield row


def with_limits(row: Row, limits: Sequence[Limit], rows: Sequence[Row]) -> Row:
    same_rows = [peer for peer in rows if peer.model == row.model and peer.precision in (row.precision, "float")]
    binding = [limit for limit in limits if limit.how in ("", row.how)]
    missed = [limit.text() for limit in binding if not limit.is_kept(row, same_rows)]
    return replace(row, limits=", ".join(limit.text() for limit in binding), missed=", ".join(missed))


def right(outputs: Tensor, answers: Tensor) -> Tensor:
    """1 for each sample that is named rightly."""
    return (outputs.argmax(1) == answers).float()
