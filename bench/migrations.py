"""What migrations win: the same network and precision with and without, on trained networks, nearest codes.

    python bench/migrations.py                            a depthwise ReLU net, MiniLM, a ViT, a small Llama, SmolLM2
    python bench/migrations.py --photographs FOLDER       also EfficientNet-Lite0: labels.csv, the first 128 calibrate
    python bench/migrations.py --only MiniLM

What calibrates is never judged. dB against the float network's outputs; seconds of the CPU, one thread. "refused"
counts the places that a migration left alone, each with its reason in the report.
"""

# ruff: noqa: PLC0415  # the networks bring their data along, which takes long
import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import publish
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize, record_of
from tuned.subject import Subject, config, judged, right, score

OUT = Path(__file__).parents[1] / "out" / "migrations.json"
Way = tuple[str, tuple[str, ...]]  # a precision, and what is migrated
TENSOR = "W8A8, one scale a weight"


@dataclass(frozen=True)
class Row:
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


def settings(subject: Subject, precision: str, names: tuple[str, ...]) -> QuantConfig:
    if precision == TENSOR:
        return QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(), migrate=names)
    found = config(precision, subject.ends)
    return QuantConfig(activation=found.activation, weight=found.weight, overrides=found.overrides, migrate=names)


def rows(subject: Subject, ways: tuple[Way, ...]) -> Iterator[Row]:
    plain, _ = judged(subject, subject.model)
    yield Row(subject.name, "float", "", score(subject, plain.marks), None, 0, 0, 0.0)
    for precision, names in ways:
        start = time.process_time()
        given = settings(subject, precision, names)
        model = quantize(subject.model, subject.calibration[0], given, forward_loop=subject.calibration, progress=False)
        seconds = time.process_time() - start
        found, level = judged(subject, model, plain)
        report = record_of(model).migrated
        counts = (0, 0) if report is None else (len(report.done), len(report.refused))
        reached = score(subject, found.marks)
        yield Row(subject.name, precision, ", ".join(names), reached, level, *counts, seconds)


def depthwise() -> Subject:
    """A small MobileNet with ReLU, trained here on 10,000 pictures."""
    import fashion_mnist as fashion
    from pictures import labels, pictures
    from tuned.vision import zipped

    class ReluNet(fashion.DepthwiseNet):
        def __init__(self) -> None:
            super().__init__()
            self.stem = fashion._unit(3, 16, 3, 2)
            for unit in [module for module in self.modules() if isinstance(module, nn.Sequential)]:
                for name, child in unit.named_children():
                    if isinstance(child, nn.ReLU6):
                        setattr(unit, name, nn.ReLU())

    test, answers = pictures("test_batch"), labels()
    model = fashion.trained(ReluNet, test[:8000], answers[:8000], 6, 5e-3)
    judging = partial(zipped, test[8500:], answers[8500:])
    return Subject("depthwise ReLU net", model, test[8000:8500].split(50), judging, right, {})


def jobs(photographs: Path | None) -> dict[str, tuple[Callable[[], Subject], tuple[Way, ...]]]:
    from tuned import encoder, language, vision

    equalize: tuple[Way, ...] = ((TENSOR, ()), (TENSOR, ("equalize",)), (TENSOR, ("equalize", "absorb")))
    found = {"depthwise ReLU net": (depthwise, equalize)}
    if photographs:
        found["EfficientNet-Lite0"] = (partial(vision.lite0, photographs), equalize)
    awq = tuple((precision, names) for precision in ("W4A8", "int3 blocks of 128") for names in ((), ("awq",)))
    found["MiniLM"] = (encoder.minilm, (*awq, ("W4A4", ()), ("W4A4", ("rotate",))))
    four: tuple[Way, ...] = tuple(("W4A4", names) for names in ((), ("smooth",), ("awq",), ("rotate",)))
    found["ViT, CIFAR-10"] = (vision.vit, four)
    words = tuple(
        (precision, names) for precision in ("int4 per channel", "int3 per channel") for names in ((), ("awq",))
    )
    found["Llama, 3 M, trained here"] = (language.small, (*words, *four))
    found["SmolLM2-135M"] = (language.smollm, (four[0], four[3], *words[:2]))
    return found


def shown(found: list[Row]) -> Table:
    table = Table(title="with and without migrations")
    for column in ("network", "", "migrate", "score", "dB", "done", "refused", "CPU s"):
        table.add_column(column)
    for row in found:
        level = "" if row.decibels is None else f"{row.decibels:.1f}"
        counts = (str(row.done), str(row.refused)) if row.migrate else ("", "")
        table.add_row(row.model, row.precision, row.migrate, f"{row.score:.2f}", level, *counts, f"{row.seconds:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, (make, ways) in jobs(given.photographs).items():
        if given.only in name:
            for row in rows(make(), ways):
                print(row, flush=True)
                found.append(replace(row, model=name))
    sys.exit(not publish(shown(found), found, OUT))


if __name__ == "__main__":
    main()
