"""Rules on groups of operations that TensorRT fuses into one kernel, if no Q/DQ pair is in the wrong place.

R10  Conv or product with its batch norm, bias and activation      R20  norms, softmax and GELU, which stay float
R11  Pad, Conv and MaxPool                                         R21  Conv and SiLU
R12  Conv and a residual Add                                       R24  ConvTranspose and its batch norm
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from onnx_ir import Node

from scalepoint.checking.qdq_graph import (
    CONVOLUTIONS,
    COPIES,
    DEQUANTIZE,
    QUANTIZE,
    WEIGHTED,
    OperandUse,
    QdqView,
    Tensor,
    both_orders,
    get_int_attribute,
    get_operand,
    get_result,
)
from scalepoint.checking.rule import Fault, Severity

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
    node = view.convolution(view.before_pairs(tensor).tensor)
    return node if node is not None and view.is_quantized(node) else None


def _check_one_convolution(view: QdqView, node: Node, convolved: Tensor, skip: Tensor, kernel: Node) -> Iterator[Fault]:
    if view.before_pairs(convolved).dequantize is not None:
        yield Fault(node, convolved, "the convolution's side of a residual Add has Q/DQ")
    elif view.dequantizer(skip) is None and not _starts_at_convolution(view, skip, kernel):
        yield Fault(node, skip, "the skip input of a residual Add is not quantized")


def _starts_at_convolution(view: QdqView, skip: Tensor, kernel: Node) -> bool:
    """Whether the skip input is the convolution that the other side starts with (ConvNeXt).

    TensorRT does not fuse such a residual.
    """
    first = view.convolution(view.before_pairs(skip).tensor, has_one_reader=False)
    return first is not None and _comes_from(view, get_operand(kernel, 0), first)


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


def _check_two_convolutions(view: QdqView, node: Node) -> Iterator[Fault]:
    is_quantized = [view.before_pairs(tensor).dequantize is not None for tensor in node.inputs]
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
    tensor = view.before_pairs(get_operand(node, 0)).tensor
    while view.only_reader_step(tensor) is not None:
        producer = view.producer(tensor)
        if producer is None or producer.op_type not in COPIES:
            break
        tensor = view.before_pairs(get_operand(producer, 0)).tensor
    kernel = view.convolution(tensor)
    return kernel is not None and view.is_quantized(kernel)


def _check_inner_operands(view: QdqView, operands: list[OperandUse], group: str) -> Iterator[Fault]:
    """Yield the first Q/DQ pair on an operand inside a group of operations."""
    for use in operands:
        tensor = get_operand(use.node, use.operand_index)
        dequantize = view.before_pairs(tensor).dequantize
        if dequantize is not None:
            yield Fault(dequantize, tensor, f"Q/DQ is inside {group}, before its {use.node.op_type}")
            return


def _match_layer_norm(view: QdqView, sqrt: Node) -> list[OperandUse]:
    """Return the inner operands of (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), or [] if `sqrt` is not in one."""
    operands: list[OperandUse] = []

    def find_producer(node: Node, index: int, *op_types: str) -> Node | None:
        """Record an operand, and return its producer if it has one of these types."""
        operands.append(OperandUse(node, index))
        producer = view.producer(view.before_pairs(get_operand(node, index)).tensor)
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
    scaled = view.producer(view.before_pairs(get_operand(erf, 0)).tensor)
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
