"""Scales with a sign, for formats that allow negative scales (llama.cpp's Q4_0, Q5_0).

    scale = m / low        m: value of the largest magnitude in a block, with its sign; low: the lowest code, such as -8

A signed integer has one more code below zero than above. The sign of the scale puts this code on the side of the
largest weight, which is then stored exactly. llama.cpp rounds like this. Scales with a smaller squared error are not
better: SmolLM2-135M has perplexity 16.9 with these scales, and 17.4 with the best of 0.96 to 1.08 times them, although
the squared error of the weights is 13 % smaller (1,536 tokens of English text).
"""

from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams, QuantizationFormulation, QuantizationScheme
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, StatefulQParamsCalculatorBase

TINY = torch.finfo(torch.float32).tiny


@QParamsCalculatorBase.register("signed_scale")
class SignedScaleQParamsCalculator(StatefulQParamsCalculatorBase):
    """Computes parameters from the current tensor, like `static`, with scales that may be negative."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        grid = self.grid
        is_supported = grid.scheme == QuantizationScheme.SYMMETRIC and grid.formulation == QuantizationFormulation.ZP
        if grid.format.is_float or not grid.format.is_signed or not is_supported:
            raise SpecError("signed_scale is for signed integers with qscheme='symmetric' and qformulation='zp'")

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        unsigned = self.choose(min_val, max_val)
        rows = self.range_calculator.blocks(tensor.detach())
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        scale = (largest / self.grid.low).reshape(unsigned.scale.shape)
        return unsigned._replace(scale=torch.where(scale.abs() < TINY, unsigned.scale, scale))
