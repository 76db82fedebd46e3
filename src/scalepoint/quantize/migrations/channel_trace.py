"""Follows the channels of a tensor through the graph, to the layers that read them.

    start: 0 1 2 3 along its channels  --permute, reshape-->  0 2 1 3 at the input of a linear layer (its `columns`)

Operations that move values (reshape, split, transpose) run on the channel numbers, so that they need no rules of their
own. A value that does not come from the start has the number FOREIGN. A channel is pinned if an operation reads it that
does not commute with scaling. It is free if a layer reads it and it is not pinned.
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
RECTIFIERS = frozenset(("relu", "leaky_relu", "prelu"))
CLAMPS = frozenset(("relu6", "hardtanh"))
SUMS = ("attention", "matmul")  # weighted sums of values
POOLS = frozenset(("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"))


@dataclass
class ChannelTrace:
    """Where the channels of one tensor go.

    Attributes:
        channels: Number of channels.
        readers: The layers that read channels, with the channel number of each of their inputs.
        pinned: Channels that may not be scaled -> the reason.
        passed: The operations that channels were followed through.
        numbers: Channel numbers of the result of each operation, by its index.
    """

    channels: int
    readers: list[tuple[RecordedOperation, Tensor]] = field(default_factory=list)
    pinned: dict[int, str] = field(default_factory=dict)
    passed: list[RecordedOperation] = field(default_factory=list)
    numbers: dict[int, Any] = field(default_factory=dict)

    @property
    def free(self) -> Tensor:
        """A mask of the channels that a layer reads and that are not pinned."""
        is_free = torch.ones(self.channels, dtype=torch.bool)
        is_free[list(self.pinned)] = False
        is_read = torch.zeros(self.channels, dtype=torch.bool)
        for _, columns in self.readers:
            is_read[columns[columns != FOREIGN]] = True
        return is_free & is_read

    @property
    def reason(self) -> str:
        """The first reason for which a channel is pinned; used if no channel is free."""
        return next(iter(self.pinned.values()), "nothing reads it")

    def pin(self, numbers: Tensor, reason: str) -> None:
        for channel in _unique_numbers(numbers):
            self.pinned.setdefault(channel, reason)

    def is_pinned(self, numbers: Tensor) -> bool:
        """Whether none of these channels is free."""
        return all(channel in self.pinned for channel in _unique_numbers(numbers))


def trace_channels(
    graph: RecordedGraph, start: RecordedOperation, axis: int, passes: Callable[[RecordedOperation], bool]
) -> ChannelTrace:
    """Follow the channels of a result to the layers that read them.

    Args:
        graph: The recorded operations.
        start: The operation whose result is followed.
        axis: The axis of its channels.
        passes: Whether channels may be followed through an operation.
    """
    assert start.shape is not None  # noqa: S101  # its result is a tensor
    count = start.shape[axis]
    shape = [1] * len(start.shape)
    shape[axis] = count
    trace = ChannelTrace(count, numbers={start.index: torch.arange(count).view(shape).expand(start.shape)})
    for op in graph.operations[start.index + 1 :]:
        inputs = {index: trace.numbers[index] for index in op.inputs if index in trace.numbers}
        if not inputs:
            continue
        columns = _reader_columns(op, inputs)
        if columns is not None:
            trace.readers.append((op, columns))
            continue
        if op.kind in SUMS and passes(op):
            inputs = _keep_value_input(trace, op, inputs)
        numbers, reason = _pass_numbers(graph, op, inputs) if passes(op) else (None, _explain_unknown(op))
        if numbers is None:
            for input_numbers in inputs.values():
                trace.pin(input_numbers, reason)
        else:
            trace.numbers[op.index] = numbers
            trace.passed.append(op)
    return trace


def channel_axis(op: RecordedOperation) -> int:
    """Return the axis on which a layer or norm has its channels, in its input and output, counted from the end."""
    if op.kind in ("conv", "conv_transpose", "head"):
        return 1 - int(op.operation.weight.ndim)
    return -1


def _explain_unknown(op: RecordedOperation) -> str:
    if op.kind == "output":
        return "it is an output of the model"
    return f"read by {op.name} ({op.kind}), which does not commute with scaling"


def _drop_expanded_axes(numbers: Tensor) -> Tensor:
    """Return the numbers with size 1 on axes that only repeat them (stride 0). They are compared much faster."""
    return numbers[tuple(slice(1) if stride == 0 else slice(None) for stride in numbers.stride())]


def _unique_numbers(numbers: Any) -> list[int]:
    tensors = numbers if isinstance(numbers, tuple | list) else [numbers]
    unique = torch.cat([torch.unique(_drop_expanded_axes(tensor)) for tensor in tensors])
    return sorted({int(number) for number in unique} - {FOREIGN})


def numbers_along(numbers: Tensor, axis: int) -> Tensor | None:
    """Return the numbers along an axis, if they are the same at all positions of the other axes."""
    last = _drop_expanded_axes(numbers.movedim(axis, -1)).expand(*[-1] * (numbers.ndim - 1), numbers.shape[axis])
    rows = last.reshape(-1, numbers.shape[axis])
    return rows[0].clone() if bool((rows == rows[0]).all()) else None


def _reader_columns(op: RecordedOperation, inputs: Mapping[int, Any]) -> Tensor | None:
    """Return the channel number of each input of a layer with a weight; None for other operations."""
    if op.kind not in WEIGHT_PRODUCTS or len(op.inputs) != 1 or not isinstance(inputs[op.inputs[0]], Tensor):
        return None
    return numbers_along(inputs[op.inputs[0]], channel_axis(op))


# How numbers pass an operation: each function returns the numbers of its result, or None if they cannot be followed.


def _pass_unchanged(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Any:
    return inputs.get(op.inputs[0])


def _pass_pool(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Tensor | None:
    numbers = inputs[op.inputs[0]]
    if op.shape is None or not isinstance(numbers, Tensor) or len(op.shape) != numbers.ndim:
        return None
    # Along axes whose size changes, all positions must have the same number: then the result has it too.
    keeps_size = [size == new_size for size, new_size in zip(numbers.shape, op.shape, strict=True)]
    first = numbers[tuple(slice(None) if is_kept else slice(1) for is_kept in keeps_size)]
    is_same = bool((_drop_expanded_axes(numbers) == _drop_expanded_axes(first)).all())
    return first.expand(op.shape) if is_same else None


def _pass_mean(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Tensor | None:
    """Pass channels that are equal along the reduced axes: the mean of equal numbers is that number."""
    mean = graph.rerun(op, {index: numbers.double() for index, numbers in inputs.items()})
    mean_square = graph.rerun(op, {index: numbers.double() ** 2 for index, numbers in inputs.items()})
    if mean is None or mean_square is None:
        return None
    return mean.round().long() if torch.allclose(mean.square(), mean_square, rtol=1e-12, atol=1e-9) else None


def _pass_product(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Tensor | None:
    """Pass one factor or numerator. A second traced factor would square the scale, a denominator would invert it."""
    positions = [position for position, index in enumerate(op.inputs) if index in inputs]
    is_denominator = op.kind == "div" and any(
        op.argument_name(position) not in ("self", "input", "0") for position in positions
    )
    if len(positions) != 1 or is_denominator or op.shape is None:
        return None
    numbers = next(iter(inputs.values()))
    return torch.broadcast_to(numbers, op.shape) if numbers.ndim <= len(op.shape) else None


def _pass_add(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Tensor | None:
    """Pass x + x, which is 2 x. In any other sum the other operand would not be scaled."""
    constants = op.module.tensors() if isinstance(op.module, Operation) else []
    parts = [inputs[index] for index in op.inputs if index in inputs]
    if len(parts) != len(op.inputs) or len(parts) < 2 or constants:
        return None
    first, *rest = parts
    is_same = all(other.shape == first.shape and torch.equal(other, first) for other in rest)
    return first if is_same else None


def get_value_input(op: RecordedOperation) -> int:
    """Return the operation whose result an attention or a product sums: v in softmax(q k') v; -1 if there is none."""
    names = ("value", "other", "mat2", "2" if op.kind == "attention" else "1")
    return next((index for position, index in enumerate(op.inputs) if op.argument_name(position) in names), -1)


def _keep_value_input(trace: ChannelTrace, op: RecordedOperation, inputs: dict[int, Any]) -> dict[int, Any]:
    """Pin the channels that an attention reads as query or key, if one layer computes queries, keys and values."""
    value = get_value_input(op)
    if value not in inputs:
        return inputs
    for index, numbers in inputs.items():
        if index != value:
            trace.pin(numbers, f"{op.name} reads it as query or key")
    return {value: inputs[value]}


def _pass_weighted_sum(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> Tensor | None:
    """Pass v of sum_t p_t v_t: each channel of v is one channel of the result, in each head that reads it."""
    numbers = inputs.get(get_value_input(op))
    if numbers is None or len(inputs) != 1:
        return None
    row = numbers[..., :1, :]
    if op.shape is None or not bool((_drop_expanded_axes(numbers) == _drop_expanded_axes(row)).all()):
        return None
    if op.kind == "attention" and numbers.ndim > 2 and numbers.shape[-3] != op.shape[-3]:
        row = row.repeat_interleave(op.shape[-3] // numbers.shape[-3], -3)  # several query heads share a value head
    result: Tensor = row.expand(op.shape)
    return result


PassRule = Callable[[RecordedGraph, RecordedOperation, dict[int, Any]], Any]
PASS_RULES: tuple[tuple[Collection[str], PassRule, str], ...] = (  # kinds, rule, reason if it returns None
    (UNCHANGED | RECTIFIERS | CLAMPS, _pass_unchanged, "reads it as another argument"),
    (MOVES, RecordedGraph.rerun, "moves it in a way that cannot be followed"),
    (POOLS, _pass_pool, "pools over channels"),
    (("mean",), _pass_mean, "averages over channels"),
    (("mul", "div"), _pass_product, "multiplies it by itself, or divides by it"),
    (("add",), _pass_add, "adds another tensor to it"),
    (SUMS, _pass_weighted_sum, "reads it as query or key"),
)


def _pass_numbers(graph: RecordedGraph, op: RecordedOperation, inputs: dict[int, Any]) -> tuple[Any, str]:
    """Return the numbers of an operation's result, and the reason if they are None."""
    for kinds, rule, reason in PASS_RULES:
        if op.kind in kinds:
            return rule(graph, op, inputs), f"{op.name} {reason}"
    return None, _explain_unknown(op)
