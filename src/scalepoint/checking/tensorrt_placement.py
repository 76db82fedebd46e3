"""Rules on where Q/DQ pairs stand: on operands, around groups that TensorRT fuses, in attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from onnx_ir import Node

from scalepoint.checking.qdq_graph import (
    ACTIVATIONS,
    CONVOLUTIONS,
    COPIES,
    DEQUANTIZE,
    FP8,
    INT4,
    MOVES,
    QUANTIZE,
    WEIGHTED,
    OperandUse,
    QdqView,
    Tensor,
    get_integer,
    get_operand,
    get_result,
    last_sizes,
)
from scalepoint.checking.rule import Fault, Severity

_INT8_BOTH_WAYS = ("Add", "Mul", "AveragePool", "GlobalAveragePool")
_POINTWISE = ACTIVATIONS | frozenset(
    ["Add", "Sub", "Mul", "Div", "Min", "Max", "Sigmoid", "Tanh", "BatchNormalization"]
)
_LOGIC = frozenset({"Shape", "Size", "Where", "NonZero", "TopK", "ArgMax", "ArgMin", "Not", "And", "Or", "Xor"})
_COMPARE = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_ONE_OPERAND = frozenset({"BatchNormalization", "Resize", "Upsample"})
_MIN_CHANNELS = 8


def both_operands(view: QdqView) -> Iterator[Fault]:
    """R09: a weighted operation has Q/DQ on data and weight, or on neither; int4 is weight-only by design."""
    for node in view.nodes(*WEIGHTED):
        sources = [_dequantizer_past_cast(view, tensor) for tensor in node.inputs[:2]]
        if len(sources) != 2 or (sources[0] is None) == (sources[1] is None):
            continue
        there = 0 if sources[0] is not None else 1
        source, other = sources[there], node.inputs[1 - there]
        if source is None or view.kind(source) == INT4 or _is_probability(view, other):
            continue
        roles = ["data", "weight"] if view.weight(node) == 1 else ["first operand", "second operand"]
        yield Fault(node, other, f"{node.op_type} has Q/DQ on its {roles[there]} but not on its {roles[1 - there]}")


def _dequantizer_past_cast(view: QdqView, tensor: Tensor) -> Node | None:
    """Rule R08 speaks of the Cast itself, and block formats have one by design."""
    maker = view.producer(view.source(tensor, MOVES))
    return view.dequantizer(get_operand(maker, 0) if maker is not None and maker.op_type == "Cast" else tensor)


def _is_probability(view: QdqView, tensor: Tensor) -> bool:
    """Fused attention takes the scale of the softmax as an option; rule R19 asks for it where it is needed."""
    maker = view.producer(view.source(tensor, COPIES | {"Cast", "Dropout"}))
    if maker is not None and maker.op_type == "Where":  # torch guards against rows of NaN: where(isnan(p), 0, p)
        maker = view.producer(get_operand(maker, 2))
    return maker is not None and maker.op_type == "Softmax"


def int8_in_and_out(view: QdqView) -> Iterator[Fault]:
    """R13: Add, Mul, average pools with a dequantized input have a quantized output; Resize behind Conv wants int8."""
    for node in view.nodes(*_INT8_BOTH_WAYS, "Resize", "Upsample"):
        if node.op_type in _INT8_BOTH_WAYS:
            tensor = next((name for name in node.inputs if _arrives_quantized(view, name)), None)
            if tensor is not None and not view.quantizers(get_result(node), _POINTWISE | {"Concat"}):
                yield Fault(node, tensor, f"{node.op_type} has a quantized input and a float output")
        elif view.dequantizer(get_operand(node, 0)) is None:
            kernel = _kernel_behind(view, get_operand(node, 0))
            if kernel is not None and view.is_quantized(kernel):
                seen = f"{node.op_type} reads float from the int8 {kernel.op_type} before it"
                why, way_out = "with Q/DQ there both run in int8", f"Put Q/DQ on the input of {node.op_type}."
                yield Fault(node, get_operand(node, 0), seen, Severity.ADVICE, why, way_out)


def _arrives_quantized(view: QdqView, tensor: Tensor) -> bool:
    return view.dequantizer(tensor) is not None and not view.is_constant(tensor)


def _kernel_behind(view: QdqView, tensor: Tensor) -> Node | None:
    """The convolution that makes a tensor, its activation fused in."""
    return view.convolution(view.source(tensor, ACTIVATIONS), alone=False)


def concat_scales(view: QdqView) -> Iterator[Fault]:
    """R14: a Concat with a quantized output: its quantized inputs, also of Concats before it, have that scale."""
    for node in view.nodes("Concat"):
        targets = view.quantizers(get_result(node))
        if not targets:
            continue
        for tensor, source in _iterate_concat_inputs(view, node):
            if not view.same_scale(source, targets[0]):
                seen = f"Concat joins scales of {view.label(source)!r} and {view.label(targets[0])!r} that differ"
                yield Fault(node, tensor, seen)
                break


def _iterate_concat_inputs(view: QdqView, node: Node) -> Iterator[tuple[Tensor, Node]]:
    pending, seen = list(node.inputs)[::-1], set(node.inputs)
    while pending:
        tensor = pending.pop()
        source = view.dequantizer(tensor)
        maker = view.producer(view.source(tensor, MOVES))
        if source is not None:
            yield tensor, source
        elif maker is not None and maker.op_type == "Concat":
            pending += [name for name in maker.inputs[::-1] if name not in seen]
            seen.update(maker.inputs)


def equal_scales(view: QdqView) -> Iterator[Fault]:
    """R15: all Q on one tensor have one scale; no DQ -> Q back to back with another scale."""
    for tensor, nodes in _group_quantizers(view).items():
        other = next((node for node in nodes[1:] if not _have_same_scale(view, nodes[0], node)), None)
        if other is not None:
            yield Fault(
                other, tensor, f"one tensor is quantized twice, with the scales of {view.label(nodes[0])!r} and this"
            )
    for node in view.nodes(*QUANTIZE):
        source = view.dequantizer(get_operand(node, 0))
        if (
            source is not None
            and not view.is_constant(get_operand(node, 0))
            and not _have_same_scale(view, source, node)
        ):
            if _is_behind_concat(view, node):
                continue  # rule R14 speaks of those
            yield Fault(
                node,
                get_operand(node, 0),
                f"what {view.label(source)!r} dequantized is quantized again with another scale",
            )


def _group_quantizers(view: QdqView) -> dict[Tensor, list[Node]]:
    found: dict[Tensor, list[Node]] = {}
    for node in view.nodes(*QUANTIZE):
        found.setdefault(get_operand(node, 0), []).append(node)
    return found


def _have_same_scale(view: QdqView, left: Node, right: Node) -> bool:
    return view.same_scale(left, right) and view.kind(left) == view.kind(right)


def _is_behind_concat(view: QdqView, node: Node) -> bool:
    maker = view.producer(view.source(get_operand(node, 0), MOVES))
    return maker is not None and maker.op_type == "Concat"


def needless_pairs(view: QdqView) -> Iterator[Fault]:
    """R25: no Q/DQ on compare, where, reduce and shape operands, parameters of BN and Resize, tiny tensors, outputs."""
    for node in view.nodes(*DEQUANTIZE):
        uses = view.readers(get_result(node))
        if uses and all(use.node.op_type in DEQUANTIZE and use.place == 1 for use in uses):
            continue  # the scales of a block format
        seen = _why_needless(view, node, uses)
        if seen:
            yield Fault(node, get_result(node), seen)


def _why_needless(view: QdqView, node: Node, uses: list[OperandUse]) -> str | None:
    size = view.size(get_operand(node, 0))
    reader = next((use.node for use in uses if _is_control(use.node) and not _is_pool(view, use.node)), None)
    parameter = next((use.node for use in uses if use.node.op_type in _ONE_OPERAND and use.place > 0), None)
    if reader is not None:
        return f"an operand of {reader.op_type} is quantized"
    if parameter is not None:
        return f"a parameter of {parameter.op_type} is quantized"
    if size is not None and size < _MIN_CHANNELS:
        return f"a tensor of {size} values is quantized"
    if get_result(node) in view.outputs and not view.is_constant(get_operand(node, 0)):
        return "an output of the model is quantized and dequantized again"
    return None


def _is_pool(view: QdqView, node: Node) -> bool:
    """A mean with a quantized result: torch writes a global average pool so, and the pool runs in int8."""
    return node.op_type == "ReduceMean" and bool(view.quantizers(get_result(node)))


def _is_control(node: Node) -> bool:
    return node.op_type in _LOGIC | _COMPARE or node.op_type.startswith("Reduce")


_NORMS = frozenset(["LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"])
_FLOAT_ONLY = _NORMS | {"Softmax", "LogSoftmax"}


def epilogues(view: QdqView) -> Iterator[Fault]:
    """R10: no Q/DQ between a weighted operation and its batch norm, bias Add or activation."""
    for node in view.nodes(*WEIGHTED):
        for step in view.epilogue(node):
            if step.crossed is not None and step.use.node.op_type != "MaxPool":
                between = f"Q/DQ stands between {node.op_type} and the {step.use.node.op_type} behind it"
                yield Fault(step.crossed, get_operand(step.crossed, 0), between)


def pools_and_pads(view: QdqView) -> Iterator[Fault]:
    """R11: no Q/DQ between Conv(-BN)-Relu and the MaxPool it feeds, nor between Pad and the Conv it folds into."""
    for node in view.graph:
        if node.op_type in CONVOLUTIONS:
            for step in view.epilogue(node):
                if step.crossed is not None and step.use.node.op_type == "MaxPool":
                    yield Fault(
                        step.crossed,
                        get_operand(step.crossed, 0),
                        f"Q/DQ stands between {node.op_type} and the MaxPool behind it",
                    )
        elif node.op_type == "Pad" and _pads_with_constant(node):
            steps = view.steps(get_result(node))
            crossed = next((step.crossed for step in steps if step.use.node.op_type == "Conv" and step.crossed), None)
            if crossed is not None:
                seen = "Q/DQ stands between Pad and Conv"
                yield Fault(crossed, get_operand(crossed, 0), seen, way_out="Quantize the input of Pad instead.")


def _pads_with_constant(node: Node) -> bool:
    mode = node.attributes.get("mode")
    return mode is None or mode.value == "constant"


def residuals(view: QdqView) -> Iterator[Fault]:
    """R12: an Add behind an int8 convolution has Q/DQ on its skip input only; of two, the shorter side is the skip."""
    for node in view.nodes("Add"):
        if len(node.inputs) != 2 or any(map(view.is_constant, node.inputs)):
            continue
        kernels = [_int8_convolution(view, tensor) for tensor in node.inputs]
        if kernels[0] is not None and kernels[1] is not None:
            yield from _two_convolutions(view, node)
        elif kernels[0] is not None:
            yield from _one_convolution(view, node, node.inputs[0], node.inputs[1], kernels[0])
        elif kernels[1] is not None:
            yield from _one_convolution(view, node, node.inputs[1], node.inputs[0], kernels[1])


def _int8_convolution(view: QdqView, tensor: Tensor) -> Node | None:
    origin, _ = view.origin(tensor)
    node = view.convolution(origin)
    return node if node is not None and view.is_quantized(node) else None


def _one_convolution(view: QdqView, node: Node, side: Tensor, skip: Tensor, kernel: Node) -> Iterator[Fault]:
    if view.origin(side)[1] is not None:
        yield Fault(node, side, "the convolution's side of a residual Add has Q/DQ")
    elif view.dequantizer(skip) is None and not _starts_at_convolution(view, skip, kernel):
        yield Fault(node, skip, "the skip input of a residual Add is not quantized")


def _starts_at_convolution(view: QdqView, skip: Tensor, kernel: Node) -> bool:
    """The skip is the output of a convolution that the other side begins with (ConvNeXt): no residual for TensorRT."""
    first = view.convolution(view.origin(skip)[0], alone=False)
    return first is not None and _comes_from(view, get_operand(kernel, 0), first)


def _two_convolutions(view: QdqView, node: Node) -> Iterator[Fault]:
    quantized = [view.origin(tensor)[1] is not None for tensor in node.inputs]
    lengths = _lengths(view, node)
    skip = 0 if lengths[0] <= lengths[1] else 1
    if all(quantized):
        yield Fault(node, node.inputs[1 - skip], "both inputs of a residual Add have Q/DQ")
    elif not any(quantized):
        yield Fault(node, node.inputs[skip], "neither input of a residual Add is quantized")
    elif lengths[0] != lengths[1] and not quantized[skip]:
        yield Fault(node, node.inputs[1 - skip], "the longer side of a residual Add has Q/DQ instead of the shorter")


def _lengths(view: QdqView, node: Node) -> tuple[int, int]:
    """How many operations lie between each input and the last tensor that both come from; equal if there is none."""
    sides: tuple[dict[Tensor, int], dict[Tensor, int]] = {node.inputs[0]: 0}, {node.inputs[1]: 0}
    pending = [_heap_entry(view, tensor) for tensor in dict.fromkeys(node.inputs)]
    heapify(pending)
    while pending:  # backward in graph order, so that all paths to a tensor were seen before it
        tensor = heappop(pending)[-1]
        if tensor in sides[0] and tensor in sides[1]:
            return sides[0][tensor], sides[1][tensor]
        for source, cost in _sources(view, tensor):
            if source not in sides[0] and source not in sides[1]:
                heappush(pending, _heap_entry(view, source))
            for side in sides:
                if tensor in side:
                    side[source] = min(side[tensor] + cost, side.get(source, side[tensor] + cost))
    return 0, 0


def _heap_entry(view: QdqView, tensor: Tensor) -> tuple[int, str, int, Tensor]:
    # id: onnx_ir values have no order, and a body may repeat the name of a tensor around it
    return -_position(view, tensor), (tensor.name if tensor else "") or "", id(tensor), tensor


def _position(view: QdqView, tensor: Tensor) -> int:
    maker = view.producer(tensor)
    return -1 if maker is None else view.position(maker)


def _sources(view: QdqView, tensor: Tensor) -> list[tuple[Tensor, int]]:
    """The operands that a tensor is computed from, each with the number of operations; Q/DQ counts as none."""
    maker = view.producer(tensor)
    cost = 0 if maker is not None and maker.op_type in QUANTIZE | DEQUANTIZE else 1
    operands = () if maker is None else maker.inputs
    return [(source, cost) for source in operands if source is not None and not view.is_constant(source)]


def _comes_from(view: QdqView, tensor: Tensor, origin: Node) -> bool:
    pending, seen = [tensor], {tensor}
    while pending:
        current = pending.pop()
        if current is get_result(origin):
            return True
        sources = [source for source, _ in _sources(view, current) if source not in seen]
        sources = [source for source in sources if _position(view, source) >= view.position(origin)]
        seen.update(sources)
        pending += sources
    return False


def float_islands(view: QdqView) -> Iterator[Fault]:
    """R20: no Q/DQ on or in layer norm, instance norm, softmax, erf-GELU; but Conv -> copies -> LayerNorm wants it."""
    for node in view.graph:
        if node.op_type in _FLOAT_ONLY:
            yield from _check_norm(view, node)
        elif node.op_type == "Sqrt":
            yield from _check_inside(view, _layer_norm_chain(view, node), "a layer norm")
        elif node.op_type == "Erf":
            yield from _check_inside(view, _gelu_chain(view, node), "an erf-GELU")


def _check_norm(view: QdqView, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(get_operand(node, 0))
    wants = node.op_type == "LayerNormalization" and _behind_convolution(view, node)
    if source is not None and not wants:
        yield Fault(source, get_operand(node, 0), f"the input of {node.op_type} is quantized")
    elif source is None and wants:
        seen = "an int8 convolution writes float for the LayerNormalization behind it"
        why, way_out = "with Q/DQ there it writes int8 and is faster", "Put Q/DQ on the input of this layer norm."
        yield Fault(node, get_operand(node, 0), seen, Severity.PERFORMANCE, why, way_out)
    for tensor in node.inputs[1:]:
        if view.dequantizer(tensor) is not None:
            yield Fault(node, tensor, f"a parameter of {node.op_type} is quantized")


def _behind_convolution(view: QdqView, node: Node) -> bool:
    """Over copies and Q/DQ in any order there is an int8 convolution, which nobody else reads."""
    tensor = view.origin(get_operand(node, 0))[0]
    while view.only_step(tensor) is not None:
        maker = view.producer(tensor)
        if maker is None or maker.op_type not in COPIES:
            break
        tensor = view.origin(get_operand(maker, 0))[0]
    kernel = view.convolution(tensor)
    return kernel is not None and view.is_quantized(kernel)


def _check_inside(view: QdqView, operands: list[OperandUse], what: str) -> Iterator[Fault]:
    for use in operands:
        tensor = get_operand(use.node, use.place)
        crossed = view.origin(tensor)[1]
        if crossed is not None:
            yield Fault(crossed, tensor, f"Q/DQ stands inside {what}, before its {use.node.op_type}")
            return


def _layer_norm_chain(view: QdqView, root: Node) -> list[OperandUse]:
    """The inner operands of (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), if that is what stands around Sqrt."""
    operands: list[OperandUse] = []

    def back(node: Node, place: int, *ops: str) -> Node | None:
        operands.append(OperandUse(node, place))
        maker = view.producer(view.origin(get_operand(node, place))[0])
        return maker if maker is not None and maker.op_type in ops else None

    added = back(root, 0, "Add")
    if added is None:
        return []
    place = 1 if view.is_constant(get_operand(added, 0)) else 0
    mean = back(added, place, "ReduceMean")
    power = mean and back(mean, 0, "Pow", "Mul")
    centred = power and back(power, 0, "Sub")
    if centred is None or back(centred, 1, "ReduceMean") is None:
        return []
    quotient = view.only_step(get_result(root))
    if quotient is not None and quotient.use.node.op_type == "Div":
        operands += [OperandUse(quotient.use.node, 0), OperandUse(quotient.use.node, 1)]
    return operands


def _gelu_chain(view: QdqView, erf: Node) -> list[OperandUse]:
    """The inner operands of x * (1 + erf(x / sqrt 2)) * 0.5, if that is what stands around Erf."""
    scaled = view.producer(view.origin(get_operand(erf, 0))[0])
    added = view.only_step(get_result(erf))
    if scaled is None or scaled.op_type not in ("Div", "Mul") or added is None or added.use.node.op_type != "Add":
        return []
    product = view.only_step(get_result(added.use.node))
    return [
        OperandUse(erf, 0),
        added.use,
        *([product.use] if product is not None and product.use.node.op_type == "Mul" else []),
    ]


def silu(view: QdqView) -> Iterator[Fault]:
    """R21: no Q/DQ between Conv and the Sigmoid and Mul of its SiLU; a depthwise conv does not absorb it anyway."""
    for node in view.nodes("Mul"):
        for gate, data in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
            gate_origin, gate_crossed = view.origin(gate)
            sigmoid = view.producer(gate_origin)
            if sigmoid is None or sigmoid.op_type != "Sigmoid":
                continue
            inner, inner_crossed = view.origin(get_operand(sigmoid, 0))
            outer, outer_crossed = view.origin(data)
            kernel = view.convolution(outer, alone=False)
            crossed = inner_crossed or outer_crossed or gate_crossed
            if inner == outer and kernel is not None and crossed and not _is_depthwise(view, kernel):
                yield Fault(
                    crossed,
                    get_result(crossed),
                    f"Q/DQ stands inside the SiLU of {kernel.op_type} {view.label(kernel)!r}",
                )
                break


def _is_depthwise(view: QdqView, node: Node) -> bool:
    shape = view.shape(get_operand(node, 1))
    return get_integer(node, "group", 1) > 1 and shape is not None and shape[1:2] == (1,)


def transposed_convolutions(view: QdqView) -> Iterator[Fault]:
    """R24: grouped int8 ConvTranspose has Cin >= 4 * groups (before 10.9); nothing between it and its batch norm."""
    for node in view.nodes("ConvTranspose"):
        if not view.is_quantized(node):
            continue
        shape, groups = view.shape(get_operand(node, 1)), get_integer(node, "group", 1)
        few = shape[0] if shape else None
        if view.version < (10, 9) and groups > 1 and few is not None and few < 4 * groups:
            yield Fault(node, get_operand(node, 1), f"{few} input channels in {groups} groups", Severity.ERROR)
        step = view.only_step(get_result(node))
        after = (
            view.only_step(get_result(step.use.node))
            if step and step.use.node.op_type != "BatchNormalization"
            else None
        )
        if step and after and after.use.node.op_type == "BatchNormalization" and after.use.place == 0:
            seen = f"{step.use.node.op_type} stands between ConvTranspose and its batch norm"
            yield Fault(step.use.node, get_result(step.use.node), seen)


_MAX_INT8_TOKENS = 512
_SOFTMAX_FP8_SCALE = 1 / 448
_STEPS = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Cast", "Max", "Min"}) | COPIES
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Attention:
    """The first product, what stands between it and the Softmax (last first), the Softmax, the second product."""

    scores: Node
    between: tuple[Node, ...]
    softmax: Node
    result: Node


def attentions(view: QdqView) -> Iterator[Attention]:
    for softmax in view.nodes("Softmax"):
        path = _path_to_scores(view, get_operand(softmax, 0), ())
        second = _find_result_product(view, get_result(softmax))
        if path and second is not None:
            yield Attention(path[-1], path[:-1], softmax, second)


def _path_to_scores(view: QdqView, tensor: Tensor, path: tuple[Node, ...]) -> tuple[Node, ...]:
    """The way back to a product of two activations; empty if there is none near."""
    node = view.producer(view.origin(tensor)[0])
    if node is None or len(path) > _MAX_DEPTH:
        return ()
    if node.op_type == "MatMul":
        return (*path, node) if view.weight(node) is None else ()
    operands = node.inputs if node.op_type in _STEPS - COPIES else node.inputs[:1]
    if node.op_type not in _STEPS:
        return ()
    paths = (_path_to_scores(view, source, (*path, node)) for source in operands if not view.is_constant(source))
    return next(filter(None, paths), ())


def _find_result_product(view: QdqView, tensor: Tensor) -> Node | None:
    for _ in range(_MAX_DEPTH):
        steps = [step for step in view.steps(tensor) if step.use.node.op_type != "IsNaN"]  # torch guards against NaN
        if len(steps) != 1 or tensor in view.outputs:
            return None
        step = steps[0]
        node = step.use.node
        if node.op_type == "MatMul":
            return node if step.use.place == 0 else None
        if node.op_type not in COPIES | {"Cast", "Dropout", "Where"}:
            return None
        tensor = get_result(node)
    return None


def _quantized_types(view: QdqView, *nodes: Node) -> set[int]:
    sources = (view.dequantizer(tensor) for node in nodes for tensor in node.inputs[:2])
    return {view.kind(source) for source in sources if source is not None}


def int8_attention(view: QdqView) -> Iterator[Fault]:
    """R18: int8 products only up to 512 tokens and without a mask Add before the Softmax; never Q/DQ on that Add."""
    for attention in attentions(view):
        for node in attention.between:
            tensor = next((name for name in node.inputs if view.dequantizer(name)), None)
            if node.op_type == "Add" and tensor is not None:
                yield Fault(node, tensor, "the mask Add before a Softmax has Q/DQ")
        kinds = _quantized_types(view, attention.scores, attention.result)
        if kinds and FP8 not in kinds:
            yield from _no_int8_kernel(view, attention)


def _no_int8_kernel(view: QdqView, attention: Attention) -> Iterator[Fault]:
    node = attention.scores
    tokens = [size for size in last_sizes(view.shape(get_result(node)), 2) if size is not None]
    if max(tokens, default=0) > _MAX_INT8_TOKENS:
        yield Fault(node, get_result(node), f"int8 attention over {max(tokens)} tokens")
    for step in attention.between:
        if step.op_type == "Add" and not any(map(view.is_constant, step.inputs)):
            yield Fault(node, get_result(step), f"int8 attention with a mask that is computed ({view.label(step)!r})")


def fp8_attention(view: QdqView) -> Iterator[Fault]:
    """R19: fp8 on q, k, v, the softmax (scale 1/448) and the result, or nowhere; 8 < head <= 256; scaling before Q."""
    for attention in attentions(view):
        if FP8 in _quantized_types(view, attention.scores, attention.result):
            node, tensor, seen = next(_find_missing_fp8(view, attention), (attention.scores, None, ""))
            if seen:
                yield Fault(node, tensor, seen)


def _find_missing_fp8(view: QdqView, attention: Attention) -> Iterator[tuple[Node, Tensor, str]]:
    first, second = attention.scores, attention.result
    for node in (first, second):
        for tensor in node.inputs:
            if not view.is_fp8(view.dequantizer(tensor)):
                yield node, tensor, "fp8 attention has an operand without fp8 Q/DQ"
    for tensor in first.inputs:
        maker = view.producer(tensor)
        if maker is not None and maker.op_type == "Transpose":
            yield maker, tensor, "the Transpose of fp8 attention stands behind the Q/DQ"
    source = view.dequantizer(get_operand(second, 0))
    scale = None if source is None else view.scale(source)
    if scale is not None and not np.allclose(scale, _SOFTMAX_FP8_SCALE, rtol=1e-3):
        yield (
            second,
            get_operand(second, 0),
            f"the softmax of fp8 attention has the scale {float(scale.ravel()[0]):.4g}",
        )
    if not view.quantizers(get_result(second)):
        yield second, get_result(second), "the result of fp8 attention is not quantized"
    head = last_sizes(view.shape(get_operand(first, 0)), 1)[0]
    if head is not None and not 8 < head <= 256:
        yield first, get_operand(first, 0), f"fp8 attention with heads of {head}"
    odd = next((node for node in attention.between if node.op_type not in ("Mul", "Div", "Add")), None)
    if odd is not None:
        yield odd, get_result(odd), f"{odd.op_type} stands between the scores and the Softmax of fp8 attention"
