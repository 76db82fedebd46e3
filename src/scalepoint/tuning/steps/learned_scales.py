"""Learned scales: those of weights and activations, and the biases, by their gradients; codes of weights stay.

    d fq(x)/ds = round(x/s) - x/s inside, the end of the range outside (LSQ);      s = s0 exp(a),   Adam on a and biases

`clip` works block by block, so that ranges of few bits give up what costs the block less than finer steps win it;
`end_to_end` on the whole net against its float outputs, with a small rate, and only while held-out samples agree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.tuning.reconstruct import AdamVariables, PieceTask, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

LEARNING_RATES = {"clip": 2e-3, "end_to_end": 2e-4}


@register("clip", over="piece")
def clip(work: PieceTask) -> None:
    """Scales and biases of a piece."""
    _learn_scales(work, LEARNING_RATES["clip"])


@register("end_to_end", over="model")
def end_to_end(work: PieceTask) -> None:
    """Scales and biases of the whole net."""
    work.drop = 0.0
    _learn_scales(work, LEARNING_RATES["end_to_end"])


def _learn_scales(work: PieceTask, rate: float) -> None:
    layers, stubs = [TrainableWeight(shape) for shape in work.layers()], work.stubs()
    if layers or stubs:
        reconstruct(work, LearnedScales(layers, stubs, rate))


class LearnedScales(AdamVariables):
    """Scales as powers, so that they stay positive."""

    def __init__(self, layers: Sequence[TrainableWeight], stubs: Sequence[QuantStub], rate: float) -> None:
        self.layers, self.stubs = layers, stubs
        self.powers = [torch.zeros_like(each.start.scale).requires_grad_() for each in layers]
        self.first = [stub.scale.detach().clone() for stub in stubs]
        self.stretch = [torch.zeros_like(scale).requires_grad_() for scale in self.first]
        shifts = [each.shift for each in layers]
        self.optimizer = torch.optim.Adam([*self.powers, *self.stretch, *shifts], lr=rate)

    def parameters(self) -> list[Tensor]:
        return [*self.powers, *self.stretch, *(each.shift for each in self.layers)]

    def installed(self) -> Any:
        weights = [
            each.computing(partial(getattr, each.start, "codes"), partial(self._scale, index))
            for index, each in enumerate(self.layers)
        ]
        return enter_all([*weights, *(self._learned(index) for index in range(len(self.stubs)))])

    def _scale(self, index: int) -> Tensor:
        layer = self.layers[index]
        return layer.start.scale * self.powers[index].exp() if layer.shape.has_own_scales else layer.start.scale

    @contextmanager
    def _learned(self, index: int) -> Iterator[None]:
        stub = self.stubs[index]
        kept = stub._buffers["scale"]
        stub._buffers["scale"] = self.first[index] * self.stretch[index].exp()
        try:
            yield
        finally:
            stub._buffers["scale"] = kept

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.harden(layer.start.codes, self._scale(index))
        for index, stub in enumerate(self.stubs):
            stub.set_parameters(QParams(self.first[index] * self.stretch[index].detach().exp()))
