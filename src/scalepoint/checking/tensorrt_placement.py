"""Rules on where Q/DQ pairs are placed: on operands, around groups that TensorRT fuses, in attention."""

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
    both_orders,
    get_int_attribute,
    get_operand,
    get_result,
    last_sizes,
)
from scalepoint.checking.rule import Fault, Severity

_INT8_IN_AND_OUT = ("Add", "Mul", "AveragePool", "GlobalAveragePool")
_POINTWISE = ACTIVATIONS | frozenset(
    ["Add", "Sub", "Mul", "Div", "Min", "Max", "Sigmoid", "Tanh", "BatchNormalization"]
)
_LOGIC = frozenset({"Shape", "Size", "Where", "NonZero", "TopK", "ArgMax", "ArgMin", "Not", "And", "Or", "Xor"})
_COMPARE = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_PARAMETRIZED = frozenset({"BatchNormalization", "Resize", "Upsample"})
_MIN_QUANTIZED_VALUES = 8


def check_both_operands(view: QdqView) -> Iterator[Fault]:
    """R09: a weighted operation has Q/DQ on data and weight, or on neither; int4 is weight-only by design."""
    for node in view.nodes(*WEIGHTED):
        sources = [_dequantizer_past_cast(view, tensor) for tensor in node.inputs[:2]]
        if len(sources) != 2 or (sources[0] is None) == (sources[1] is None):
            continue
        quantized = 0 if sources[0] is not None else 1
        source, float_operand = sources[quantized], node.inputs[1 - quantized]
        if source is None or view.quantized_dtype(source) == INT4 or _is_probability(view, float_operand):
            continue
        roles = ["data", "weight"] if view.weight_index(node) == 1 else ["first operand", "second operand"]
        description = f"{node.op_type} has Q/DQ on its {roles[quantized]} but not on its {roles[1 - quantized]}"
        yield Fault(node, float_operand, description)


def _dequantizer_past_cast(view: QdqView, tensor: Tensor) -> Node | None:
    """Return the DQ of a tensor, looking through a Cast: R08 reports the Cast itself, block formats need one."""
    producer = view.producer(view.skip_back(tensor, MOVES))
    return view.dequantizer(get_operand(producer, 0) if producer is not None and producer.op_type == "Cast" else tensor)


def _is_probability(view: QdqView, tensor: Tensor) -> bool:
    """Whether a tensor is a softmax. Fused attention does not need Q/DQ on it; R19 reports where it does."""
    producer = view.producer(view.skip_back(tensor, COPIES | {"Cast", "Dropout"}))
    if producer is not None and producer.op_type == "Where":  # torch's guard against rows of NaN: where(isnan(p), 0, p)
        producer = view.producer(get_operand(producer, 2))
    return producer is not None and producer.op_type == "Softmax"


def check_int8_in_and_out(view: QdqView) -> Iterator[Fault]:
    """R13: Add, Mul, average pools with a dequantized input have a quantized output; Resize after Conv should."""
    for node in view.nodes(*_INT8_IN_AND_OUT, "Resize", "Upsample"):
        if node.op_type in _INT8_IN_AND_OUT:
            tensor = next((operand for operand in node.inputs if _is_quantized_data(view, operand)), None)
            if tensor is not None and not view.quantizers(get_result(node), _POINTWISE | {"Concat"}):
                yield Fault(node, tensor, f"{node.op_type} has a quantized input and a float output")
        elif view.dequantizer(get_operand(node, 0)) is None:
            kernel = _convolution_before(view, get_operand(node, 0))
            if kernel is not None and view.is_quantized(kernel):
                description = f"{node.op_type} reads float from the int8 {kernel.op_type} before it"
                why, way_out = "with Q/DQ there both run in int8", f"Put Q/DQ on the input of {node.op_type}."
                yield Fault(node, get_operand(node, 0), description, Severity.ADVICE, why, way_out)


def _is_quantized_data(view: QdqView, tensor: Tensor) -> bool:
    return view.dequantizer(tensor) is not None and not view.is_constant(tensor)


def _convolution_before(view: QdqView, tensor: Tensor) -> Node | None:
    """Return the convolution that computes a tensor, with its activation fused."""
    return view.convolution(view.skip_back(tensor, ACTIVATIONS), has_one_reader=False)


