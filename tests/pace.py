"""Marks the cases of a test: the named ones are fast, the others run in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[str], *fast_cases: str) -> list[Any]:
    all_cases = list(cases)
    unknown = set(fast_cases) - set(all_cases)
    assert not unknown, unknown
    return [case if case in fast_cases else pytest.param(case, marks=pytest.mark.slow) for case in all_cases]
