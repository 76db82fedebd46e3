"""SignRound: offsets inside the rounding, scales and biases move by the sign of their gradients.

    q = round(p + V),  |V| <= 1,    s' = s (1 + a),  |a| <= 0.2,    V <- V - lr sign(dV),   lr = 0.6/iterations, falling

p is the present code, moved up to a quarter of a step towards the float weight. So codes whose weight lies near the
middle between two codes change first, and the others only if gradients agree for long. AutoRound, from a better start.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.tuning.code_grids import CodeGrid
from scalepoint.tuning.reconstruct import PieceTask, TrainableVariables, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

MAX_SCALE_CHANGE = 0.2  # as a share of the scale
BIAS_RATE = 1e-3  # change of a bias per iteration, as a share of the layer's largest scale


@register("sign_round", over="piece")
def sign_round(task: PieceTask) -> None:
    """Learn codes, scales and biases of a piece."""
    layers = [TrainableWeight(grouped) for grouped in task.layers()]
    if layers:
        reconstruct(task, RoundingOffsets(layers, task.iterations))


class RoundingOffsets(TrainableVariables):
    """Offsets inside the rounding, relative changes of the scales, and shifts of the biases."""

    def __init__(self, layers: Sequence[TrainableWeight], iterations: int) -> None:
        self.layers, self.learning_rate = layers, 0.6 / iterations
        self.grids = [_to_float32(layer.grouped.code_grid()) for layer in layers]
        self.offsets = [torch.zeros_like(layer.start.codes).requires_grad_() for layer in layers]
        self.scale_changes = [torch.zeros_like(layer.start.scale).requires_grad_() for layer in layers]

    def parameters(self) -> list[Tensor]:
        return [*self.offsets, *self.scale_changes, *(layer.shift for layer in self.layers)]

    def installed(self) -> Any:
        return enter_all(
            [
                layer.installed(partial(self._codes, index), partial(self._scale, index))
                for index, layer in enumerate(self.layers)
            ]
        )

    def _codes(self, index: int) -> Tensor:
        """Return rounded codes, with the gradient of the unrounded ones."""
        grid = self.grids[index]
        unrounded = (self.layers[index].initial_codes + self.offsets[index]).clamp(grid.low, grid.high)
        return unrounded + (grid.round_(unrounded.detach().clone()) - unrounded).detach()

    def _scale(self, index: int) -> Tensor:
        layer = self.layers[index]
        if not layer.grouped.can_change_scales:
            return layer.start.scale
        return layer.start.scale * (1 + self.scale_changes[index])

    def update(self, gradients: Sequence[Tensor | None], progress: float) -> None:
        learning_rate, count = self.learning_rate * (1 - progress), len(self.layers)
        for index, (parameter, gradient) in enumerate(zip(self.parameters(), gradients, strict=True)):
            if gradient is None:
                continue
            if index < count:  # an offset
                parameter.sub_(learning_rate * gradient.sign()).clamp_(-1, 1)
            elif index < 2 * count:  # a change of scale
                parameter.sub_(0.1 * learning_rate * gradient.sign()).clamp_(-MAX_SCALE_CHANGE, MAX_SCALE_CHANGE)
            else:
                largest_scale = self.layers[index - 2 * count].start.scale.amax()
                parameter.sub_(BIAS_RATE * (1 - progress) * largest_scale * gradient.sign())

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.harden(layer.initial_codes + self.offsets[index], self._scale(index))


def _to_float32(grid: CodeGrid) -> CodeGrid:
    """Return the grid without partners, whose limits hardening applies."""
    return CodeGrid(grid.low.to(torch.float32), grid.high.to(torch.float32), grid.float_format)