def check_concat_scales(view: QdqView) -> Iterator[Fault]:
    """R14: quantized inputs of a Concat with a quantized output, and of Concats before it, have the output's scale."""
    for node in view.nodes("Concat"):
        targets = view.quantizers(get_result(node))
        if not targets:
            continue
        for tensor, source in _iterate_concat_inputs(view, node):
            if not view.has_same_scale(source, targets[0]):
                labels = f"{view.label(source)!r} and {view.label(targets[0])!r}"
                yield Fault(node, tensor, f"Concat joins tensors with the different scales of {labels}")
                break


def _iterate_concat_inputs(view: QdqView, node: Node) -> Iterator[tuple[Tensor, Node]]:
    """Yield the dequantized inputs of a Concat, and of Concats before it, with their DQ."""
    pending, visited = list(node.inputs)[::-1], set(node.inputs)
    while pending:
        tensor = pending.pop()
        source = view.dequantizer(tensor)
        producer = view.producer(view.skip_back(tensor, MOVES))
        if source is not None:
            yield tensor, source
        elif producer is not None and producer.op_type == "Concat":
            pending += [operand for operand in producer.inputs[::-1] if operand not in visited]
            visited.update(producer.inputs)


def check_equal_scales(view: QdqView) -> Iterator[Fault]:
    """R15: all Q on one tensor have the same scale; a Q directly after a DQ has its scale."""
    for tensor, quantizers in _group_quantizers(view).items():
        first = quantizers[0]
        different = next((node for node in quantizers[1:] if not _have_same_scale(view, first, node)), None)
        if different is not None:
            description = f"one tensor is quantized twice, with the scales of {view.label(first)!r} and this"
            yield Fault(different, tensor, description)
    for node in view.nodes(*QUANTIZE):
        tensor = get_operand(node, 0)
        source = view.dequantizer(tensor)
        if source is None or view.is_constant(tensor) or _have_same_scale(view, source, node):
            continue
        if not _is_after_concat(view, node):  # R14 reports those
            yield Fault(node, tensor, f"the result of {view.label(source)!r} is quantized again with another scale")


def _group_quantizers(view: QdqView) -> dict[Tensor, list[Node]]:
    """Return the Q nodes of each tensor."""
    quantizers: dict[Tensor, list[Node]] = {}
    for node in view.nodes(*QUANTIZE):
        quantizers.setdefault(get_operand(node, 0), []).append(node)
    return quantizers


def _have_same_scale(view: QdqView, left: Node, right: Node) -> bool:
    return view.has_same_scale(left, right) and view.quantized_dtype(left) == view.quantized_dtype(right)


def _is_after_concat(view: QdqView, node: Node) -> bool:
    producer = view.producer(view.skip_back(get_operand(node, 0), MOVES))
    return producer is not None and producer.op_type == "Concat"


def check_needless_pairs(view: QdqView) -> Iterator[Fault]:
    """R25: no Q/DQ on compare, where, reduce and shape operands, parameters of BN and Resize, tiny tensors, outputs."""
    for node in view.nodes(*DEQUANTIZE):
        uses = view.readers(get_result(node))
        if uses and all(use.node.op_type in DEQUANTIZE and use.operand_index == 1 for use in uses):
            continue  # these are the scales of a block format
        description = _describe_needless_pair(view, node, uses)
        if description:
            yield Fault(node, get_result(node), description)


def _describe_needless_pair(view: QdqView, node: Node, uses: list[OperandUse]) -> str | None:
    """Say why a pair is needless; None if it is not."""
    size = view.element_count(get_operand(node, 0))
    readers = [use.node for use in uses]
    control = next((reader for reader in readers if _is_control(reader) and not _is_pool(view, reader)), None)
    parametrized = next((use.node for use in uses if use.node.op_type in _PARAMETRIZED and use.operand_index > 0), None)
    if control is not None:
        return f"an operand of {control.op_type} is quantized"
    if parametrized is not None:
        return f"a parameter of {parametrized.op_type} is quantized"
    if size is not None and size < _MIN_QUANTIZED_VALUES:
        return f"a tensor of {size} values is quantized"
    if get_result(node) in view.outputs and not view.is_constant(get_operand(node, 0)):
        return "an output of the model is quantized and dequantized again"
    return None


