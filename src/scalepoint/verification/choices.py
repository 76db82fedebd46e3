"""Repeats the simulation with the indices that the runtime chose in top-k, sort and argmax.

The order of equal scores is undefined, and a rounding error can swap nearly equal scores. All values that depend on
the indices then differ, although the file is correct. The simulation therefore runs again with the indices of the
runtime. It takes them only if they are a valid choice:

1. the scores in the runtime agree with the scores in the simulation to the bound that is required of outputs, and
2. the indices select the best of the scores in the runtime.

All other values are compared as usual, so that an error before, in or after the choice is still found.
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
    """Scores and indices of one top-k, sort or argmax in the runtime."""

    name: str  # name of the node
    scores: np.ndarray
    indices: np.ndarray


def read_runtime_choices(description: ChoiceOutputs, outputs: Mapping[str, np.ndarray]) -> list[RuntimeChoice]:
    """Read the choices from the outputs of a run. Outputs are matched by position: OpenVINO may rename them."""
    if len(outputs) != len(description.outputs):
        return []
    arrays = dict(zip(description.outputs, outputs.values(), strict=True))
    return [RuntimeChoice(name, arrays[scores], arrays[indices]) for name, scores, indices in description.choices]


class FollowChoices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which torch returns the indices of the runtime, if they are a valid choice.

    Args:
        choices: The choices of the runtime.
        bound: Smallest SQNR in dB between the scores of the runtime and of the simulation.
    """

    def __init__(self, choices: Sequence[RuntimeChoice], bound: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices, self.bound = choices, bound
        self._used: set[int] = set()  # indices into self.choices
        self._different: dict[int, Choice] = {}

    @property
    def followed(self) -> tuple[Choice, ...]:
        """The choices whose indices replaced different indices of torch."""
        return tuple(self._different.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in CHOOSE_ONE and func not in CHOOSE_MANY:
            return result
        call = _ChoiceCall.of(func, args, kwargs or {}, result)
        candidates = [_match_choice(call, choice, index) for index, choice in enumerate(self.choices)]
        matches = [match for match in candidates if match is not None and match.sqnr >= self.bound]
        if not matches:
            return result
        # Two nodes can have the same scores, for example the heads of an untrained net. Prefer a node without a call.
        best = max(matches, key=lambda match: (match.sqnr, match.choice_index not in self._used))
        self._used.add(best.choice_index)
        if torch.equal(best.indices, call.indices):
            return result
        difference = call.scores_at(best.indices).double() - call.scores_at(call.indices).double()
        gap = float(difference.abs().nan_to_num(0.0).max())  # inf - inf is NaN, but the scores are equal
        self._different[best.choice_index] = Choice(self.choices[best.choice_index].name, best.sqnr, gap)
        return call.build_result(best.indices)


@dataclass(frozen=True)
class _ChoiceCall:
    """One call of top-k, sort or argmax in the simulation."""

    function: Any
    arguments: Mapping[str, Any]  # all arguments except the scores
    scores: Tensor
    axis: int | None  # None: the best of all values
    indices: Tensor  # what torch chose
    has_values: bool  # the operation returns (values, indices), not only indices

    @staticmethod
    def of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> "_ChoiceCall":
        """Bind the arguments of the aten operation by name, with its defaults."""
        schema = function._schema.arguments
        arguments = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        arguments |= dict(zip((argument.name for argument in schema), args, strict=False))
        arguments |= kwargs
        scores = arguments.pop("self")
        has_values = not isinstance(result, Tensor)
        indices = result[1] if has_values else result
        return _ChoiceCall(function, arguments, scores, arguments["dim"], indices, has_values)

    def choose_by(self, scores: Tensor) -> Tensor:
        """Return the indices that the operation chooses for other scores."""
        result = self.function(scores, **self.arguments)
        indices: Tensor = result[1] if self.has_values else result
        return indices

    def scores_at(self, indices: Tensor, scores: Tensor | None = None) -> Tensor:
        """Return the scores at these indices."""
        scores = self.scores if scores is None else scores
        if self.axis is None:
            return scores.flatten()[indices]
        if indices.ndim == scores.ndim:
            return scores.gather(self.axis, indices)
        return scores.gather(self.axis, indices.unsqueeze(self.axis)).squeeze(self.axis)

    def build_result(self, indices: Tensor) -> Any:
        """Return what the operation returns if it chooses these indices."""
        return (self.scores_at(indices), indices) if self.has_values else indices


class _Match(NamedTuple):
    """A valid choice of the runtime for a call of the simulation."""

    choice_index: int  # into FollowChoices.choices
    sqnr: float  # between the scores of the two
    indices: Tensor


def _match_choice(call: _ChoiceCall, choice: RuntimeChoice, choice_index: int) -> _Match | None:
    """Return a match if the choice of the runtime is valid for this call, and how well the scores agree."""
    if choice.scores.size != call.scores.numel() or choice.indices.size != call.indices.numel():
        return None
    array = choice.scores.reshape(call.scores.shape)
    indices = torch.tensor(choice.indices.reshape(call.indices.shape), dtype=torch.int64, device=call.indices.device)
    if not _is_valid_choice(call, torch.tensor(array, device=call.scores.device), indices):
        return None
    return _Match(choice_index, compare_outputs([call.scores], {choice.name: array})[0].sqnr, indices)


def _is_valid_choice(call: _ChoiceCall, scores: Tensor, indices: Tensor) -> bool:
    """Whether the indices are in range and unique, and select the same scores as torch does."""
    size = scores.numel()  # number of scores to choose from
    if call.axis is not None and scores.ndim:
        size = scores.shape[call.axis]
    if bool(((indices < 0) | (indices >= size)).any()):
        return False
    expected, selected = call.scores_at(call.choose_by(scores), scores), call.scores_at(indices, scores)
    if call.function in CHOOSE_ONE or not scores.ndim:
        return torch.equal(expected, selected)
    axis = call.axis or 0
    if bool((indices.sort(axis).values.diff(dim=axis) == 0).any()):
        return False
    if not call.arguments.get("sorted", True):
        expected, selected = expected.sort(axis).values, selected.sort(axis).values
    return torch.equal(expected, selected)
