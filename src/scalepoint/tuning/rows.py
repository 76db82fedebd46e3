"""The rows of a layer: what its weight is multiplied by, one row an output position.

    y[r, g, o] = sum_n  row[r, g, n] * weight[g, o, n]

A linear layer has a row a vector; a convolution a patch of its padded input, group by group; a transposed convolution a
patch of its input with zeros between. Only the rows that are asked for are gathered; nothing is padded as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from scalepoint.graph import Operation
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec.palette import is_palette

MIN_ROWS, ROWS_PER_UNKNOWN = 4096, 128


@dataclass(frozen=True)
class Geometry:
    """How a layer walks over its input."""

    kind: str
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    def count(self, shape: torch.Size) -> int:
        """How many rows an input of this shape has."""
        return prod(map(int, shape[:-1])) if self.kind == "linear" else prod(self._outputs(shape))

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows (r, groups, n) at these places among all of the batch, in float32."""
        if self.kind == "linear":
            return _select_rows(x.reshape(-1, x.shape[-1]), index).to(torch.float32).unsqueeze(1)
        dims, outputs = len(self.kernel), self._outputs(x.shape)
        x = x if x.ndim == dims + 2 else x.unsqueeze(0)
        where = torch.unravel_index(index, outputs)
        x = _insert_zeros(x, self.stride) if self.kind == "conv_transpose" else x
        places: list[Any] = [where[0].view(-1, *[1] * dims), slice(None)]
        inside = torch.ones((1,) * (dims + 1), dtype=torch.bool)
        for axis, (along, size) in enumerate(zip(self._taps(where[1:]), x.shape[2:], strict=True)):
            taps = along.view(-1, *[1] * axis, along.shape[1], *[1] * (dims - axis - 1))
            inside = inside & (taps >= 0) & (taps < size)
            places.append(taps.clamp(0, size - 1))
        patches = x[tuple(places)].to(torch.float32).masked_fill_(~inside.unsqueeze(-1), 0.0).movedim(-1, 1)
        if self.kind == "conv_transpose":
            patches = patches.flip(tuple(range(2, 2 + dims)))
        return patches.reshape(patches.shape[0], self.groups, -1)

    def _outputs(self, shape: torch.Size) -> tuple[int, ...]:
        """How many samples, and how many positions on each axis."""
        dims = len(self.kernel)
        samples, sizes = int(shape[0]) if len(shape) == dims + 2 else 1, list(map(int, shape[-dims:]))
        if self.kind == "conv_transpose":
            sizes = [(size - 1) * step + 1 for size, step in zip(sizes, self.stride, strict=True)]
        axes = zip(sizes, self.padding, self.kernel, self.dilation, self._steps, strict=True)
        return samples, *((size + sum(pads) - apart * (k - 1) - 1) // step + 1 for size, pads, k, apart, step in axes)

    def _taps(self, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """On each axis the places of the input that the kernel meets, (r, kernel)."""
        axes = zip(outputs, self._steps, self.padding, self.kernel, self.dilation, strict=True)
        for place, step, pads, size, apart in axes:
            yield place[:, None] * step - pads[0] + torch.arange(size) * apart

    @property
    def _steps(self) -> tuple[int, ...]:
        """A transposed convolution walks one by one over an input with zeros between."""
        return self.stride if self.kind == "conv" else (1,) * len(self.kernel)

    def outputs(self, y: Tensor, index: Tensor, count: int, outputs: int) -> Tensor | None:
        """Outputs (r, groups, outputs) at the places of rows, of a tensor that has the shape of the layer's output;
        None of another that is only spread over it."""
        if self.kind != "linear":
            y = (y if y.ndim == len(self.kernel) + 2 else y.unsqueeze(0)).movedim(1, -1)
        flat = y.reshape(-1, y.shape[-1])
        if flat.shape != (count, outputs * self.groups):
            return None
        return _select_rows(flat, index).to(torch.float32).reshape(len(index), self.groups, outputs)

    def by_group(self, weight: Tensor) -> Tensor:
        """A weight as its quantizer sees it, as (groups, outputs, n)."""
        if self.kind != "conv_transpose":
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        inputs = weight.shape[0] // self.groups
        return weight.reshape(self.groups, inputs, weight.shape[1], -1).transpose(1, 2).flatten(2)

    def as_stored(self, by_group: Tensor, like: Tensor) -> Tensor:
        """(groups, outputs, n) back in the shape of the weight."""
        if self.kind != "conv_transpose":
            return by_group.reshape(like.shape)
        inputs = like.shape[0] // self.groups
        apart = by_group.reshape(self.groups, like.shape[1], inputs, -1).transpose(1, 2)
        return apart.reshape(like.shape)


def _select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows at these places, which go up; all of them without a copy."""
    return rows if len(index) == len(rows) else rows[index]


def get_geometry(layer: QuantizedLayer) -> Geometry | None:
    """How a layer walks; None where it pads with other things than zeros itself, or has tables, not steps."""
    if is_palette(layer.weight_quant.spec):
        return None
    if layer.kind == "linear":
        return Geometry("linear")
    operation, kernel = layer.operation, tuple(layer.weight.shape[2:])
    dims = len(kernel)
    if layer.kind == "head":
        return Geometry("conv", 1, kernel, (1,) * dims, (1,) * dims, ((0, 0),) * dims)
    stride, dilation = (
        _get_setting_per_axis(operation, "stride", 1, dims),
        _get_setting_per_axis(operation, "dilation", 1, dims),
    )
    groups = int(_get_setting_per_axis(operation, "groups", 1, 1)[0])
    if layer.kind == "conv_transpose":
        pads, more = (
            _get_setting_per_axis(operation, "padding", 0, dims),
            _get_setting_per_axis(operation, "output_padding", 0, dims),
        )
        edges = tuple(
            (d * (k - 1) - p, d * (k - 1) - p + o) for k, d, p, o in zip(kernel, dilation, pads, more, strict=True)
        )
        return Geometry("conv_transpose", groups, kernel, stride, dilation, edges)
    if getattr(operation, "padding_mode", "zeros") != "zeros":
        return None
    return Geometry(
        "conv", groups, kernel, stride, dilation, _edge_padding(_get_setting(operation, "padding", 0), kernel, dilation)
    )


def _edge_padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    sizes = (0,) * len(kernel) if padding == "valid" else _to_tuple(padding, len(kernel))
    return tuple((size, size) for size in sizes)


def _get_setting(operation: Any, name: str, default: int) -> Any:
    return (
        operation.arguments.get(name, default)
        if isinstance(operation, Operation)
        else getattr(operation, name, default)
    )


def _get_setting_per_axis(operation: Any, name: str, default: int, dims: int) -> tuple[int, ...]:
    return _to_tuple(_get_setting(operation, name, default), dims)


def _to_tuple(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(map(int, values * dims if len(values) == 1 else values))


def _insert_zeros(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """stride - 1 zeros between neighbours, as a transposed convolution sees its input."""
    if all(step == 1 for step in stride):
        return x
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], stride, strict=True)]
    wide = x.new_zeros((*x.shape[:2], *sizes))
    places: Any = (..., *(slice(None, None, step) for step in stride))
    wide[places] = x
    return wide


def limit_row_count(most: int, groups: int, unknowns: int) -> int:
    """How many rows to look at: groups make a row long, but leave few unknowns to tell by it."""
    return most if groups == 1 else min(most, max(MIN_ROWS, ROWS_PER_UNKNOWN * unknowns))


def sample_rows(first: int, samples: int, each: int, share: float) -> Tensor:
    """Which rows of a batch are looked at: a hash of a row's number among all decides, so batch sizes do not matter."""
    numbers = torch.arange(first * each, (first + samples) * each)
    return (hash_to_uniform(numbers) < share).nonzero().view(-1) if share < 1 else torch.arange(samples * each)


def hash_to_uniform(numbers: Tensor, salt: int = 0) -> Tensor:
    """A number in [0, 1) for each integer, the same on every machine (splitmix64)."""
    h = (numbers.to(torch.int64) + salt) * -7046029254386353131 + 1442695040888963407
    h = (h ^ _shift_right(h, 30)) * -4658895280553007687
    h = (h ^ _shift_right(h, 27)) * -7723592293110705685
    return _shift_right(h ^ _shift_right(h, 31), 11).to(torch.float64) / 2.0**53


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings zeros in."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
