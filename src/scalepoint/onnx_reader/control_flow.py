"""If, Loop and Scan, and sequences of tensors.

When torch.export captures the model, only the chosen branch is recorded, and loops are unrolled. So conditions and
numbers of iterations must not depend on data then.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.operators import Node, add_operator, operator, require
from scalepoint.onnx_reader.values import AnyValue, as_list, as_number, as_tensor, known_array

CONTROL_FLOW = ("If", "Loop", "Scan")
BRANCHES = {True: "then_branch", False: "else_branch"}  # attributes of If
MAX_ITERATIONS = 10_000


class Body(Protocol):
    """A graph inside of If, Loop or Scan. It is a GraphModule, which this module cannot import."""

    graph_outputs: tuple[Any, ...]

    def run(self, inputs: Sequence[AnyValue], outer: Mapping[str, AnyValue]) -> list[AnyValue]: ...


class If(nn.Module):
    """Runs one of two graphs. A branch that could not be read raises its error only if it is chosen."""

    def __init__(self, branches: Mapping[bool, nn.Module], errors: Mapping[bool, str]) -> None:
        super().__init__()
        self.errors = dict(errors)
        for choice, branch in branches.items():
            self.add_module(BRANCHES[choice], branch)

    def forward(self, condition: AnyValue, outer: Mapping[str, AnyValue]) -> Any:
        choice = bool(as_number(condition, "condition"))
        if choice in self.errors:
            raise OnnxReadError(self.errors[choice])
        branch: Any = self.get_submodule(BRANCHES[choice])
        return tuple(branch.run([], outer))


class Loop(nn.Module):
    """Runs a body until a count is reached or a condition is false.

    The body takes iteration, condition and states; it returns condition, states, and slices of the scan outputs.
    """

    def __init__(self, node: Node, body: Body) -> None:
        super().__init__()
        self.node = node
        self.body = body

    def forward(self, *inputs: AnyValue, outer: Mapping[str, AnyValue]) -> Any:
        count, condition, *state = inputs
        max_iterations = MAX_ITERATIONS if count is None else int(as_number(count, "number of iterations"))
        is_active = condition is None or bool(as_number(condition, "condition"))
        scan_outputs: list[list[Any]] = [[] for _ in range(len(self.node.outputs) - len(state))]
        iteration = 0
        while iteration < max_iterations and is_active:
            require(iteration < MAX_ITERATIONS, f"a Loop of more than {MAX_ITERATIONS} iterations")
            active = known_array([True], (), torch.bool)
            outputs = self.body.run([known_array([iteration], ()), active, *state], outer)
            is_active = bool(as_number(outputs[0], "condition"))
            state = outputs[1 : len(state) + 1]
            for slices, value in zip(scan_outputs, outputs[len(state) + 1 :], strict=True):
                slices.append(as_tensor(value))
            iteration += 1
        require(bool(iteration) or not scan_outputs, "a Loop without iterations that has scan outputs")
        return (*state, *(torch.stack(slices) for slices in scan_outputs))


class Scan(nn.Module):
    """Runs a body for each slice of its scan inputs.

    The body takes states and slices; it returns states, and slices of the scan outputs. A direction of 1 means that
    the slices are read or written from the last to the first.
    """

    def __init__(self, node: Node, body: Body) -> None:
        super().__init__()
        require(node.opset >= 9, "Scan before opset 9")
        self.node = node
        self.body = body

    def forward(self, *inputs: AnyValue, outer: Mapping[str, AnyValue]) -> Any:
        node, count = self.node, self.node.get("num_scan_inputs")
        states = list(inputs[:-count])
        axes = node.get("scan_input_axes", [0] * count)
        directions = node.get("scan_input_directions", [0] * count)
        scan_inputs = _flip_if_reversed([as_tensor(value) for value in inputs[-count:]], axes, directions)
        length = scan_inputs[0].shape[axes[0]]
        require(isinstance(length, int), "a Scan over a free axis")
        require(length <= MAX_ITERATIONS, f"a Scan of more than {MAX_ITERATIONS} slices")
        output_count = len(self.body.graph_outputs) - len(states)
        scan_outputs: list[list[Any]] = [[] for _ in range(output_count)]
        for index in range(length):
            current = [tensor.select(axis, index) for tensor, axis in zip(scan_inputs, axes, strict=True)]
            outputs = self.body.run([*states, *current], outer)
            states = outputs[: len(states)]
            for slices, value in zip(scan_outputs, outputs[len(states) :], strict=True):
                slices.append(as_tensor(value))
        axes = node.get("scan_output_axes", [0] * output_count)
        directions = node.get("scan_output_directions", [0] * output_count)
        stacked = [torch.stack(slices, axis) for slices, axis in zip(scan_outputs, axes, strict=True)]
        return (*states, *_flip_if_reversed(stacked, axes, directions))


def _flip_if_reversed(tensors: Sequence[Tensor], axes: Sequence[int], directions: Sequence[int]) -> list[Tensor]:
    return [
        tensor.flip(axis) if is_reversed else tensor
        for tensor, axis, is_reversed in zip(tensors, axes, directions, strict=True)
    ]


# --- sequences: lists of values ------------------------------------------------------------------------------------


add_operator("SequenceEmpty", lambda node: [])
add_operator("SequenceConstruct", lambda node, *values: list(values))


@operator("SequenceInsert", known_inputs=(1, 2))
def sequence_insert(node: Node, sequence: list[AnyValue], value: AnyValue, position: AnyValue = None) -> list[AnyValue]:
    index = len(sequence) if position is None else int(as_number(position, "position"))
    return [*sequence[:index], value, *sequence[index:]]


@operator("SequenceErase", known_inputs=(1,))
def sequence_erase(node: Node, sequence: list[AnyValue], position: AnyValue = None) -> list[AnyValue]:
    index = len(sequence) - 1 if position is None else int(as_number(position, "position")) % len(sequence)
    return [*sequence[:index], *sequence[index + 1 :]]


@operator("SequenceAt", known_inputs=(1,))
def sequence_at(node: Node, sequence: list[AnyValue], position: AnyValue) -> AnyValue:
    return sequence[int(as_number(position, "position"))]


add_operator("SequenceLength", lambda node, sequence: known_array([len(sequence)], ()))


@operator("ConcatFromSequence")
def concat_from_sequence(node: Node, sequence: list[AnyValue]) -> Any:
    tensors = [as_tensor(value) for value in sequence]
    axis = node.get("axis")
    return torch.stack(tensors, axis) if node.get("new_axis", 0) else torch.cat(tensors, axis)


@operator("SplitToSequence", known_inputs=(1,))
def split_to_sequence(node: Node, x: Any, sizes: AnyValue = None) -> list[Any]:
    axis = node.get("axis", 0)
    if sizes is None:
        parts = list(x.split(1, axis))
        return parts if node.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    lengths = as_list(sizes, "list of sizes")
    return list(x.split(lengths[0] if sizes.ndim == 0 else lengths, axis))
