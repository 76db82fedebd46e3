"""The kinds of tuning steps, and the registry of steps by name.

layer   takes a problem and a solution, and returns another solution. It must be deterministic and treat every output by
        itself. What it decides for all outputs it decides by `problem.sum_over_ranks`, because ranks share the outputs
stub    proposes another range of an activation quantizer
piece   changes the modules of a piece; undone if the error on held-out samples is not smaller
model   the same, once, on the whole model after all its pieces
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scalepoint.errors import UsageError
from scalepoint.support.plugins import PluginRegistry
from scalepoint.tuning.problem import LayerProblem, Solution

if TYPE_CHECKING:
    from torch import fx

    from scalepoint.numerics import QParams
    from scalepoint.quantize.quantizers import QuantStub
    from scalepoint.tuning.reconstruct import PieceTask
    from scalepoint.tuning.walk import StreamWalk

INTERCEPT = "intercept"  # not a registered step: the bias takes up the mean error of every output


@dataclass(frozen=True)
class TuningStep:
    """A step and its name."""

    name: str
    run: Callable[..., Any]


@dataclass(frozen=True)
class LayerStep(TuningStep):
    """Solves one layer on its moments."""

    run: Callable[[LayerProblem, Solution], Solution]


@dataclass(frozen=True)
class StubStep(TuningStep):
    """Reads what reaches an activation quantizer, and returns other parameters for it, or None."""

    run: "Callable[[StreamWalk, fx.Node, QuantStub], QParams | None]"


@dataclass(frozen=True)
class PieceStep(TuningStep):
    """Works on a piece; with over="model" once on the whole model at the end."""

    run: "Callable[[PieceTask], None]"
    over: Literal["piece", "model"] = "piece"


_STEPS: PluginRegistry[TuningStep] = PluginRegistry(TuningStep, "scalepoint.steps", {}, UsageError)


def register(
    name: str, over: Literal["layer", "stub", "piece", "model"] = "layer"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a step of tuning under a name. Used as a decorator.

    Args:
        name: The name in TuneConfig.
        over: The argument of the step: one layer, one activation quantizer ("stub"), one piece, or the whole model.

    Example:
        >>> @register("nearest")
        ... def nearest(problem, solution):
        ...     codes = problem.nearest_codes(solution.target, solution.scale)
        ...     return Solution(solution.target, codes, solution.scale)
    """

    def add(step: Callable[..., Any]) -> Callable[..., Any]:
        if over == "layer":
            _STEPS.builtin[name] = LayerStep(name, step)
        elif over == "stub":
            _STEPS.builtin[name] = StubStep(name, step)
        else:
            _STEPS.builtin[name] = PieceStep(name, step, over)
        return step

    return add


def find_step(name: str) -> TuningStep:
    """Find a step by name: built in, registered, or from the entry point of another package."""
    return _STEPS.find(name)


def step_names() -> list[str]:
    """Return the names of all tuning steps."""
    return [INTERCEPT, *_STEPS.names()]
