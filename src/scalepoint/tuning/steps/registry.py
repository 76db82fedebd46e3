"""Steps by name: each takes a problem and a solution and gives another solution; pure and deterministic."""

from collections.abc import Callable

from scalepoint.errors import UsageError, nearest
from scalepoint.tuning.problem import Problem, Solution

Step = Callable[[Problem, Solution], Solution]
_STEPS: dict[str, Step] = {}
INTERCEPT = "intercept"  # no step of its own: the bias takes up what the mean of every output lacks


def register(name: str) -> Callable[[Step], Step]:
    """Make a step known under a name."""

    def known(step: Step) -> Step:
        _STEPS[name] = step
        return step

    return known


def find_step(name: str) -> Step:
    if name not in _STEPS:
        raise UsageError(f"no tuning step {name!r}: {nearest(name, step_names())}")
    return _STEPS[name]


def step_names() -> list[str]:
    return [INTERCEPT, *_STEPS]
