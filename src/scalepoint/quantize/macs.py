"""Multiply-accumulates of an operation, from the shapes that capture recorded; None where those are not known."""

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any

from torch import fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.kinds import OPAQUE, PRODUCTS_WITH_ADDEND, WEIGHTLESS_PRODUCTS
from scalepoint.graph.nodes import get_fake_tensor, get_info
from scalepoint.graph.operations import Slot, get_tensors
from scalepoint.graph.origin import get_origin
from scalepoint.quantize.operations import WEIGHT_PRODUCTS, get_weight_shape

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
TensorShape = tuple[int, ...]


def get_shape(node: fx.Node) -> TensorShape | None:
    """The sizes of a tensor for the example inputs; those that depend on values were seen in a run."""
    value = get_fake_tensor(node)
    extents = () if value is None else tuple(map(_to_int, value.shape))
    known = tuple(extent for extent in extents if extent is not None)
    if value is not None and len(known) == len(extents):
        return known
    return get_info(node).sizes


def _to_int(value: Any) -> int | None:
    """An extent as a number: a symbolic one has the size of the example."""
    if isinstance(value, int):
        return value
    hint = getattr(getattr(value, "node", None), "hint", None)
    return None if hint is None else int(hint)


def count_macs(kind: str, part: nn.Module | None, node: fx.Node, operands: Sequence[fx.Node]) -> int | None:
    """Multiply-accumulates for the example inputs, be the weight stored or computed."""
    shapes = [get_shape(operand) for operand in operands]
    if kind in WEIGHT_PRODUCTS and part is not None:
        return _count_weighted(kind, part, shapes)
    if kind == "grouped_linear" or kind in WEIGHTLESS_PRODUCTS:
        return _count_weightless_product(kind, node, get_shape(node), shapes)
    if kind == "attention":
        return _count_attention(part, shapes)
    if kind in _GATES:
        return _count_recurrent(part, operands)
    return (get_info(node).macs or 0) if kind == OPAQUE else 0


def _count_weighted(kind: str, part: nn.Module, shapes: Sequence[TensorShape | None]) -> int | None:
    source = shapes[0] if shapes else None
    weight = get_weight_shape(part) or _get_computed_weight_shape(part, shapes)
    if source is None or weight is None:
        return None
    if kind == "linear":
        return prod(source[:-1]) * prod(weight)
    if kind == "conv_transpose":
        return prod(source) * prod(weight[1:])
    if kind == "head":
        return source[0] * prod(weight)
    batch = source[0] if len(source) == len(weight) else 1
    return prod(_get_output_sizes(part, source, weight[2:])) * batch * prod(weight)


def _get_computed_weight_shape(part: nn.Module, shapes: Sequence[TensorShape | None]) -> TensorShape | None:
    """Of a weight that comes as an input."""
    given = part.arguments.get("weight") if isinstance(part, Operation) else None
    return shapes[given.index] if isinstance(given, Slot) and given.index < len(shapes) else None


def _count_weightless_product(
    kind: str, node: fx.Node, out: TensorShape | None, shapes: Sequence[TensorShape | None]
) -> int | None:
    """A product of any two tensors: every value of the output is a sum over what both share."""
    known = [shape for shape in shapes if shape is not None]
    if out is None or not known or len(known) != len(shapes):
        return None
    if kind == "einsum":
        return _count_einsum(str(node.args[0]), known)
    if kind == "bilinear":
        return prod(out) * known[0][-1] * known[min(1, len(known) - 1)][-1]
    if kind == "tensordot":
        return isqrt(prod(known[0]) * prod(known[-1]) * prod(out))
    if kind == "grouped_linear" and len(out) > len(known[0]):  # each group has its share of the sum
        return prod(out[1:]) * known[0][-1]
    first = known[-2] if kind in PRODUCTS_WITH_ADDEND and len(known) > 1 else known[0]  # before it stands what is added
    return prod(out) * first[-1] * (first[0] if kind == "addbmm" else 1)


def _count_einsum(equation: str, shapes: Sequence[TensorShape]) -> int:
    """All letters together, where more than one tensor is multiplied; what an ellipsis stands for counts once."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    extents: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        before, dots, after = term.partition("...")
        named = [*zip(before, shape, strict=False), *zip(reversed(after), reversed(shape), strict=False)]
        free = len(shape) - len(before) - len(after)
        extents |= dict(named) | ({dots: prod(shape[len(before) : len(before) + free])} if dots else {})
    return prod(extents.values()) if len(terms) > 1 else 0


def _get_output_sizes(part: nn.Module, source: TensorShape, kernel: TensorShape) -> list[int]:
    """The spatial extents that a convolution gives; a fused pool may follow, so the group's own do not tell."""
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


def count_output_positions(part: nn.Module | None, source: TensorShape, weight: TensorShape) -> int:
    """How many positions a convolution has in its output, all pictures of the batch together."""
    return 0 if part is None else source[0] * prod(_get_output_sizes(part, source, weight[2:]))


def _count_attention(part: nn.Module | None, shapes: Sequence[TensorShape | None]) -> int | None:
    """q k^T and p v. Where it is written out the key comes transposed, and the value is the last operand."""
    known = [shape for shape in shapes if shape is not None and len(shape) > 1]
    if len(known) < 2:
        return None
    query, key = known[0], known[1]
    is_spelled_out = isinstance(part, Operation) and part.kind == "matmul"
    length = key[-1] if is_spelled_out else key[-2]
    value = known[-1] if is_spelled_out else known[2] if len(known) > 2 else key
    return prod(query) * length + prod(query[:-1]) * length * value[-1]


def _count_recurrent(part: nn.Module | None, operands: Sequence[fx.Node]) -> int | None:
    source = get_shape(operands[0]) if operands else None
    if source is None or part is None:
        return None
    return prod(source[:-1]) * sum(weight.numel() for weight in get_tensors(part) if weight.ndim == 2)


def get_example_share(model: fx.GraphModule) -> float:
    """The share of the recorded work that the example stands for: an example of one is captured as two."""
    return 0.5 if get_origin(model).is_widened else 1.0
