"""Counts multiply-accumulates (MACs) of operations, from the shapes that capture recorded."""

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any

from torch import fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.kinds import OPAQUE, PRODUCTS_WITH_ADDEND, RECURRENT, WEIGHTLESS_PRODUCTS
from scalepoint.graph.nodes import get_fake_tensor, get_info
from scalepoint.graph.operations import Slot, get_tensors
from scalepoint.graph.origin import get_origin
from scalepoint.quantize.operations import WEIGHT_PRODUCTS, get_weight_shape

TensorShape = tuple[int, ...]


def get_shape(node: fx.Node) -> TensorShape | None:
    """Return the shape of a tensor for the example inputs. A size that depends on values is that of a dry run."""
    value = get_fake_tensor(node)
    if value is not None:
        sizes = tuple(map(_to_int, value.shape))
        known = tuple(size for size in sizes if size is not None)
        if len(known) == len(sizes):
            return known
    return get_info(node).sizes


def _to_int(size: Any) -> int | None:
    """Return a size as a number. A symbolic one has the size of the example as its hint."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return None if hint is None else int(hint)


def count_macs(kind: str, part: nn.Module | None, node: fx.Node, operands: Sequence[fx.Node]) -> int | None:
    """Count the MACs of an operation for the example inputs; None if shapes are unknown.

    The weight may be stored in `part` or computed by the graph.
    """
    shapes = [get_shape(operand) for operand in operands]
    if kind in WEIGHT_PRODUCTS and part is not None:
        return _count_weighted(kind, part, shapes)
    if kind == "grouped_linear" or kind in WEIGHTLESS_PRODUCTS:
        return _count_weightless_product(kind, node, get_shape(node), shapes)
    if kind == "attention":
        return _count_attention(part, shapes)
    if kind in RECURRENT:
        return _count_recurrent(part, operands)
    return (get_info(node).macs or 0) if kind == OPAQUE else 0


def _count_weighted(kind: str, part: nn.Module, shapes: Sequence[TensorShape | None]) -> int | None:
    input_shape = shapes[0] if shapes else None
    weight = get_weight_shape(part) or _get_computed_weight_shape(part, shapes)
    if input_shape is None or weight is None:
        return None
    if kind == "linear":
        return prod(input_shape[:-1]) * prod(weight)
    if kind == "conv_transpose":
        return prod(input_shape) * prod(weight[1:])
    if kind == "head":
        return input_shape[0] * prod(weight)
    batch = input_shape[0] if len(input_shape) == len(weight) else 1
    return prod(_compute_output_sizes(part, input_shape, weight[2:])) * batch * prod(weight)


def _get_computed_weight_shape(part: nn.Module, shapes: Sequence[TensorShape | None]) -> TensorShape | None:
    """Return the shape of a weight that is an input of the operation."""
    slot = part.arguments.get("weight") if isinstance(part, Operation) else None
    return shapes[slot.index] if isinstance(slot, Slot) and slot.index < len(shapes) else None


def _count_weightless_product(
    kind: str, node: fx.Node, output_shape: TensorShape | None, shapes: Sequence[TensorShape | None]
) -> int | None:
    """Count a product of two tensors: each value of the output is a sum over the axis that both have."""
    known = [shape for shape in shapes if shape is not None]
    if output_shape is None or not known or len(known) != len(shapes):
        return None
    if kind == "einsum":
        return _count_einsum(str(node.args[0]), known)
    if kind == "bilinear":
        return prod(output_shape) * known[0][-1] * known[min(1, len(known) - 1)][-1]
    if kind == "tensordot":
        # kept_a * summed, kept_b * summed and kept_a * kept_b: the root of their product is kept_a * kept_b * summed
        return isqrt(prod(known[0]) * prod(known[-1]) * prod(output_shape))
    if kind == "grouped_linear" and len(output_shape) > len(known[0]):  # each group sums over its part of the tokens
        return prod(output_shape[1:]) * known[0][-1]
    has_addend = kind in PRODUCTS_WITH_ADDEND and len(known) > 1  # addmm(addend, first, second)
    first = known[-2] if has_addend else known[0]
    return prod(output_shape) * first[-1] * (first[0] if kind == "addbmm" else 1)


def _count_einsum(equation: str, shapes: Sequence[TensorShape]) -> int:
    """Multiply the sizes of all letters and of the ellipsis; an einsum of one tensor multiplies nothing."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[str, int] = {}  # letter, or "..." -> size
    for term, shape in zip(terms, shapes, strict=False):
        before, ellipsis, after = term.partition("...")
        sizes |= dict(zip(before, shape, strict=False))
        sizes |= dict(zip(reversed(after), reversed(shape), strict=False))
        if ellipsis:
            sizes[ellipsis] = prod(shape[len(before) : len(shape) - len(after)])
    return prod(sizes.values())


def _compute_output_sizes(part: nn.Module, input_shape: TensorShape, kernel: TensorShape) -> list[int]:
    """Compute the spatial output sizes of a convolution.

    The recorded shape of the group cannot be used: a fused pool may follow the convolution.
    """
    dims = len(kernel)
    spatial = input_shape[-dims:]

    def get_setting(name: str, default: int) -> list[Any]:
        value = part.arguments.get(name, default) if isinstance(part, Operation) else getattr(part, name, default)
        values = [value] * dims if isinstance(value, int | str) else list(value)
        return values * dims if len(values) == 1 else values

    stride, padding, dilation = get_setting("stride", 1), get_setting("padding", 0), get_setting("dilation", 1)
    if padding[0] == "same":
        return list(spatial)
    paddings = [0 if padding[0] == "valid" else int(value) for value in padding]
    sizes = []
    for size, pad, step, taps, move in zip(spatial, paddings, dilation, kernel, stride, strict=True):
        window = step * (taps - 1) + 1
        sizes.append((size + 2 * pad - window) // move + 1)
    return sizes


def count_output_positions(part: nn.Module | None, input_shape: TensorShape, weight: TensorShape) -> int:
    """Count the output positions of a convolution over all images of the batch."""
    return 0 if part is None else input_shape[0] * prod(_compute_output_sizes(part, input_shape, weight[2:]))


def _count_attention(part: nn.Module | None, shapes: Sequence[TensorShape | None]) -> int | None:
    """Count q k^T and p v. Attention of separate matmuls has the key transposed, and the value as the last operand."""
    known = [shape for shape in shapes if shape is not None and len(shape) > 1]
    if len(known) < 2:
        return None
    query, key = known[0], known[1]
    if isinstance(part, Operation) and part.kind == "matmul":
        length, value = key[-1], known[-1]
    else:
        length, value = key[-2], known[2] if len(known) > 2 else key
    return prod(query) * length + prod(query[:-1]) * length * value[-1]


def _count_recurrent(part: nn.Module | None, operands: Sequence[fx.Node]) -> int | None:
    input_shape = get_shape(operands[0]) if operands else None
    if input_shape is None or part is None:
        return None
    return prod(input_shape[:-1]) * sum(weight.numel() for weight in get_tensors(part) if weight.ndim == 2)


def get_example_share(model: fx.GraphModule) -> float:
    """Return the share of the recorded work that the example causes: capture runs a batch of one as a batch of two."""
    return 0.5 if get_origin(model).is_widened else 1.0
