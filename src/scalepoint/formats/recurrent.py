"""Recurrent layers as single steps, for formats without an operator for them.

    lstm   i, f, g, o = W x + U h + b;  c = s(f) c + s(i) tanh(g);  h = P (s(o) tanh(c))
    gru    r, z = s(W x + U h + b);     n = tanh(W x + b + r (U h + b'));  h = n + z (h - n)
    rnn    h = act(W x + U h + b)

W x is one product for all steps. The rest is written once per step, so the sequence length is that of the example.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]  # h, and c of an LSTM


class _Weights(NamedTuple):
    """The weights of one direction of a layer."""

    input: Tensor  # W
    hidden: Tensor  # U
    input_bias: Tensor | None  # b
    hidden_bias: Tensor | None  # b'
    projection: Tensor | None  # P, of an LSTM with proj_size > 0


RecurrentStep = Callable[[Tensor, State, _Weights], State]  # (W x, state, weights) -> state


def lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute aten.lstm.input in eval mode."""
    projects = has_projection(params, has_biases, num_layers, bidirectional)
    weights = _iterate_weights(params, has_biases, projects)
    y, (h, c) = _run_layers(_lstm_step, x, hx, weights, num_layers, bidirectional, batch_first)
    return y, h, c


def has_projection(params: Sequence[Any], has_biases: bool, num_layers: int, bidirectional: bool) -> bool:
    """Whether an LSTM projects its hidden state (proj_size > 0): its layers then have one more weight."""
    weights_per_direction = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    return len(params) > weights_per_direction * directions * num_layers


def _run_without_cell(
    step: RecurrentStep,
    x: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Compute aten.gru.input, aten.rnn_tanh.input or aten.rnn_relu.input in eval mode."""
    weights = _iterate_weights(params, has_biases, projects=False)
    y, (h,) = _run_layers(step, x, (hx,), weights, num_layers, bidirectional, batch_first)
    return y, h


def _lstm_step(input_product: Tensor, state: State, weights: _Weights) -> State:
    h, c = state
    i, f, g, o = (input_product + F.linear(h, weights.hidden, weights.hidden_bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if weights.projection is None else F.linear(h, weights.projection)), c


def _gru_step(input_product: Tensor, state: State, weights: _Weights) -> State:
    (h,) = state
    r, z, n = input_product.chunk(3, -1)
    state_r, state_z, state_n = F.linear(h, weights.hidden, weights.hidden_bias).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + state_r) * state_n)
    return (n + torch.sigmoid(z + state_z) * (h - n),)


def _rnn_step(act: Callable[[Tensor], Tensor], input_product: Tensor, state: State, weights: _Weights) -> State:
    (h,) = state
    return (act(input_product + F.linear(h, weights.hidden, weights.hidden_bias)),)


def _run_layers(
    step: RecurrentStep,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Iterator[_Weights],
    layers: int,
    is_bidirectional: bool,
    is_batch_first: bool,
) -> tuple[Tensor, State]:
    """Run all layers, each in one or two directions. Between the layers x has the shape (batch, steps, features)."""
    directions = 2 if is_bidirectional else 1
    is_unbatched = x.ndim == 2
    if is_unbatched:
        x = x.unsqueeze(0)
        states = [state.unsqueeze(1) for state in states]
    elif not is_batch_first:
        x = x.transpose(0, 1)
    final_states: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            initial_state = tuple(state[layer * directions + direction] for state in states)
            y, final_state = _run_direction(step, x, initial_state, next(weights), is_reversed=direction == 1)
            outputs.append(y)
            final_states.append(final_state)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    stacked_states = tuple(torch.stack(state) for state in zip(*final_states, strict=True))
    if is_unbatched:
        return x.squeeze(0), tuple(state.squeeze(1) for state in stacked_states)
    return (x if is_batch_first else x.transpose(0, 1)), stacked_states


def _iterate_weights(params: Sequence[Tensor], has_biases: bool, projects: bool) -> Iterator[_Weights]:
    """Yield the weights of each direction of each layer."""
    tensors = iter(params)
    for w in tensors:
        u = next(tensors)
        input_bias = next(tensors) if has_biases else None
        hidden_bias = next(tensors) if has_biases else None
        yield _Weights(w, u, input_bias, hidden_bias, next(tensors) if projects else None)


def _run_direction(
    step: RecurrentStep, x: Tensor, state: State, weights: _Weights, *, is_reversed: bool
) -> tuple[Tensor, State]:
    input_products = F.linear(x, weights.input, weights.input_bias)
    outputs: list[Tensor] = []
    for step_index in range(x.shape[1]):
        state = step(input_products[:, -1 - step_index if is_reversed else step_index], state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if is_reversed else outputs, 1), state


RECURRENT_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.lstm.input: lstm,
    torch.ops.aten.gru.input: partial(_run_without_cell, _gru_step),
    torch.ops.aten.rnn_tanh.input: partial(_run_without_cell, partial(_rnn_step, torch.tanh)),
    torch.ops.aten.rnn_relu.input: partial(_run_without_cell, partial(_rnn_step, torch.relu)),
}
