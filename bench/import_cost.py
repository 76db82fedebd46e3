"""What importing scalepoint costs beside importing torch, and what its quick commands do: CPU seconds, medians."""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

from measure import Row, report

REPEATS = 7
QUICK = ("targets", "targets tensorrt", "doctor", "config schema", "report FOLDER")  # at most one CPU-second each


def cpu_seconds(statement: str) -> float:
    """User and system time of a fresh interpreter that runs one statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def command(line: str) -> str:
    return f"from scalepoint.cli.app import run; raise SystemExit(run({line.split()!r}))"


def made_report() -> Path:
    """A folder with the report of a deployment."""
    folder = Path("out/bench-import").resolve()
    if not (folder / "report.json").is_file():
        made = (
            "import torch, scalepoint; x = torch.randn(8, 64); "
            f"scalepoint.deploy(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), x, [x], output={str(folder)!r})"
        )
        subprocess.run([sys.executable, "-c", made], check=True)
    return folder


def main() -> int:
    imports = ("import torch", "import scalepoint", "import scalepoint.spec")
    folder = made_report()
    commands = {f"scalepoint {line}": command(line.replace("FOLDER", str(folder))) for line in QUICK}
    statements = (*imports, *commands.values())
    taken: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(REPEATS):
        for statement in statements:
            taken[statement].append(cpu_seconds(statement))
    median = {statement: statistics.median(times) for statement, times in taken.items()}
    base = median["import torch"]
    rows = [Row(name, median[name] / base, 1.15, "import torch") for name in imports[1:]]
    rows += [Row(f"{name}, CPU-seconds", median[run], 1.0, "one CPU-second") for name, run in commands.items()]
    return 0 if report("import cost", rows, Path("out/bench-import.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
