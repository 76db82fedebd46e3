"""Cases of a test of which the named ones are fast, and the others are read by `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[str], *named: str) -> list[Any]:
    every = list(cases)
    unknown = set(named) - set(every)
    assert not unknown, unknown
    return [case if case in named else pytest.param(case, marks=pytest.mark.slow) for case in every]
