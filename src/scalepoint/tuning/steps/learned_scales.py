"""Learned scales: scales of weights and activations, and biases, move by their gradients. Codes of weights stay.

    d fq(x)/ds = round(x/s) - x/s inside, the end of the range outside (LSQ);      s = s0 exp(a),   Adam on a and biases

`clip` works block by block: with few bits, a smaller range costs the block less than finer steps gain. `end_to_end`
works on the whole model against its float outputs, with a small learning rate, while held-out samples improve.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalepoint.numerics import QParams
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.tuning.reconstruct import PieceTask, TrainableVariables, TrainableWeight, enter_all, reconstruct
from scalepoint.tuning.steps.registry import register

LEARNING_RATES = {"clip": 2e-3, "end_to_end": 2e-4}


@register("clip", over="piece")
def clip(task: PieceTask) -> None:
    """Learn scales and biases of a piece."""
    _learn_scales(task, LEARNING_RATES["clip"])


@register("end_to_end", over="model")
def end_to_end(task: PieceTask) -> None:
    """Learn scales and biases of the whole model."""
    task.drop = 0.0  # the inputs of the model are exact in both streams
    _learn_scales(task, LEARNING_RATES["end_to_end"])


def _learn_scales(task: PieceTask, learning_rate: float) -> None:
    layers, stubs = [TrainableWeight(grouped) for grouped in task.layers()], task.stubs()
    if layers or stubs:
        reconstruct(task, LearnedScales(layers, stubs, learning_rate))


class LearnedScales(TrainableVariables):
    """Exponents a of scales s0 exp(a), which stay positive."""

    def __init__(self, layers: Sequence[TrainableWeight], stubs: Sequence[QuantStub], learning_rate: float) -> None:
        self.layers, self.stubs = layers, stubs
        self.weight_exponents = [torch.zeros_like(layer.start.scale).requires_grad_() for layer in layers]
        self.stub_scales = [stub.scale.detach().clone() for stub in stubs]
        self.stub_exponents = [torch.zeros_like(scale).requires_grad_() for scale in self.stub_scales]
        shifts = [layer.shift for layer in layers]
        self.optimizer = torch.optim.Adam([*self.weight_exponents, *self.stub_exponents, *shifts], lr=learning_rate)

    def parameters(self) -> list[Tensor]:
        return [*self.weight_exponents, *self.stub_exponents, *(layer.shift for layer in self.layers)]

    def update(self, gradients: Sequence[Tensor | None], progress: float) -> None:
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def installed(self) -> Any:
        weights = [
            layer.installed(partial(getattr, layer.start, "codes"), partial(self._weight_scale, index))
            for index, layer in enumerate(self.layers)
        ]
        return enter_all([*weights, *(self._stub_installed(index) for index in range(len(self.stubs)))])

    def _weight_scale(self, index: int) -> Tensor:
        layer = self.layers[index]
        if not layer.grouped.can_change_scales:
            return layer.start.scale
        return layer.start.scale * self.weight_exponents[index].exp()

    @contextmanager
    def _stub_installed(self, index: int) -> Iterator[None]:
        """A context in which an activation quantizer computes with its learned scale."""
        stub = self.stubs[index]
        scale = stub._buffers["scale"]
        stub._buffers["scale"] = self.stub_scales[index] * self.stub_exponents[index].exp()
        try:
            yield
        finally:
            stub._buffers["scale"] = scale

    def harden(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.harden(layer.start.codes, self._weight_scale(index))
        for index, stub in enumerate(self.stubs):
            stub.set_parameters(QParams(self.stub_scales[index] * self.stub_exponents[index].detach().exp()))