def _is_pool(view: QdqView, node: Node) -> bool:
    """Whether a node is a mean with a quantized result: torch's global average pool, which runs in int8."""
    return node.op_type == "ReduceMean" and bool(view.quantizers(get_result(node)))


def _is_control(node: Node) -> bool:
    """Whether a node compares, selects or reduces, or computes shapes."""
    return node.op_type in _LOGIC | _COMPARE or node.op_type.startswith("Reduce")


_NORMS = frozenset(["LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"])
_FLOAT_ONLY = _NORMS | {"Softmax", "LogSoftmax"}


def check_epilogues(view: QdqView) -> Iterator[Fault]:
    """R10: no Q/DQ between a weighted operation and its batch norm, bias Add or activation."""
    for node in view.nodes(*WEIGHTED):
        for step in view.epilogue(node):
            if step.quantize is not None and step.use.node.op_type != "MaxPool":
                description = f"Q/DQ is between {node.op_type} and the {step.use.node.op_type} after it"
                yield Fault(step.quantize, get_operand(step.quantize, 0), description)


def check_pools_and_pads(view: QdqView) -> Iterator[Fault]:
    """R11: no Q/DQ between Conv(-BN)-Relu and the MaxPool it feeds, nor between Pad and the Conv it folds into."""
    for node in view.graph:
        if node.op_type in CONVOLUTIONS:
            for step in view.epilogue(node):
                if step.quantize is not None and step.use.node.op_type == "MaxPool":
                    description = f"Q/DQ is between {node.op_type} and the MaxPool after it"
                    yield Fault(step.quantize, get_operand(step.quantize, 0), description)
        elif node.op_type == "Pad" and _pads_with_constant(node):
            steps = view.reader_steps(get_result(node))
            quantize = next(
                (step.quantize for step in steps if step.use.node.op_type == "Conv" and step.quantize), None
            )
            if quantize is not None:
                way_out = "Quantize the input of Pad instead."
                yield Fault(quantize, get_operand(quantize, 0), "Q/DQ is between Pad and Conv", way_out=way_out)


def _pads_with_constant(node: Node) -> bool:
    mode = node.attributes.get("mode")
    return mode is None or mode.value == "constant"


def check_residuals(view: QdqView) -> Iterator[Fault]:
    """R12: an Add after an int8 convolution has Q/DQ on its skip input only.

    If both inputs are convolutions, the one with fewer operations since the common start is the skip input.
    """
    for node in view.nodes("Add"):
        if len(node.inputs) != 2 or any(map(view.is_constant, node.inputs)):
            continue
        kernels = [_int8_convolution(view, tensor) for tensor in node.inputs]
        if kernels[0] is not None and kernels[1] is not None:
            yield from _check_two_convolutions(view, node)
        elif kernels[0] is not None:
            yield from _check_one_convolution(view, node, node.inputs[0], node.inputs[1], kernels[0])
        elif kernels[1] is not None:
            yield from _check_one_convolution(view, node, node.inputs[1], node.inputs[0], kernels[1])


def _int8_convolution(view: QdqView, tensor: Tensor) -> Node | None:
    """Return the int8 convolution that computes a tensor, looking through Q/DQ pairs."""
    node = view.convolution(view.before_pairs(tensor)[0])
    return node if node is not None and view.is_quantized(node) else None


def _check_one_convolution(view: QdqView, node: Node, convolved: Tensor, skip: Tensor, kernel: Node) -> Iterator[Fault]:
    if view.before_pairs(convolved)[1] is not None:
        yield Fault(node, convolved, "the convolution's side of a residual Add has Q/DQ")
    elif view.dequantizer(skip) is None and not _starts_at_convolution(view, skip, kernel):
        yield Fault(node, skip, "the skip input of a residual Add is not quantized")


def _starts_at_convolution(view: QdqView, skip: Tensor, kernel: Node) -> bool:
    """Whether the skip input is the convolution that the other side starts with (ConvNeXt).

    TensorRT does not fuse such a residual.
    """
    first = view.convolution(view.before_pairs(skip)[0], has_one_reader=False)
    return first is not None and _comes_from(view, get_operand(kernel, 0), first)


