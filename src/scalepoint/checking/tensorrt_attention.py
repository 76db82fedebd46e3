"""Rules on attention: R18 (int8) and R19 (fp8).

scores = q k'  ->  scaling, mask  ->  softmax  ->  result = softmax v         `find_attentions` finds these nodes
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from onnx_ir import Node

from scalepoint.checking.qdq_graph import COPIES, FP8, QdqView, Tensor, get_operand, get_result, last_sizes
from scalepoint.checking.rule import Fault

_MAX_INT8_TOKENS = 512
_SOFTMAX_FP8_SCALE = 1 / 448
_SCORE_OPERATIONS = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Cast", "Max", "Min"}) | COPIES
_MAX_DEPTH = 8  # operations between a product and the softmax


@dataclass(frozen=True)
class AttentionNodes:
    """The nodes of one attention.

    Attributes:
        scores: The product of queries and keys.
        between: The operations between scores and softmax, the last one first.
        result: The product of the softmax and the values.
    """

    scores: Node
    between: tuple[Node, ...]
    result: Node


def check_int8_attention(view: QdqView) -> Iterator[Fault]:
    """R18: int8 products only up to 512 tokens and without a mask Add before the Softmax; never Q/DQ on that Add."""
    for attention in find_attentions(view):
        for node in attention.between:
            tensor = next((operand for operand in node.inputs if view.dequantizer(operand)), None)
            if node.op_type == "Add" and tensor is not None:
                yield Fault(node, tensor, "the mask Add before a Softmax has Q/DQ")
        dtypes = _quantized_dtypes(view, attention.scores, attention.result)
        if dtypes and FP8 not in dtypes:
            yield from _check_int8_kernel(view, attention)


def _check_int8_kernel(view: QdqView, attention: AttentionNodes) -> Iterator[Fault]:
    node = attention.scores
    tokens = [size for size in last_sizes(view.shape(get_result(node)), 2) if size is not None]
    if max(tokens, default=0) > _MAX_INT8_TOKENS:
        yield Fault(node, get_result(node), f"int8 attention over {max(tokens)} tokens")
    for mask in attention.between:
        if mask.op_type == "Add" and not any(map(view.is_constant, mask.inputs)):
            yield Fault(node, get_result(mask), f"int8 attention with a mask that is computed ({view.label(mask)!r})")


def check_fp8_attention(view: QdqView) -> Iterator[Fault]:
    """R19: fp8 on q, k, v, the softmax (scale 1/448) and the result, or nowhere; 8 < head <= 256; scaling before Q."""
    for attention in find_attentions(view):
        if FP8 in _quantized_dtypes(view, attention.scores, attention.result):
            yield from islice(_find_fp8_faults(view, attention), 1)  # any fault prevents the fusion


def _find_fp8_faults(view: QdqView, attention: AttentionNodes) -> Iterator[Fault]:
    scores, result = attention.scores, attention.result
    for node in (scores, result):
        for tensor in node.inputs:
            if not view.is_fp8(view.dequantizer(tensor)):
                yield Fault(node, tensor, "fp8 attention has an operand without fp8 Q/DQ")
    for tensor in scores.inputs:
        producer = view.producer(tensor)
        if producer is not None and producer.op_type == "Transpose":
            yield Fault(producer, tensor, "the Transpose of fp8 attention is after the Q/DQ")
    source = view.dequantizer(get_operand(result, 0))
    scale = None if source is None else view.scale(source)
    if scale is not None and not np.allclose(scale, _SOFTMAX_FP8_SCALE, rtol=1e-3):
        description = f"the softmax of fp8 attention has the scale {float(scale.ravel()[0]):.4g}"
        yield Fault(result, get_operand(result, 0), description)
    if not view.quantizers(get_result(result)):
        yield Fault(result, get_result(result), "the result of fp8 attention is not quantized")
    head_size = last_sizes(view.shape(get_operand(scores, 0)), 1)[0]
    if head_size is not None and not 8 < head_size <= 256:
        yield Fault(scores, get_operand(scores, 0), f"fp8 attention with heads of {head_size} channels")
    unsupported = next((node for node in attention.between if node.op_type not in ("Mul", "Div", "Add")), None)
    if unsupported is not None:
        description = f"{unsupported.op_type} is between the scores and the Softmax of fp8 attention"
        yield Fault(unsupported, get_result(unsupported), description)


def _quantized_dtypes(view: QdqView, *nodes: Node) -> set[int]:
    sources = (view.dequantizer(tensor) for node in nodes for tensor in node.inputs[:2])
    return {view.quantized_dtype(source) for source in sources if source is not None}


def find_attentions(view: QdqView) -> Iterator[AttentionNodes]:
    for softmax in view.nodes("Softmax"):
        path = _path_to_scores(view, get_operand(softmax, 0), ())
        result = _find_result_product(view, get_result(softmax))
        if path and result is not None:
            yield AttentionNodes(path[-1], path[:-1], result)


def _path_to_scores(view: QdqView, tensor: Tensor, path: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes from a tensor back to a product of two activations, or () if there is none nearby."""
    node = view.producer(view.before_pairs(tensor).tensor)
    if node is None or len(path) > _MAX_DEPTH:
        return ()
    if node.op_type == "MatMul":
        return (*path, node) if view.weight_index(node) is None else ()
    if node.op_type not in _SCORE_OPERATIONS:
        return ()
    operands = node.inputs[:1] if node.op_type in COPIES else node.inputs  # further operands of copies are shapes
    paths = (_path_to_scores(view, source, (*path, node)) for source in operands if not view.is_constant(source))
    return next(filter(None, paths), ())


def _find_result_product(view: QdqView, tensor: Tensor) -> Node | None:
    """Return the product that reads the softmax `tensor` as its first operand, or None."""
    for _ in range(_MAX_DEPTH):
        # torch's guard against rows of NaN reads the softmax too.
        steps = [step for step in view.reader_steps(tensor) if step.use.node.op_type != "IsNaN"]
        if len(steps) != 1 or tensor in view.outputs:
            return None
        use = steps[0].use
        if use.node.op_type == "MatMul":
            return use.node if use.operand_index == 0 else None
        if use.node.op_type not in COPIES | {"Cast", "Dropout", "Where"}:
            return None
        tensor = get_result(use.node)
    return None
