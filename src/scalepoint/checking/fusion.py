"""Rules on groups that TensorRT fuses into one kernel: Q/DQ stands around them, never inside."""

from collections.abc import Iterator
from heapq import heappop, heappush

from scalepoint.checking.graph import COPIES, Node, Use
from scalepoint.checking.qdq import CONVOLUTIONS, DEQUANTIZE, QUANTIZE, WEIGHTED, View
from scalepoint.checking.rule import Fault, Severity

_NORMS = frozenset(["LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"])
_FLOAT_ONLY = _NORMS | {"Softmax", "LogSoftmax"}


def epilogues(view: View) -> Iterator[Fault]:
    """R10: no Q/DQ between a weighted operation and its batch norm, bias Add or activation."""
    for node in view.nodes(*WEIGHTED):
        for step in view.epilogue(node):
            if step.crossed is not None and step.use.node.op != "MaxPool":
                between = f"Q/DQ stands between {node.op} and the {step.use.node.op} behind it"
                yield Fault(step.crossed, step.crossed.input(0), between)


def pools_and_pads(view: View) -> Iterator[Fault]:
    """R11: no Q/DQ between Conv(-BN)-Relu and the MaxPool it feeds, nor between Pad and the Conv it folds into."""
    for node in view.graph.nodes:
        if node.op in CONVOLUTIONS:
            for step in view.epilogue(node):
                if step.crossed is not None and step.use.node.op == "MaxPool":
                    yield Fault(
                        step.crossed, step.crossed.input(0), f"Q/DQ stands between {node.op} and the MaxPool behind it"
                    )
        elif node.op == "Pad" and node.attributes.get("mode", "constant") == "constant":
            steps = view.steps(node.output)
            crossed = next((step.crossed for step in steps if step.use.node.op == "Conv" and step.crossed), None)
            if crossed is not None:
                seen = "Q/DQ stands between Pad and Conv"
                yield Fault(crossed, crossed.input(0), seen, way_out="Quantize the input of Pad instead.")


def residuals(view: View) -> Iterator[Fault]:
    """R12: an Add behind an int8 convolution has Q/DQ on its skip input only; of two, the shorter side is the skip."""
    for node in view.nodes("Add"):
        if len(node.inputs) != 2 or any(map(view.graph.is_constant, node.inputs)):
            continue
        kernels = [_int8_convolution(view, tensor) for tensor in node.inputs]
        if kernels[0] is not None and kernels[1] is not None:
            yield from _two_convolutions(view, node)
        elif kernels[0] is not None:
            yield from _one_convolution(view, node, node.inputs[0], node.inputs[1], kernels[0])
        elif kernels[1] is not None:
            yield from _one_convolution(view, node, node.inputs[1], node.inputs[0], kernels[1])


def _int8_convolution(view: View, tensor: str) -> Node | None:
    origin, _ = view.origin(tensor)
    node = view.convolution(origin)
    return node if node is not None and view.is_quantized(node) else None


def _one_convolution(view: View, node: Node, side: str, skip: str, kernel: Node) -> Iterator[Fault]:
    if view.origin(side)[1] is not None:
        yield Fault(node, side, "the convolution's side of a residual Add has Q/DQ")
    elif view.dequantizer(skip) is None and not _starts_at_convolution(view, skip, kernel):
        yield Fault(node, skip, "the skip input of a residual Add is not quantized")


def _starts_at_convolution(view: View, skip: str, kernel: Node) -> bool:
    """The skip is the output of a convolution that the other side begins with (ConvNeXt): no residual for TensorRT."""
    first = view.convolution(view.origin(skip)[0], alone=False)
    return first is not None and _comes_from(view, kernel.input(0), first)


