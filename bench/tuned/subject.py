"""A trained network with what calibrates and what judges it, and one way after another to quantize it."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.pipeline.accuracy import tuning_for
from scalepoint.quantize import Override, QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, tune
from tuned.rows import AWQ, BALANCED, BEST, GPTQ, GPTQ_INTERCEPT, NEAREST, Kept, Limit, Row

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
    steps = tuning_for(model, how, has_data=True) if how in PRESETS else STEPS[how]
    if steps is not None:
        tune(model, subject.calibration, steps, progress=False)
    return model, time.process_time() - start


@dataclass
class Plain:
    """What the float network makes of the judging data."""

    marks: Tensor
    outputs: list[Tensor]


@torch.no_grad()
def judged(subject: Subject, run: Callable[..., Tensor], plain: Plain | None = None) -> tuple[Plain, float | None]:
    """Marks of all samples, and dB against the outputs of the float network where it is given."""
    found, outputs, signal, noise, room = [], [], 0.0, 0.0, COMPARED
    for index, (inputs, answers) in enumerate(subject.judging()):
        output = run(**inputs) if isinstance(inputs, dict) else run(inputs)
        found.append(subject.marks(output, answers))
        if plain is None and output.numel() <= room:
            outputs.append(output)
            room -= output.numel()
        elif plain is not None and index < len(plain.outputs):
            signal += float(plain.outputs[index].double().square().sum())
            noise += float((plain.outputs[index] - output).double().square().sum())
    level = None if plain is None or not signal else 10 * math.log10(signal / max(noise, 1e-300))
    return Plain(torch.cat(found), outputs), level


def score(subject: Subject, marks: Tensor) -> float:
    mean = float(marks.double().mean())
    return math.exp(mean) if subject.is_perplexity else 100 * mean


def error(subject: Subject, marks: Tensor, plain: Tensor) -> float:
    """The standard error of the difference to float; tokens of a text are not independent, so texts are counted."""
    apart = (marks.double() - plain.double()).flatten(1).mean(1) if marks.ndim > 1 else marks.double() - plain.double()
    spread = float(apart.std()) / math.sqrt(len(apart))
    return spread * score(subject, marks) if subject.is_perplexity else 100 * spread


def rows(subject: Subject, kept: Kept, part: str = "", only: Sequence[str] = ()) -> Iterator[Row]:
    """All rows of a network that are not there yet, or those of some precisions and ways."""
    wanted = [(precision, how) for precision in subject.limits for how in subject.ways]
    wanted += [(precision, BEST) for precision in subject.best]
    wanted = [(precision, how) for precision, how in wanted if part in precision and (not only or how in only)]
    if all((subject.name, *each) in kept.rows for each in wanted):
        return
    plain, _ = judged(subject, subject.model)
    first = Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0, subject.is_perplexity)
    kept.add(first)
    yield first
    for precision, how in wanted:
        if (subject.name, precision, how) in kept.rows:
            continue
        model, seconds = prepared(subject, precision, how)
        found, level = judged(subject, model, plain)
        reached, apart = score(subject, found.marks), error(subject, found.marks, plain.marks)
        row = Row(subject.name, precision, how, reached, apart, level, seconds, subject.is_perplexity)
        if how in PRESETS:
            row = with_limits(row, subject.limits[precision], list(kept.rows.values()))
        kept.add(row)
        yield row


def with_limits(row: Row, limits: Sequence[Limit], rows: Sequence[Row]) -> Row:
    others = [each for each in rows if each.model == row.model and each.precision in (row.precision, "float")]
    binding = [limit for limit in limits if limit.how in ("", row.how)]
    missed = [limit.text() for limit in binding if not limit.is_kept(row, others)]
    return replace(row, limits=", ".join(limit.text() for limit in binding), missed=", ".join(missed))


def right(outputs: Tensor, answers: Tensor) -> Tensor:
    """1 for each sample that is named rightly."""
    return (outputs.argmax(1) == answers).float()
