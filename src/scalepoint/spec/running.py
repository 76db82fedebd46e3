"""Qparams calculators with a running range over batches: a moving average, or the extremes.

The range is stored in two buffers of the calculator, `running_min` and `running_max`. The functions below work on these
buffers. They are functions, not a base class, because histogram calculators use them too and choose another range.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams
from scalepoint.spec.granularity import PerTensorGranularity
from scalepoint.spec.qparams_calculator import (
    QParamsCalculatorBase,
    StatefulQParamsCalculatorBase,
    check_same_kind,
)

Range = tuple[Tensor, Tensor]


def add_range(calculator: QParamsCalculatorBase) -> None:
    calculator.add_empty("running_min")
    calculator.add_empty("running_max")


def get_range(calculator: QParamsCalculatorBase) -> Range:
    low, high = calculator._buffers["running_min"], calculator._buffers["running_max"]
    assert low is not None and high is not None  # noqa: S101, PT018  # add_range has added them
    return low, high


def set_range(calculator: QParamsCalculatorBase, low: Tensor, high: Tensor) -> None:
    calculator.set_buffer("running_min", low)
    calculator.set_buffer("running_max", high)


def merge_extremes(old: Range, new: Range) -> Range:
    return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


def update_range(calculator: QParamsCalculatorBase, new: Range, update: Callable[[Range, Range], Range]) -> Range:
    """Update the running range with the range of a batch, store it and return it. The first range is taken as it is."""
    calculator.check_shape(new[0].shape)
    old = get_range(calculator)
    is_first = not old[0].numel()
    if not is_first and isinstance(calculator.granularity, PerTensorGranularity):
        new = new[0].view_as(old[0]), new[1].view_as(old[0])  # tensors of another rank: (1, 1) or (1, 1, 1)
    low, high = new if is_first else update(old, new)
    if torch.compiler.is_compiling():
        # A graph cannot raise: a batch with NaN or infinity is skipped here and counted.
        is_finite = torch.isfinite(new[0] + 0 * new[1]).all()
        low = torch.where(is_finite, low, torch.zeros_like(low) if is_first else old[0])
        high = torch.where(is_finite, high, torch.zeros_like(high) if is_first else old[1])
        calculator.skipped_batches.add_(~is_finite)
    set_range(calculator, low, high)
    return low, high


def seed_range(calculator: QParamsCalculatorBase, qparams: QParams) -> None:
    """Set the running range to the range of given parameters."""
    zero_point = 0 if qparams.zero_point is None else qparams.zero_point
    grid = calculator.grid
    set_range(calculator, (grid.low - zero_point) * qparams.scale, (grid.high - zero_point) * qparams.scale)


def merge_range(
    calculator: QParamsCalculatorBase, other: QParamsCalculatorBase, merge: Callable[[Range, Range], Range]
) -> None:
    """Merge the range and the number of batches of another calculator. One without data changes nothing."""
    check_same_kind(calculator, other)
    other_range = get_range(other)
    if not other_range[0].numel():
        return
    low, high = (value.to(calculator.scale.device) for value in other_range)
    current_range = get_range(calculator)
    if current_range[0].numel():
        calculator.check_shape(low.shape)
        low, high = merge(current_range, (low, high))
    set_range(calculator, low, high)
    calculator.store(calculator.choose(low, high))
    calculator.observed_batches.add_(other.observed_batches.to(calculator.observed_batches.device))


class RunningRangeMixin(StatefulQParamsCalculatorBase):
    """Stores `running_min` and `running_max` over batches. A subclass decides how the range of a batch changes them.

    Attributes:
        is_ordered: Whether the range depends on the order of the batches.
        history: The range of each batch, for `merge_all`; None if they are not recorded.
    """

    running_min: Tensor
    running_max: Tensor
    is_ordered: ClassVar[bool] = True
    history: list[Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_range(self)

    def record(self, on: bool = True) -> None:
        """Record the range of each batch if their order matters; see `merge_all`."""
        self.history = [] if on and self.is_ordered else None

    @abstractmethod
    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        """Return (running_min, running_max) after a later batch.

        Args:
            min_val: Smallest value of the batch per block, at most 0.
            max_val: Largest value of the batch per block, at least 0.

        The range of the first batch becomes the running range without a call of this method.
        """
        raise SpecError(f"{type(self).__name__} must implement update_running_range(min_val, max_val)")

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        if self.history is not None:
            self.history.append(torch.stack((min_val.detach(), max_val.detach())))
        return self.choose(*self._update_range(min_val, max_val))

    def _update_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        return update_range(self, (min_val, max_val), lambda _, batch: self.update_running_range(*batch))

    def statistics(self) -> dict[str, Tensor]:
        history = {} if not self.history else {"history": torch.stack([batch.flatten(1) for batch in self.history])}
        return super().statistics() | history

    def merge_all(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Merge parts. If the order matters: the first batch of each part, then the second batch of each part, ..."""
        if self.history is None:
            super().merge_all(parts)
            return
        observed = sum(int(part["observed_batches"]) for part in parts)
        skipped = sum(int(part["skipped_batches"]) for part in parts)
        shape = next((part["running_min"].shape for part in parts if "history" in part), None)
        histories = [part["history"].to(self.scale.device) for part in parts if "history" in part]
        self.reset()
        for index in range(max(map(len, histories), default=0)):
            for history in histories:
                if index < len(history) and shape is not None:
                    self.store(self.choose(*self._update_range(*history[index].view(2, *shape))))
        self.observed_batches.fill_(observed)
        self.skipped_batches.fill_(skipped)

    def seed(self, qparams: QParams) -> None:
        super().seed(qparams)
        seed_range(self, qparams)

    def merge(self, other: QParamsCalculatorBase) -> None:
        share = other.observed_batches / (self.observed_batches + other.observed_batches)
        merge_range(self, other, lambda first, second: self._merge_ranges(first, second, share))

    def _merge_ranges(self, first: Range, second: Range, share: Tensor) -> Range:
        """Merge two ranges. `share` is the share of the second one in all batches."""
        return merge_extremes(first, second)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, running_min={self.running_min}, running_max={self.running_max}"


@QParamsCalculatorBase.register("moving_average")
class MovingAverageQParamsCalculator(RunningRangeMixin):
    """Range by moving average: running = c * new + (1 - c) * running; `new` is the range of a batch, with zero.

    So the average of [0.5, 2] and [-1, 2] with c = 0.01 starts at -0.01. Widening the average instead would give 0.
    """

    def __init__(self, *args: Any, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 < averaging_constant <= 1:
            raise SpecError(f"averaging_constant={averaging_constant}: must be above 0 and at most 1")
        self.averaging_constant = averaging_constant

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        c = self.averaging_constant
        return c * min_val + (1 - c) * self.running_min, c * max_val + (1 - c) * self.running_max

    def _merge_ranges(self, first: Range, second: Range, share: Tensor) -> Range:
        weight = share.to(first[0])
        return torch.lerp(first[0], second[0], weight), torch.lerp(first[1], second[1], weight)


@QParamsCalculatorBase.register("global_minmax")
class GlobalMinMaxQParamsCalculator(RunningRangeMixin):
    """Range from the smallest to the largest value of all batches."""

    is_ordered = False

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        return merge_extremes((self.running_min, self.running_max), (min_val, max_val))
