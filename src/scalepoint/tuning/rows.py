"""The rows of a layer: the vectors that its weight is multiplied by, one per output position.

    y[r, g, o] = sum_n  row[r, g, n] * weight[g, o, n]

A linear layer has one row per vector. A convolution has one per patch of its padded input, in groups. A transposed
convolution has one per patch of its input with zeros inserted. Only the requested rows are gathered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from scalepoint.graph import Operation
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec.palette import get_cluster_dim, is_palette

# A layer with groups gets ROWS_PER_UNKNOWN rows for each of its unknowns, but at least MIN_ROWS.
MIN_ROWS = 4096
ROWS_PER_UNKNOWN = 128


@dataclass(frozen=True)
class Geometry:
    """Which inputs one output position of a layer reads: the settings of a linear layer or convolution.

    Attributes:
        kind: "linear", "conv" or "conv_transpose".
        groups: Number of groups of channels.
        kernel, stride, dilation: Settings of each axis.
        padding: Zeros before and after each axis.
    """

    kind: str
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    def count_rows(self, shape: torch.Size) -> int:
        """Return the number of rows of an input of this shape."""
        return prod(map(int, shape[:-1])) if self.kind == "linear" else prod(self._output_sizes(shape))

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the rows (r, groups, n) with these numbers, in float32. Only these are gathered; x is never padded."""
        if self.kind == "linear":
            rows = x.reshape(-1, x.shape[-1])
            rows = rows if len(index) == len(rows) else rows[index]  # all rows: the index is ascending, no copy needed
            return rows.to(torch.float32).unsqueeze(1)
        dims, output_sizes = len(self.kernel), self._output_sizes(x.shape)
        x = x if x.ndim == dims + 2 else x.unsqueeze(0)
        output_positions = torch.unravel_index(index, output_sizes)
        x = _insert_zeros(x, self.stride) if self.kind == "conv_transpose" else x
        # One index tensor per axis; together they broadcast to (r, *kernel).
        indices: list[Any] = [output_positions[0].view(-1, *[1] * dims), slice(None)]
        is_inside = torch.ones((1,) * (dims + 1), dtype=torch.bool)
        for axis, (positions, size) in enumerate(
            zip(self._tap_positions(output_positions[1:]), x.shape[2:], strict=True)
        ):
            tap_positions = positions.view(-1, *[1] * axis, positions.shape[1], *[1] * (dims - axis - 1))
            is_inside = is_inside & (tap_positions >= 0) & (tap_positions < size)
            indices.append(tap_positions.clamp(0, size - 1))
        # Indexing puts the channels, which have no index tensor, behind all other axes. Indices beyond the border were
        # clamped, so what they read is replaced by the zeros of the padding.
        patches = x[tuple(indices)].to(torch.float32).masked_fill_(~is_inside.unsqueeze(-1), 0.0).movedim(-1, 1)
        if self.kind == "conv_transpose":
            patches = patches.flip(tuple(range(2, 2 + dims)))
        return patches.reshape(patches.shape[0], self.groups, -1)

    def _output_sizes(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the number of samples, and the number of output positions on each axis."""
        dims = len(self.kernel)
        samples = int(shape[0]) if len(shape) == dims + 2 else 1
        sizes = list(map(int, shape[-dims:]))
        if self.kind == "conv_transpose":
            sizes = [(size - 1) * step + 1 for size, step in zip(sizes, self.stride, strict=True)]
        output_sizes = []
        axes = zip(sizes, self.padding, self.kernel, self.dilation, self._strides, strict=True)
        for size, pads, tap_count, dilation, stride in axes:
            window = dilation * (tap_count - 1) + 1
            output_sizes.append((size + sum(pads) - window) // stride + 1)
        return samples, *output_sizes

    def _tap_positions(self, output_positions: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield for each axis the input positions (r, kernel) that the kernel reads; negative in the padding."""
        axes = zip(output_positions, self._strides, self.padding, self.kernel, self.dilation, strict=True)
        for position, stride, pads, tap_count, dilation in axes:
            yield position[:, None] * stride - pads[0] + torch.arange(tap_count) * dilation

    @property
    def _strides(self) -> tuple[int, ...]:
        """A transposed convolution moves one by one over an input with zeros inserted."""
        return self.stride if self.kind == "conv" else (1,) * len(self.kernel)

    def output_rows(self, y: Tensor, count: int, outputs: int) -> Tensor | None:
        """Return the rows of a tensor that has the shape of the layer's output.

        Args:
            y: The tensor.
            count: Number of rows of the layer's input.
            outputs: Output channels per group.

        Returns:
            The rows (count, groups, outputs). None for a tensor of another shape, which is only broadcast to the
            output.
        """
        if self.kind != "linear":
            y = (y if y.ndim == len(self.kernel) + 2 else y.unsqueeze(0)).movedim(1, -1)
        flat = y.reshape(-1, y.shape[-1])
        if flat.shape != (count, outputs * self.groups):
            return None
        return flat.to(torch.float32).reshape(count, self.groups, outputs)

    def to_groups(self, weight: Tensor) -> Tensor:
        """Return a weight in the shape that its quantizer sees, as (groups, outputs, n)."""
        if self.kind != "conv_transpose":
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        inputs = weight.shape[0] // self.groups
        return weight.reshape(self.groups, inputs, weight.shape[1], -1).transpose(1, 2).flatten(2)

    def from_groups(self, grouped: Tensor, like: Tensor) -> Tensor:
        """Convert (groups, outputs, n) back to the shape of the weight `like`."""
        if self.kind != "conv_transpose":
            return grouped.reshape(like.shape)
        inputs = like.shape[0] // self.groups
        return grouped.reshape(self.groups, like.shape[1], inputs, -1).transpose(1, 2).reshape(like.shape)


def get_geometry(layer: QuantizedLayer) -> Geometry | None:
    """Return the geometry of a layer; None if rows cannot describe it.

    That is the case for padding other than zeros inside the layer, and for a palette whose tables are not of output
    channels, whose vectors cross groups of channels, or that is pruned.
    """
    geometry = _get_geometry(layer)
    quant = layer.weight_quant
    if geometry is None or not is_palette(quant.spec):
        return geometry
    output_axis = 1 if geometry.kind == "conv_transpose" else 0
    channels = layer.to_output_first(layer.weight).shape[output_axis]
    per_group = channels if output_axis else channels // geometry.groups
    has_tables_of_outputs = getattr(quant.calculator.granularity, "axis", None) == output_axis
    has_whole_vectors = per_group % get_cluster_dim(quant.spec) == 0
    return geometry if has_tables_of_outputs and has_whole_vectors and quant.sparsity is None else None


def _get_geometry(layer: QuantizedLayer) -> Geometry | None:
    if layer.kind == "linear":
        return Geometry("linear")
    operation, kernel = layer.operation, tuple(layer.weight.shape[2:])
    dims = len(kernel)
    if layer.kind == "head":  # the last linear layer, which a conversion turned into a 1x1 convolution
        ones = (1,) * dims
        return Geometry("conv", kernel=kernel, stride=ones, dilation=ones, padding=((0, 0),) * dims)
    stride = _get_setting_per_axis(operation, "stride", 1, dims)
    dilation = _get_setting_per_axis(operation, "dilation", 1, dims)
    groups = int(_get_setting_per_axis(operation, "groups", 1, 1)[0])
    if layer.kind == "conv_transpose":
        padding = _get_setting_per_axis(operation, "padding", 0, dims)
        output_padding = _get_setting_per_axis(operation, "output_padding", 0, dims)
        reaches = [step * (tap_count - 1) for tap_count, step in zip(kernel, dilation, strict=True)]
        edges = tuple(
            (reach - pad, reach - pad + extra)
            for reach, pad, extra in zip(reaches, padding, output_padding, strict=True)
        )
        return Geometry("conv_transpose", groups, kernel, stride, dilation, edges)
    if getattr(operation, "padding_mode", "zeros") != "zeros":
        return None
    edges = _edge_padding(_get_setting(operation, "padding", 0), kernel, dilation)
    return Geometry("conv", groups, kernel, stride, dilation, edges)


def _edge_padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the padding of a convolution before and after each axis."""
    if padding == "same":
        totals = [step * (tap_count - 1) for tap_count, step in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    sizes = (0,) * len(kernel) if padding == "valid" else _to_tuple(padding, len(kernel))
    return tuple((size, size) for size in sizes)


def _get_setting(operation: Any, name: str, default: int) -> Any:
    if isinstance(operation, Operation):
        return operation.arguments.get(name, default)
    return getattr(operation, name, default)


def _get_setting_per_axis(operation: Any, name: str, default: int, dims: int) -> tuple[int, ...]:
    return _to_tuple(_get_setting(operation, name, default), dims)


def _to_tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(map(int, values * dims if len(values) == 1 else values))


def _insert_zeros(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert stride - 1 zeros between neighbours: a transposed convolution is a convolution of the result."""
    if all(step == 1 for step in stride):
        return x
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], stride, strict=True)]
    spaced = x.new_zeros((*x.shape[:2], *sizes))
    positions: Any = (..., *(slice(None, None, step) for step in stride))
    spaced[positions] = x
    return spaced


