"""Rules on where Q/DQ stands: both operands or none, int8 in and out, equal scales where pairs meet."""

from collections.abc import Iterator

from scalepoint.checking.graph import COPIES, Node, Use
from scalepoint.checking.qdq import ACTIVATIONS, DEQUANTIZE, INT4, MOVES, QUANTIZE, WEIGHTED, View
from scalepoint.checking.rule import Fault, Severity

_INT8_BOTH_WAYS = ("Add", "Mul", "AveragePool", "GlobalAveragePool")
_POINTWISE = ACTIVATIONS | frozenset(
    ["Add", "Sub", "Mul", "Div", "Min", "Max", "Sigmoid", "Tanh", "BatchNormalization"]
)
_LOGIC = frozenset({"Shape", "Size", "Where", "NonZero", "TopK", "ArgMax", "ArgMin", "Not", "And", "Or", "Xor"})
_COMPARE = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_ONE_OPERAND = frozenset({"BatchNormalization", "Resize", "Upsample"})
_FEWEST = 8


def both_operands(view: View) -> Iterator[Fault]:
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
        yield Fault(node, other, f"{node.op} has Q/DQ on its {roles[there]} but not on its {roles[1 - there]}")


def _dequantizer_past_cast(view: View, tensor: str) -> Node | None:
    """Rule R08 speaks of the Cast itself, and block formats have one by design."""
    maker = view.graph.producer(view.graph.source(tensor, MOVES))
    return view.dequantizer(maker.input(0) if maker is not None and maker.op == "Cast" else tensor)


def _is_probability(view: View, tensor: str) -> bool:
    """Fused attention takes the scale of the softmax as an option; rule R19 asks for it where it is needed."""
    maker = view.graph.producer(view.graph.source(tensor, COPIES | {"Cast", "Dropout"}))
    if maker is not None and maker.op == "Where":  # torch guards against rows of NaN: where(isnan(p), 0, p)
        maker = view.graph.producer(maker.input(2))
    return maker is not None and maker.op == "Softmax"


def int8_in_and_out(view: View) -> Iterator[Fault]:
    """R13: Add, Mul, average pools with a dequantized input have a quantized output; Resize behind Conv wants int8."""
    for node in view.nodes(*_INT8_BOTH_WAYS, "Resize", "Upsample"):
        if node.op in _INT8_BOTH_WAYS:
            tensor = next((name for name in node.inputs if _arrives_quantized(view, name)), None)
            if tensor is not None and not view.quantizers(node.output, _POINTWISE | {"Concat"}):
                yield Fault(node, tensor, f"{node.op} has a quantized input and a float output")
        elif view.dequantizer(node.input(0)) is None:
            kernel = _kernel_behind(view, node.input(0))
            if kernel is not None and view.is_quantized(kernel):
                seen = f"{node.op} reads float from the int8 {kernel.op} before it"
                why, way_out = "with Q/DQ there both run in int8", f"Put Q/DQ on the input of {node.op}."
                yield Fault(node, node.input(0), seen, Severity.ADVICE, why, way_out)


def _arrives_quantized(view: View, tensor: str) -> bool:
    return view.dequantizer(tensor) is not None and not view.graph.is_constant(tensor)


def _kernel_behind(view: View, tensor: str) -> Node | None:
    """The convolution that makes a tensor, its activation fused in."""
    return view.convolution(view.graph.source(tensor, ACTIVATIONS), alone=False)


def concat_scales(view: View) -> Iterator[Fault]:
    """R14: a Concat with a quantized output: its quantized inputs, also of Concats before it, have that scale."""
    for node in view.nodes("Concat"):
        targets = view.quantizers(node.output)
        if not targets:
            continue
        for tensor, source in _leaves(view, node):
            if not view.same_scale(source, targets[0]):
                seen = f"Concat joins scales of {source.name!r} and {targets[0].name!r} that differ"
                yield Fault(node, tensor, seen)
                break


def _leaves(view: View, node: Node) -> Iterator[tuple[str, Node]]:
    pending, seen = list(node.inputs)[::-1], set(node.inputs)
    while pending:
        tensor = pending.pop()
        source = view.dequantizer(tensor)
        maker = view.graph.producer(view.graph.source(tensor, MOVES))
        if source is not None:
            yield tensor, source
        elif maker is not None and maker.op == "Concat":
            pending += [name for name in maker.inputs[::-1] if name not in seen]
            seen.update(maker.inputs)


def equal_scales(view: View) -> Iterator[Fault]:
    """R15: all Q on one tensor have one scale; no DQ -> Q back to back with another scale."""
    for tensor, nodes in _by_tensor(view).items():
        other = next((node for node in nodes[1:] if not _same(view, nodes[0], node)), None)
        if other is not None:
            yield Fault(other, tensor, f"one tensor is quantized twice, with the scales of {nodes[0].name!r} and this")
    for node in view.nodes(*QUANTIZE):
        source = view.dequantizer(node.input(0))
        if source is not None and not view.graph.is_constant(node.input(0)) and not _same(view, source, node):
            if _is_behind_concat(view, node):
                continue  # rule R14 speaks of those
            yield Fault(node, node.input(0), f"what {source.name!r} dequantized is quantized again with another scale")


def _by_tensor(view: View) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in view.nodes(*QUANTIZE):
        found.setdefault(node.input(0), []).append(node)
    return found


def _same(view: View, left: Node, right: Node) -> bool:
    return view.same_scale(left, right) and view.kind(left) == view.kind(right)


def _is_behind_concat(view: View, node: Node) -> bool:
    maker = view.graph.producer(view.graph.source(node.input(0), MOVES))
    return maker is not None and maker.op == "Concat"


def needless_pairs(view: View) -> Iterator[Fault]:
    """R25: no Q/DQ on compare, where, reduce and shape operands, parameters of BN and Resize, tiny tensors, outputs."""
    for node in view.nodes(*DEQUANTIZE):
        uses = view.graph.readers(node.output)
        if uses and all(use.node.op in DEQUANTIZE and use.place == 1 for use in uses):
            continue  # the scales of a block format
        seen = _needless(view, node, uses)
        if seen:
            yield Fault(node, node.output, seen)


def _needless(view: View, node: Node, uses: list[Use]) -> str | None:
    size = view.size(node.input(0))
    reader = next((use.node for use in uses if _is_control(use.node) and not _is_pool(view, use.node)), None)
    parameter = next((use.node for use in uses if use.node.op in _ONE_OPERAND and use.place > 0), None)
    if reader is not None:
        return f"an operand of {reader.op} is quantized"
    if parameter is not None:
        return f"a parameter of {parameter.op} is quantized"
    if size is not None and size < _FEWEST:
        return f"a tensor of {size} values is quantized"
    if node.output in view.graph.outputs and not view.graph.is_constant(node.input(0)):
        return "an output of the model is quantized and dequantized again"
    return None


def _is_pool(view: View, node: Node) -> bool:
    """A mean with a quantized result: torch writes a global average pool so, and the pool runs in int8."""
    return node.op == "ReduceMean" and bool(view.quantizers(node.output))


def _is_control(node: Node) -> bool:
    return node.op in _LOGIC | _COMPARE or node.op.startswith("Reduce")