def _two_convolutions(view: View, node: Node) -> Iterator[Fault]:
    quantized = [view.origin(tensor)[1] is not None for tensor in node.inputs]
    lengths = _lengths(view, node)
    skip = 0 if lengths[0] <= lengths[1] else 1
    if all(quantized):
        yield Fault(node, node.inputs[1 - skip], "both inputs of a residual Add have Q/DQ")
    elif not any(quantized):
        yield Fault(node, node.inputs[skip], "neither input of a residual Add is quantized")
    elif lengths[0] != lengths[1] and not quantized[skip]:
        yield Fault(node, node.inputs[1 - skip], "the longer side of a residual Add has Q/DQ instead of the shorter")


def _lengths(view: View, node: Node) -> tuple[int, int]:
    """How many operations lie between each input and the last tensor that both come from; equal if there is none."""
    sides = {node.inputs[0]: 0}, {node.inputs[1]: 0}
    pending = sorted((-_index(view, tensor), tensor) for tensor in set(node.inputs))
    while pending:  # backward in graph order, so that whatever leads to a tensor was seen before it
        _, tensor = heappop(pending)
        if tensor in sides[0] and tensor in sides[1]:
            return sides[0][tensor], sides[1][tensor]
        for operand, cost in _operands(view, tensor):
            if operand not in sides[0] and operand not in sides[1]:
                heappush(pending, (-_index(view, operand), operand))
            for side in sides:
                if tensor in side:
                    side[operand] = min(side[tensor] + cost, side.get(operand, side[tensor] + cost))
    return 0, 0


def _index(view: View, tensor: str) -> int:
    maker = view.graph.producer(tensor)
    return -1 if maker is None else maker.index


def _operands(view: View, tensor: str) -> list[tuple[str, int]]:
    """What a tensor is computed from, each with the number of operations that is; Q/DQ counts nothing."""
    maker = view.graph.producer(tensor)
    cost = 0 if maker is not None and maker.op in QUANTIZE | DEQUANTIZE else 1
    names = () if maker is None else maker.inputs
    return [(name, cost) for name in names if name and not view.graph.is_constant(name)]


def _comes_from(view: View, tensor: str, source: Node) -> bool:
    pending, seen = [tensor], {tensor}
    while pending:
        name = pending.pop()
        if name == source.output:
            return True
        behind = [operand for operand, _ in _operands(view, name) if operand not in seen]
        behind = [operand for operand in behind if _index(view, operand) >= source.index]
        seen.update(behind)
        pending += behind
    return False


def float_islands(view: View) -> Iterator[Fault]:
    """R20: no Q/DQ on or in layer norm, instance norm, softmax, erf-GELU; but Conv -> copies -> LayerNorm wants it."""
    for node in view.graph.nodes:
        if node.op in _FLOAT_ONLY:
            yield from _norm(view, node)
        elif node.op == "Sqrt":
            yield from _inside(view, _layer_norm_chain(view, node), "a layer norm")
        elif node.op == "Erf":
            yield from _inside(view, _gelu_chain(view, node), "an erf-GELU")


def _norm(view: View, node: Node) -> Iterator[Fault]:
    source = view.dequantizer(node.input(0))
    wants = node.op == "LayerNormalization" and _behind_convolution(view, node)
    if source is not None and not wants:
        yield Fault(source, node.input(0), f"the input of {node.op} is quantized")
    elif source is None and wants:
        seen = "an int8 convolution writes float for the LayerNormalization behind it"
        why, way_out = "with Q/DQ there it writes int8 and is faster", "Put Q/DQ on the input of this layer norm."
        yield Fault(node, node.input(0), seen, Severity.PERFORMANCE, why, way_out)
    for tensor in node.inputs[1:]:
        if view.dequantizer(tensor) is not None:
            yield Fault(node, tensor, f"a parameter of {node.op} is quantized")


def _behind_convolution(view: View, node: Node) -> bool:
    """Over copies and Q/DQ in any order there is an int8 convolution, which nobody else reads."""
    tensor = view.origin(node.input(0))[0]
    while view.only_step(tensor) is not None:
        maker = view.graph.producer(tensor)
        if maker is None or maker.op not in COPIES:
            break
        tensor = view.origin(maker.input(0))[0]
    kernel = view.convolution(tensor)
    return kernel is not None and view.is_quantized(kernel)


