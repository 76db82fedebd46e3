"""If, Loop and Scan whose conditions and counts are known when the model is captured, and sequences of tensors.

A branch is chosen, and a loop is unrolled. What depends on data runs, but cannot be captured.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.operators import Node, operator, require
from scalepoint.onnx_reader.values import AnyValue, KnownArray, as_number, as_tensor, known

CONTROL_FLOW = ("If", "Loop", "Scan")
BRANCHES = {True: "then_branch", False: "else_branch"}  # attributes of If
MAX_ITERATIONS = 10_000


class Body(Protocol):
    """A graph inside of If, Loop or Scan: a GraphModule."""

    graph_outputs: tuple[Any, ...]

    def run(self, inputs: Sequence[AnyValue], outer: Mapping[str, AnyValue]) -> list[AnyValue]: ...


class If(nn.Module):
    """Runs one of two graphs. A branch that cannot be read is an error only if it is chosen."""

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
    """Runs a body a known number of times."""

    def __init__(self, node: Node, body: Body) -> None:
        super().__init__()
        self.node = node
        self.body = body

    def forward(self, *inputs: AnyValue, outer: Mapping[str, AnyValue]) -> Any:
        count, condition, *state = inputs
        trips = MAX_ITERATIONS if count is None else int(as_number(count, "number of iterations"))
        is_active = condition is None or bool(as_number(condition, "condition"))
        results: list[list[Any]] = [[] for _ in range(len(self.node.outputs) - len(state))]
        iteration = 0
        while iteration < trips and is_active:
            require(iteration < MAX_ITERATIONS, f"a Loop of more than {MAX_ITERATIONS} iterations")
            active = known([True], (), torch.bool)
            outputs = self.body.run([known([iteration], ()), active, *state], outer)
            is_active = bool(as_number(outputs[0], "condition"))
            state = outputs[1 : len(state) + 1]
            for result, value in zip(results, outputs[len(state) + 1 :], strict=True):
                result.append(as_tensor(value))
            iteration += 1
        require(bool(iteration) or not results, "a Loop without iterations that has scan outputs")
        return (*state, *(torch.stack(values) for values in results))


class Scan(nn.Module):
    """Runs a body for each slice of its inputs."""

    def __init__(self, node: Node, body: Body) -> None:
        super().__init__()
        require(node.opset >= 9, "Scan before opset 9")
        self.node = node
        self.body = body

    def forward(self, *inputs: AnyValue, outer: Mapping[str, AnyValue]) -> Any:
        node, count = self.node, self.node.get("num_scan_inputs")
        states, scanned = list(inputs[:-count]), [as_tensor(value) for value in inputs[-count:]]
        results_count = len(self.body.graph_outputs) - len(states)
        axes = node.get("scan_input_axes", [0] * count)
        directions = node.get("scan_input_directions", [0] * count)
        slices = [
            value.flip(axis) if back else value for value, axis, back in zip(scanned, axes, directions, strict=True)
        ]
        length = slices[0].shape[axes[0]]
        require(isinstance(length, int), "a Scan over a free axis")
        require(length <= MAX_ITERATIONS, f"a Scan of more than {MAX_ITERATIONS} slices")
        results: list[list[Any]] = [[] for _ in range(results_count)]
        for index in range(length):
            outputs = self.body.run([*states, *(v.select(a, index) for v, a in zip(slices, axes, strict=True))], outer)
            states = outputs[: len(states)]
            for result, value in zip(results, outputs[len(states) :], strict=True):
                result.append(as_tensor(value))
        output_axes = node.get("scan_output_axes", [0] * results_count)
        output_directions = node.get("scan_output_directions", [0] * results_count)
        stacked = [torch.stack(values, axis) for values, axis in zip(results, output_axes, strict=True)]
        turned = [v.flip(a) if back else v for v, a, back in zip(stacked, output_axes, output_directions, strict=True)]
        return (*states, *turned)


# --- sequences: lists of values ------------------------------------------------------------------------------------


@operator("SequenceEmpty")
def sequence_empty(node: Node) -> list[AnyValue]:
    return []


@operator("SequenceConstruct")
def sequence_construct(node: Node, *values: AnyValue) -> list[AnyValue]:
    return list(values)


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


@operator("SequenceLength")
def sequence_length(node: Node, sequence: list[AnyValue]) -> KnownArray:
    return known([len(sequence)], ())


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
    lengths = sizes.to_list() if isinstance(sizes, KnownArray) else sizes.reshape(-1).tolist()
    return list(x.split(lengths[0] if sizes.ndim == 0 else lengths, axis))
