"""AdaRound: learns for every code whether it is rounded up or down. The loss is the error at the end of the block.

    q = floor(p) + h(V),   h = clip(1.2 sigmoid(V) - 0.1, 0, 1)        penalty = lam sum(1 - |2 h - 1|^beta)

V is learned. p is the present code, moved up to a quarter of a step towards the float weight. The penalty pushes h to 0
or 1: it starts after a fifth of the iterations, and beta falls from 20 to 2. Nagel et al. 2020; over blocks as in
BRECQ, with partly exact inputs as in QDrop.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.tuning.reconstruct import AdamVariables, PieceTask, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

TOTAL_LEARNING_RATE = 10.0  # over all iterations: far enough for V to change from one side to the other
BIAS_LEARNING_RATE = 1e-4
PENALTY_WEIGHT = 1e-2
WARM_UP_SHARE = 0.2  # of the iterations, without penalty
FIRST_BETA, LAST_BETA = 20.0, 2.0


@register("ada_round", over="piece")
def ada_round(task: PieceTask) -> None:
    """Learn codes and biases of a piece."""
    layers = [TrainableWeight(grouped) for grouped in task.layers() if grouped.code_grid().float_format is None]
    if layers:
        reconstruct(task, SoftRounding(layers, TOTAL_LEARNING_RATE / task.iterations))


class SoftRounding(AdamVariables):
    """Continuous choices between floor and ceiling: V of the formula above."""

    def __init__(self, layers: Sequence[TrainableWeight], learning_rate: float) -> None:
        self.layers = layers
        self.floors = [layer.initial_codes.floor() for layer in layers]
        grids = [layer.grouped.code_grid() for layer in layers]
        self.limits = [(grid.low.float(), grid.high.float()) for grid in grids]
        shares = [layer.initial_codes - floor for layer, floor in zip(layers, self.floors, strict=True)]
        self.choices = [_inverse_of_share(share).requires_grad_() for share in shares]
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.choices, "lr": learning_rate},
                {"params": [layer.shift for layer in layers], "lr": BIAS_LEARNING_RATE},
            ]
        )
        self.count = sum(choice.numel() for choice in self.choices)

    def parameters(self) -> list[Tensor]:
        return [*self.choices, *(layer.shift for layer in self.layers)]

    def installed(self) -> Any:
        return enter_all(
            [
                layer.installed(partial(self._codes, index), partial(getattr, layer.start, "scale"))
                for index, layer in enumerate(self.layers)
            ]
        )

    def _codes(self, index: int) -> Tensor:
        return (self.floors[index] + _round_up_share(self.choices[index])).clamp(*self.limits[index])

    def penalty(self, progress: float) -> Tensor | float:
        if progress < WARM_UP_SHARE:
            return 0.0
        beta = LAST_BETA + (FIRST_BETA - LAST_BETA) * (1 - (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))
        sums = [(1 - (2 * _round_up_share(choice) - 1).abs().pow(beta)).sum() for choice in self.choices]
        return PENALTY_WEIGHT * torch.stack(sums).sum() / self.count

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            codes = self.floors[index] + (_round_up_share(self.choices[index].detach()) >= 0.5)
            layer.harden(codes, layer.start.scale)


def _round_up_share(choice: Tensor) -> Tensor:
    """h of the formula above: 0 rounds down, 1 rounds up."""
    return (1.2 * torch.sigmoid(choice) - 0.1).clamp(0, 1)


def _inverse_of_share(share: Tensor) -> Tensor:
    """The V whose h is this share."""
    inner = ((share + 0.1) / 1.2).clamp(0.01, 0.99)
    return torch.log(inner / (1 - inner))
