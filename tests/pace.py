"""Mark the slow cases of a parametrized test, which run in `make test-all` only.

@pytest.mark.parametrize("case", fast(CASES, "small", "large"))        # all other cases are slow
"""

from collections.abc import Iterable
from typing import Any

import pytest


def fast(cases: Iterable[str], *fast_cases: str) -> list[Any]:
    """Return the cases as parameters; those not in `fast_cases` are marked slow."""
    all_cases = list(cases)
    unknown = set(fast_cases) - set(all_cases)
    assert not unknown, unknown
    return [case if case in fast_cases else pytest.param(case, marks=pytest.mark.slow) for case in all_cases]
