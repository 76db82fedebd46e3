"""What bias correction wins: dB of held-out outputs against float, simulated, with and without, and CPU seconds.

python bench/bias_correction.py [resnet50 lite0 ..] [--cpu avx2 | vnni] [--pictures FOLDER]
"""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from networks import SUBJECTS, Subject
from onnx_files import run, sqnr
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import onnxruntime_target

OUT = Path(__file__).parent.parent / "out" / "bias_correction.json"


@dataclass(frozen=True)
class Row:
    network: str
    cpu: str
    nearest: float  # dB
    corrected: float
    nearest_seconds: float
    corrected_seconds: float


def measured(subject: Subject, cpu: str) -> Row:
    expected, found = run(subject.model, subject.held_out), []
    for corrects in (False, True):
        config, start = QuantConfig(speed_first=True, correct_bias=corrects), time.process_time()
        options = {"forward_loop": subject.calibration, "target": onnxruntime_target(cpu), "progress": False}
        made = quantize(subject.model, subject.inputs, config, **options)
        taken = time.process_time() - start
        found.append((sqnr(expected, run(made, subject.held_out)), taken))
    (nearest, one), (corrected, two) = found
    return Row(subject.title, cpu, nearest, corrected, one, two)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; all when none is named")
    parser.add_argument("--cpu", choices=("avx2", "vnni"), default="avx2", help="whose weights")
    parser.add_argument(
        "--pictures", type=Path, help="a folder with photographs for EfficientNet-Lite0; else it has 20"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = json.loads(OUT.read_text()) if OUT.exists() else []
    for name in given.networks or SUBJECTS:
        row = measured(SUBJECTS[name](given.pictures), given.cpu)
        print(row, flush=True)
        rows = [each for each in rows if (each["network"], each["cpu"]) != (row.network, row.cpu)]
        rows.append(asdict(row))
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