def _inside(view: View, operands: list[Use], what: str) -> Iterator[Fault]:
    for use in operands:
        tensor = use.node.input(use.place)
        crossed = view.origin(tensor)[1]
        if crossed is not None:
            yield Fault(crossed, tensor, f"Q/DQ stands inside {what}, before its {use.node.op}")
            return


def _layer_norm_chain(view: View, root: Node) -> list[Use]:
    """The inner operands of (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), if that is what stands around Sqrt."""
    operands: list[Use] = []

    def back(node: Node, place: int, *ops: str) -> Node | None:
        operands.append(Use(node, place))
        maker = view.graph.producer(view.origin(node.input(place))[0])
        return maker if maker is not None and maker.op in ops else None

    added = back(root, 0, "Add")
    if added is None:
        return []
    place = 1 if view.graph.is_constant(added.input(0)) else 0
    mean = back(added, place, "ReduceMean")
    power = mean and back(mean, 0, "Pow", "Mul")
    centred = power and back(power, 0, "Sub")
    if centred is None or back(centred, 1, "ReduceMean") is None:
        return []
    quotient = view.only_step(root.output)
    if quotient is not None and quotient.use.node.op == "Div":
        operands += [Use(quotient.use.node, 0), Use(quotient.use.node, 1)]
    return operands


def _gelu_chain(view: View, erf: Node) -> list[Use]:
    """The inner operands of x * (1 + erf(x / sqrt 2)) * 0.5, if that is what stands around Erf."""
    scaled = view.graph.producer(view.origin(erf.input(0))[0])
    added = view.only_step(erf.output)
    if scaled is None or scaled.op not in ("Div", "Mul") or added is None or added.use.node.op != "Add":
        return []
    product = view.only_step(added.use.node.output)
    return [Use(erf, 0), added.use, *([product.use] if product is not None and product.use.node.op == "Mul" else [])]


def silu(view: View) -> Iterator[Fault]:
    """R21: no Q/DQ between Conv and the Sigmoid and Mul of its SiLU; a depthwise conv does not absorb it anyway."""
    for node in view.nodes("Mul"):
        for gate, data in (node.inputs, node.inputs[::-1]) if len(node.inputs) == 2 else ():
            gate_origin, gate_crossed = view.origin(gate)
            sigmoid = view.graph.producer(gate_origin)
            if sigmoid is None or sigmoid.op != "Sigmoid":
                continue
            inner, inner_crossed = view.origin(sigmoid.input(0))
            outer, outer_crossed = view.origin(data)
            kernel = view.convolution(outer, alone=False)
            crossed = inner_crossed or outer_crossed or gate_crossed
            if inner == outer and kernel is not None and crossed and not _is_depthwise(view, kernel):
                yield Fault(crossed, crossed.output, f"Q/DQ stands inside the SiLU of {kernel.op} {kernel.name!r}")
                break


def _is_depthwise(view: View, node: Node) -> bool:
    shape = view.graph.shape(node.input(1))
    return node.integer("group", 1) > 1 and shape is not None and shape[1:2] == (1,)


def transposed_convolutions(view: View) -> Iterator[Fault]:
    """R24: grouped int8 ConvTranspose has Cin >= 4 * groups (before 10.9); nothing between it and its batch norm."""
    for node in view.nodes("ConvTranspose"):
        if not view.is_quantized(node):
            continue
        shape, groups = view.graph.shape(node.input(1)), node.integer("group", 1)
        few = shape[0] if shape else None
        if view.version < (10, 9) and groups > 1 and few is not None and few < 4 * groups:
            yield Fault(node, node.input(1), f"{few} input channels in {groups} groups", Severity.ERROR)
        step = view.only_step(node.output)
        after = view.only_step(step.use.node.output) if step and step.use.node.op != "BatchNormalization" else None
        if step and after and after.use.node.op == "BatchNormalization" and after.use.place == 0:
            seen = f"{step.use.node.op} stands between ConvTranspose and its batch norm"
            yield Fault(step.use.node, step.use.node.output, seen)
