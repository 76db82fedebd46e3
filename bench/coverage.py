"""What becomes of real architectures: captured or not, parity with the model, matches, time, weights covered.

`python bench/coverage.py [--quick]` prints the table and writes out/bench-coverage.json. Parity is the worst
max |difference| / max |output| of batch 1 and batch 3; operations with weights are counted by torch's dispatcher, and
each is in a match (covered) or named in the report as left (told).
"""

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

from measure import publish
from scalepoint.errors import ScalepointError
from scalepoint.transformation import transform

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests own the list
from architectures import ARCHITECTURES, Architecture, Inputs
from weighted import batch, covered, executed, relative_difference, run, told

LIMIT = 1e-4


@dataclass(frozen=True)
class Row:
    """One architecture; `note` says why it was not captured or does not run."""

    name: str
    captured: bool
    parity: float | None = None  # None: not measured, because it does not run
    matches: int = 0
    seconds: float = 0.0
    covered: int = 0
    told: int = 0
    weighted: int = 0
    expected_failure: bool = False
    note: str = ""

    @property
    def holds(self) -> bool:
        if not self.captured:
            return self.expected_failure
        return self.parity is not None and self.parity <= LIMIT and self.covered + self.told == self.weighted


def measure(architecture: Architecture) -> Row:
    model, inputs = architecture.build()
    start = time.process_time()
    try:
        result = transform(model, inputs)
    except ScalepointError as error:
        return Row(
            architecture.name,
            captured=False,
            seconds=time.process_time() - start,
            expected_failure=bool(architecture.cannot),
            note=architecture.cannot or str(error),
        )
    seconds = time.process_time() - start
    parity, note = compare(model, result.model.eval(), inputs)
    return Row(
        architecture.name,
        captured=True,
        parity=parity,
        matches=len(result.matches),
        seconds=seconds,
        covered=sum(covered(result).values()),
        told=sum(told(result).values()),
        weighted=sum(executed(model, inputs).values()),
        note=note,
    )


def compare(model: nn.Module, graph: nn.Module, inputs: Inputs) -> tuple[float | None, str]:
    """The worst difference of both batches, and what went wrong where a graph does not even run."""
    batches = [batch(inputs, samples) for samples in ([0], [0, 1, 0])]
    try:
        with torch.no_grad():
            return max(relative_difference(run(model, each), run(graph, each)) for each in batches), ""
    except Exception as error:  # a row also for these: the table is about all of them
        return None, f"{type(error).__name__}: {error}"


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"architectures, 1 thread, torch {torch.__version__}")
    for column in ("model", "captured", "parity", "matches", "CPU s", "weights covered", "note"):
        right = column in ("parity", "matches", "CPU s", "weights covered")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        parity = "" if row.parity is None else f"{row.parity:.1e}"
        weights = f"{row.covered} of {row.weighted}" + (f", {row.told} told" if row.told else "")
        shown = (parity, str(row.matches), f"{row.seconds:.1f}", weights)
        shown = shown if row.captured else ("", "", f"{row.seconds:.1f}", "")
        style = None if row.holds else "bold red"
        table.add_row(row.name, "yes" if row.captured else "no", *shown, row.note[:200], style=style)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the spread of ten that the default tests run")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the models' libraries, at import and in forward
    chosen = [each for each in ARCHITECTURES.values() if each.quick or not quick]
    rows = [measure(each) for each in track(chosen, "transforming", transient=True)]
    return 0 if publish(table_of(rows), rows, Path("out/bench-coverage.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
