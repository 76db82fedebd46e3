"""Side-by-side measurement for machines that are shared and noisy: interleaved runs, medians, CPU time, ratios."""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One claim: a measured ratio, the limit it must stay within, and what it is measured against."""

    name: str
    ratio: float
    limit: float
    against: str
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.ratio <= self.limit


def interleave(runs: dict[str, Callable[[], object]], repeats: int = 9, inner: int = 1) -> dict[str, float]:
    """Return the median CPU seconds of each run.

    The runs take turns, so that noise affects them equally. Garbage is collected before each one.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            start = time.process_time()
            for _ in range(inner):
                run()
            times[name].append((time.process_time() - start) / inner)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """How far the process grows beyond what it holds now while `run` works (Linux: resets the high-water mark)."""
    status = Path("/proc/self/status")

    def read(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed but kept would hide what the run takes
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS:")
    run()
    return read("VmHWM:") - before


def report(title: str, rows: list[Row], path: Path) -> bool:
    """Print the table, write it as JSON, and say whether every row holds."""
    table = Table(title=title)
    for column in ("row", "ratio", "limit", "against", "note"):
        table.add_column(column, justify="right" if column in ("ratio", "limit") else "left")
    for row in rows:
        style = None if row.holds else "bold red"
        table.add_row(row.name, f"{row.ratio:.2f}", f"{row.limit:.2f}", row.against, row.note, style=style)
    return publish(table, rows, path)


def publish(table: Table, rows: Sequence[Any], path: Path) -> bool:
    """Print a table of rows with `name` and `holds`, write them as JSON, and say whether every one holds."""
    console = Console(width=118)
    console.print(table)
    missed = [row.name for row in rows if not row.holds]
    console.print(f"{len(rows) - len(missed)} of {len(rows)} rows hold")
    for name in missed:
        console.print(f"missed: {name}")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([{**asdict(row), "holds": row.holds} for row in rows], indent=2))
    console.print(f"written to {path}")
    return not missed


def run_part(description: str, parts: Mapping[str, Callable[[], int | None]]) -> int:
    """Run the part of a script that the command line names first; the part parses the arguments after its name."""
    shape = argparse.RawDescriptionHelpFormatter
    epilog = "PART --help shows the options of a part"
    parser = argparse.ArgumentParser(description=description, formatter_class=shape, epilog=epilog)
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the part")
    options = parser.parse_args()
    sys.argv = [f"{sys.argv[0]} {options.part}", *options.options]
    return parts[options.part]() or 0