def _check_two_convolutions(view: QdqView, node: Node) -> Iterator[Fault]:
    is_quantized = [view.before_pairs(tensor)[1] is not None for tensor in node.inputs]
    lengths = _branch_lengths(view, node)
    skip = 0 if lengths[0] <= lengths[1] else 1
    if all(is_quantized):
        yield Fault(node, node.inputs[1 - skip], "both inputs of a residual Add have Q/DQ")
    elif not any(is_quantized):
        yield Fault(node, node.inputs[skip], "neither input of a residual Add is quantized")
    elif lengths[0] != lengths[1] and not is_quantized[skip]:
        yield Fault(node, node.inputs[1 - skip], "the longer side of a residual Add has Q/DQ instead of the shorter")


def _branch_lengths(view: QdqView, node: Node) -> tuple[int, int]:
    """Return the number of operations from the last common tensor to each input of a node; (0, 0) if there is none."""
    # For each input: the number of operations from a tensor to this input
    distances: tuple[dict[Tensor, int], dict[Tensor, int]] = {node.inputs[0]: 0}, {node.inputs[1]: 0}
    pending = [_heap_entry(view, tensor) for tensor in dict.fromkeys(node.inputs)]
    heapify(pending)
    while pending:  # backward in graph order: all paths from a tensor to the inputs are followed before the tensor
        tensor = heappop(pending)[-1]
        if tensor in distances[0] and tensor in distances[1]:
            return distances[0][tensor], distances[1][tensor]
        for source, cost in _list_sources(view, tensor):
            if source not in distances[0] and source not in distances[1]:
                heappush(pending, _heap_entry(view, source))
            for distance in distances:
                if tensor in distance:
                    new_distance = distance[tensor] + cost
                    distance[source] = min(new_distance, distance.get(source, new_distance))
    return 0, 0


def _heap_entry(view: QdqView, tensor: Tensor) -> tuple[int, str, int, Tensor]:
    # The id is a tie-breaker: onnx_ir values cannot be compared, and a body may reuse the name of an outer tensor.
    return -_position(view, tensor), (tensor.name if tensor else "") or "", id(tensor), tensor


def _position(view: QdqView, tensor: Tensor) -> int:
    producer = view.producer(tensor)
    return -1 if producer is None else view.position(producer)


def _list_sources(view: QdqView, tensor: Tensor) -> list[tuple[Tensor, int]]:
    """Return the operands that a tensor is computed from, with the number of operations: 0 for Q and DQ, else 1."""
    producer = view.producer(tensor)
    cost = 0 if producer is not None and producer.op_type in QUANTIZE | DEQUANTIZE else 1
    operands = () if producer is None else producer.inputs
    return [(source, cost) for source in operands if source is not None and not view.is_constant(source)]


def _comes_from(view: QdqView, tensor: Tensor, origin: Node) -> bool:
    """Whether a tensor is computed from the result of `origin`."""
    pending, visited = [tensor], {tensor}
    while pending:
        current = pending.pop()
        if current is get_result(origin):
            return True
        sources = [source for source, _ in _list_sources(view, current) if source not in visited]
        sources = [source for source in sources if _position(view, source) >= view.position(origin)]
        visited.update(sources)
        pending += sources
    return False


def check_float_islands(view: QdqView) -> Iterator[Fault]:
    """R20: no Q/DQ on or inside norms, softmax and erf-GELU, except on a LayerNorm after an int8 convolution."""
    for node in view.graph:
        if node.op_type in _FLOAT_ONLY:
            yield from _check_norm(view, node)
        elif node.op_type == "Sqrt":
            yield from _check_inner_operands(view, _match_layer_norm(view, node), "a layer norm")
        elif node.op_type == "Erf":
            yield from _check_inner_operands(view, _match_gelu(view, node), "an erf-GELU")


