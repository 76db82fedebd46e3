"""Rewrites operations that torch's ONNX translation does not support, or translates wrongly.

attention with three axes     softmax(c q k^T + mask) v as single operations
number - integer tensor       the tensor is cast first: number + (-x)
chunks of a dynamic axis      slices
an LSTM with a projection     single steps
distances of all pairs        the root of the sum of squares, or the sum of absolute differences
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.formats.lowering import attention_from_core, pairwise_distances
from scalepoint.formats.pre_export import RESHAPES
from scalepoint.formats.recurrent import has_projection, lstm

aten = torch.ops.aten


def rewrite_program(program: ExportedProgram) -> ExportedProgram:
    """Apply the rewrites. The program is traced again only if a rule applies."""
    for node in program.graph.nodes:
        node.target = RESHAPES.get(node.target, node.target)
    decompositions: dict[Any, Callable[..., Any]] = {}
    for node in program.graph.nodes:
        rule = REWRITE_RULES.get(node.target) if node.op == "call_function" else None
        if rule is not None and rule.applies_to(node):
            decompositions[rule.operation] = rule.function
    return program.run_decompositions(decompositions) if decompositions else program


def _fake_value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _has_three_axes(node: fx.Node) -> bool:
    return bool(_fake_value(node.args[0]).ndim != 4)


def attention_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """Compute attention as torch defines it."""
    scores = query @ key.transpose(-2, -1) * factor
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ value


def _changes_dtype(node: fx.Node) -> bool:
    """Whether the result has a different dtype from the tensor."""
    return bool(_fake_value(node).dtype != _fake_value(node.args[0]).dtype)


def subtract_from_number(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    """Compute other - alpha * x in the dtype of the result."""
    x = x.to(torch.result_type(x, other))
    return torch.add(x.neg() if alpha == 1 else x * -alpha, other)


def _splits_dynamic_axis(node: fx.Node) -> bool:
    """Whether the axis that is split is dynamic."""
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return not isinstance(_fake_value(node.args[0]).shape[axis], int)


def split_into_slices(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Split into slices of `size` elements; the last one may be shorter."""
    last = int((x.shape[dim] + size - 1) // size) - 1
    slices = [x.narrow(dim, index * size, size) for index in range(last)]
    return [*slices, x.narrow(dim, last * size, x.shape[dim] - last * size)]


def _has_lstm_projection(node: fx.Node) -> bool:
    params, has_biases, num_layers, bidirectional = (node.args[index] for index in (2, 3, 4, 7))
    return has_projection(params, bool(has_biases), int(num_layers), bool(bidirectional))  # type: ignore[arg-type]


def _is_supported_distance(node: fx.Node) -> bool:
    return len(node.args) < 3 or node.args[2] in (1, 2)


class _ProgramRewrite(NamedTuple):
    """Replaces `operation` by `function` in the whole program if a call satisfies `applies_to`."""

    applies_to: Callable[[fx.Node], bool]
    operation: Any
    function: Callable[..., Any]


REWRITE_RULES: dict[Any, _ProgramRewrite] = {
    aten.scaled_dot_product_attention.default: _ProgramRewrite(
        _has_three_axes, aten.scaled_dot_product_attention.default, attention_from_core(attention_core)
    ),
    aten.rsub.Scalar: _ProgramRewrite(_changes_dtype, aten.rsub.Scalar, subtract_from_number),
    aten.split.Tensor: _ProgramRewrite(_splits_dynamic_axis, aten.split.Tensor, split_into_slices),
    # run_decompositions turns a chunk into a split before it applies these rules.
    aten.chunk.default: _ProgramRewrite(_splits_dynamic_axis, aten.split.Tensor, split_into_slices),
    aten.lstm.input: _ProgramRewrite(_has_lstm_projection, aten.lstm.input, lstm),
    aten.cdist.default: _ProgramRewrite(_is_supported_distance, aten.cdist.default, pairwise_distances),
    aten._cdist_forward.default: _ProgramRewrite(
        _is_supported_distance, aten._cdist_forward.default, pairwise_distances
    ),
}
