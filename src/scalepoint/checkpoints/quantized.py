"""A quantized checkpoint as values: what every format of language models is written from.

    codes (out, in)   scale (out, blocks)   zero_point (out, blocks)      w = (codes - zero_point) scale
                                            or minval (out, blocks)       w = (codes - lowest code) scale + minval

A format packs these; it never rounds anything itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalepoint.checkpoints.source import Source
from scalepoint.errors import ExportError
from scalepoint.numerics import get_format
from scalepoint.spec import QuantizationSpec

E4M3_HIGH = 448.0


def outer_scale(scale: Tensor) -> Tensor:
    """The power of two whose multiples by float8_e4m3fn hold these scales of blocks, the largest in its upper half."""
    return torch.exp2((scale.amax() / E4M3_HIGH).log2().ceil())


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized weight. Integer codes have the sign of their type (int4: -8..7 as int8, uint4: 0..15 as uint8);
    float8 and float4 codes are their values as float8. Blocks lie along the second axis."""

    codes: Tensor
    scale: Tensor  # float32 (out, blocks), one column for a scale a row; already rounded to what the format stores
    spec: QuantizationSpec
    zero_point: Tensor | None = None  # int32, of unsigned integers; None: 0 for all
    activation: QuantizationSpec | None = None  # how its input is quantized; None: not at all
    activation_scale: Tensor | None = None  # of a static one; None: dynamic, a scale a token
    outer_scale: Tensor | None = None  # of two-level formats (NVFP4): scale = stored e4m3 scale times this
    minval: Tensor | None = None  # float32, what the lowest code stands for; in place of zero points

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.scale.ndim != 2 or self.scale.shape[0] != rows or columns % self.scale.shape[1]:
            raise ExportError(f"scales of shape {tuple(self.scale.shape)} for codes of shape {(rows, columns)}")
        if self.zero_point is not None and self.zero_point.shape != self.scale.shape:
            raise ExportError(
                f"zero points of shape {tuple(self.zero_point.shape)}, scales of {tuple(self.scale.shape)}"
            )
        if self.minval is not None and (self.minval.shape != self.scale.shape or self.zero_point is not None):
            raise ExportError("minval stands in place of zero points, one for each scale")

    @property
    def bits(self) -> int:
        return get_format(self.spec.dtype).bits

    @property
    def is_float(self) -> bool:
        return get_format(self.spec.dtype).is_float

    @property
    def block(self) -> int:
        """Columns that share a scale."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    @property
    def has_block(self) -> bool:
        return self.scale.shape[1] > 1

    def unsigned(self) -> tuple[Tensor, Tensor]:
        """Codes from 0 and zero points that fit them, as int32: what most packed layouts store."""
        low = int(get_format(self.spec.dtype).low)
        zero = torch.zeros_like(self.scale, dtype=torch.int32) if self.zero_point is None else self.zero_point
        return self.codes.to(torch.int32) - low, zero.to(torch.int32) - low

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the codes stand for."""
        wide = self.codes.to(torch.float32).reshape(*self.scale.shape, self.block)
        if self.minval is not None:
            above = wide - get_format(self.spec.dtype).low
            return (above * self.scale[..., None] + self.minval[..., None]).reshape(self.codes.shape).to(dtype)
        if self.zero_point is not None:
            wide = wide - self.zero_point.to(torch.float32)[..., None]
        return (wide * self.scale[..., None]).reshape(self.codes.shape).to(dtype)


@dataclass(frozen=True)
class CacheScales:
    """Keys and values of earlier tokens as codes of so many bits, with the scales (groups, channels) of each block, or
    one scale for all of them, (1, 1)."""

    bits: int
    scales: tuple[tuple[Tensor, Tensor], ...]
    is_float: bool = False


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint and its quantized tensors. Both mappings may read lazily.

    Attributes:
        source: The checkpoint.
        packed: Quantized weights by their name in the source, all with shape (out, in).
        changed: Tensors that are not quantized but have new values.
        cache: How keys and values of earlier tokens are quantized, or None.
    """

    source: Source
    packed: Mapping[str, QuantizedWeight]
    changed: Mapping[str, Tensor] = field(default_factory=dict)  # float tensors that migrations or tuning changed
    cache: CacheScales | None = None  # where the format stores how keys and values are kept

    def tensor(self, name: str) -> Tensor:
        """A float tensor as it is to be stored."""
        return self.changed[name] if name in self.changed else self.source.tensor(name)

    @property
    def floats(self) -> list[str]:
        """What stays float, in the order of the source; then what the source has not."""
        kept = [name for name in self.source.tensors if name not in self.packed]
        return kept + [name for name in self.changed if name not in self.source.tensors]
