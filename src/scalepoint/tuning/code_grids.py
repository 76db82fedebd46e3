"""The values that the codes of a layer may have, and rounding to them.

    CodeGrid      whole numbers between limits, or the values of a float format
    PaletteGrid   entries of tables (a palette), shared by some outputs

Codes have the shape (groups, outputs, n), with n the inputs of one output, and a column is one of the n inputs. Zero
points are subtracted already: value = code * scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import UsageError
from scalepoint.numerics import Format, round_to_float
from scalepoint.numerics.palette import make_tables, make_vector_tables
from scalepoint.spec.pair_safe import MAX_PAIR_SUM

VECTOR_COLUMNS = 64  # columns of vector palettes that are rounded at once
# x + offset - offset rounds x to a whole number: near the offset a float has no fraction bits. As tensors, because a
# Python number is converted at every call.
ROUNDING_OFFSETS = {
    dtype: torch.tensor(1.5 * 2.0**bits, dtype=dtype) for dtype, bits in ((torch.float32, 23), (torch.float64, 52))
}
LowHigh = tuple[Any, Any]  # smallest and largest code: numbers or tensors


@dataclass(frozen=True)
class CodeGrid:
    """The values that codes may have: whole numbers between `low` and `high`, or values of a float format.

    Attributes:
        low, high: Limits; they broadcast to (groups, outputs, n).
        float_format: The format, if codes are floats.
        partners: (pairings, n): the column that each column is paired with; a column without one is its own partner.
            The kernel adds the products of a pair in 16 bits, so the sum of two codes of one sign is limited.
    """

    low: Tensor
    high: Tensor
    float_format: Format | None = None
    partners: Tensor | None = None

    def with_tables(self, tables: Tensor) -> "CodeGrid":
        """Return this grid with other tables. Only palettes have tables."""
        raise UsageError("a solution with tables is for a palette")

    def select_outputs(self, outputs: slice) -> "CodeGrid":
        low, high = (limit if limit.shape[1] == 1 else limit[:, outputs] for limit in (self.low, self.high))
        return replace(self, low=low, high=high)

    def round_(self, x: Tensor) -> Tensor:
        """Round values within the limits to the grid, in place; whole numbers round half to even."""
        if self.float_format is None:
            # torch.round wakes all threads even for some thousand values, and the steps call this for every column.
            offset = ROUNDING_OFFSETS[x.dtype]
            return x.add_(offset).sub_(offset)
        return x.copy_(round_to_float(x.to(torch.float32), self.float_format))

    def nearest_codes(self, x: Tensor) -> Tensor:
        """Return the nearest codes. If the sum of a pair is too large, both move towards zero by half of the excess."""
        codes = self.round_(x.clamp(*self.limits))
        for partner in self.pairings:
            partner_codes = codes[..., partner]
            columns = torch.arange(len(partner))
            is_pair = (partner != columns) & (codes.sign() == partner_codes.sign())
            excess = torch.where(is_pair, (codes.abs() + partner_codes.abs() - MAX_PAIR_SUM).clamp(min=0), 0)
            # If the excess is odd, the first of the two columns takes the larger half.
            is_first = partner > columns
            codes = codes - codes.sign() * torch.where(is_first, (excess / 2).ceil(), (excess / 2).floor())
        return codes

    @property
    def pairings(self) -> Sequence[Tensor]:
        """The rows of `partners`; empty if pairs are not limited."""
        return () if self.partners is None else self.partners.unbind()

    @cached_property
    def limits(self) -> LowHigh:
        """Low and high: as numbers if all codes have the same, because clamping to numbers is five times as fast."""
        is_uniform = self.low.numel() == self.high.numel() == 1
        return (float(self.low), float(self.high)) if is_uniform else (self.low, self.high)

    def column_limits(self, size: int) -> Sequence[LowHigh]:
        """Return low and high of each of `size` columns, as numbers or (groups, outputs). Partners are ignored."""
        if isinstance(self.limits[0], float):  # one limit for all codes
            return [self.limits] * size
        lows, highs = (_split_columns(limit, size) for limit in (self.low, self.high))
        return list(zip(lows, highs, strict=True))

    def paired_limits(self, codes: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Return low and high of a column, given the codes of its partners."""
        low, high = _select_column(self.low, column), _select_column(self.high, column)
        for partner in self.pairings:
            partner_column = int(partner[column])
            if partner_column != column:
                partner_codes = codes[..., partner_column]
                high = torch.minimum(high, MAX_PAIR_SUM - partner_codes.clamp(min=0))
                low = torch.maximum(low, -MAX_PAIR_SUM - partner_codes.clamp(max=0))
        return low, high


