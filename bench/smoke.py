"""What `smoke=True` saves: CPU seconds of the demo's deployment, with the runtime's processes, against the full run."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from measure import Row, report

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
from sentences import Task, prepared

OUT = Path(__file__).parent.parent / "out"
LIMIT = 0.25


def seconds(task: Task, *, smoke: bool) -> float:
    """Of this process and all that it started."""
    import scalepoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        before = sum(os.times()[:4])
        scalepoint.deploy(
            task.model,
            task.calibration[0],
            task.calibration,
            output=folder,
            force=True,
            evaluate=task.accuracy,
            smoke=smoke,
            progress=False,
        )
        return sum(os.times()[:4]) - before


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = prepared()
    seconds(task, smoke=True)  # imports, and torch's first times
    taken = [(seconds(task, smoke=True), seconds(task, smoke=False)) for _ in range(2)]
    fast, full = (min(each) for each in zip(*taken, strict=True))
    row = Row("smoke=True of the demo", fast / full, LIMIT, "the full run", f"{fast:.1f} s against {full:.1f} s")
    return 0 if report("a smoke run, CPU seconds", [row], OUT / "smoke.json") else 1


if __name__ == "__main__":
    sys.exit(main())
