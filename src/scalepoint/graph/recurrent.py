"""Shapes of recurrent layers for sequences of any length. Torch works them out step by step, which fixes the length.

x [T, B, I], states [D L, B, H]  ->  y [T, B, D H], states      T steps, D directions, L layers; B first if asked
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensor

aten = torch.ops.aten
OPERATIONS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


@contextmanager
def shapes_of_any_length() -> Iterator[None]:
    """Meanwhile a recurrent layer over fake tensors gives its shapes, and does not count the steps."""
    before = [(each, dict(each.py_kernels), decomposition_table.get(each)) for each in OPERATIONS]
    for each, kernels, parts in before:
        _install_kernel(
            each, {key: _make_shape_kernel(own) for key, own in kernels.items()}, parts and _make_shape_kernel(parts)
        )
    try:
        yield
    finally:
        for each, kernels, parts in before:
            _install_kernel(each, kernels, parts)


def _install_kernel(operation: Any, kernels: Mapping[Any, Any], parts: Any) -> None:
    """In both places that torch takes a kernel from, and out of where it keeps what it found."""
    operation.py_kernels.update(kernels)
    operation._dispatch_cache.clear()
    if parts is not None:
        decomposition_table[operation] = parts


def _make_shape_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    def shapes(x: Tensor, hidden: Any, *rest: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return own(x, hidden, *rest)
        states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        *_, is_both_ways, is_batch_first = rest
        over_time = x.transpose(0, 1) if is_batch_first else x  # as torch lays the result out
        gives = over_time.new_empty((*over_time.shape[:-1], states[0].shape[-1] * (2 if is_both_ways else 1)))
        return (gives.transpose(0, 1) if is_batch_first else gives, *(torch.empty_like(each) for each in states))

    return shapes
