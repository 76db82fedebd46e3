"""Steps by name.

layer   takes a problem and a solution, gives another solution: pure and deterministic, output by output. What is one
        for all outputs is decided by sums that went through `problem.added`, as ranks may share the outputs
stub    proposes another range of an activation
piece   changes the modules of a piece; taken back when it does not end better on held-out samples
model   the same, once, on the whole net after all its pieces
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from scalepoint.errors import UsageError
from scalepoint.support.plugins import Registry
from scalepoint.tuning.problem import Problem, Solution

if TYPE_CHECKING:
    from torch import fx

    from scalepoint.numerics import QParams
    from scalepoint.quantize.quantizers import QuantStub
    from scalepoint.tuning.reconstruct import PieceTask
    from scalepoint.tuning.walk import StreamWalk

INTERCEPT = "intercept"  # no step of its own: the bias takes up what the mean of every output lacks


@dataclass(frozen=True)
class TuningStep:
    """A step under its name."""

    name: str
    run: Callable[..., Any]


@dataclass(frozen=True)
class LayerStep(TuningStep):
    """Solves one layer on its moments."""

    run: Callable[[Problem, Solution], Solution]


@dataclass(frozen=True)
class StubStep(TuningStep):
    """Looks at what reaches an activation quantizer: walk, node, stub -> parameters, or None."""

    run: "Callable[[StreamWalk, fx.Node, QuantStub], QParams | None]"


@dataclass(frozen=True)
class PieceStep(TuningStep):
    """Works on a piece, or with over="model" once on all of them at the end."""

    run: "Callable[[PieceTask], None]"
    over: Literal["piece", "model"] = "piece"


_STEPS: Registry[TuningStep] = Registry(TuningStep, "scalepoint.steps", {}, UsageError)


def register(
    name: str, over: Literal["layer", "stub", "piece", "model"] = "layer"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a step of tuning under a name. Used as a decorator.

    Args:
        name: The name in TuneConfig.
        over: What the step is called with: one layer, one activation quantizer, one piece of the model, or the model.
    """

    def known(step: Callable[..., Any]) -> Callable[..., Any]:
        if over == "layer":
            _STEPS.builtin[name] = LayerStep(name, step)
        elif over == "stub":
            _STEPS.builtin[name] = StubStep(name, step)
        else:
            _STEPS.builtin[name] = PieceStep(name, step, over)
        return step

    return known


def find_step(name: str) -> TuningStep:
    """By name: ours, registered, or of another package."""
    return _STEPS.find(name)


def step_names() -> list[str]:
    return [INTERCEPT, *_STEPS.names()]