def limit_row_count(max_rows: int, groups: int, unknowns: int) -> int:
    """Return how many rows to use. Rows of grouped layers are long but have few unknowns per output: fewer suffice."""
    return max_rows if groups == 1 else min(max_rows, max(MIN_ROWS, ROWS_PER_UNKNOWN * unknowns))


def sample_rows(first: int, count: int, share: float) -> Tensor:
    """Choose a share of the rows of a batch. A hash of a row's number decides, so the batch size does not matter.

    Args:
        first: Number of the first row of the batch, counted over all batches.
        count: Number of rows of the batch.
        share: Share of the rows to choose.

    Returns:
        Positions of the chosen rows in the batch, ascending.
    """
    if share >= 1:
        return torch.arange(count)
    return (hash_to_uniform(torch.arange(first, first + count)) < share).nonzero().view(-1)


def hash_to_uniform(numbers: Tensor, salt: int = 0) -> Tensor:
    """Return a number in [0, 1) for each integer, the same on every machine (splitmix64)."""
    h = (numbers.to(torch.int64) + salt) * -7046029254386353131 + 1442695040888963407
    h = (h ^ _shift_right(h, 30)) * -4658895280553007687
    h = (h ^ _shift_right(h, 27)) * -7723592293110705685
    return _shift_right(h ^ _shift_right(h, 31), 11).to(torch.float64) / 2.0**53


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Return a logical shift: torch has no unsigned 64-bit integers, and its shift repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
