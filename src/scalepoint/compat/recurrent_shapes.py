"""Output shapes of recurrent layers, without running their steps.

    x [T, B, I], states [D * L, B, H]  ->  y [T, B, D * H], states        batch_first: x [B, T, I], y [B, T, D * H]
    T steps, B batch, D directions, L layers, I input size, H hidden size

Torch 2.13 infers these shapes by unrolling the layer, which turns a symbolic sequence length into a number.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from scalepoint.compat import patches_enabled
from scalepoint.compat.torch_names import FakeTensor

aten = torch.ops.aten
OPERATIONS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


@contextmanager
def any_length_recurrent_shapes() -> Iterator[None]:
    """Inside this context, recurrent layers over fake tensors keep a symbolic sequence length."""
    if not patches_enabled():
        yield
        return
    originals = [
        (operation, dict(operation.py_kernels), decomposition_table.get(operation)) for operation in OPERATIONS
    ]
    for operation, kernels, decomposition in originals:
        shape_kernels = {key: _make_shape_kernel(kernel) for key, kernel in kernels.items()}
        shape_decomposition = None if decomposition is None else _make_shape_kernel(decomposition)
        _set_kernels(operation, shape_kernels, shape_decomposition)
    try:
        yield
    finally:
        for operation, kernels, decomposition in originals:
            _set_kernels(operation, kernels, decomposition)


def _set_kernels(operation: Any, kernels: Mapping[Any, Any], decomposition: Any) -> None:
    """Set the kernels in both tables that torch reads, and clear the operation's cache of chosen kernels."""
    operation.py_kernels.update(kernels)
    operation._dispatch_cache.clear()
    if decomposition is not None:
        decomposition_table[operation] = decomposition


def _make_shape_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel that only computes shapes for fake tensors, and calls the original one for others."""

    def infer_shapes(x: Tensor, hidden: Any, *rest: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return original(x, hidden, *rest)
        states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        *_, is_bidirectional, is_batch_first = rest
        # Torch stores the output as [T, B, ...] and transposes it for batch_first: the strides must be the same here.
        time_first = x.transpose(0, 1) if is_batch_first else x
        output_size = states[0].shape[-1] * (2 if is_bidirectional else 1)
        output = time_first.new_empty((*time_first.shape[:-1], output_size))
        if is_batch_first:
            output = output.transpose(0, 1)
        return (output, *(torch.empty_like(state) for state in states))

    return infer_shapes
