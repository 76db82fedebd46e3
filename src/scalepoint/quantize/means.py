"""Bias correction: what the rounding of a weight adds to the mean of a layer's output is taken off its bias.

    shift = mean over positions of (W - Wq) * mean over samples of x        (* is the layer's own product)

A layer is linear, so the mean of its error is its product with the mean of its input: exact, borders and groups
counted, and known from the pass that finds the ranges. Layers without a bias get none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint import ranks
from scalepoint.quantize.parts import run_with
from scalepoint.quantize.weighted import QuantizedWeighted

KINDS = ("conv", "linear")


class Means:
    """The means of what layers read, while `with` lasts."""

    def __init__(self, model: nn.Module) -> None:
        layers = [each for each in model.modules() if isinstance(each, QuantizedWeighted) and each.kind in KINDS]
        self.layers = [each for each in layers if each.folded()[1] is not None]
        self.sums: list[Tensor | None] = [None for _ in self.layers]
        self.counts = [0 for _ in self.layers]
        self.hooks: list[Any] = []

    def __enter__(self) -> "Means":
        for index, layer in enumerate(self.layers):
            layer.shift_bias(None)
            self.hooks.append(layer.register_forward_pre_hook(self._hook(index)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, index: int) -> Any:
        is_linear = self.layers[index].kind == "linear"

        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            samples = x.reshape(-1, x.shape[-1]) if is_linear else x if x.ndim > 2 else x[None]
            found, known = samples.sum(0, dtype=torch.float32), self.sums[index]
            if not len(samples) or not bool(torch.isfinite(found).all()):
                return  # what holds NaN is told, or left out, by the stubs
            if known is None:
                self.sums[index], self.counts[index] = found, len(samples)
            elif known.shape == found.shape:  # pictures of another size have a mean of their own, which is not kept
                known += found
                self.counts[index] += len(samples)

        return see

    def merge(self) -> None:
        """Of all ranks, in their order."""
        own = {f"{index} sum": each for index, each in enumerate(self.sums) if each is not None}
        own |= {f"{index} count": torch.tensor(each) for index, each in enumerate(self.counts)}
        parts: Sequence[dict[str, Tensor]] = ranks.gathered(own, "merging means")
        for index in range(len(self.layers)):
            sums = [part[f"{index} sum"] for part in parts if f"{index} sum" in part]
            same = [each for each in sums if each.shape == sums[0].shape]
            self.sums[index] = torch.stack(same).sum(0) if same else None
            self.counts[index] = sum(
                int(part[f"{index} count"])
                for part in parts
                if f"{index} sum" in part and part[f"{index} sum"].shape == sums[0].shape
            )

    @torch.no_grad()
    def correct(self) -> None:
        """Shift the biases of all that saw something; weights are frozen."""
        for layer, found, count in zip(self.layers, self.sums, self.counts, strict=True):
            quant = layer.weight_quant
            if found is None or not count or not quant.frozen or quant.quantizer.is_disabled():
                continue
            weight, _ = layer.folded()
            values = layer.canonical(quant.values(layer.deployed().codes, weight.dtype))
            mean = (found / count)[None].to(weight)
            y = run_with(layer.operation, mean, weight - values, None)
            shift = y.reshape(-1, y.shape[-1]).mean(0) if layer.kind == "linear" else y.flatten(2).mean(2)[0]
            if bool(torch.isfinite(shift).all()):
                layer.shift_bias(shift)
