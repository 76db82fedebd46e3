"""Operations that LiteRT has none for, in the parts that it has: written with torch, taken apart before the walk."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from scalepoint.formats import recurrent
from scalepoint.formats.litert.walk import OPERATION_WRITERS
from scalepoint.formats.lowering import attention_from_core, mask_to_bias, pairwise_distances

aten = torch.ops.aten
SLICE_TO_END = 2**62  # an end beyond all that there is


def decompose_program(program: ExportedProgram) -> ExportedProgram:
    """A program of operations that have a form, where their parts have one."""
    table: Any = torch.export.default_decompositions()
    known = {
        target: parts for target, parts in table.items() if target not in OPERATION_WRITERS and not _is_size(target)
    }
    made: ExportedProgram = program.run_decompositions({**known, **DECOMPOSITIONS})
    return made


def _is_size(target: Any) -> bool:
    return str(target).startswith("aten.sym_")


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    scores = scores if mask is None else scores + mask_to_bias(mask, query.dtype)
    return torch.matmul(torch.softmax(scores, -1), value)


def vector_norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The root of the sum of squares."""
    axes = list(range(x.ndim)) if dim is None else dim
    return torch.sqrt(x.square().sum(axes, keepdim=keepdim)) if order == 2 else NotImplemented


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    axes = list(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    made = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With the statistics of the model: one factor and one term a channel."""
    factor = torch.rsqrt(var + eps)
    factor = factor if weight is None else factor * weight
    term = -mean * factor if bias is None else bias - mean * factor
    shape = [1, -1, *[1] * (x.ndim - 2)]
    empty = x.new_empty(0)
    return x * factor.reshape(shape) + term.reshape(shape), empty, empty


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Tensor:
    split = x.reshape(x.shape[0], groups, -1)
    centred = split - split.mean(-1, keepdim=True)
    made = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    made = made if weight is None else made * weight.reshape(shape)
    return made if bias is None else made + bias.reshape(shape)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, axis in zip(shifts, dims, strict=True):
        cut = (-shift) % x.shape[axis]
        if cut:
            x = torch.cat([x.narrow(axis, cut, x.shape[axis] - cut), x.narrow(axis, 0, cut)], axis)
    return x


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    count, channels, height, width = x.shape
    split = x.reshape(count, channels // factor**2, factor, factor, height, width).permute(0, 1, 4, 2, 5, 3)
    return split.reshape(count, channels // factor**2, height * factor, width * factor)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """max(bx, 0) + log(1 + exp(-|bx|)), which nothing overflows in."""
    scaled = x * beta
    return (torch.relu(scaled) + torch.log(torch.exp(-scaled.abs()) + 1)) / beta


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """LiteRT has an ELU with an alpha of 1 and without scales: others are made of it and of a ReLU."""
    if (alpha, scale, input_scale) == (1, 1, 1):
        return NotImplemented
    below = aten.elu(aten.clamp(x * input_scale, max=0)) * (alpha * scale)
    return (torch.relu(x) if scale == 1 else torch.relu(x) * scale) + below


def average_pool_1d(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), *rest: Any
) -> Any:
    pads = [0, *padding]
    return aten.avg_pool2d(x.unsqueeze(2), [1, *size], [1, *(stride or size)], pads, *rest[:2]).squeeze(2)


def max_pool_1d(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), *rest: Any
) -> Any:
    dilation = [1, *rest[0]] if rest else [1, 1]
    made = aten.max_pool2d(x.unsqueeze(2), [1, *size], [1, *(stride or size)], [0, *padding], dilation, *rest[1:])
    return made.squeeze(2)


def adaptive_average(x: Tensor, size: Sequence[int]) -> Any:
    """In windows of several sizes: a product with what each contributes, along either axis."""
    if all(int(whole) % part == 0 for whole, part in zip(x.shape[2:], size, strict=True)):
        return NotImplemented
    rows, columns = (_window_weights(int(whole), part) for whole, part in zip(x.shape[2:], size, strict=True))
    return torch.matmul(torch.matmul(x, columns).transpose(2, 3), rows).transpose(2, 3)


def _window_weights(whole: int, part: int) -> Tensor:
    """(whole, part): 1 / length of a window for its elements, 0 for others."""
    window, place = torch.arange(part), torch.arange(whole)[:, None]
    start, end = window * whole // part, ((window + 1) * whole + part - 1) // part
    return ((place >= start) & (place < end)).to(torch.float32) / (end - start).to(torch.float32)


def slice_scatter(x: Tensor, piece: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A slice that is written: what stands before it, it, and what stands behind it."""
    size = x.shape[axis]
    if step == 1 and not start and (end is None or end >= SLICE_TO_END):
        return piece
    if step != 1 or not isinstance(size, int):
        return NotImplemented
    first, last, _ = slice(start, end).indices(size)
    kept = [x.narrow(axis, 0, first), piece, x.narrow(axis, last, size - last)]
    parts = [each for each in kept if each.shape[axis] != 0]
    return x if not piece.shape[axis] else parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def select_scatter(x: Tensor, piece: Tensor, axis: int, index: int) -> Any:
    index = index % x.shape[axis] if isinstance(x.shape[axis], int) else index
    return slice_scatter(x, piece.unsqueeze(axis), axis, index, index + 1)


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, *_: Any) -> Any:
    """Where a mask of the whole tensor says so, one value."""
    is_mask = len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].ndim == x.ndim
    if accumulate or not is_mask or values.numel() != 1:
        return NotImplemented
    return torch.where(indices[0], values.to(x.dtype).reshape(()), x)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **recurrent.RECURRENT_DECOMPOSITIONS,
    aten.slice_scatter.default: slice_scatter,
    aten.copy.default: lambda x, values, *_: values.to(x.dtype).expand(x.shape),
    aten.select_scatter.default: select_scatter,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.cdist.default: pairwise_distances,
    aten._cdist_forward.default: pairwise_distances,
    aten.layer_norm.default: layer_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.group_norm.default: group_norm,
    aten.instance_norm.default: lambda x, weight, bias, mean, var, use_input_stats, momentum, eps, _: (
        group_norm(x, x.shape[1], weight, bias, eps) if use_input_stats else NotImplemented
    ),
    aten.scaled_dot_product_attention.default: attention_from_core(attention),
    aten.linalg_vector_norm.default: vector_norm,
    aten.silu.default: lambda x: x * torch.sigmoid(x),
    aten.hardsigmoid.default: lambda x: aten.relu6(x + 3) * (1 / 6),
    aten.mish.default: lambda x: x * torch.tanh(softplus(x)),
    aten.softplus.default: softplus,
    aten.elu.default: elu,
    aten.celu.default: lambda x, alpha=1: aten.elu(x) if alpha == 1 else elu(x, alpha, 1, 1 / alpha),
    aten.log_sigmoid.default: lambda x: -softplus(-x),
    aten.roll.default: roll,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.adaptive_avg_pool2d.default: adaptive_average,
    aten.avg_pool1d.default: average_pool_1d,
    aten.max_pool1d.default: max_pool_1d,
    aten.adaptive_avg_pool1d.default: lambda x, size: aten.adaptive_avg_pool2d(x.unsqueeze(2), [1, *size]).squeeze(2),
    aten.sigmoid_.default: torch.sigmoid,
}
