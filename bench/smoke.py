"""What `smoke=True` saves: CPU seconds of the demo's deployment, with the runtime's processes, against the full run.

Without a metric, and with the demo's, which is called as often and takes as long either way.
"""

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
LIMIT, NO_LIMIT = 0.25, 1.0


def seconds(task: Task, *, smoke: bool, is_judged: bool) -> float:
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
            evaluate=task.accuracy if is_judged else None,
            smoke=smoke,
            progress=False,
        )
        return sum(os.times()[:4]) - before


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = prepared()
    seconds(task, smoke=True, is_judged=False)  # imports, and torch's first times
    rows = []
    for name, is_judged, limit in (("smoke=True of the demo", False, LIMIT), ("with its metric", True, NO_LIMIT)):
        taken = [[seconds(task, smoke=smoke, is_judged=is_judged) for smoke in (True, False)] for _ in range(2)]
        fast, full = (min(each) for each in zip(*taken, strict=True))
        rows.append(Row(name, fast / full, limit, "the full run", f"{fast:.1f} s against {full:.1f} s"))
    return 0 if report("a smoke run, CPU seconds", rows, OUT / "smoke.json") else 1


if __name__ == "__main__":
    sys.exit(main())
