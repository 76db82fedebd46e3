"""Parameters made anew for every call, as a runtime with dynamic quantization does: per tensor or per token."""

from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase


@QParamsCalculatorBase.register("dynamic")
class DynamicQParamsCalculator(QParamsCalculatorBase):
    """From the tensor of this very call, in every mode; nothing is kept for the next one but to look at.

    With PerTokenGranularity each token has its own scale, whatever the batch and the length.
    """

    always_called = True

    def forward(self, tensor: Tensor) -> QParams:
        low, high = self._range(tensor.detach())
        return self.choose(low, high)
