"""SignRound: offsets of the weights inside the rounding, scales and biases move by the sign of their gradient.

    q = round(p + V),  |V| <= 1,    s' = s (1 + a),  |a| <= 0.2,    V <- V - lr sign(dV),   lr = 0.6/iterations, falling

p is the code that was chosen before, moved a quarter of a step at most to where the float weight lies: what is
undecided moves first, and only where gradients agree for long (AutoRound, from a better start).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.tuning.problem import CodeGrid
from scalepoint.tuning.reconstruct import PieceTask, TrainableVariables, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

MAX_SCALE_CHANGE = 0.2  # how far a scale may go
BIAS_RATE = 1e-3  # a step of the bias, in shares of the largest output step


@register("sign_round", over="piece")
def sign_round(work: PieceTask) -> None:
    """Codes, scales and biases of a piece."""
    layers = [TrainableWeight(shape) for shape in work.layers()]
    if layers:
        reconstruct(work, RoundingOffsets(layers, work.iterations))


class RoundingOffsets(TrainableVariables):
    """Offsets inside the rounding."""

    def __init__(self, layers: Sequence[TrainableWeight], iterations: int) -> None:
        self.layers, self.rate = layers, 0.6 / iterations
        self.grids = [_to_float32(each.shape.codes()) for each in layers]
        self.offsets = [torch.zeros_like(each.start.codes).requires_grad_() for each in layers]
        self.stretch = [torch.zeros_like(each.start.scale).requires_grad_() for each in layers]

    def parameters(self) -> list[Tensor]:
        return [*self.offsets, *self.stretch, *(each.shift for each in self.layers)]

    def installed(self) -> Any:
        return enter_all(
            [
                each.computing(partial(self._codes, index), partial(self._scale, index))
                for index, each in enumerate(self.layers)
            ]
        )

    def _codes(self, index: int) -> Tensor:
        grid, place = self.grids[index], self.layers[index].place + self.offsets[index]
        inside = place.clamp(grid.low, grid.high)
        return inside + (grid.round_(inside.detach().clone()) - inside).detach()

    def _scale(self, index: int) -> Tensor:
        layer = self.layers[index]
        return layer.start.scale * (1 + self.stretch[index]) if layer.shape.has_own_scales else layer.start.scale

    def move(self, gradients: Sequence[Tensor | None], progress: float) -> None:
        rate, count = self.rate * (1 - progress), len(self.layers)
        for index, (value, gradient) in enumerate(zip(self.parameters(), gradients, strict=True)):
            if gradient is None:
                continue
            if index < count:
                value.sub_(rate * gradient.sign()).clamp_(-1, 1)
            elif index < 2 * count:
                value.sub_(0.1 * rate * gradient.sign()).clamp_(-MAX_SCALE_CHANGE, MAX_SCALE_CHANGE)
            else:
                step = self.layers[index - 2 * count].start.scale.amax()
                value.sub_(BIAS_RATE * (1 - progress) * step * gradient.sign())

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.harden(layer.place + self.offsets[index], self._scale(index))


def _to_float32(codes: CodeGrid) -> CodeGrid:
    return CodeGrid(codes.low.to(torch.float32), codes.high.to(torch.float32), codes.floats)
