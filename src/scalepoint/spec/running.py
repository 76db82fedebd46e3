"""Calculators that remember a range over batches: a moving average, or the extremes.

The memory itself is two buffers of the calculator, `running_min` and `running_max`, and the functions below on them;
histograms have the same one.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams
from scalepoint.spec.granularity import PerTensorGranularity
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, check_same_kind

Range = tuple[Tensor, Tensor]


def add_range(owner: QParamsCalculatorBase) -> None:
    owner.add_empty("running_min")
    owner.add_empty("running_max")


def get_range(owner: QParamsCalculatorBase) -> Range:
    low, high = owner._buffers["running_min"], owner._buffers["running_max"]
    assert low is not None and high is not None  # noqa: S101, PT018  # add_range made them
    return low, high


def set_range(owner: QParamsCalculatorBase, low: Tensor, high: Tensor) -> None:
    owner.keep("running_min", low)
    owner.keep("running_max", high)


def merge_extremes(old: Range, new: Range) -> Range:
    return torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])


def update_range(owner: QParamsCalculatorBase, new: Range, update: Callable[[Range, Range], Range]) -> Range:
    """The range after a batch with this one, which is kept; the first is taken as it is."""
    owner.check_shape(new[0].shape)
    old = get_range(owner)
    is_first = not old[0].numel()
    if not is_first and isinstance(owner.granularity, PerTensorGranularity):
        new = new[0].view_as(old[0]), new[1].view_as(old[0])  # ranks may differ
    low, high = new if is_first else update(old, new)
    if torch.compiler.is_compiling():
        # A graph cannot raise, so a batch with NaN or infinity is left out here and counted.
        finite = torch.isfinite(new[0] + 0 * new[1]).all()
        low = torch.where(finite, low, torch.zeros_like(low) if is_first else old[0])
        high = torch.where(finite, high, torch.zeros_like(high) if is_first else old[1])
        owner.skipped_batches.add_(~finite)
    set_range(owner, low, high)
    return low, high


def seed_range(owner: QParamsCalculatorBase, qparams: QParams) -> None:
    """As if the whole range of these parameters had been observed."""
    zero_point = 0 if qparams.zero_point is None else qparams.zero_point
    grid = owner.grid
    set_range(owner, (grid.low - zero_point) * qparams.scale, (grid.high - zero_point) * qparams.scale)


def merge_range(
    owner: QParamsCalculatorBase, other: QParamsCalculatorBase, merged: Callable[[Range, Range], Range]
) -> None:
    """Take in the range that another observed, and its batches; one that saw nothing changes nothing."""
    check_same_kind(owner, other)
    theirs = get_range(other)
    if not theirs[0].numel():
        return
    low, high = (value.to(owner.scale.device) for value in theirs)
    own = get_range(owner)
    if own[0].numel():
        owner.check_shape(low.shape)
        low, high = merged(own, (low, high))
    set_range(owner, low, high)
    owner.store(owner.choose(low, high))
    owner.observed_batches.add_(other.observed_batches.to(owner.observed_batches.device))


class RunningRangeMixin(QParamsCalculatorBase):
    """Keeps `running_min` and `running_max` over batches; a subclass decides how a new range changes them."""

    running_min: Tensor
    running_max: Tensor
    is_ordered: ClassVar[bool] = True  # whether batches in another order give another range
    history: list[Tensor] | None = None  # a list: every range is kept, so that parts can be put in order later

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_range(self)

    def record(self, on: bool = True) -> None:
        """Keep the range of every batch, where their order matters: see `merge_all`."""
        self.history = [] if on and self.is_ordered else None

    @abstractmethod
    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        """Return (running_min, running_max) after a later batch.

        Args:
            min_val: The least value of the batch per block, at most 0.
            max_val: The largest value of the batch per block, at least 0.

        The range of the first batch becomes the running range without a call of this method.
        """
        raise SpecError(f"{type(self).__name__} must implement update_running_range(min_val, max_val)")

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        if self.history is not None:
            self.history.append(torch.stack((min_val.detach(), max_val.detach())))
        return self.choose(*self._update_range(min_val, max_val))

    def _update_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        new = self._batch_range(min_val, max_val)
        return update_range(self, new, lambda _, batch: self.update_running_range(*batch))

    def _batch_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        """Widen the range of a batch to include zero, before it is averaged.

        The average of [0.5, 2] and [-1, 2] with c = 0.01 starts at -0.01 that way. Widening the average gives 0.
        """
        return min_val.clamp(max=0.0), max_val.clamp(min=0.0)

    def statistics(self) -> dict[str, Tensor]:
        history = {} if not self.history else {"history": torch.stack([batch.flatten(1) for batch in self.history])}
        return super().statistics() | history

    def merge_all(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Where the order matters: batch after batch, the first of every part, then the second of every part, ..."""
        if self.history is None:
            super().merge_all(parts)
            return
        counted = [sum(int(part[name]) for part in parts) for name in ("observed_batches", "skipped_batches")]
        shape = next((part["running_min"].shape for part in parts if "history" in part), None)
        histories = [part["history"].to(self.scale.device) for part in parts if "history" in part]
        self.reset()
        for index in range(max(map(len, histories), default=0)):
            for history in histories:
                if index < len(history) and shape is not None:
                    self.store(self.choose(*self._update_range(*history[index].view(2, *shape))))
        self.observed_batches.fill_(counted[0])
        self.skipped_batches.fill_(counted[1])

    def seed(self, qparams: QParams) -> None:
        super().seed(qparams)
        seed_range(self, qparams)

    def merge(self, other: QParamsCalculatorBase) -> None:
        share = other.observed_batches / (self.observed_batches + other.observed_batches)
        merge_range(self, other, lambda own, theirs: self._merged(own, theirs, share))

    def _merged(self, own: Range, theirs: Range, share: Tensor) -> Range:
        """The range of both; `share` is the other's of the batches."""
        return merge_extremes(own, theirs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, running_min={self.running_min}, running_max={self.running_max}"


@QParamsCalculatorBase.register("moving_average")
class MovingAverageQParamsCalculator(RunningRangeMixin):
    """Range by moving average: running = c * new + (1 - c) * running; `new` is the range of a batch, with zero."""

    def __init__(self, *args: Any, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 < averaging_constant <= 1:
            raise SpecError(f"averaging_constant={averaging_constant}: it is above 0 and at most 1")
        self.averaging_constant = averaging_constant

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        c = self.averaging_constant
        return c * min_val + (1 - c) * self.running_min, c * max_val + (1 - c) * self.running_max

    def _merged(self, own: Range, theirs: Range, share: Tensor) -> Range:
        weight = share.to(own[0])
        return torch.lerp(own[0], theirs[0], weight), torch.lerp(own[1], theirs[1], weight)


@QParamsCalculatorBase.register("global_minmax")
class GlobalMinMaxQParamsCalculator(RunningRangeMixin):
    """Range from the smallest to the largest value of all batches."""

    is_ordered = False

    def _batch_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        """Keep the range as observed: widening the extremes to include zero later gives the same parameters."""
        return min_val, max_val

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> Range:
        return merge_extremes((self.running_min, self.running_max), (min_val, max_val))
