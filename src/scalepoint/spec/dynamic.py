"""Dynamic quantization: parameters are computed again in every call, per tensor, token or block.

tensor -> range_calculator -> (min, max) -> compute_qparams -> scale, zero_point, minval
"""

from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams, choose_qparams, tensor_scale
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, check_same_kind, to_qparams


class StatelessQParamsCalculatorBase(QParamsCalculatorBase):
    """Base of the calculators that compute the parameters of every tensor, also when frozen and in export.

    The parameters are not part of the state; `get_qparams()` returns those of the last call. For two-level formats
    (NVFP4) only the block scales are computed again: runtimes take the scale of the tensor as a constant, so it is the
    largest observed. A subclass may override `compute_qparams(tensor, min_val, max_val)`.
    """

    always_called = True  # also with the observer off: there are no stored parameters to use instead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: QParams | None = None  # of the last call, for get_qparams(); not in the state_dict

    def forward(self, tensor: Tensor) -> QParams:
        if self.needs_calibration and not self.is_on("export_mode"):
            low, high = self._observe_range(tensor.detach())
            self._raise_tensor_scale(tensor_scale(torch.maximum(-low, high), self.grid.format))
        return self._compute(tensor)

    def _raise_tensor_scale(self, scale: Tensor) -> None:
        """Store the scale of a tensor if it is the largest so far."""
        largest = self.tensor_scale
        is_first = largest is None or not largest.numel()
        self.set_buffer("tensor_scale", scale if is_first else torch.maximum(scale, largest))  # type: ignore[arg-type]

    def compute_for(self, tensor: Tensor) -> QParams:
        with torch.no_grad():
            return self._compute(tensor)

    def _compute(self, tensor: Tensor) -> QParams:
        low, high = self._observe_range(tensor)
        qparams = to_qparams(self.compute_qparams(tensor, low, high), type(self).__name__)
        if not torch.compiler.is_compiling():
            self._last = qparams.map(Tensor.detach) if qparams.scale.requires_grad else qparams
        return qparams

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        outer = None if self.tensor_scale is None or not self.tensor_scale.numel() else self.tensor_scale
        return choose_qparams(min_val, max_val, self.grid, outer)

    def _observe_range(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        observed = self._zero_range(tensor) if None not in self.float_range else self.range_calculator(tensor)
        return self.prepare_range(*observed)

    @property
    def needs_calibration(self) -> bool:
        return self.tensor_scale is not None

    @property
    def is_initialized(self) -> bool:
        return self._last is not None or (self.tensor_scale is not None and self.tensor_scale.numel() > 0)

    @property
    def stored(self) -> QParams:
        return super().stored if self._last is None else self._last

    def finalize(self) -> QParams:
        """Return the parameters that are constant in a file: the scale of the tensor, for two-level formats."""
        return self.stored if self.tensor_scale is None else QParams(self.tensor_scale)

    def merge(self, other: QParamsCalculatorBase) -> None:
        """Use the larger scale of the tensor. The other parameters are computed again in every call."""
        check_same_kind(self, other)
        if other.tensor_scale is not None and other.tensor_scale.numel():
            self._raise_tensor_scale(other.tensor_scale)

    def reset(self) -> None:
        super().reset()
        self._last = None


@QParamsCalculatorBase.register("dynamic")
class DynamicQParamsCalculator(StatelessQParamsCalculatorBase):
    """Computes the parameters from the current tensor in every call, also when frozen and in export.

    With PerTokenGranularity every token has its own scale, with PerTokenBlockGranularity every block of a token.
    """
