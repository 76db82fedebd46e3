"""Simulated error of int8 networks for ONNX Runtime: dB of held-out outputs against the float model, and CPU seconds.

    python bench/int8_error.py bias [resnet50 lite0 ..] [--cpu avx2 | vnni] [--pictures FOLDER]
    python bench/int8_error.py pair-safe [lite0 resnet50 ..] [--pictures FOLDER]

bias: without and with bias correction.
pair-safe: the cost of the pair-safe scale on CPUs without VNNI, and what tuning recovers: nearest codes with all 8 bits
(VNNI), nearest codes under the pair rule (AVX2), and codes chosen under that rule by accuracy="fast" and "balanced".
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from measure import run_part
from networks import SUBJECTS, Subject
from onnx_files import run, sqnr
from scalepoint.pipeline.accuracy import PRESETS, choose_tuning
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import onnxruntime_target
from scalepoint.tuning import tune

BIAS_FILE = Path(__file__).parent.parent / "out" / "bias_correction.json"


@dataclass(frozen=True)
class BiasRow:
    network: str
    cpu: str
    nearest: float  # dB
    corrected: float
    nearest_seconds: float
    corrected_seconds: float


def bias_row(subject: Subject, cpu: str) -> BiasRow:
    expected, rows_by_method = run(subject.model, subject.held_out), []
    for corrects in (False, True):
        config, start = QuantConfig(speed_first=True, correct_bias=corrects), time.process_time()
        options = {"forward_loop": subject.calibration, "target": onnxruntime_target(cpu), "progress": False}
        quantized = quantize(subject.model, subject.inputs, config, **options)
        seconds = time.process_time() - start
        rows_by_method.append((sqnr(expected, run(quantized, subject.held_out)), seconds))
    (nearest, one), (corrected, two) = rows_by_method
    return BiasRow(subject.title, cpu, nearest, corrected, one, two)


def bias() -> int:
    parser = argparse.ArgumentParser(description="Bias correction")
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; all when none is named")
    parser.add_argument("--cpu", choices=("avx2", "vnni"), default="avx2", help="whose weights")
    parser.add_argument(
        "--pictures", type=Path, help="a folder with photographs for EfficientNet-Lite0; else it has 20"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = json.loads(BIAS_FILE.read_text()) if BIAS_FILE.exists() else []
    for name in options.networks or SUBJECTS:
        row = bias_row(SUBJECTS[name](options.pictures), options.cpu)
        print(row, flush=True)
        rows = [known_row for known_row in rows if (known_row["network"], known_row["cpu"]) != (row.network, row.cpu)]
        rows.append(asdict(row))
        BIAS_FILE.parent.mkdir(exist_ok=True)
        BIAS_FILE.write_text(json.dumps(rows, indent=2))
    return 0


PAIR_SAFE_FILE = Path(__file__).parent.parent / "out" / "pair_safe.json"
CORRECTED = "nearest, biases corrected"  # as deploy does
PAIR_SAFE_NETWORKS = ("lite0", "resnet50")
PAIR_SAFE_WAYS = (("vnni", None), ("avx2", None), ("avx2", CORRECTED), ("avx2", "fast"), ("avx2", "balanced"))


@dataclass(frozen=True)
class PairSafeRow:
    network: str
    cpu: str
    how: str
    decibels: float
    seconds: float  # of CPU time, calibration counted


def pair_safe_rows(subject: Subject) -> Iterator[PairSafeRow]:
    expected = run(subject.model, subject.held_out)
    for cpu, accuracy in PAIR_SAFE_WAYS:
        start, target = time.process_time(), onnxruntime_target(cpu)
        config = QuantConfig(correct_bias=accuracy == CORRECTED)
        quantized = quantize(subject.model, subject.inputs, config, forward_loop=subject.calibration, target=target)
        how = choose_tuning(quantized, accuracy, has_data=True) if accuracy in PRESETS else None
        if how:
            tune(quantized, subject.calibration, how, progress=False)
        seconds = time.process_time() - start
        yield PairSafeRow(
            subject.title, cpu, accuracy or "nearest", sqnr(expected, run(quantized, subject.held_out)), seconds
        )


def pair_safe() -> int:
    parser = argparse.ArgumentParser(description="The pair-safe scale without VNNI")
    parser.add_argument(
        "networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; {' and '.join(PAIR_SAFE_NETWORKS)} unless named"
    )
    parser.add_argument("--pictures", type=Path, help="a folder with photographs; else it has 20")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[PairSafeRow] = []
    table = Table("network", "CPU", "how", "dB against float", "CPU s")
    for name in options.networks or PAIR_SAFE_NETWORKS:
        subject = SUBJECTS[name](options.pictures)
        for row in pair_safe_rows(subject):
            rows.append(row)
            table.add_row(row.network, row.cpu, row.how, f"{row.decibels:.1f}", f"{row.seconds:.0f}")
            PAIR_SAFE_FILE.parent.mkdir(exist_ok=True)
            PAIR_SAFE_FILE.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    Console().print(table)
    return 0


PARTS = {"bias": bias, "pair-safe": pair_safe}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
