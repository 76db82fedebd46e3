"""Range calculators: tensor -> (min, max), one value per block. A new one takes a few lines:

@RangeCalculatorBase.register("three_sigma")
class ThreeSigma(RangeCalculatorBase):
    def _generate_min_max(self, tensor):
        rows = self.blocks(tensor)
        return rows.mean(1) - 3 * rows.std(1), rows.mean(1) + 3 * rows.std(1)
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scalepoint.errors import SpecError
from scalepoint.numerics import CodeType, Grid, QuantizationScheme, as_blocks, get_format, min_max
from scalepoint.numerics.blocks import block_counts, is_ragged, split_ragged
from scalepoint.numerics.histogram import compute_histogram
from scalepoint.numerics.range_search import least_divergence, least_squares, percentile_of_rows
from scalepoint.spec.granularity import CompressionTargetTensor, QuantizationGranularity, get_target_block_size
from scalepoint.spec.registry import ClassRegistry


class RangeCalculatorBase(ClassRegistry, nn.Module):
    """Base of the components that compute the range of a tensor: (min, max) as float32, one value per block."""

    _registry: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        granularity: QuantizationGranularity,
        quantization_target: CompressionTargetTensor = CompressionTargetTensor.WEIGHT,
        **extra: Any,
    ) -> None:
        super().__init__()
        self.granularity = granularity
        self.quantization_target = quantization_target

    def get_block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the size of a block along each axis of a tensor of this shape."""
        return get_target_block_size(self.granularity, shape, self.quantization_target)

    @abstractmethod
    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return (min, max) of a tensor that the blocks divide, with one value per block, in their order."""
        raise SpecError(f"{type(self).__name__} must implement _generate_min_max(tensor)")

    def blocks(self, tensor: Tensor) -> Tensor:
        """Return the tensor as float32 with one row per block."""
        return as_blocks(tensor.to(torch.float32), self.get_block_size(tensor.shape))

    def forward(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        block = self.get_block_size(tensor.shape)
        counts = block_counts(tensor.shape, block)
        if not is_ragged(tensor.shape, block):
            low, high = self._generate_min_max(tensor)
            return self._reshape(low, counts), self._reshape(high, counts)
        low, high = (tensor.new_empty(counts, dtype=torch.float32) for _ in range(2))
        for region, params, _ in split_ragged(tensor.shape, block):
            low[params], high[params] = self(tensor[region])
        return low, high

    def _reshape(self, value: Tensor, counts: tuple[int, ...]) -> Tensor:
        try:
            return value.to(torch.float32).reshape(counts)
        except RuntimeError:
            raise SpecError(
                f"{type(self).__name__}._generate_min_max returned shape {tuple(value.shape)}: "
                f"{self.granularity!r} needs one value per block, shape {counts}"
            ) from None


@RangeCalculatorBase.register("minmax")
class MinMaxRangeCalculator(RangeCalculatorBase):
    """Range from the smallest to the largest value."""

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return min_max(tensor, self.get_block_size(tensor.shape))


@RangeCalculatorBase.register("percentile")
class PercentileRangeCalculator(RangeCalculatorBase):
    """Range from the (100 - p)-th to the p-th percentile; values outside are clipped."""

    def __init__(self, granularity: QuantizationGranularity, percentile: float = 99.99, **extra: Any) -> None:
        super().__init__(granularity, **extra)
        self.percentile = check_percentile(percentile)

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return percentile_of_rows(self.blocks(tensor), self.percentile)


class _GridRangeCalculator(RangeCalculatorBase):
    """Base of calculators that need the codes. The factory passes these fields of the spec."""

    def __init__(
        self,
        granularity: QuantizationGranularity,
        dtype: CodeType = torch.int8,
        qscheme: QuantizationScheme = QuantizationScheme.SYMMETRIC,
        quant_min: float | None = None,
        quant_max: float | None = None,
        scale_dtype: torch.dtype | None = None,
        search_steps: int = 80,
        **extra: Any,
    ) -> None:
        super().__init__(granularity, **extra)
        self.search_steps = search_steps
        fmt = get_format(dtype)
        low, high = fmt.limits(qscheme)
        self.grid = Grid(
            fmt,
            low if quant_min is None else quant_min,
            high if quant_max is None else quant_max,
            qscheme,
            scale_dtype=scale_dtype,
        )


@RangeCalculatorBase.register("mse")
class MseRangeCalculator(_GridRangeCalculator):
    """Range with the smallest squared quantization error, by search over shrunk ranges."""

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.blocks(tensor)
        return least_squares(rows, None, rows.amin(1), rows.amax(1), self.grid, steps=self.search_steps)


@RangeCalculatorBase.register("entropy")
class EntropyRangeCalculator(_GridRangeCalculator):
    """Range for which the distribution of the values changes least (smallest KL divergence)."""

    def __init__(self, granularity: QuantizationGranularity, bins: int = 4096, **extra: Any) -> None:
        super().__init__(granularity, **extra)
        self.bins = check_bins(bins)

    def _generate_min_max(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.blocks(tensor)
        histogram, levels = compute_histogram(rows.detach(), self.bins), count_levels(self.grid)
        return least_divergence(histogram, rows.amin(1), rows.amax(1), levels, steps=self.search_steps)


def count_levels(grid: Grid) -> int:
    """Return the number of levels for `least_divergence`."""
    return 2**grid.format.bits if grid.format.is_float else int(grid.span) + 1


def check_percentile(percentile: float) -> float:
    if not 50 < percentile <= 100:
        raise SpecError(f"percentile={percentile}: must be above 50 and at most 100; 99.99 clips one value in 10,000")
    return float(percentile)


def check_bins(bins: int) -> int:
    if bins < 16 or bins % 2:
        raise SpecError(f"bins={bins}: must be an even number, at least 16; 2048 is usual")
    return int(bins)
