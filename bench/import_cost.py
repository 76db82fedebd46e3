"""What importing scalepoint costs beside importing torch: CPU seconds of fresh processes, interleaved, medians."""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

from measure import Row, report

REPEATS = 7


def cpu_seconds(statement: str) -> float:
    """User and system time of a fresh interpreter that runs one statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> int:
    statements = ("import torch", "import scalepoint", "import scalepoint.spec")
    taken: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(REPEATS):
        for statement in statements:
            taken[statement].append(cpu_seconds(statement))
    median = {statement: statistics.median(times) for statement, times in taken.items()}
    base = median["import torch"]
    rows = [Row(name, median[name] / base, 1.15, "import torch") for name in statements[1:]]
    return 0 if report("import cost", rows, Path("out/bench-import.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
