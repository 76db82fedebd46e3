"""Parameters made anew for every call, as a runtime with dynamic quantization does: per tensor or per token."""

from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase


@QParamsCalculatorBase.register("dynamic")
class DynamicQParamsCalculator(QParamsCalculatorBase):
    """From the tensor of this very call, in every mode, also frozen and in export mode.

    With PerTokenGranularity each token has its own scale, whatever the batch and the length. `get_qparams()` gives
    those of the last call; they are no part of the state.
    """

    always_called = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: QParams | None = None

    def forward(self, tensor: Tensor) -> QParams:
        with torch.no_grad():
            observed = self._no_range(tensor) if None not in self.float_range else self.range_calculator(tensor)
            qparams = self.choose(*observed)
        if not torch.compiler.is_compiling():
            self._last = qparams
        return qparams

    @property
    def is_initialized(self) -> bool:
        return self._last is not None

    @property
    def stored(self) -> QParams:
        return super().stored if self._last is None else self._last

    def reset(self) -> None:
        super().reset()
        self._last = None
