"""Replaces shapes that a graph computes when it runs, so that files with free sizes have fewer operations.

    Reshape(x, Concat(Shape(x)[0], [20], ..))       ->  Reshape(x, [0, 20, ..])
    Reshape -> Transpose -> Reshape (torch's K^T)   ->  Transpose of the last two axes
    LSTM(x, initial states = Expand(0, batch))      ->  LSTM(x), whose states start at zero by default
    Transpose -> Reshape of one LSTM direction      ->  Squeeze

Each operation on a shape takes about 1 us in ONNX Runtime, as long as a small layer. A free size is a symbol here;
sizes are equal if their symbols are.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from scalepoint.formats.onnx.graph_edits import add_constant, find_producer, replace_node

RECURRENT_OPERATORS = ("LSTM", "GRU", "RNN")
INITIAL_STATES = (5, 6)  # positions of their inputs; GRU and RNN have only the first
MOVES_OF_CONSTANTS = ("Expand", "Slice", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Transpose", "Concat")

Size = int | str  # a number, or the symbol of a free size


def fold_shape_arithmetic(model: Any) -> None:
    """Fold shapes in place. Run it on a graph whose values have the shapes of torch.export."""
    for node in list(model.graph):
        if node.op_type in RECURRENT_OPERATORS:
            _drop_zero_states(node)
            _infer_output_shape(node)
            _squeeze_direction(model.graph, node)
    for node in list(model.graph):
        if node.op_type == "Reshape" and node.graph is not None:
            _swap_last_axes(node)
    for node in list(model.graph):
        if node.op_type == "Reshape":
            _fold_reshape(model.graph, node)
    RemoveUnusedNodesPass()(model)


def _fold_reshape(graph: Any, node: Any) -> None:
    """Replace a computed shape by a constant: 0 copies a free size of the same axis, -1 stands for one other size."""
    x, computed = node.inputs
    sizes = _evaluate_sizes(computed)
    if sizes is None or computed.const_value is not None:
        return
    before = _read_shape(x) or ()
    if (known_shape := _read_shape(node.outputs[0])) is not None:
        node.outputs[0].shape = ir.Shape(known_shape)  # a constant shape with 0 and -1 does not say it any more
    shape: list[int] = []
    for axis, size in enumerate(sizes):
        if isinstance(size, int):
            shape.append(size)
        elif before[axis : axis + 1] == (size,):
            shape.append(0)  # Reshape copies the size of the same axis of its input
        else:
            shape.append(-1)
    # A size that really is 0 would need allowzero, with which 0 does not copy a size.
    if shape.count(-1) > 1 or 0 in sizes:
        return
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, _add_sizes(graph, f"{node.outputs[0].name}.shape", shape))


def _swap_last_axes(last: Any) -> None:
    """Replace Reshape -> Transpose(0, 2, 1) -> Reshape by one Transpose, if they swap the last two axes."""
    transpose = find_producer(last.inputs[0], "Transpose")
    if transpose is None or _read_axes(transpose) != (0, 2, 1):
        return
    first = find_producer(transpose.inputs[0], "Reshape")
    if first is None:
        return
    before = _read_shape(first.inputs[0])
    flat, after = _evaluate_sizes(first.inputs[1]), _evaluate_sizes(last.inputs[1])
    if before is None or flat is None or after is None or len(before) < 3:
        return
    keeps_last_axes = len(flat) == 3 and tuple(flat[1:]) == before[-2:]
    if keeps_last_axes and _is_shape(after, (*before[:-2], before[-1], before[-2])):
        axes = list(range(len(before)))
        perm = [*axes[:-2], axes[-1], axes[-2]]
        replace_node(last, ir.node("Transpose", [first.inputs[0]], {"perm": perm}))


def _drop_zero_states(node: Any) -> None:
    """Leave out initial states that are zero: it is their default."""
    for position in INITIAL_STATES:
        if position < len(node.inputs) and _is_zero(node.inputs[position]):
            node.replace_input_with(position, None)


def explicit_zero_states(model: Any) -> None:
    """Give recurrent layers with a free batch their initial states again. Layers of one size share the zeros."""
    zeros: dict[tuple[Size, ...], Any] = {}
    for node in list(model.graph):
        if node.op_type not in RECURRENT_OPERATORS:
            continue
        positions = INITIAL_STATES if node.op_type == "LSTM" else INITIAL_STATES[:1]
        missing = [i for i in positions if i >= len(node.inputs) or node.inputs[i] is None]
        sizes, weight = _read_shape(node.inputs[0]), _read_shape(node.inputs[2])
        if not missing or sizes is None or weight is None or isinstance(sizes[1], int):
            continue
        # The batch is read from an input of the graph: reading it from x keeps OpenVINO from fusing what makes x.
        source = next((value for value in model.graph.inputs if sizes[1] in (_read_shape(value) or ())), None)
        if source is None:
            continue
        key = (weight[0], sizes[1], weight[2])
        if key not in zeros:
            zeros[key] = _insert_zeros(model.graph, node, source, key)
        node.resize_inputs(max(*missing, len(node.inputs) - 1) + 1)
        for i in missing:
            node.replace_input_with(i, zeros[key])


def _insert_zeros(graph: Any, node: Any, source: Any, sizes: Sequence[Size]) -> Any:
    """Insert zeros of these sizes before a recurrent layer. The second size is free: an axis of `source` has it."""
    axis = (_read_shape(source) or ()).index(sizes[1])
    batch = ir.node("Shape", [source], {"start": axis, "end": axis + 1})
    # Named after the number: the name of the layer's output may be empty, if only its last state is used.
    first, last = (_add_sizes(graph, f"initial_state.size_{sizes[i]}", [int(sizes[i])]) for i in (0, 2))
    shape = ir.node("Concat", [first, batch.outputs[0], last], {"axis": 0})
    zero = ir.tensor(np.zeros(1, np.float32))
    zeros = ir.node("ConstantOfShape", [shape.outputs[0]], {"value": zero})
    zeros.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    for new in (batch, shape, zeros):
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, [batch, shape, zeros])
    return zeros.outputs[0]


def _infer_output_shape(node: Any) -> None:
    """Set the shape of the output: (steps, directions, batch, size of the hidden state)."""
    steps_and_batch = _read_shape(node.inputs[0])
    weight = node.inputs[2].shape if node.inputs[2] is not None else None
    if steps_and_batch is not None and weight is not None and _read_shape(node.outputs[0]) is None:
        steps, batch, _ = steps_and_batch
        node.outputs[0].shape = ir.Shape([steps, weight[0], batch, weight[2]])


def _squeeze_direction(graph: Any, node: Any) -> None:
    """Write Transpose -> Reshape of the output (steps, 1, batch, size) as a Squeeze of the second axis."""
    output = node.outputs[0]
    shape = _read_shape(output)
    if shape is None or shape[1] != 1:
        return
    squeezed = (shape[0], *shape[2:])
    for transpose in [use.node for use in output.uses()]:
        if transpose.op_type != "Transpose" or _read_axes(transpose) != (0, 2, 1, 3):
            continue
        for reshape in [use.node for use in transpose.outputs[0].uses() if use.node.op_type == "Reshape"]:
            if _is_shape(_evaluate_sizes(reshape.inputs[1]), squeezed):
                axes = _add_sizes(graph, f"{reshape.outputs[0].name}.axes", [1])
                reshape.outputs[0].shape = ir.Shape(squeezed)
                replace_node(reshape, ir.node("Squeeze", [output, axes]))


def _is_shape(sizes: Sequence[Size] | None, shape: Sequence[Size]) -> bool:
    """Whether the sizes that a Reshape gets, of which one may be -1, are this shape."""
    if sizes is None or len(sizes) != len(shape):
        return False
    differences = [size for size, expected in zip(sizes, shape, strict=True) if size != expected]
    return differences in ([], [-1])


def _add_sizes(graph: Any, name: str, numbers: Sequence[int]) -> Any:
    return add_constant(graph, name, np.array(numbers, dtype=np.int64))


def _is_zero(value: Any) -> bool:
    """Whether a tensor is made of zero constants only."""
    if value is None:
        return False
    if value.const_value is not None:
        return not value.const_value.numpy().any()
    node = value.producer()
    if node is None or node.op_type not in MOVES_OF_CONSTANTS:
        return False
    sources = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return all(map(_is_zero, sources))


def _evaluate_sizes(value: Any) -> list[Size] | None:
    """Return the numbers and symbols of a computed shape; None if it is computed in another way."""
    if value.const_value is not None:
        return [int(number) for number in value.const_value.numpy().reshape(-1)]
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Shape":
        shape = _read_shape(node.inputs[0])
        return None if shape is None else list(shape[node.attributes.get_int("start") : node.attributes.get_int("end")])
    operands: list[list[Size]] = []
    for source in node.inputs:
        if source is None:
            continue
        sizes = _evaluate_sizes(source)
        if sizes is None:
            return None
        operands.append(sizes)
    return _compute_sizes(node.op_type, operands)


def _compute_sizes(operator: str, operands: list[list[Size]]) -> list[Size] | None:
    """Return the result of an operator on sizes; None if it is not known."""
    if operator == "Concat" and operands:
        return [size for sizes in operands for size in sizes]
    if operator == "Slice" and len(operands) == 3:
        sizes, (start, *_), (end, *_) = operands
        return sizes[start:end] if isinstance(start, int) and isinstance(end, int) else None
    if operator in ("Reshape", "Squeeze", "Unsqueeze") and operands and len(operands[0]) == 1:
        return operands[0]
    if operator == "Mul" and operands and all(len(sizes) == 1 for sizes in operands):
        numbers = [sizes[0] for sizes in operands if isinstance(sizes[0], int)]
        symbols = sorted(sizes[0] for sizes in operands if isinstance(sizes[0], str))
        return ["*".join([str(prod(numbers)), *symbols]) if symbols else prod(numbers)]
    return None


def _read_shape(value: Any) -> tuple[Size, ...] | None:
    """Return the shape of a tensor; None if a size has neither a number nor a symbol."""
    if value.shape is not None:
        sizes = [size if isinstance(size, int) else size.value for size in value.shape]
        if None not in sizes:
            return tuple(sizes)
    reshape = find_producer(value, "Reshape")
    if reshape is not None:  # between two layers of a recurrent network
        computed = _evaluate_sizes(reshape.inputs[1])
        return None if computed is None or {0, -1} & set(computed) else tuple(computed)
    transpose = find_producer(value, "Transpose")
    before = None if transpose is None else _read_shape(transpose.inputs[0])
    return None if before is None else tuple(before[axis] for axis in _read_axes(transpose))


def _read_axes(transpose: Any) -> tuple[int, ...]:
    return tuple(transpose.attributes.get_ints("perm"))
