"""AdaRound: every code is floor or ceiling by a soft choice that hardens on the way; the block's output is the loss.

    q = floor(p) + h(V),   h = clip(1.2 sigmoid(V) - 0.1, 0, 1)        penalty = lam sum(1 - |2 h - 1|^beta)

beta falls from 20 to 2 and the penalty starts after a fifth of the iterations (Nagel et al. 2020; over blocks, BRECQ;
with inputs that are exact in part, QDrop). p is the code that was
chosen before, moved a quarter of a step at most to where the float weight lies.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.tuning.reconstruct import AdamVariables, PieceTask, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

TOTAL_LEARNING_RATE, PENALTY_WEIGHT, WARM_UP_SHARE = 10.0, 1e-2, 0.2  # the rate is such that a choice can go so far
FIRST_BETA, LAST_BETA = 20.0, 2.0


@register("ada_round", over="piece")
def ada_round(work: PieceTask) -> None:
    """Codes and biases of a piece."""
    layers = [TrainableWeight(shape) for shape in work.layers() if shape.codes().floats is None]
    if layers:
        reconstruct(work, SoftRounding(layers, TOTAL_LEARNING_RATE / work.iterations))


class SoftRounding(AdamVariables):
    """Soft choices between floor and ceiling."""

    def __init__(self, layers: Sequence[TrainableWeight], rate: float) -> None:
        self.layers = layers
        self.floors = [each.place.floor() for each in layers]
        self.ends = [(each.shape.codes().low.float(), each.shape.codes().high.float()) for each in layers]
        shares = [each.place - floor for each, floor in zip(layers, self.floors, strict=True)]
        self.choices = [_inverse_of_share(share).requires_grad_() for share in shares]
        self.optimizer = torch.optim.Adam(
            [{"params": self.choices, "lr": rate}, {"params": [each.shift for each in layers], "lr": 1e-4}]
        )
        self.count = sum(each.numel() for each in self.choices)

    def parameters(self) -> list[Tensor]:
        return [*self.choices, *(each.shift for each in self.layers)]

    def installed(self) -> Any:
        return enter_all(
            [
                each.computing(partial(self._codes, index), partial(getattr, each.start, "scale"))
                for index, each in enumerate(self.layers)
            ]
        )

    def _codes(self, index: int) -> Tensor:
        return (self.floors[index] + _round_up_share(self.choices[index])).clamp(*self.ends[index])

    def penalty(self, progress: float) -> Tensor | float:
        if progress < WARM_UP_SHARE:
            return 0.0
        beta = LAST_BETA + (FIRST_BETA - LAST_BETA) * (1 - (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))
        parts = [(1 - (2 * _round_up_share(each) - 1).abs().pow(beta)).sum() for each in self.choices]
        return PENALTY_WEIGHT * torch.stack(parts).sum() / self.count

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            codes = self.floors[index] + (_round_up_share(self.choices[index].detach()) >= 0.5)
            layer.harden(codes, layer.start.scale)


def _round_up_share(choice: Tensor) -> Tensor:
    return (1.2 * torch.sigmoid(choice) - 0.1).clamp(0, 1)


def _inverse_of_share(share: Tensor) -> Tensor:
    """The choice that gives a share."""
    inner = ((share + 0.1) / 1.2).clamp(0.01, 0.99)
    return torch.log(inner / (1 - inner))
