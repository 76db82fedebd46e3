"""Rules on shapes for which TensorRT has no fast kernel: there Q/DQ only costs."""

from collections.abc import Iterator

from scalepoint.checking.graph import Node, Shape
from scalepoint.checking.qdq import PRODUCTS, View, last
from scalepoint.checking.rule import Fault

_SMALL = 16
_FP8_KERNEL = 32


def small_products(view: View) -> Iterator[Fault]:
    """R16: no Q/DQ on a product with M or N = 1 (constant weight: only if the output is 2-D), K < 16 or N < 16."""
    for node in view.nodes(*PRODUCTS):
        if not view.is_quantized(node):
            continue
        m, k, n = _sizes(view, node)
        rank = len(view.graph.shape(node.output) or ())
        counts = rank == 2 or view.weight(node) is None
        if counts and 1 in (m, n):
            yield Fault(node, node.output, f"a {node.op} with {m if m else '?'} x {n if n else '?'} results is a GEMV")
        elif any(size is not None and size < _SMALL for size in (k, n)):
            yield Fault(node, node.output, f"a {node.op} with K = {k} and N = {n} has no tensor core kernel")


def _sizes(view: View, node: Node) -> tuple[int | None, int | None, int | None]:
    """M, K, N; None where a size is not known."""
    left, right = (last(view.graph.shape(node.input(place)), 2) for place in (0, 1))
    if node.op == "Gemm":
        left = left[::-1] if node.integer("transA") else left
        right = right[::-1] if node.integer("transB") else right
    return left[0], left[1] if left[1] is not None else right[0], right[1]


def small_convolutions(view: View) -> Iterator[Fault]:
    """R17: the convolutions with few channels, odd kernels or groups that have no int8 or fp8 kernel stay float."""
    for node in view.nodes("Conv"):
        source = view.data_dequantizer(node)
        if source is None:
            continue
        weight = node.input(1)
        shape = view.graph.shape(weight)
        if not view.graph.is_constant(weight):
            yield Fault(node, weight, "the weight of a quantized Conv is not constant")
        elif shape is not None and len(shape) > 2:
            groups = node.integer("group", 1)
            if not (_fits_fp8(shape, groups) if view.is_fp8(source) else _fits_int8(view, node, shape, groups)):
                kernel = "x".join(map(str, shape[2:]))
                seen = f"a {kernel} Conv of {shape[1]} to {shape[0]} channels in {groups} groups has no fast kernel"
                yield Fault(node, weight, seen)


def _fits_int8(view: View, node: Node, shape: Shape, groups: int) -> bool:
    out, per_group, *kernel = (size or 0 for size in shape)
    if min(out, per_group) >= _SMALL:
        return True
    if groups > 1:
        return out % 8 == 0 and min(kernel) >= 3
    is_first = view.graph.source(view.origin(node.input(0))[0]) in view.graph.inputs
    wide = is_first or max(out, per_group) >= _SMALL
    return (out % 8 == 0 or per_group % 8 == 0) and wide and len(set(kernel)) == 1


def _fits_fp8(shape: Shape, groups: int) -> bool:
    out, per_group, *kernel = (size or 0 for size in shape)
    count = 1
    for size in kernel:
        count *= size
    return groups == 1 and min(out, per_group) > _SMALL and count <= _FP8_KERNEL
