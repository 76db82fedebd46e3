"""LSTM, GRU and RNN."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.onnx_reader.layers import parameter
from scalepoint.onnx_reader.operators import Layer, Node, operator, require
from scalepoint.onnx_reader.values import as_list

# Order of the gates in torch, as positions in ONNX's order: LSTM i o f c -> i f g o, GRU z r h -> r z n.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_MODULES: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Recurrent(nn.Module):
    """A recurrent layer of torch with the inputs and outputs of ONNX.

    ONNX has the output as (time, direction, batch, hidden), or as (batch, time, direction, hidden) with layout=1.
    """

    def __init__(self, cell: nn.RNNBase, *, is_reversed: bool, batch_first: bool, hidden_size: int) -> None:
        super().__init__()
        self.cell = cell
        self.is_reversed = is_reversed
        self.batch_first = batch_first
        self.hidden_size = hidden_size

    def forward(self, x: Tensor, state: Tensor | None = None, cell_state: Tensor | None = None) -> Any:
        states = [value for value in (state, cell_state) if value is not None]
        if self.batch_first:
            x, states = x.transpose(0, 1), [value.transpose(0, 1) for value in states]
        if self.is_reversed:
            x = x.flip(0)
        if isinstance(self.cell, nn.LSTM) and len(states) == 1:
            states.append(torch.zeros_like(states[0]))  # ONNX may omit the second state, torch may not
        y, last = self.cell(x, *([tuple(states)] if len(states) == 2 else states))
        if self.is_reversed:
            y = y.flip(0)
        directions = 2 if self.cell.bidirectional else 1
        y = y.reshape(y.shape[0], y.shape[1], directions, self.hidden_size).permute(0, 2, 1, 3)
        ends = list(last) if isinstance(last, tuple) else [last]
        if self.batch_first:
            y, ends = y.permute(2, 0, 1, 3), [value.transpose(0, 1) for value in ends]
        return (y, *ends)


def _gates_in_torch_order(kind: str, tensor: Tensor) -> Tensor:
    parts = tensor.chunk(len(_GATES[kind]))
    return torch.cat([parts[position] for position in _GATES[kind]])


def _check_attributes(node: Node) -> None:
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    activations = [name.lower() for name in node.get("activations") or _ACTIVATIONS[node.operator] * directions]
    require(activations == _ACTIVATIONS[node.operator] * directions, f"{node.operator} with activations {activations}")
    require(not node.get("clip") and not node.get("input_forget", 0), f"{node.operator} with clip or input_forget")
    if node.operator == "GRU":
        require(bool(node.get("linear_before_reset", 0)), "GRU with linear_before_reset=0")


def recurrent_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight, recurrence, bias = constants[1:4]
    has_computed_bias = len(node.inputs) > 3 and bool(node.inputs[3]) and bias is None
    has_peepholes = len(node.inputs) > 7 and bool(node.inputs[7])
    if weight is None or recurrence is None or has_computed_bias or has_peepholes:
        return None
    _check_attributes(node)
    if len(node.inputs) > 4 and node.inputs[4]:
        lengths = constants[4]
        are_equal = lengths is not None and bool((lengths == lengths[0]).all())
        require(are_equal, f"{node.operator} with sequence_lens that differ or are not constant")
    # Inputs 5 and 6 are the initial states.
    data_inputs = (0, 5, 6) if node.operator == "LSTM" else (0, 5)
    return Layer(_make_module(node, weight, recurrence, bias), data_inputs)


def _make_module(node: Node, weight: Tensor, recurrence: Tensor, bias: Tensor | None) -> Recurrent:
    return Recurrent(
        _make_cell(node, weight, recurrence, bias),
        is_reversed=node.get("direction", "forward") == "reverse",
        batch_first=bool(node.get("layout", 0)),
        hidden_size=recurrence.shape[-1],
    )


def _make_cell(node: Node, weight: Tensor, recurrence: Tensor, bias: Tensor | None) -> nn.RNNBase:
    kind, directions, hidden = node.operator, weight.shape[0], recurrence.shape[-1]
    cell: nn.RNNBase = _MODULES[kind](weight.shape[-1], hidden, bias=bias is not None, bidirectional=directions == 2)
    for direction, suffix in zip(range(directions), ("", "_reverse"), strict=False):
        tensors = {"weight_ih_l0": weight[direction], "weight_hh_l0": recurrence[direction]}
        if bias is not None:
            tensors["bias_ih_l0"], tensors["bias_hh_l0"] = bias[direction].chunk(2)
        for name, tensor in tensors.items():
            setattr(cell, f"{name}{suffix}", parameter(_gates_in_torch_order(kind, tensor)))
    return cell


@operator("LSTM", "GRU", "RNN", known_inputs=(4,), make_layer=recurrent_layer)
def recurrent(node: Node, x: Tensor, weight: Tensor, recurrence: Tensor, *rest: Any) -> Any:
    """Compute a node whose weights are not constants."""
    bias, lengths, state, cell_state, peepholes = (*rest, *[None] * 5)[:5]
    _check_attributes(node)
    require(peepholes is None, "peepholes")
    if lengths is not None:
        steps = x.shape[1 if node.get("layout", 0) else 0]
        is_whole_input = all(length == steps for length in as_list(lengths, "sequence_lens"))
        require(is_whole_input, "sequence_lens shorter than the input")
    module = _make_module(node, weight, recurrence, bias)
    return module(x, *(value for value in (state, cell_state) if value is not None))
