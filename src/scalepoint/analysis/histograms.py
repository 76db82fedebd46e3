"""histograms: the values of chosen layers and the ranges that their codes cover, for a plot."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.analysis.layers import (
    AnalyzedLayer,
    check_has_active_quantizers,
    get_code_range,
    get_layers,
    get_quantized_part,
    select_layers,
)
from scalepoint.errors import UsageError, short_repr
from scalepoint.numerics.histogram import Histogram, bin_width, compute_histogram, merge_histograms
from scalepoint.quantize.feeding import Data, feed_data
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.shadow_models import copy_with_shared_parameters
from scalepoint.results import TensorHistogram

FINE_BINS = 8192  # bins of the streaming histogram, which neighbours of are added up for the plot


@distributed.participating()
def histograms(
    quantized: fx.GraphModule,
    data: Data,
    names: Sequence[str],
    bins: int = 64,
    *,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> list[TensorHistogram]:
    """Collect histograms of the weights and the inputs of layers, batch by batch.

    Args:
        quantized: The quantized model.
        data: As for `calibrate`.
        names: The layers.
        bins: Largest number of bins. All have the same width, and counts are exact.
        max_batches: Stop after this many batches.
        progress: Show a progress bar. None shows it on a terminal only.

    Returns:
        One histogram per tensor: the weight with its batch norm folded in, and each float input of the layer.
    """
    if not isinstance(bins, int) or not 1 <= bins <= FINE_BINS // 4:
        raise UsageError(f"bins={short_repr(bins)}: a number from 1 to {FINE_BINS // 4}")
    check_has_active_quantizers(quantized)
    if isinstance(names, str):
        raise UsageError(f"names is a list of layers, not one string: [{names!r}]")
    layers = select_layers(get_layers(quantized), list(names))
    model = copy_with_shared_parameters(quantized, quantizing=False)
    watched = {str(node.target) for layer in layers for node in layer.stub_nodes}
    seen: dict[str, Histogram] = {}
    for target in watched:
        model.get_submodule(target).register_forward_pre_hook(_make_hook(seen, target))
    feed_data(
        model, data, "histograms", max_batches=max_batches, progress=progress, merge=lambda: _merge_over_ranks(seen)
    )
    found: list[TensorHistogram] = []
    for layer in layers:
        found += _weight_histogram(layer, model, bins)
        for target in dict.fromkeys(str(node.target) for node in layer.stub_nodes):
            stub = model.get_submodule(target)
            if target in seen and isinstance(stub, QuantStub):
                found.append(_make_tensor_histogram(layer.name, "input", target, seen[target], stub, bins))
    return found


def _make_hook(seen: dict[str, Histogram], target: str) -> Any:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
        new = _fine_histogram(inputs[0])
        seen[target] = merge_histograms(seen[target], new) if target in seen else new

    return hook


def _merge_over_ranks(seen: dict[str, Histogram]) -> None:
    """Take in what the other ranks have seen."""
    own = {f"{part} {name}": value for name, each in seen.items() for part, value in each._asdict().items()}
    parts = distributed.gather_tensors(own, "merging histograms")
    seen.clear()
    for part in parts:
        for name in [key.removeprefix("counts ") for key in part if key.startswith("counts ")]:
            new = Histogram(part[f"counts {name}"], part[f"power {name}"])
            seen[name] = merge_histograms(seen[name], new) if name in seen else new


def _fine_histogram(tensor: Tensor) -> Histogram:
    values = tensor.detach().to(torch.float32).reshape(1, -1)
    return compute_histogram(values[values.isfinite()][None], FINE_BINS)


def _weight_histogram(layer: AnalyzedLayer, model: fx.GraphModule, bins: int) -> list[TensorHistogram]:
    weighted = get_quantized_part(model, layer)
    if weighted is None:
        return []
    with torch.no_grad():
        weight, _ = weighted.fold_norm()
    return [_make_tensor_histogram(layer.name, "weight", "", _fine_histogram(weight), weighted.weight_quant, bins)]


def _make_tensor_histogram(
    name: str, role: str, stub: str, histogram: Histogram, quantizer: QuantizerBase, bins: int
) -> TensorHistogram:
    edges, counts = _group_bins(histogram, bins)
    found = get_code_range(quantizer)
    low, high = (None, None) if found is None else (float(found[0].min()), float(found[1].max()))
    return TensorHistogram(name, role, stub, edges, counts, low, high)


def _group_bins(histogram: Histogram, bins: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Fine bins from the first to the last with a value, added up in equal groups."""
    fine, width = histogram.counts[0], float(bin_width(histogram)[0])
    held = fine.nonzero().view(-1)
    first, last = (int(held[0]), int(held[-1])) if held.numel() else (FINE_BINS // 2, FINE_BINS // 2)
    group = -(-(last - first + 1) // bins)
    count = -(-(last - first + 1) // group)
    part = torch.zeros(count * group, dtype=torch.int64)
    part[: last - first + 1] = fine[first : last + 1].cpu()
    edges = tuple((first - FINE_BINS // 2 + index * group) * width for index in range(count + 1))
    return edges, tuple(part.view(count, group).sum(1).tolist())
