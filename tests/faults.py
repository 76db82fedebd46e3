"""What scalepoint survives: sixty-four faults, what happens at each, and the tests that hold it to that (faults.yaml).

`docs/generate.py` makes the page of it; `tests/test_faults.py` sees that every test is there, and has those of its own.
"""

from dataclasses import dataclass
from pathlib import Path

from scalepoint.support.documents import parse_yaml


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, what then happens, and where that is tested: file::test."""

    number: int
    what: str
    happens: str
    tests: tuple[str, ...]


def read() -> dict[str, tuple[Fault, ...]]:
    """The faults by group, numbered through."""
    found: dict[str, tuple[Fault, ...]] = {}
    number = 0
    for group, rows in parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        found[group] = tuple(
            Fault(number + place, row["what"], row["happens"], tuple(row["tests"])) for place, row in enumerate(rows, 1)
        )
        number += len(rows)
    return found


GROUPS = read()
FAULTS = tuple(fault for group in GROUPS.values() for fault in group)