def _select_column(limit: Tensor, column: int) -> Tensor:
    """Return a limit of one column. A limit that is one number, or has one column, is that of all columns."""
    if not limit.ndim:
        return limit
    return limit[..., 0] if limit.shape[-1] == 1 else limit[..., column]


def _split_columns(values: Tensor, size: int) -> tuple[Tensor, ...]:
    values = values if values.ndim else values.reshape(1, 1, 1)
    return values.expand(-1, -1, size).unbind(-1)


@dataclass(frozen=True, kw_only=True)
class PaletteGrid(CodeGrid):
    """Codes of a palette: entries of tables. `dim` neighbouring outputs share an index, so they are rounded together.

    Attributes:
        tables: (tables, entries, dim), in float32; ascending if dim is 1.
        table_index: The table of each vector of outputs, (groups, outputs / dim).
        round_tables: Rounds tables to what a file can store.
    """

    tables: Tensor
    table_index: Tensor
    round_tables: Callable[[Tensor], Tensor]

    @property
    def dim(self) -> int:
        return self.tables.shape[-1]

    @cached_property
    def _output_tables(self) -> Tensor:
        """The table of each vector of outputs: (groups, outputs / dim, entries, dim)."""
        return self.tables[self.table_index]

    @cached_property
    def _midpoints(self) -> Tensor:
        tables = self._output_tables[..., 0]
        return ((tables[..., 1:] + tables[..., :-1]) / 2).contiguous()

    def with_tables(self, tables: Tensor) -> "PaletteGrid":
        return replace(self, tables=tables)

    def find_indices(self, x: Tensor) -> Tensor:
        """Return the index of the nearest entry: (groups, outputs / dim, n) for values (groups, outputs, n)."""
        if self.dim == 1:
            return torch.searchsorted(self._midpoints, x.to(torch.float32).contiguous())
        tables = self._output_tables
        squares = tables.square().sum(-1)[..., None]
        # |t - x|^2 is smallest for the entry t with the smallest t^2 - 2 t x.
        parts = torch.split(_to_output_vectors(x, self.dim), VECTOR_COLUMNS, -1)
        return torch.cat([(squares - 2 * (tables @ vectors)).argmin(2) for vectors in parts], -1)

    def look_up(self, index: Tensor) -> Tensor:
        """Return the entries (groups, outputs, n) of indices (groups, outputs / dim, n)."""
        shape = (*index.shape, self.dim)
        entries = self._output_tables.gather(2, index[..., None].expand(shape))
        return entries.transpose(-1, -2).flatten(1, 2)

    def round_(self, x: Tensor) -> Tensor:
        columns = x[..., None] if x.ndim == 2 else x  # one column, or all of them
        return x.copy_(self.look_up(self.find_indices(columns)).reshape(x.shape))

    def make_tables(self, target: Tensor, weights: Tensor) -> Tensor:
        """Return the tables of k-means, with these importances of the values of `target` (groups, outputs, n)."""
        count, entries, dim = self.tables.shape
        target_vectors = _to_output_vectors(target, dim)
        weight_vectors = _to_output_vectors(weights.expand_as(target), dim)
        tables = []
        for table in range(count):
            is_member = self.table_index == table
            values = target_vectors[is_member].mT.reshape(1, -1, dim)
            importance = weight_vectors[is_member].mT.reshape(1, -1, dim)
            if dim == 1:
                tables.append(make_tables(values[..., 0], entries, importance[..., 0])[..., None])
            else:
                tables.append(make_vector_tables(values, entries, importance))
        return self.round_tables(torch.cat(tables))


def _to_output_vectors(x: Tensor, dim: int) -> Tensor:
    """Arrange (groups, outputs, n) as (groups, outputs / dim, dim, n), in float32."""
    return x.to(torch.float32).reshape(x.shape[0], -1, dim, x.shape[-1])
