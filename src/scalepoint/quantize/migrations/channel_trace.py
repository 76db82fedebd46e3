"""Where the channels of a tensor go.

    0 1 2 .. along the channels  --what moves, pools, rectifies or averages values-->  numbers at the input of a reader

Numbers of channels are sent through the operations themselves, so that reshapes, splits, transposes and heads need no
rules of their own. What does not scale along pins the channels that reach it; the others are free.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalepoint.graph import Operation
from scalepoint.graph.kinds import CASTS, VALUE_PRESERVING
from scalepoint.quantize.migrations.recorded_graph import FOREIGN, RecordedGraph, RecordedOperation
from scalepoint.quantize.operations import WEIGHT_PRODUCTS

MOVES = frozenset((*VALUE_PRESERVING, "cat", "stack", "repeat", "repeat_interleave", "roll", "channel_shuffle"))
UNCHANGED = frozenset(("quant", "dropout", "identity", *CASTS))
RECTIFIES = frozenset(("relu", "leaky_relu", "prelu"))
CLAMPS = frozenset(("relu6", "hardtanh"))
SUMS = ("attention", "matmul")  # of values, weighted
POOLS = frozenset(("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"))


@dataclass
class ChannelTrace:
    """Where the channels of one tensor go."""

    channels: int
    readers: list[tuple[RecordedOperation, Tensor]] = field(
        default_factory=list
    )  # and which channel each of its inputs is
    pinned: dict[int, str] = field(default_factory=dict)  # channels that something else reads, with the reason
    passed: list[RecordedOperation] = field(default_factory=list)
    ids: dict[int, Any] = field(default_factory=dict)

    @property
    def free(self) -> Tensor:
        free = torch.ones(self.channels, dtype=torch.bool)
        free[list(self.pinned)] = False
        seen = torch.zeros(self.channels, dtype=torch.bool)
        for _, columns in self.readers:
            seen[columns[columns != FOREIGN]] = True
        return free & seen

    @property
    def why(self) -> str:
        """Why no channel is free."""
        return next(iter(self.pinned.values()), "nothing reads it")

    def pin(self, ids: Tensor, why: str) -> None:
        for each in _unique_numbers(ids):
            self.pinned.setdefault(each, why)

    def is_pinned(self, ids: Tensor) -> bool:
        """Whether none of these channels is free."""
        return all(each in self.pinned for each in _unique_numbers(ids))


def trace_channels(
    flow: RecordedGraph, start: RecordedOperation, axis: int, through: Callable[[RecordedOperation], bool]
) -> ChannelTrace:
    """Send the channels of a tensor on, through the operations that `through` takes, to the layers that read them."""
    assert start.shape is not None  # noqa: S101  # it gave a tensor
    count = start.shape[axis]
    shape = [1] * len(start.shape)
    shape[axis] = count
    trace = ChannelTrace(count, ids={start.index: torch.arange(count).view(shape).expand(start.shape)})
    for op in flow.ops[start.index + 1 :]:
        own = {index: trace.ids[index] for index in op.inputs if index in trace.ids}
        if not own:
            continue
        columns = _reader_columns(op, own)
        if columns is not None:
            trace.readers.append((op, columns))
            continue
        if op.kind in SUMS and through(op):
            own = _keep_value_input(trace, op, own)
        found, why = _pass_numbers(flow, op, own) if through(op) else (None, _explain_unknown(op))
        if found is None:
            for ids in own.values():
                trace.pin(ids, why)
        else:
            trace.ids[op.index] = found
            trace.passed.append(op)
    return trace


def channel_axis(op: RecordedOperation) -> int:
    """The axis of its output (and input) on which a layer or norm has its channels."""
    if op.kind in ("conv", "conv_transpose", "head"):
        return 1 - int(op.operation.weight.ndim)
    return -1


def _explain_unknown(op: RecordedOperation) -> str:
    if op.kind == "output":
        return "it is an output of the model"
    return f"read by {op.name} ({op.kind}), which does not pass scales on"


def _drop_expanded_axes(ids: Tensor) -> Tensor:
    """One of all that an expanded axis repeats."""
    return ids[tuple(slice(1) if stride == 0 else slice(None) for stride in ids.stride())]


def _unique_numbers(ids: Any) -> list[int]:
    tensors = ids if isinstance(ids, tuple | list) else [ids]
    found = torch.cat([torch.unique(_drop_expanded_axes(each)) for each in tensors])
    return sorted({int(each) for each in found} - {FOREIGN})


def numbers_along(ids: Tensor, axis: int) -> Tensor | None:
    """The numbers along an axis, when all other axes agree."""
    rows = (
        _drop_expanded_axes(ids.movedim(axis, -1))
        .expand(*[-1] * (ids.ndim - 1), ids.shape[axis])
        .reshape(-1, ids.shape[axis])
    )
    return rows[0].clone() if bool((rows == rows[0]).all()) else None


def _reader_columns(op: RecordedOperation, own: Mapping[int, Any]) -> Tensor | None:
    if op.kind not in WEIGHT_PRODUCTS or len(op.inputs) != 1 or not isinstance(own[op.inputs[0]], Tensor):
        return None
    return numbers_along(own[op.inputs[0]], channel_axis(op))


def _pass_unchanged(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Any:
    return own.get(op.inputs[0])


def _pass_pool(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Tensor | None:
    ids = own[op.inputs[0]]
    if op.shape is None or not isinstance(ids, Tensor) or len(op.shape) != ids.ndim:
        return None
    whole = tuple(slice(None) if have == want else slice(1) for have, want in zip(ids.shape, op.shape, strict=True))
    one = ids[whole]
    return one.expand(op.shape) if bool((_drop_expanded_axes(ids) == _drop_expanded_axes(one)).all()) else None


def _pass_mean(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Tensor | None:
    """The mean of equal numbers is that number, the mean of their squares its square."""
    mean, square = (flow.again(op, {k: v.double() ** power for k, v in own.items()}) for power in (1, 2))
    if mean is None or square is None:
        return None
    return mean.round().long() if torch.allclose(mean.square(), square, rtol=1e-12, atol=1e-9) else None


def _pass_product(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Tensor | None:
    places = [place for place, index in enumerate(op.inputs) if index in own]
    divides = op.kind == "div" and any(op.argument(place) not in ("self", "input", "0") for place in places)
    if len(places) != 1 or divides or op.shape is None:
        return None
    ids = next(iter(own.values()))
    return torch.broadcast_to(ids, op.shape) if ids.ndim <= len(op.shape) else None


def _pass_add(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Tensor | None:
    """x + x is 2 x; anything else has a part that does not scale along."""
    constants = op.module.tensors() if isinstance(op.module, Operation) else []
    parts = [own[index] for index in op.inputs if index in own]
    if len(parts) != len(op.inputs) or len(parts) < 2 or constants:
        return None
    return parts[0] if all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts) else None


def get_value_input(op: RecordedOperation) -> int:
    """The operation whose values an attention or a product sums."""
    names = ("value", "other", "mat2", "2" if op.kind == "attention" else "1")
    return next((index for place, index in enumerate(op.inputs) if op.argument(place) in names), -1)


def _keep_value_input(trace: ChannelTrace, op: RecordedOperation, own: dict[int, Any]) -> dict[int, Any]:
    """Where queries, keys and values come from one layer: the channels of the first two stay, those of values pass."""
    value = get_value_input(op)
    if value not in own:
        return own
    for index, ids in own.items():
        if index != value:
            trace.pin(ids, f"{op.name} takes it as query or key")
    return {value: own[value]}


def _pass_weighted_sum(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> Tensor | None:
    """sum_t p_t v_t: each channel of v is one of the result, in each head that reads it."""
    ids = own.get(get_value_input(op))
    if ids is None or len(own) != 1:
        return None
    row = ids[..., :1, :]
    if op.shape is None or not bool((_drop_expanded_axes(ids) == _drop_expanded_axes(row)).all()):
        return None
    if op.kind == "attention" and ids.ndim > 2 and ids.shape[-3] != op.shape[-3]:
        row = row.repeat_interleave(op.shape[-3] // ids.shape[-3], -3)
    found: Tensor = row.expand(op.shape)
    return found


PassRule = Callable[
    [RecordedGraph, RecordedOperation, dict[int, Any]], Any
]  # the numbers behind an operation; None where they cannot be told
PASS_RULES: tuple[tuple[Collection[str], PassRule, str], ...] = (
    (UNCHANGED | RECTIFIES | CLAMPS, _pass_unchanged, "takes it in another place"),
    (MOVES, RecordedGraph.again, "moves it in a way that cannot be followed"),
    (POOLS, _pass_pool, "pools over channels"),
    (("mean",), _pass_mean, "averages over channels"),
    (("mul", "div"), _pass_product, "multiplies it by itself, or divides by it"),
    (("add",), _pass_add, "adds another tensor to it"),
    (SUMS, _pass_weighted_sum, "takes it as query or key"),
)


def _pass_numbers(flow: RecordedGraph, op: RecordedOperation, own: dict[int, Any]) -> tuple[Any, str]:
    """The numbers behind an operation; None and the reason where there is no telling."""
    for kinds, rule, why in PASS_RULES:
        if op.kind in kinds:
            return rule(flow, op, own), f"{op.name} {why}"
    return None, _explain_unknown(op)