def _check_norm(view: QdqView, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(get_operand(node, 0))
    needs_pair = node.op_type == "LayerNormalization" and _is_after_int8_convolution(view, node)
    if source is not None and not needs_pair:
        yield Fault(source, get_operand(node, 0), f"the input of {node.op_type} is quantized")
    elif source is None and needs_pair:
        description = "an int8 convolution writes float for the LayerNormalization after it"
        why, way_out = "with Q/DQ there it writes int8 and is faster", "Put Q/DQ on the input of this layer norm."
        yield Fault(node, get_operand(node, 0), description, Severity.PERFORMANCE, why, way_out)
    for tensor in node.inputs[1:]:
        if view.dequantizer(tensor) is not None:
            yield Fault(node, tensor, f"a parameter of {node.op_type} is quantized")


def _is_after_int8_convolution(view: QdqView, node: Node) -> bool:
    """Whether the input comes from an int8 convolution without other readers, over copies and Q/DQ pairs."""
    tensor = view.before_pairs(get_operand(node, 0))[0]
    while view.only_reader_step(tensor) is not None:
        producer = view.producer(tensor)
        if producer is None or producer.op_type not in COPIES:
            break
        tensor = view.before_pairs(get_operand(producer, 0))[0]
    kernel = view.convolution(tensor)
    return kernel is not None and view.is_quantized(kernel)


def _check_inner_operands(view: QdqView, operands: list[OperandUse], group: str) -> Iterator[Fault]:
    """Yield the first Q/DQ pair on an operand inside a group of operations."""
    for use in operands:
        tensor = get_operand(use.node, use.operand_index)
        dequantize = view.before_pairs(tensor)[1]
        if dequantize is not None:
            yield Fault(dequantize, tensor, f"Q/DQ is inside {group}, before its {use.node.op_type}")
            return


def _match_layer_norm(view: QdqView, sqrt: Node) -> list[OperandUse]:
    """Return the inner operands of (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), or [] if `sqrt` is not in one."""
    operands: list[OperandUse] = []

    def find_producer(node: Node, index: int, *op_types: str) -> Node | None:
        """Record an operand, and return its producer if it has one of these types."""
        operands.append(OperandUse(node, index))
        producer = view.producer(view.before_pairs(get_operand(node, index))[0])
        return producer if producer is not None and producer.op_type in op_types else None

    plus_epsilon = find_producer(sqrt, 0, "Add")
    if plus_epsilon is None:
        return []
    variance_index = 1 if view.is_constant(get_operand(plus_epsilon, 0)) else 0
    variance = find_producer(plus_epsilon, variance_index, "ReduceMean")
    square = variance and find_producer(variance, 0, "Pow", "Mul")
    centred = square and find_producer(square, 0, "Sub")
    if centred is None or find_producer(centred, 1, "ReduceMean") is None:
        return []
    quotient = view.only_reader_step(get_result(sqrt))
    if quotient is not None and quotient.use.node.op_type == "Div":
        operands += [OperandUse(quotient.use.node, 0), OperandUse(quotient.use.node, 1)]
    return operands


def _match_gelu(view: QdqView, erf: Node) -> list[OperandUse]:
    """Return the inner operands of x * (1 + erf(x / sqrt 2)) * 0.5, or [] if `erf` is not in one."""
    scaled = view.producer(view.before_pairs(get_operand(erf, 0))[0])
    plus_one = view.only_reader_step(get_result(erf))
    if scaled is None or scaled.op_type not in ("Div", "Mul"):
        return []
    if plus_one is None or plus_one.use.node.op_type != "Add":
        return []
    operands = [OperandUse(erf, 0), plus_one.use]
    product = view.only_reader_step(get_result(plus_one.use.node))
    if product is not None and product.use.node.op_type == "Mul":
        operands.append(product.use)
    return operands


def check_silu(view: QdqView) -> Iterator[Fault]:
    """R21: no Q/DQ between Conv and the Sigmoid and Mul of its SiLU; a depthwise Conv has no such fusion anyway."""
    for node in view.nodes("Mul"):
        for gate, data in both_orders(node):
            gate_before_pairs, gate_dequantize = view.before_pairs(gate)
            sigmoid = view.producer(gate_before_pairs)
            if sigmoid is None or sigmoid.op_type != "Sigmoid":
                continue
            sigmoid_input, sigmoid_dequantize = view.before_pairs(get_operand(sigmoid, 0))
            data_before_pairs, data_dequantize = view.before_pairs(data)
            kernel = view.convolution(data_before_pairs, has_one_reader=False)
            dequantize = sigmoid_dequantize or data_dequantize or gate_dequantize
            if sigmoid_input != data_before_pairs or kernel is None or dequantize is None:
                continue
            if not _is_depthwise(view, kernel):
                description = f"Q/DQ is inside the SiLU of {kernel.op_type} {view.label(kernel)!r}"
                yield Fault(dequantize, get_result(dequantize), description)
                break


def _is_depthwise(view: QdqView, node: Node) -> bool:
    shape = view.shape(get_operand(node, 1))
    return get_int_attribute(node, "group", 1) > 1 and shape is not None and shape[1:2] == (1,)


def check_transposed_convolutions(view: QdqView) -> Iterator[Fault]:
    """R24: grouped int8 ConvTranspose has at least 4 input channels per group (before 10.9); batch norm follows it."""
    for node in view.nodes("ConvTranspose"):
        if not view.is_quantized(node):
            continue
        shape, groups = view.shape(get_operand(node, 1)), get_int_attribute(node, "group", 1)
        channels = shape[0] if shape else None
        if view.version < (10, 9) and groups > 1 and channels is not None and channels < 4 * groups:
            yield Fault(node, get_operand(node, 1), f"{channels} input channels in {groups} groups", Severity.ERROR)
        step = view.only_reader_step(get_result(node))
        if step is None or step.use.node.op_type == "BatchNormalization":
            continue
        between = step.use.node
        next_step = view.only_reader_step(get_result(between))
        if next_step and next_step.use.node.op_type == "BatchNormalization" and next_step.use.operand_index == 0:
            description = f"{between.op_type} is between ConvTranspose and its batch norm"
            yield Fault(between, get_result(between), description)


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
        softmax: The softmax.
        result: The product of the softmax and the values.
    """

    scores: Node
    between: tuple[Node, ...]
    softmax: Node
    result: Node


def find_attentions(view: QdqView) -> Iterator[AttentionNodes]:
    for softmax in view.nodes("Softmax"):
        path = _path_to_scores(view, get_operand(softmax, 0), ())
        result = _find_result_product(view, get_result(softmax))
        if path and result is not None:
            yield AttentionNodes(path[-1], path[:-1], softmax, result)


def _path_to_scores(view: QdqView, tensor: Tensor, path: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes from a tensor back to a product of two activations, or () if there is none nearby."""
    node = view.producer(view.before_pairs(tensor)[0])
    if node is None or len(path) > _MAX_DEPTH:
        return ()
    if node.op_type == "MatMul":
        return (*path, node) if view.weight_index(node) is None else ()
    operands = node.inputs if node.op_type in _SCORE_OPERATIONS - COPIES else node.inputs[:1]
    if node.op_type not in _SCORE_OPERATIONS:
        return ()
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


def _quantized_dtypes(view: QdqView, *nodes: Node) -> set[int]:
    sources = (view.dequantizer(tensor) for node in nodes for tensor in node.inputs[:2])
    return {view.quantized_dtype(source) for source in sources if source is not None}


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
            node, tensor, description = next(_find_missing_fp8(view, attention), (attention.scores, None, ""))
            if description:
                yield Fault(node, tensor, description)


def _find_missing_fp8(view: QdqView, attention: AttentionNodes) -> Iterator[tuple[Node, Tensor, str]]:
    first, second = attention.scores, attention.result
    for node in (first, second):
        for tensor in node.inputs:
            if not view.is_fp8(view.dequantizer(tensor)):
                yield node, tensor, "fp8 attention has an operand without fp8 Q/DQ"
    for tensor in first.inputs:
        producer = view.producer(tensor)
        if producer is not None and producer.op_type == "Transpose":
            yield producer, tensor, "the Transpose of fp8 attention is after the Q/DQ"
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
    head_size = last_sizes(view.shape(get_operand(first, 0)), 1)[0]
    if head_size is not None and not 8 < head_size <= 256:
        yield first, get_operand(first, 0), f"fp8 attention with heads of {head_size} channels"
    unsupported = next((node for node in attention.between if node.op_type not in ("Mul", "Div", "Add")), None)
    if unsupported is not None:
        description = f"{unsupported.op_type} is between the scores and the Softmax of fp8 attention"
        yield unsupported, get_result(unsupported), description
