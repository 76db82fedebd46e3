"""Rules on attention: two products around a Softmax, which TensorRT fuses as a whole or not at all."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalepoint.checking.graph import COPIES, Node
from scalepoint.checking.qdq import FP8, View, last
from scalepoint.checking.rule import Fault

_LONGEST_INT8 = 512
_SOFTMAX_FP8_SCALE = 1 / 448
_STEPS = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Cast", "Max", "Min"}) | COPIES
_DEEPEST = 8


@dataclass(frozen=True)
class Attention:
    """The first product, what stands between it and the Softmax (last first), the Softmax, the second product."""

    scores: Node
    between: tuple[Node, ...]
    softmax: Node
    result: Node


def attentions(view: View) -> Iterator[Attention]:
    for softmax in view.nodes("Softmax"):
        path = _back(view, softmax.input(0), ())
        result = _forward(view, softmax.output)
        if path and result is not None:
            yield Attention(path[-1], path[:-1], softmax, result)


def _back(view: View, tensor: str, path: tuple[Node, ...]) -> tuple[Node, ...]:
    """The way back to a product of two activations; empty if there is none near."""
    node = view.graph.producer(view.origin(tensor)[0])
    if node is None or len(path) > _DEEPEST:
        return ()
    if node.op == "MatMul":
        return (*path, node) if view.weight(node) is None else ()
    operands = node.inputs if node.op in _STEPS - COPIES else node.inputs[:1]
    if node.op not in _STEPS:
        return ()
    ways = (_back(view, operand, (*path, node)) for operand in operands if not view.graph.is_constant(operand))
    return next(filter(None, ways), ())


def _forward(view: View, tensor: str) -> Node | None:
    for _ in range(_DEEPEST):
        steps = [step for step in view.steps(tensor) if step.use.node.op != "IsNaN"]  # torch guards against NaN
        if len(steps) != 1 or tensor in view.graph.outputs:
            return None
        step = steps[0]
        node = step.use.node
        if node.op == "MatMul":
            return node if step.use.place == 0 else None
        if node.op not in COPIES | {"Cast", "Dropout", "Where"}:
            return None
        tensor = node.output
    return None


def _kinds(view: View, *nodes: Node) -> set[int]:
    sources = (view.dequantizer(tensor) for node in nodes for tensor in node.inputs[:2])
    return {view.kind(source) for source in sources if source is not None}


def int8_attention(view: View) -> Iterator[Fault]:
    """R18: int8 products only up to 512 tokens and without a mask Add before the Softmax; never Q/DQ on that Add."""
    for attention in attentions(view):
        for node in attention.between:
            tensor = next((name for name in node.inputs if view.dequantizer(name)), None)
            if node.op == "Add" and tensor is not None:
                yield Fault(node, tensor, "the mask Add before a Softmax has Q/DQ")
        kinds = _kinds(view, attention.scores, attention.result)
        if kinds and FP8 not in kinds:
            yield from _no_int8_kernel(view, attention)


def _no_int8_kernel(view: View, attention: Attention) -> Iterator[Fault]:
    node = attention.scores
    tokens = [size for size in last(view.graph.shape(node.output), 2) if size is not None]
    if max(tokens, default=0) > _LONGEST_INT8:
        yield Fault(node, node.output, f"int8 attention over {max(tokens)} tokens")
    for step in attention.between:
        if step.op == "Add" and not any(map(view.graph.is_constant, step.inputs)):
            yield Fault(node, step.output, f"int8 attention with a mask that is computed ({step.name!r})")


def fp8_attention(view: View) -> Iterator[Fault]:
    """R19: fp8 on q, k, v, the softmax (scale 1/448) and the result, or nowhere; 8 < head <= 256; scaling before Q."""
    for attention in attentions(view):
        if FP8 in _kinds(view, attention.scores, attention.result):
            node, tensor, seen = next(_incomplete(view, attention), (attention.scores, "", ""))
            if seen:
                yield Fault(node, tensor, seen)


def _incomplete(view: View, attention: Attention) -> Iterator[tuple[Node, str, str]]:
    first, second = attention.scores, attention.result
    for node in (first, second):
        for tensor in node.inputs:
            if not view.is_fp8(view.dequantizer(tensor)):
                yield node, tensor, "fp8 attention has an operand without fp8 Q/DQ"
    for tensor in first.inputs:
        maker = view.graph.producer(tensor)
        if maker is not None and maker.op == "Transpose":
            yield maker, tensor, "the Transpose of fp8 attention stands behind the Q/DQ"
    source = view.dequantizer(second.input(0))
    scale = None if source is None else view.scale(source)
    if scale is not None and not np.allclose(scale, _SOFTMAX_FP8_SCALE, rtol=1e-3):
        yield second, second.input(0), f"the softmax of fp8 attention has the scale {float(scale.ravel()[0]):.4g}"
    if not view.quantizers(second.output):
        yield second, second.output, "the result of fp8 attention is not quantized"
    head = last(view.graph.shape(first.input(0)), 1)[0]
    if head is not None and not 8 < head <= 256:
        yield first, first.input(0), f"fp8 attention with heads of {head}"
    odd = next((node for node in attention.between if node.op not in ("Mul", "Div", "Add")), None)
    if odd is not None:
        yield odd, odd.output, f"{odd.op} stands between the scores and the Softmax of fp8 attention"
