"""Operations that LiteRT does not have, written with operations that it has.

Each function has the signature of its aten operation, except `attention`, the core of formats/lowering.py. It returns
NotImplemented for arguments that need no decomposition or have none. Then the operation stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from scalepoint.formats import recurrent
from scalepoint.formats.litert.graph_writer import OPERATION_WRITERS
from scalepoint.formats.lowering import attention_from_core, mask_to_bias, pairwise_distances

aten = torch.ops.aten
SLICE_TO_END = 2**62  # torch writes an open end as 2**63 - 1


def decompose_program(program: ExportedProgram) -> ExportedProgram:
    """Decompose the operations that have no writer, with torch's decompositions and those of this module."""
    torch_decompositions: Any = torch.export.default_decompositions()
    # Sizes and strides (aten.sym_size, aten.sym_stride) are numbers of the exported graph, not operations of the file.
    decompositions = {
        operation: decomposition
        for operation, decomposition in torch_decompositions.items()
        if operation not in OPERATION_WRITERS and not str(operation).startswith("aten.sym_")
    }
    decomposed: ExportedProgram = program.run_decompositions({**decompositions, **DECOMPOSITIONS})
    return decomposed


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    scores = scores if mask is None else scores + mask_to_bias(mask, query.dtype)
    return torch.matmul(torch.softmax(scores, -1), value)


def vector_norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Compute sqrt(sum x^2). `dtype` has no effect: all values of the file are float32."""
    if order != 2:
        return NotImplemented
    axes = list(range(x.ndim)) if dim is None else dim
    return torch.sqrt(x.square().sum(axes, keepdim=keepdim))


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    axes = list(range(-len(shape), 0))
    centered = x - x.mean(axes, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a batch norm in eval mode as x * scale + offset, with one scale and one offset per channel."""
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    offset = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1, *[1] * (x.ndim - 2)]
    empty = x.new_empty(0)  # the saved mean and variance, which only training reads
    return x * scale.reshape(shape) + offset.reshape(shape), empty, empty


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    centered = grouped - grouped.mean(-1, keepdim=True)
    y = (centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = [1, -1, *[1] * (x.ndim - 2)]
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, _: Any
) -> Any:
    return group_norm(x, x.shape[1], weight, bias, eps) if use_input_stats else NotImplemented


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, axis in zip(shifts, dims, strict=True):
        split_at = (-shift) % x.shape[axis]
        if split_at:
            end = x.narrow(axis, split_at, x.shape[axis] - split_at)
            x = torch.cat([end, x.narrow(axis, 0, split_at)], axis)
    return x


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    batch, channels, height, width = x.shape
    split = x.reshape(batch, channels // factor**2, factor, factor, height, width).permute(0, 1, 4, 2, 5, 3)
    return split.reshape(batch, channels // factor**2, height * factor, width * factor)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """Compute log(1 + exp(b x)) / b as (max(b x, 0) + log(1 + exp(-|b x|))) / b, which cannot overflow.

    So `threshold` is not needed, above which torch returns x.
    """
    scaled = x * beta
    return (torch.relu(scaled) + torch.log(torch.exp(-scaled.abs()) + 1)) / beta


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """Compute an ELU with other parameters from a ReLU and from LiteRT's ELU, whose parameters are all 1."""
    if (alpha, scale, input_scale) == (1, 1, 1):
        return NotImplemented
    negative_part = aten.elu(aten.clamp(x * input_scale, max=0)) * (alpha * scale)
    return (torch.relu(x) if scale == 1 else torch.relu(x) * scale) + negative_part


def average_pool_1d(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), *rest: Any
) -> Any:
    pads = [0, *padding]
    return aten.avg_pool2d(x.unsqueeze(2), [1, *size], [1, *(stride or size)], pads, *rest[:2]).squeeze(2)


def max_pool_1d(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), *rest: Any
) -> Any:
    dilation = [1, *rest[0]] if rest else [1, 1]
    pooled = aten.max_pool2d(x.unsqueeze(2), [1, *size], [1, *(stride or size)], [0, *padding], dilation, *rest[1:])
    return pooled.squeeze(2)


def adaptive_average(x: Tensor, size: Sequence[int]) -> Any:
    """Compute windows of different sizes as y = R^T x C, with the window weights R of rows and C of columns."""
    sizes = [(int(input_size), output_size) for input_size, output_size in zip(x.shape[2:], size, strict=True)]
    if all(input_size % output_size == 0 for input_size, output_size in sizes):
        return NotImplemented
    row_weights, column_weights = (_window_weights(*axis_sizes) for axis_sizes in sizes)
    return torch.matmul(torch.matmul(x, column_weights).transpose(2, 3), row_weights).transpose(2, 3)


def _window_weights(input_size: int, output_size: int) -> Tensor:
    """Return (input_size, output_size): 1 / length of a window for the elements in it, else 0."""
    window, position = torch.arange(output_size), torch.arange(input_size)[:, None]
    start = window * input_size // output_size
    end = ((window + 1) * input_size + output_size - 1) // output_size
    return ((position >= start) & (position < end)).to(torch.float32) / (end - start).to(torch.float32)


def slice_scatter(
    x: Tensor, replacement: Tensor, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Replace a slice of `x`: concatenate the elements before it, the replacement, and the elements after it."""
    size = x.shape[axis]
    if step == 1 and not start and (end is None or end >= SLICE_TO_END):
        return replacement
    if step != 1 or not isinstance(size, int):
        return NotImplemented
    if not replacement.shape[axis]:
        return x
    first, last, _ = slice(start, end).indices(size)
    parts = [x.narrow(axis, 0, first), replacement, x.narrow(axis, last, size - last)]
    parts = [part for part in parts if part.shape[axis] != 0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def select_scatter(x: Tensor, replacement: Tensor, axis: int, index: int) -> Any:
    index = index % x.shape[axis] if isinstance(x.shape[axis], int) else index
    return slice_scatter(x, replacement.unsqueeze(axis), axis, index, index + 1)


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, *_: Any) -> Any:
    """Write one value where a mask of the shape of `x` is true."""
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
    aten.instance_norm.default: instance_norm,
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
}
