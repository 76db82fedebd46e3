"""Scales with a sign, for formats whose blocks may have a negative one (llama.cpp's Q4_0, Q5_0).

    scale = f * m / low        m the value of the largest magnitude in a block, with its sign; low the lowest code, -8

A signed integer has one code more below zero than above. With the sign of the scale the extra code goes to the side of
the largest weight, which f = 1 stores exactly. That is llama.cpp's own rounding; a few other f are tried, and the one
with the least squared error is taken, so no block is worse. Strong clipping (small f) has a low squared error too, and
costs language models far more than it seems to win: the largest weights carry the signal. So f stays near 1.
"""

from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import SpecError
from scalepoint.numerics import QParams, QuantizationFormulation, QuantizationScheme
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase

FACTORS = (1.0, 0.96, 1.04, 1.08)
TINY = torch.finfo(torch.float32).tiny
ROWS = 4096  # blocks at a time: what is tried stays in the cache of a core


@QParamsCalculatorBase.register("signed_scale")
class SignedScaleQParamsCalculator(QParamsCalculatorBase):
    """From the current tensor only, as `static`, with scales that may be negative."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        grid = self.grid
        is_fit = grid.scheme == QuantizationScheme.SYMMETRIC and grid.formulation == QuantizationFormulation.ZP
        if grid.format.is_float or not grid.format.is_signed or not is_fit:
            raise SpecError("signed_scale is for signed integers with qscheme='symmetric' and qformulation='zp'")

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        plain = self.choose(min_val, max_val)
        rows = self.range_calculator.blocks(tensor.detach())
        scale = torch.cat([self._best(part) for part in rows.split(ROWS)]).reshape(plain.scale.shape)
        return plain._replace(scale=torch.where(scale.abs() < TINY, plain.scale, scale))

    def _best(self, rows: Tensor) -> Tensor:
        """The scale of least squared error for each row."""
        low, high = self.grid.low, self.grid.high
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        start = largest / low
        best, least = start, torch.full_like(start, torch.inf)
        for factor in FACTORS:
            scale = start * factor
            values = (rows / scale).round_().clamp_(low, high).mul_(scale)
            error = values.sub_(rows).square_().sum(1, keepdim=True)
            is_better = error < least
            best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
        return best
