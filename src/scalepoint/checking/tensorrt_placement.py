"""Rules on where Q/DQ pairs are.

R09  on both operands of a product, or on neither         R15  equal scales where pairs are moved or merged
R13  before and after an operation without weights        R25  not where they only cost time
R14  around a Concat, with one scale
"""

from collections.abc import Iterator

from onnx_ir import Node

from scalepoint.checking.qdq_graph import (
    ACTIVATIONS,
    COPIES,
    DEQUANTIZE,
    INT4,
    MOVES,
    QUANTIZE,
    WEIGHTED,
    OperandUse,
    QdqView,
    Tensor,
    get_operand,
    get_result,
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
