"""Bias correction: subtracts from each bias what the rounding of the weight adds to the mean of the layer's output.

    shift = mean over positions of (W - Wq) * E[x]        E[x]: mean of each input channel; *: the layer's own product

A layer is linear, so the mean of its error is the error of its weight applied to the mean of its input. The means come
from the pass that collects the ranges. Layers without a bias, and transposed convolutions, are not corrected.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint import distributed
from scalepoint.quantize.operations import run_with_weight
from scalepoint.quantize.quantized_layers import QuantizedLayer

CORRECTED_KINDS = ("conv", "linear")


def remove_bias_correction(model: nn.Module) -> None:
    """Remove what an earlier calibration added to biases. Shifts that tuning added stay with the codes it chose."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer) and module.weight_quant.chosen is None:
            module.set_bias_shift(None)


class BiasCorrection:
    """Collects the mean input of each layer inside a `with` block, and corrects biases with it afterwards."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
        self.layers = [layer for layer in layers if layer.kind in CORRECTED_KINDS and layer.fold_norm()[1] is not None]
        self.sums: list[Tensor | None] = [None for _ in self.layers]  # per channel
        self.counts = [0 for _ in self.layers]  # positions and samples that were summed
        self.sizes: list[tuple[int, ...]] = [() for _ in self.layers]  # spatial size of the first input
        self.hooks: list[Any] = []

    def __enter__(self) -> "BiasCorrection":
        for index, layer in enumerate(self.layers):
            self.hooks.append(layer.register_forward_pre_hook(self._make_hook(index)))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        if error is None:  # after an error the model must be as it was before
            for layer in self.layers:
                layer.set_bias_shift(None)

    def _make_hook(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        layer = self.layers[index]
        spatial_rank = 0 if layer.kind == "linear" else layer.weight.ndim - 2

        def add_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            channel_axis = x.ndim - 1 - spatial_rank
            summed_axes = [axis for axis in range(x.ndim) if axis != channel_axis]
            # Without the condition, torch would sum all axes of a vector: an empty list means all.
            sums = x.sum(summed_axes, dtype=torch.float32) if summed_axes else x.to(torch.float32)
            if not x.numel() or not bool(torch.isfinite(sums).all()):
                return  # the quantizers raise an error or skip the batch
            # In float64 the order of the batches does not change the result after rounding to float32.
            sums = sums.cpu().double()
            previous = self.sums[index]
            self.sums[index] = sums if previous is None else previous + sums
            self.sizes[index] = self.sizes[index] or tuple(x.shape[channel_axis + 1 :])
            self.counts[index] += x.numel() // x.shape[channel_axis]

        return add_input

    def merge(self) -> None:
        """Add up the sums of all ranks, in rank order."""
        local: dict[str, Tensor] = {}
        for index, (sums, count, sizes) in enumerate(zip(self.sums, self.counts, self.sizes, strict=True)):
            local[f"{index} count"] = torch.tensor(count)
            if sums is not None:
                local[f"{index} sum"] = sums
            if sizes:
                local[f"{index} sizes"] = torch.tensor(sizes)
        per_rank: Sequence[dict[str, Tensor]] = distributed.gather_tensors(local, "merging means")
        for index in range(len(self.layers)):
            with_sum = [tensors for tensors in per_rank if f"{index} sum" in tensors]
            if with_sum:
                self.sums[index] = torch.stack([tensors[f"{index} sum"] for tensors in with_sum]).sum(0)
                self.counts[index] = sum(int(tensors[f"{index} count"]) for tensors in with_sum)
                gathered_sizes = with_sum[0].get(f"{index} sizes")
                self.sizes[index] = () if gathered_sizes is None else tuple(map(int, gathered_sizes.tolist()))

    @torch.no_grad()
    def correct(self) -> None:
        """Shift the bias of every layer with a frozen weight that got input."""
        for layer, sums, count, sizes in zip(self.layers, self.sums, self.counts, self.sizes, strict=True):
            quantizer = layer.weight_quant
            if sums is None or not quantizer.frozen or quantizer.quantizer.is_disabled():
                continue
            weight, _ = layer.fold_norm()
            quantized = layer.from_output_first(quantizer.values(layer.get_deployed().codes, weight.dtype))
            mean = (sums / count).to(weight)
            if layer.kind == "linear":
                shift = run_with_weight(layer.operation, mean[None], weight - quantized, None)[0]
            else:
                # A constant image of the same size: near its borders fewer taps see data, as in a real image.
                image = mean.view(1, -1, *(1 for _ in sizes)).expand(1, -1, *sizes)
                shift = run_with_weight(layer.operation, image, weight - quantized, None).flatten(2).mean(2)[0]
            if bool(torch.isfinite(shift).all()):
                layer.set_bias_shift(shift)
                layer.has_bias_correction = True
