"""Recurrent layers step by step, for files that have no operator for them.

    lstm   i, f, g, o = W x + U h + b;  c = s(f) c + s(i) tanh(g);  h = P (s(o) tanh(c))
    gru    r, z = s(W x + U h + b);     n = tanh(W x + b + r (U h + b'));  h = n + z (h - n)
    rnn    h = act(W x + U h + b)

The product with the input is one for all steps; the one with the state is written once a step, as long as the example.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor | None]], State]  # (W x, state, weights) -> state; h is its first


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
    """aten.lstm.input in eval; with a projection where a fifth weight says so."""
    how = (has_biases, num_layers, bidirectional, batch_first)
    projects = has_projection(params, has_biases, num_layers, bidirectional)
    y, (h, c) = _layers(_lstm_step, x, hx, params, how, projects=projects)
    return y, h, c


def has_projection(params: Sequence[Any], has_biases: bool, num_layers: int, bidirectional: bool) -> bool:
    """Whether an LSTM's output is a product of its hidden state."""
    return len(params) > (4 if has_biases else 2) * num_layers * (2 if bidirectional else 1)


def gru(x: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, *rest: Any) -> Any:
    """aten.gru.input in eval."""
    y, (h,) = _layers(_gru_step, x, (hx,), params, (has_biases, num_layers, *rest[2:]))
    return y, h


def rnn(act: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """aten.rnn_tanh.input or aten.rnn_relu.input in eval."""

    def run(x: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, *rest: Any) -> Any:
        y, (h,) = _layers(partial(_rnn_step, act), x, (hx,), params, (has_biases, num_layers, *rest[2:]))
        return y, h

    return run


def _lstm_step(given: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    h, c = state
    _, u, _, bias, projection = weights
    i, f, g, o = (given + torch.nn.functional.linear(h, _some(u), bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if projection is None else torch.nn.functional.linear(h, projection)), c


def _gru_step(given: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    (h,) = state
    r, z, n = given.chunk(3, -1)
    own_r, own_z, own_n = torch.nn.functional.linear(h, _some(weights[1]), weights[3]).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + own_r) * own_n)
    return (n + torch.sigmoid(z + own_z) * (h - n),)


def _rnn_step(act: Callable[[Tensor], Tensor], given: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    return (act(given + torch.nn.functional.linear(state[0], _some(weights[1]), weights[3])),)


def _some(weight: Tensor | None) -> Tensor:
    assert weight is not None  # noqa: S101  # only biases and projections may be missing
    return weight


def _layers(
    step: Step,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    how: tuple[bool, int, bool, bool],
    *,
    projects: bool = False,
) -> tuple[Tensor, State]:
    """All layers, and in each both directions where there are two; the samples stand first in between."""
    has_biases, layers, is_both, is_first = how
    is_single = x.ndim == 2  # no batch
    x = x.unsqueeze(0) if is_single else x if is_first else x.transpose(0, 1)
    states = [each.unsqueeze(1) for each in states] if is_single else states
    weights = _weights(params, has_biases, projects)
    last: list[State] = []
    for layer in range(layers):
        made = []
        for direction in range(2 if is_both else 1):
            begin = tuple(each[layer * (2 if is_both else 1) + direction] for each in states)
            y, end = _direction(step, x, begin, next(weights), is_back=direction == 1)
            made.append(y)
            last.append(end)
        x = made[0] if len(made) == 1 else torch.cat(made, -1)
    ends = tuple(torch.stack(each) for each in zip(*last, strict=True))
    if is_single:
        return x.squeeze(0), tuple(each.squeeze(1) for each in ends)
    return (x if is_first else x.transpose(0, 1)), ends


def _weights(params: Sequence[Tensor], has_biases: bool, projects: bool) -> Iterator[list[Tensor | None]]:
    """Of one direction after the other: W, U, b, b', P."""
    given = iter(params)
    for w in given:
        found: list[Tensor | None] = [w, next(given)]
        found += [next(given), next(given)] if has_biases else [None, None]
        yield [*found, next(given) if projects else None]


def _direction(
    step: Step, x: Tensor, state: State, weights: Sequence[Tensor | None], *, is_back: bool
) -> tuple[Tensor, State]:
    given = torch.nn.functional.linear(x, _some(weights[0]), weights[2])
    outputs: list[Tensor] = []
    for place in range(x.shape[1]):
        state = step(given[:, -1 - place if is_back else place], state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if is_back else outputs, 1), state


PARTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.lstm.input: lstm,
    torch.ops.aten.gru.input: gru,
    torch.ops.aten.rnn_tanh.input: rnn(torch.tanh),
    torch.ops.aten.rnn_relu.input: rnn(torch.relu),
}
