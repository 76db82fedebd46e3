"""Bias correction: what the rounding of a weight adds to the mean of a layer's output is taken off its bias.

    shift = mean over positions of (W - Wq) * E[x]        E[x] a value a channel, * the layer's own product

A layer is linear, so the mean of its error is its product with the mean of its input, borders and groups counted; the
means come from the pass that finds the ranges. Layers without a bias, and transposed convolutions, get none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint import distributed
from scalepoint.quantize.operations import run_with_weight
from scalepoint.quantize.quantized_layers import QuantizedLayer

CORRECTED_KINDS = ("conv", "linear")


def remove_bias_correction(model: nn.Module) -> None:
    """Biases without what an earlier calibration added; what tuning added goes with the codes that it chose."""
    for each in model.modules():
        if isinstance(each, QuantizedLayer) and each.weight_quant.chosen is None:
            each.set_bias_shift(None)


class BiasCorrection:
    """The means of what layers read, while `with` lasts."""

    def __init__(self, model: nn.Module) -> None:
        layers = [each for each in model.modules() if isinstance(each, QuantizedLayer) and each.kind in CORRECTED_KINDS]
        self.layers = [each for each in layers if each.fold_norm()[1] is not None]
        self.sums: list[Tensor | None] = [None for _ in self.layers]
        self.counts = [0 for _ in self.layers]
        self.sizes: list[tuple[int, ...]] = [() for _ in self.layers]  # of the first picture
        self.hooks: list[Any] = []

    def __enter__(self) -> "BiasCorrection":
        for index, layer in enumerate(self.layers):
            self.hooks.append(layer.register_forward_pre_hook(self._hook(index)))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        if error is None:  # else the model is as it was
            for layer in self.layers:
                layer.set_bias_shift(None)

    def _hook(self, index: int) -> Any:
        layer = self.layers[index]
        spatial = 0 if layer.kind == "linear" else layer.weight.ndim - 2

        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            channel = x.ndim - 1 - spatial
            others = [axis for axis in range(x.ndim) if axis != channel]
            found = x.sum(others, dtype=torch.float32) if others else x.to(torch.float32)  # of no axes torch sums all
            if not x.numel() or not bool(torch.isfinite(found).all()):
                return  # what holds NaN is told, or left out, by the stubs
            known = self.sums[index]
            wide = found.cpu().double()  # which gives the same float32 in any order
            self.sums[index] = wide if known is None else known + wide
            self.sizes[index] = self.sizes[index] or tuple(x.shape[channel + 1 :])
            self.counts[index] += x.numel() // x.shape[channel]

        return see

    def merge(self) -> None:
        """Of all ranks, in their order."""
        own = {f"{index} sum": each for index, each in enumerate(self.sums) if each is not None}
        own |= {f"{index} count": torch.tensor(each) for index, each in enumerate(self.counts)}
        own |= {f"{index} sizes": torch.tensor(each) for index, each in enumerate(self.sizes) if each}
        parts: Sequence[dict[str, Tensor]] = distributed.gather_tensors(own, "merging means")
        for index in range(len(self.layers)):
            seen = [part for part in parts if f"{index} sum" in part]
            if seen:
                self.sums[index] = torch.stack([part[f"{index} sum"] for part in seen]).sum(0)
                self.counts[index] = sum(int(part[f"{index} count"]) for part in seen)
                sizes = seen[0].get(f"{index} sizes")
                self.sizes[index] = () if sizes is None else tuple(map(int, sizes.tolist()))

    @torch.no_grad()
    def correct(self) -> None:
        """Shift the biases of all that saw something; weights are frozen."""
        for layer, found, count, sizes in zip(self.layers, self.sums, self.counts, self.sizes, strict=True):
            quant = layer.weight_quant
            if found is None or not quant.frozen or quant.quantizer.is_disabled():
                continue
            weight, _ = layer.fold_norm()
            values = layer.to_output_first(quant.values(layer.get_deployed().codes, weight.dtype))
            mean = (found / count).to(weight)
            if layer.kind == "linear":
                shift = run_with_weight(layer.operation, mean[None], weight - values, None)[0]
            else:
                picture = mean.view(1, -1, *(1 for _ in sizes)).expand(1, -1, *sizes)
                shift = run_with_weight(layer.operation, picture, weight - values, None).flatten(2).mean(2)[0]
            if bool(torch.isfinite(shift).all()):
                layer.set_bias_shift(shift)
                layer.has_bias_correction = True
