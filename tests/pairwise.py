"""Pairwise combinations of options: every pair of values of two options is in at least one case."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

Case = Mapping[str, Hashable]
Refusals = Callable[[Case], Sequence[str]]  # codes of the errors that a case can end in
TRIES = 100


def pairwise(factors: Mapping[str, Sequence[Hashable]], refusals: Refusals) -> list[Case]:
    """Choose cases that cover all pairs of values. The same factors give the same cases in every process.

    A refused case shows nothing about the options that it was not refused for. A pair therefore has to be in a case
    that is not refused; only where none is found, a case with few reasons to refuse is taken for this pair alone.
    """
    random = Random(0)  # noqa: S311  # no secret
    uncovered = dict.fromkeys(
        ((first, a), (second, b))
        for first, second in combinations(factors, 2)
        for a in factors[first]
        for b in factors[second]
    )
    cases: list[Case] = []
    while uncovered:
        pair = next(iter(uncovered))
        candidates = [{name: random.choice(factors[name]) for name in factors} | dict(pair) for _ in range(TRIES)]
        fewest = min(len(refusals(case)) for case in candidates)
        best = [case for case in candidates if len(refusals(case)) == fewest]
        case = max(best, key=lambda case: sum(item in uncovered for item in _pairs(case)))
        for covered_pair in [pair] if refusals(case) else _pairs(case):
            uncovered.pop(covered_pair, None)
        cases.append(case)
    return cases


def as_parameters(cases: Sequence[Case], refusals: Refusals, costly: Sequence[Hashable] = ()) -> list[Any]:
    """The cases as parameters of a test, of which refused ones and few others are fast.

    Every value of every option is in a fast case that ends in a file. For `costly` values a refused one is enough.
    """
    fast = [case for case in cases if refusals(case)]
    accepted = [case for case in cases if not refusals(case)]
    covered = {item for case in fast for item in case.items() if item[1] in costly}
    uncovered = dict.fromkeys(item for case in accepted for item in case.items() if item not in covered)
    while uncovered:
        useful = [case for case in accepted if uncovered.keys() & case.items()]
        fast.append(max(useful, key=lambda case: _gain(case, uncovered, costly)))
        for item in fast[-1].items():
            uncovered.pop(item, None)
    return [pytest.param(case, id=_name(case), marks=[] if case in fast else [pytest.mark.slow]) for case in cases]


def _gain(case: Case, uncovered: Mapping[Any, None], costly: Sequence[Hashable]) -> int:
    return sum((item in uncovered) - 2 * (item not in uncovered and item[1] in costly) for item in case.items())


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of all files in a folder; nothing where neither is."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def _name(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def _pairs(case: Case) -> list[Any]:
    return list(combinations(case.items(), 2))
