"""What torch's ONNX translation does not take, in operations that it takes.

attention of three axes          softmax(c q k^T + mask) v, written out
number - integers                integers cast first:  number + (-x)
chunks of a free axis            slices
an LSTM with a projection        step by step
distances of all pairs           the root of the sum of squares, or the sum of differences
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.formats.lowering import attention_from_core, pairwise_distances
from scalepoint.formats.pre_export import RESHAPES
from scalepoint.formats.recurrent import has_projection, lstm

aten = torch.ops.aten


def rewrite_program(program: ExportedProgram) -> ExportedProgram:
    """The same program; traced anew only where something has to be written in another way."""
    for node in program.graph.nodes:
        node.target = RESHAPES.get(node.target, node.target)
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target in REWRITE_RULES]
    decompositions = {REWRITE_RULES[node.target][1:] for node in calls if REWRITE_RULES[node.target][0](node)}
    return program.run_decompositions(dict(decompositions)) if decompositions else program


def _fake_value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _has_three_axes(node: fx.Node) -> bool:
    return bool(_fake_value(node.args[0]).ndim != 4)


def attention_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """As torch defines it."""
    scores = query @ key.transpose(-2, -1) * factor
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ value


def _changes_dtype(node: fx.Node) -> bool:
    """Whether the result has another type than the tensor."""
    return bool(_fake_value(node).dtype != _fake_value(node.args[0]).dtype)


def subtract_from_number(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    """other - alpha x."""
    wide = x.to(torch.result_type(x, other))
    return torch.add(wide.neg() if alpha == 1 else wide * -alpha, other)


def _splits_dynamic_axis(node: fx.Node) -> bool:
    """Whether the axis that is cut has no fixed extent."""
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return not isinstance(_fake_value(node.args[0]).shape[axis], int)


def split_into_slices(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Of `size` each, but for the last."""
    last = int((x.shape[dim] + size - 1) // size) - 1
    rest = x.shape[dim] - last * size
    return [*(x.narrow(dim, each * size, size) for each in range(last)), x.narrow(dim, last * size, rest)]


def _has_lstm_projection(node: fx.Node) -> bool:
    params, has_biases, layers, is_both = (node.args[place] for place in (2, 3, 4, 7))
    return has_projection(params, bool(has_biases), int(layers), bool(is_both))  # type: ignore[arg-type]


def _is_supported_distance(node: fx.Node) -> bool:
    return len(node.args) < 3 or node.args[2] in (1, 2)


# operation -> whether it has to be rewritten, and how; torch makes a split of a chunk before anybody is asked
REWRITE_RULES: dict[Any, tuple[Callable[[fx.Node], bool], Any, Callable[..., Any]]] = {
    aten.scaled_dot_product_attention.default: (
        _has_three_axes,
        aten.scaled_dot_product_attention.default,
        attention_from_core(attention_core),
    ),
    aten.rsub.Scalar: (_changes_dtype, aten.rsub.Scalar, subtract_from_number),
    aten.split.Tensor: (_splits_dynamic_axis, aten.split.Tensor, split_into_slices),
    aten.chunk.default: (_splits_dynamic_axis, aten.split.Tensor, split_into_slices),
    aten.lstm.input: (_has_lstm_projection, aten.lstm.input, lstm),
    aten.cdist.default: (_is_supported_distance, aten.cdist.default, pairwise_distances),
    aten._cdist_forward.default: (_is_supported_distance, aten._cdist_forward.default, pairwise_distances),
}
