"""Quantized checkpoints as data: the input of every format for language models.

    codes (out, in)   scale (out, blocks)   zero_point (out, blocks)      w = (codes - zero_point) scale
                                            or minval (out, blocks)       w = (codes - lowest code) scale + minval

A format packs these numbers and never rounds them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalepoint.checkpoints.source import Source
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationSpec

E4M3_MAX = 448.0


def outer_scale(scale: Tensor) -> Tensor:
    """Return the power of two by which the scales of blocks are divided before they are stored as float8_e4m3fn.

    It is the smallest that keeps the largest scale within the range of e4m3.
    """
    return torch.exp2((scale.amax() / E4M3_MAX).log2().ceil())


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized weight of shape (out, in). Blocks lie along the second axis.

    Attributes:
        codes: Integer codes with the sign of their dtype (int4: -8..7 as int8, uint4: 0..15 as uint8); float8 and
            float4 codes are their values as float8.
        scale: float32, shape (out, blocks), one column for one scale per row; rounded to what the format stores.
        spec: The spec of the weight.
        zero_point: int32, for unsigned integer codes; None stands for 0.
        activation: The spec of the layer's input; None: the input is not quantized.
        activation_scale: The scale of a static input quantizer; None: dynamic, one scale per token.
        outer_scale: In two-level formats (NVFP4) scale = stored e4m3 scale times outer_scale; else None.
        minval: float32, the value of the lowest code. It replaces the zero points.
    """

    codes: Tensor
    scale: Tensor
    spec: QuantizationSpec
    zero_point: Tensor | None = None
    activation: QuantizationSpec | None = None
    activation_scale: Tensor | None = None
    outer_scale: Tensor | None = None
    minval: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.scale.ndim != 2 or self.scale.shape[0] != rows or columns % self.scale.shape[1]:
            raise ExportError(f"scales of shape {tuple(self.scale.shape)} do not fit codes of shape {(rows, columns)}")
        if self.zero_point is not None and self.zero_point.shape != self.scale.shape:
            raise ExportError(
                f"zero points of shape {tuple(self.zero_point.shape)} do not fit scales of shape "
                f"{tuple(self.scale.shape)}"
            )
        if self.minval is not None and (self.minval.shape != self.scale.shape or self.zero_point is not None):
            raise ExportError("minval cannot be used with zero points, and must have the shape of the scales")

    @property
    def bits(self) -> int:
        return get_format(self.spec.dtype).bits

    @property
    def is_float(self) -> bool:
        return get_format(self.spec.dtype).is_float

    @property
    def block_size(self) -> int:
        """The number of columns that share a scale."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    @property
    def has_blocks(self) -> bool:
        return self.scale.shape[1] > 1

    def to_unsigned(self) -> tuple[Tensor, Tensor]:
        """Return codes that start at 0 and their zero points, both int32, as most packed layouts store them."""
        low = int(get_format(self.spec.dtype).low)
        zero_point = torch.zeros_like(self.scale, dtype=torch.int32) if self.zero_point is None else self.zero_point
        return self.codes.to(torch.int32) - low, zero_point.to(torch.int32) - low

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of the codes, with shape (out, in)."""
        blocks = self.codes.to(torch.float32).reshape(*self.scale.shape, self.block_size)
        if self.minval is not None:
            steps = blocks - get_format(self.spec.dtype).low
            return (steps * self.scale[..., None] + self.minval[..., None]).reshape(self.codes.shape).to(dtype)
        if self.zero_point is not None:
            blocks = blocks - self.zero_point.to(torch.float32)[..., None]
        return (blocks * self.scale[..., None]).reshape(self.codes.shape).to(dtype)


@dataclass(frozen=True)
class CacheScales:
    """How keys and values of earlier tokens are quantized in the cache.

    Attributes:
        bits: The width of a code.
        scales: The scales of keys and of values for each block of the model, of shape (key/value heads, channels), or
            (1, 1) for one scale.
        is_float: Whether the codes are float8 instead of integers.
    """

    bits: int
    scales: tuple[tuple[Tensor, Tensor], ...]
    is_float: bool = False


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint and its quantized tensors. Both mappings may read lazily.

    Attributes:
        source: The float checkpoint.
        quantized: Quantized weights by their name in the source, all with shape (out, in).
        changed: Float tensors whose values migrations or tuning changed, and new tensors such as biases.
        cache: How keys and values of earlier tokens are quantized, if the format stores this.
    """

    source: Source
    quantized: Mapping[str, QuantizedWeight]
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    cache: CacheScales | None = None

    def tensor(self, name: str) -> Tensor:
        """Return the final value of a float tensor."""
        return self.changed[name] if name in self.changed else self.source.tensor(name)

    @property
    def float_names(self) -> list[str]:
        """The names of the float tensors: those of the source in its order, then new ones."""
        names = [name for name in self.source.tensors if name not in self.quantized]
        return names + [name for name in self.changed if name not in self.source.tensors]
