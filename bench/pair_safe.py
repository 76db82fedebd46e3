"""What the pair-safe scale costs a network on CPUs without VNNI, and what tuning wins back.

At 8 bits, simulated (which is what the runtime computes), dB of held-out outputs against the float model: nearest codes
with all 8 bits (VNNI), nearest codes under the pair rule (AVX2), and codes chosen under that rule by accuracy="fast"
and "balanced".

    python bench/pair_safe.py [lite0 resnet50 ..] --pictures FOLDER
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

from networks import SUBJECTS, Subject
from onnx_files import run, sqnr
from scalepoint.pipeline.accuracy import PRESETS, tuning_for
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import onnxruntime_target
from scalepoint.tuning import tune

OUT = Path(__file__).parent.parent / "out" / "pair_safe.json"
CORRECTED = "nearest, biases corrected"  # as deploy does
NETWORKS = ("lite0", "resnet50")
WAYS = (("vnni", None), ("avx2", None), ("avx2", CORRECTED), ("avx2", "fast"), ("avx2", "balanced"))


@dataclass(frozen=True)
class Row:
    network: str
    cpu: str
    how: str
    decibels: float
    seconds: float  # of CPU time, calibration counted


def rows_of(subject: Subject) -> Iterator[Row]:
    expected = run(subject.model, subject.held_out)
    for cpu, accuracy in WAYS:
        start, target = time.process_time(), onnxruntime_target(cpu)
        config = QuantConfig(correct_bias=accuracy == CORRECTED)
        made = quantize(subject.model, subject.inputs, config, forward_loop=subject.calibration, target=target)
        how = tuning_for(made, accuracy, has_data=True) if accuracy in PRESETS else None
        if how:
            tune(made, subject.calibration, how, progress=False)
        taken = time.process_time() - start
        yield Row(subject.title, cpu, accuracy or "nearest", sqnr(expected, run(made, subject.held_out)), taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; {' and '.join(NETWORKS)} unless named")
    parser.add_argument("--pictures", type=Path, help="a folder with photographs; else it has 20")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    table = Table("network", "CPU", "how", "dB against float", "CPU s")
    for name in given.networks or NETWORKS:
        subject = SUBJECTS[name](given.pictures)
        for row in rows_of(subject):
            rows.append(row)
            table.add_row(row.network, row.cpu, row.how, f"{row.decibels:.1f}", f"{row.seconds:.0f}")
            OUT.parent.mkdir(exist_ok=True)
            OUT.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
