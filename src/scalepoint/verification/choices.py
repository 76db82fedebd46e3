"""Repeats the simulation with the choices of the runtime.

Among equal scores every implementation of top-k, sort and argmax chooses as it likes, and a rounding decides between
nearly equal ones. All that depends on the indices then differs, although nothing is wrong. The simulation therefore
runs again and takes the indices of the runtime, but only where these are a right choice:

1. the scores of the runtime agree with the simulation's to the limit that is asked of outputs,
2. the indices choose the best of the scores that the runtime itself has.

Everything else is compared as ever, so a fault before a choice, in it or after it is still found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalepoint.compat.torch_names import TorchDispatchMode
from scalepoint.formats import ChoiceOutputs
from scalepoint.verification.agreement import compare_outputs
from scalepoint.verification.result import Choice

aten = torch.ops.aten
CHOOSE_ONE = (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
CHOOSE_MANY = (aten.topk.default, aten.sort.default, aten.sort.stable)


class RuntimeChoice(NamedTuple):
    """One choice as the runtime made it."""

    name: str  # of the node
    scores: np.ndarray
    indices: np.ndarray


def runtime_choices(shown: ChoiceOutputs, outputs: Mapping[str, np.ndarray]) -> list[RuntimeChoice]:
    """The choices that a run shows. Outputs are taken by position: OpenVINO may give them another name."""
    if len(outputs) != len(shown.outputs):
        return []
    arrays = dict(zip(shown.outputs, outputs.values(), strict=True))
    return [RuntimeChoice(name, arrays[scores], arrays[indices]) for name, scores, indices in shown.choices]


class FollowChoices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this mode torch takes the runtime's indices where they are a right choice.

    `followed` has the choices whose indices differ from torch's own.
    """

    def __init__(self, choices: Sequence[RuntimeChoice], bound: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices, self.bound = choices, bound
        self.used: set[int] = set()
        self._different: dict[int, Choice] = {}

    @property
    def followed(self) -> tuple[Choice, ...]:
        return tuple(self._different.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in CHOOSE_ONE and func not in CHOOSE_MANY:
            return result
        call = _Call.of(func, args, kwargs or {}, result)
        matches = [match for place, choice in enumerate(self.choices) if (match := _match_choice(call, choice, place))]
        matches = [match for match in matches if match.sqnr >= self.bound]
        if not matches:
            return result
        # two nodes may have the same scores, as the heads of an untrained net do: then each has its own call
        best = max(matches, key=lambda match: (match.sqnr, match.place not in self.used))
        self.used.add(best.place)
        if torch.equal(best.indices, call.indices):
            return result
        apart = call.chosen(best.indices).double() - call.chosen(call.indices).double()
        gap = float(apart.abs().nan_to_num(0.0).max())  # two infinities are equal
        self._different[best.place] = Choice(self.choices[best.place].name, best.sqnr, gap)
        return call.result(best.indices)


@dataclass(frozen=True)
class _Call:
    """One call of an operation that chooses: `indices` as it chose, with the axis that it chooses along."""

    function: Any
    arguments: Mapping[str, Any]
    scores: Tensor
    axis: int | None  # None: of all values
    indices: Tensor
    has_values: bool

    @staticmethod
    def of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> "_Call":
        schema = function._schema.arguments
        named = {each.name: each.default_value for each in schema if each.has_default_value()}
        named |= {each.name: value for each, value in zip(schema, args, strict=False)} | dict(kwargs)
        has_values = not isinstance(result, Tensor)
        indices = result[1] if has_values else result
        return _Call(function, named, named.pop("self"), named["dim"], indices, has_values)

    def choose_by(self, scores: Tensor) -> Tensor:
        """The indices that it chooses by other scores."""
        result = self.function(scores, **self.arguments)
        indices: Tensor = result[1] if self.has_values else result
        return indices

    def chosen(self, indices: Tensor, scores: Tensor | None = None) -> Tensor:
        """The scores at these indices."""
        scores = self.scores if scores is None else scores
        if self.axis is None:
            return scores.flatten()[indices]
        if indices.ndim == scores.ndim:
            return scores.gather(self.axis, indices)
        return scores.gather(self.axis, indices.unsqueeze(self.axis)).squeeze(self.axis)

    def result(self, indices: Tensor) -> Any:
        return (self.chosen(indices), indices) if self.has_values else indices


class _Match(NamedTuple):
    """A right choice of the runtime for a call of the simulation, and how near the scores are."""

    place: int
    sqnr: float
    indices: Tensor


def _match_choice(call: _Call, choice: RuntimeChoice, place: int) -> _Match | None:
    if choice.scores.size != call.scores.numel() or choice.indices.size != call.indices.numel():
        return None
    array = choice.scores.reshape(call.scores.shape)
    indices = torch.tensor(choice.indices.reshape(call.indices.shape), dtype=torch.int64, device=call.indices.device)
    if not _is_valid_choice(call, torch.tensor(array, device=call.scores.device), indices):
        return None
    return _Match(place, compare_outputs([call.scores], {choice.name: array})[0].sqnr, indices)


def _is_valid_choice(call: _Call, scores: Tensor, indices: Tensor) -> bool:
    """Whether these indices are in range, name nothing twice, and give the same scores as torch's own choice."""
    size = scores.numel() if call.axis is None else scores.shape[call.axis] if scores.ndim else 1
    if bool(((indices < 0) | (indices >= size)).any()):
        return False
    expected, chosen = call.chosen(call.choose_by(scores), scores), call.chosen(indices, scores)
    if call.function in CHOOSE_ONE or not scores.ndim:
        return torch.equal(expected, chosen)
    axis = call.axis or 0
    if bool((indices.sort(axis).values.diff(dim=axis) == 0).any()):
        return False
    if not call.arguments.get("sorted", True):
        expected, chosen = expected.sort(axis).values, chosen.sort(axis).values
    return torch.equal(expected, chosen)
