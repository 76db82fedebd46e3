"""Qparams calculators with a histogram of all batches, whose size does not depend on the number of batches.

The same data in another order, or in parts that are merged, gives the same histogram bit for bit.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams
from scalepoint.numerics.histogram import Histogram, compute_block_histograms, merge_histograms
from scalepoint.numerics.range_search import least_divergence, least_squares_of_histogram, percentile_of_histogram
from scalepoint.spec.qparams_calculator import (
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    check_same_kind,
)
from scalepoint.spec.range_calculator import check_bins, check_percentile, count_levels
from scalepoint.spec.running import Range, add_range, merge_extremes, merge_range, seed_range, update_range

MAX_BINNED_VALUE = 2.0**127


class HistogramQParamsCalculator(StatefulQParamsCalculatorBase):
    """Base of calculators that collect one histogram per block (`counts`, `power`) and the extremes of all batches."""

    counts: Tensor
    power: Tensor
    running_min: Tensor
    running_max: Tensor

    def __init__(self, *args: Any, bins: int = 4096, search_steps: int = 80, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bins = check_bins(bins)
        self.search_steps = search_steps
        self.is_deferred = False  # True: batches only update the histogram, and finalize() chooses the range
        add_range(self)
        self.add_empty("counts", torch.int64)
        self.add_empty("power", torch.int32)

    @abstractmethod
    def choose_range(self, histogram: Histogram, low: Tensor, high: Tensor) -> Range:
        """Return (low, high), one value per block.

        Args:
            histogram: Histogram of all batches.
            low: Smallest value of all batches.
            high: Largest value of all batches.
        """
        raise SpecError(f"{type(self).__name__} must implement choose_range(histogram, low, high)")

    def prepare_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        """Keep the range as observed: that is where the histogram has values."""
        return min_val, max_val

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        self.check_shape(min_val.shape)
        if torch.compiler.is_compiling():
            tensor = torch.nan_to_num(tensor, 0.0, 0.0, 0.0)  # a graph cannot raise; update_range counts the batch
        self._add_histogram(compute_block_histograms(tensor.detach(), self.get_block_size(tensor.shape), self.bins))
        observed_range = update_range(self, (min_val, max_val), merge_extremes)
        return self.choose(*observed_range) if self.is_deferred else self._from_histogram()

    def _add_histogram(self, histogram: Histogram) -> None:
        if self.counts.numel():
            histogram = merge_histograms(Histogram(self.counts, self.power), histogram)
        self.set_buffer("counts", histogram.counts)
        self.set_buffer("power", histogram.power)

    def seed(self, qparams: QParams) -> None:
        super().seed(qparams)
        seed_range(self, qparams)

    def finalize(self) -> QParams:
        if self.counts.numel():
            self.store(self._from_histogram())
        return super().finalize()

    def _from_histogram(self) -> QParams:
        histogram = Histogram(self.counts, self.power)
        smallest, largest = self.running_min.flatten(), self.running_max.flatten()
        low, high = self.choose_range(histogram, smallest, largest)
        # Values beyond the last bin are not in the histogram: do not clip.
        is_beyond = torch.maximum(-smallest, largest) > MAX_BINNED_VALUE
        low, high = torch.where(is_beyond, smallest, low), torch.where(is_beyond, largest, high)
        return self.choose(low.reshape(self.running_min.shape), high.reshape(self.running_min.shape))

    def merge(self, other: QParamsCalculatorBase) -> None:
        check_same_kind(self, other)
        assert isinstance(other, HistogramQParamsCalculator)  # noqa: S101  # same kind
        if other.counts.numel():
            self._add_histogram(Histogram(other.counts.to(self.counts.device), other.power.to(self.counts.device)))
            merge_range(self, other, merge_extremes)
            self.store(self._from_histogram())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, running_min={self.running_min}, running_max={self.running_max}"


@QParamsCalculatorBase.register("histogram_percentile")
class HistogramPercentileQParamsCalculator(HistogramQParamsCalculator):
    """Range from the (100 - p)-th to the p-th percentile of all batches."""

    def __init__(self, *args: Any, percentile: float = 99.99, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.percentile = check_percentile(percentile)

    def choose_range(self, histogram: Histogram, low: Tensor, high: Tensor) -> Range:
        below, above = percentile_of_histogram(histogram, self.percentile)
        return torch.maximum(below, low), torch.minimum(above, high)


@QParamsCalculatorBase.register("histogram_mse")
class HistogramMseQParamsCalculator(HistogramQParamsCalculator):
    """Range with the smallest squared error over all batches."""

    def choose_range(self, histogram: Histogram, low: Tensor, high: Tensor) -> Range:
        return least_squares_of_histogram(histogram, low, high, self.grid, steps=self.search_steps)


@QParamsCalculatorBase.register("histogram_entropy")
class HistogramEntropyQParamsCalculator(HistogramQParamsCalculator):
    """Range with the smallest KL divergence over all batches."""

    def choose_range(self, histogram: Histogram, low: Tensor, high: Tensor) -> Range:
        return least_divergence(histogram, low, high, count_levels(self.grid), steps=self.search_steps)
