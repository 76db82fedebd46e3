"""Palettes of 2, 3 and 4 bits on trained networks, next to the k-means of coreai-opt: accuracy, dB and seconds.

    [PYTHONPATH=FOLDER] python bench/palettes.py [--photographs FOLDER] [--only NAME] [--bits 4] [--judged N]

FOLDER contains the unpacked wheel of coreai-opt 0.3.0; without it only our rows are measured. One table per weight, all
convolutions and linear layers, weights only. Simulated: both libraries in PyTorch. "sensitive k-means" is coreai-opt's
calibration_mode with cross entropy against the classes that the float network predicts. "tuned" is ours with
accuracy="balanced". Each calibrates with the same pictures, and is judged by others. Seconds are CPU seconds of one
thread without judging. --judged limits the pictures that are judged. out/palettes.json keeps the rows of networks that
a run leaves out; bench/write_page.py makes the table of docs/measured/low-bits.md from it.
"""

import argparse
import copy
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

import scalepoint
from measure import publish
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import QuantConfig, calibrate, quantize
from scalepoint.tuning import TuneConfig
from trained_networks import lite0, resnet8
from tuning_cases import Plain, Subject, error, score, score_run

OUT = Path(__file__).parents[1] / "out" / "palettes.json"
BITS = (4, 3, 2)
KMEANS, SENSITIVE, THEIRS = "k-means", "sensitive k-means", "coreai-opt"
OURS, TUNED = "scalepoint, k-means", "scalepoint, tuned"
NOISE = 2.0  # standard errors


@dataclass(frozen=True)
class PaletteRow:
    network: str
    bits: int
    variant: str
    score: float
    error: float
    decibels: float
    seconds: float
    holds: bool = True

    @property
    def name(self) -> str:
        return f"{self.network} {self.bits} bits {self.variant}"


def ours(subject: Subject, bits: int, variant: str) -> nn.Module:
    data = list(subject.calibration)
    quantized = quantize(subject.model, data[0], QuantConfig.palettes(bits), target="reference", progress=False)
    calibrate(quantized, data, freeze_weights=True, progress=False)
    if variant == TUNED:
        scalepoint.tune(quantized, data, TuneConfig(steps=PRESETS["balanced"]), progress=False)
    return quantized.eval()


def theirs(subject: Subject, bits: int, variant: str) -> nn.Module:
    from coreai_opt.palettization import (  # noqa: PLC0415  # optional
        KMeansPalettizer,
        KMeansPalettizerConfig,
        ModuleKMeansPalettizerConfig,
        PalettizationSpec,
    )

    model, data = copy.deepcopy(subject.model), list(subject.calibration)
    module_config = ModuleKMeansPalettizerConfig(op_state_spec={"weight": PalettizationSpec(n_bits=bits)})
    palettizer = KMeansPalettizer(model, KMeansPalettizerConfig(global_config=module_config))
    prepared = palettizer.prepare((data[0],))
    if variant.endswith(SENSITIVE):
        with palettizer.calibration_mode(loss_fn=F.cross_entropy) as calibration:
            for batch in data:
                output = prepared(batch)
                calibration.step(output, output.detach().argmax(1))
    return prepared.eval()


def ways() -> dict[str, Callable[[Subject, int, str], nn.Module]]:
    try:
        import coreai_opt  # noqa: F401, PLC0415  # optional
    except ModuleNotFoundError:
        return {OURS: ours, TUNED: ours}
    return {f"{THEIRS}, {KMEANS}": theirs, f"{THEIRS}, {SENSITIVE}": theirs, OURS: ours, TUNED: ours}


def rows(subject: Subject, widths: Sequence[int]) -> Iterator[PaletteRow]:
    plain, _ = score_run(subject, subject.model)
    yield PaletteRow(subject.name, 32, "float", score(subject, plain.marks), 0.0, float("inf"), 0.0)
    for bits in widths:
        results: list[PaletteRow] = []
        for variant, make in ways().items():
            start = time.process_time()
            model = make(subject, bits, variant)
            results.append(measure(subject, model, plain, bits, variant, time.process_time() - start))
        best = max((row.score for row in results if row.variant.startswith(THEIRS)), default=0.0)
        for row in results:
            yield replace(row, holds=row.variant != TUNED or row.score >= best - NOISE * row.error)


def measure(subject: Subject, model: Any, plain: Plain, bits: int, variant: str, seconds: float) -> PaletteRow:
    marks, decibels = score_run(subject, model, plain)
    difference = error(subject, marks.marks, plain.marks)
    row = PaletteRow(subject.name, bits, variant, score(subject, marks.marks), difference, decibels or 0.0, seconds)
    print(row, flush=True)
    return row


def limited(subject: Subject, count: int | None) -> Subject:
    """Judge by the first batches only, until `count` pictures."""
    if count is None:
        return subject

    def judging() -> Iterator[Any]:
        remaining = count
        for inputs, answers in subject.judging():
            if remaining <= 0:
                return
            remaining -= len(answers)
            yield inputs, answers

    return replace(subject, judging=judging)


def other_rows(results: Sequence[PaletteRow]) -> list[PaletteRow]:
    """Return the rows of an earlier run for networks that this run left out."""
    measured = {row.network for row in results}
    stored = json.loads(OUT.read_text()) if OUT.exists() else []
    return [PaletteRow(**row) for row in stored if row["network"] not in measured]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, help="a folder with labels.csv: adds EfficientNet-Lite0")
    parser.add_argument("--only", default="", help="a part of the network's name")
    parser.add_argument("--bits", type=int, nargs="*", default=BITS)
    parser.add_argument("--judged", type=int, help="number of pictures that are judged")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    networks = {"ResNet-8": resnet8}
    if options.photographs is not None:
        networks["EfficientNet-Lite0"] = lambda: lite0(options.photographs)
    chosen = [make for name, make in networks.items() if options.only in name]
    results = list(
        itertools.chain.from_iterable(rows(limited(make(), options.judged), options.bits) for make in chosen)
    )
    table = Table(title="palettes")
    for column in ("network", "bits", "how", "score", "dB", "CPU s"):
        table.add_column(column)
    for row in results:
        texts = (f"{row.score:.2f} +-{row.error:.2f}", f"{row.decibels:.1f}", f"{row.seconds:.1f}")
        table.add_row(row.network, str(row.bits), row.variant, *texts)
    return int(not publish(table, [*other_rows(results), *results], OUT))


if __name__ == "__main__":
    sys.exit(main())
