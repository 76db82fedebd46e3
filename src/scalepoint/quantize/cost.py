"""Multiply-accumulates of an operation, from the shapes that capture recorded; None where those are not known."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.lift import tensor_of
from scalepoint.graph.origin import origin_of
from scalepoint.quantize.weighted import MULTIPLIES, weight_shape

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def size_of(value: Any) -> int:
    """An extent as a number: a symbolic one has the size of the example."""
    if isinstance(value, int):
        return value
    hint = getattr(getattr(value, "node", None), "hint", None)
    return int(hint) if hint is not None else int(value)


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    value = tensor_of(node)
    return None if value is None else tuple(map(size_of, value.shape))


def macs_of(kind: str, part: nn.Module | None, node: fx.Node, operands: Sequence[fx.Node]) -> int | None:
    """Multiply-accumulates for the example inputs."""
    out = shape_of(node)
    weight = getattr(part, "weight", None)
    if kind in MULTIPLIES and part is not None and isinstance(weight, Tensor):
        return _weighted(kind, part, shape_of(operands[0]) if operands else None)
    if kind == "matmul":
        shapes = [shape_of(operand) for operand in operands]
        return None if out is None or shapes[0] is None else prod(out) * shapes[0][-1]
    if kind == "attention":
        return _attention(part, [shape_of(operand) for operand in operands])
    if kind in _GATES:
        return _recurrent(part, operands)
    return 0


def _weighted(kind: str, part: nn.Module, source: tuple[int, ...] | None) -> int | None:
    weight = weight_shape(part)
    if source is None:
        return None
    if kind == "linear":
        return prod(source[:-1]) * prod(weight)
    if kind == "conv_transpose":
        return prod(source) * prod(weight[1:])
    if kind == "head":
        return source[0] * prod(weight)
    batch = source[0] if len(source) == len(weight) else 1
    return prod(_out_sizes(part, source)) * batch * prod(weight)


def _out_sizes(part: nn.Module, source: tuple[int, ...]) -> list[int]:
    """The spatial extents that a convolution gives; a fused pool may follow, so the group's own do not tell."""
    kernel = weight_shape(part)[2:]
    dims = len(kernel)
    spatial = source[-dims:]

    def setting(name: str, default: int) -> list[Any]:
        value = part.arguments.get(name, default) if isinstance(part, Operation) else getattr(part, name, default)
        values = [value] * dims if isinstance(value, int | str) else list(value)
        return values * dims if len(values) == 1 else values

    stride, padding, dilation = setting("stride", 1), setting("padding", 0), setting("dilation", 1)
    if padding[0] == "same":
        return list(spatial)
    edges = [0 if padding[0] == "valid" else int(edge) for edge in padding]
    rows = zip(spatial, edges, dilation, kernel, stride, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in rows]


def _attention(part: nn.Module | None, shapes: Sequence[tuple[int, ...] | None]) -> int | None:
    """q k^T and p v. Where it is written out the key comes transposed, and the value is the last operand."""
    known = [shape for shape in shapes if shape is not None and len(shape) > 1]
    if len(known) < 2:
        return None
    query, key = known[0], known[1]
    is_spelled_out = isinstance(part, Operation) and part.kind == "matmul"
    length = key[-1] if is_spelled_out else key[-2]
    value = known[-1] if is_spelled_out else known[2] if len(known) > 2 else key
    return prod(query) * length + prod(query[:-1]) * length * value[-1]


def _recurrent(part: nn.Module | None, operands: Sequence[fx.Node]) -> int | None:
    source = shape_of(operands[0]) if operands else None
    if source is None or part is None:
        return None
    references = part.references().values() if isinstance(part, Operation) else ()
    weights = [*part.parameters(), *(reference.value for reference in references)]
    return prod(source[:-1]) * sum(weight.numel() for weight in weights if weight.ndim == 2)


def batch_share(model: fx.GraphModule) -> float:
    """The share of the recorded work that the example stands for: an example of one is captured as two."""
    return 0.5 if origin_of(model).is_widened else 1.0
