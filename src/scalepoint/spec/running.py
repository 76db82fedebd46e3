"""Calculators that remember a range over batches: a moving average, or the extremes."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams
from scalepoint.spec.granularity import PerTensorGranularity
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, check_same_kind


class RunningRangeMixin(QParamsCalculatorBase):
    """Keeps `running_min` and `running_max`; a subclass says how a new range changes them."""

    running_min: Tensor
    running_max: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_empty("running_min")
        self.add_empty("running_max")

    @abstractmethod
    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Return (running_min, running_max) after a later batch with this range; the first is taken as it is."""
        raise SpecError(f"{type(self).__name__} must implement update_running_range(min_val, max_val)")

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        self.check_shape(min_val.shape)
        first = not self.running_min.numel()
        if not first and isinstance(self.granularity, PerTensorGranularity):
            min_val, max_val = min_val.view_as(self.running_min), max_val.view_as(self.running_min)  # ranks may differ
        low, high = (min_val, max_val) if first else self.update_running_range(min_val, max_val)
        if torch.compiler.is_compiling():
            # A graph cannot raise, so a batch with NaN or infinity is left out here and counted.
            finite = torch.isfinite(min_val + 0 * max_val).all()
            low = torch.where(finite, low, torch.zeros_like(low) if first else self.running_min)
            high = torch.where(finite, high, torch.zeros_like(high) if first else self.running_max)
            self.skipped_batches.add_(~finite)
        self._keep("running_min", low)
        self._keep("running_max", high)
        return self.choose(low, high)

    def seed(self, qparams: QParams) -> None:
        super().seed(qparams)
        zero_point = 0 if qparams.zero_point is None else qparams.zero_point
        self._keep("running_min", (self.grid.low - zero_point) * qparams.scale)
        self._keep("running_max", (self.grid.high - zero_point) * qparams.scale)

    def merge(self, other: QParamsCalculatorBase) -> None:
        check_same_kind(self, other)
        assert isinstance(other, RunningRangeMixin)  # noqa: S101  # same kind
        if not other.running_min.numel():
            return
        low, high = other.running_min.to(self.scale.device), other.running_max.to(self.scale.device)
        if self.running_min.numel():
            self.check_shape(low.shape)
            low, high = self._merged(
                low, high, other.observed_batches / (self.observed_batches + other.observed_batches)
            )
        self._keep("running_min", low)
        self._keep("running_max", high)
        self.store(self.choose(low, high))
        self.observed_batches.add_(other.observed_batches.to(self.observed_batches.device))

    def _merged(self, low: Tensor, high: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The range of both; `weight` is the other's share of the batches."""
        return torch.minimum(self.running_min, low), torch.maximum(self.running_max, high)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, running_min={self.running_min}, running_max={self.running_max}"


@QParamsCalculatorBase.register("moving_average")
class MovingAverageQParamsCalculator(RunningRangeMixin):
    """running = c * new + (1 - c) * running, the first batch taken as it is."""

    def __init__(self, *args: Any, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 < averaging_constant <= 1:
            raise SpecError(f"averaging_constant={averaging_constant}: it is above 0 and at most 1")
        self.averaging_constant = averaging_constant

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        c = self.averaging_constant
        return c * min_val + (1 - c) * self.running_min, c * max_val + (1 - c) * self.running_max

    def _merged(self, low: Tensor, high: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.to(low)
        return torch.lerp(self.running_min, low, weight), torch.lerp(self.running_max, high, weight)


@QParamsCalculatorBase.register("global_minmax")
class GlobalMinMaxQParamsCalculator(RunningRangeMixin):
    """The extremes of all batches."""

    def update_running_range(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.running_min, min_val), torch.maximum(self.running_max, max_val)
