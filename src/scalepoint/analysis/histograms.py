"""histograms: the values of chosen layers and the ranges that their codes cover, for plots.

    values of a batch -> fine histogram -> added to that of earlier batches and other ranks -> bins of the plot

A fine histogram has FINE_BINS bins of equal width over [-2^e, 2^e), with the smallest e that fits. So bin FINE_BINS / 2
begins at 0, and the width is a power of two. Its counts have the shape (1, FINE_BINS): one block, the whole tensor.
"""

from collections.abc import Sequence
from math import ceil
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
from scalepoint.quantize.batches import Data
from scalepoint.quantize.feeding import feed_data
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.shadow_models import copy_with_shared_parameters
from scalepoint.results import TensorHistogram

FINE_BINS = 8192  # bins while data streams; neighbours are added up for the plot
# Values from 0 to just above 2^(e-1) fill a quarter of the fine bins: each bin of the plot is at least one of them.
MAX_BINS = FINE_BINS // 4


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
    if not isinstance(bins, int) or not 1 <= bins <= MAX_BINS:
        raise UsageError(f"bins= must be a number from 1 to {MAX_BINS}, got {short_repr(bins)}")
    check_has_active_quantizers(quantized)
    if isinstance(names, str):
        raise UsageError(f"names= must be a list of layers, not one string: pass [{names!r}]")
    layers = select_layers(get_layers(quantized), list(names))
    model = copy_with_shared_parameters(quantized, quantizing=False)  # the inputs of stubs are then those of float
    fine: dict[str, Histogram] = {}  # by target of the stub
    for target in {str(node.target) for layer in layers for node in layer.stub_nodes}:
        model.get_submodule(target).register_forward_pre_hook(_make_hook(fine, target))
    feed_data(
        model, data, "histograms", max_batches=max_batches, progress=progress, merge=lambda: _merge_over_ranks(fine)
    )
    results: list[TensorHistogram] = []
    for layer in layers:
        results += _weight_histogram(layer, model, bins)
        for target in dict.fromkeys(str(node.target) for node in layer.stub_nodes):
            stub = model.get_submodule(target)
            if target in fine and isinstance(stub, QuantStub):
                results.append(_make_tensor_histogram(layer.name, "input", target, fine[target], stub, bins))
    return results


def _make_hook(histograms_by_stub: dict[str, Histogram], target: str) -> Any:
    """Return a forward pre-hook that adds the input of a module to its histogram."""

    def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
        _add_histogram(histograms_by_stub, target, _fine_histogram(inputs[0]))

    return hook


def _add_histogram(histograms_by_stub: dict[str, Histogram], target: str, histogram: Histogram) -> None:
    if target in histograms_by_stub:
        histogram = merge_histograms(histograms_by_stub[target], histogram)
    histograms_by_stub[target] = histogram


def _merge_over_ranks(histograms_by_stub: dict[str, Histogram]) -> None:
    """Replace the histograms by those of all ranks."""
    tensors = {  # "counts TARGET" and "power TARGET" of each stub: ranks exchange flat mappings of tensors
        f"{part} {target}": value
        for target, histogram in histograms_by_stub.items()
        for part, value in histogram._asdict().items()
    }
    parts = distributed.gather_tensors(tensors, "merging histograms")
    histograms_by_stub.clear()
    for part in parts:
        for target in [key.removeprefix("counts ") for key in part if key.startswith("counts ")]:
            histogram = Histogram(part[f"counts {target}"], part[f"power {target}"])
            _add_histogram(histograms_by_stub, target, histogram)


def _fine_histogram(tensor: Tensor) -> Histogram:
    values = tensor.detach().to(torch.float32)
    return compute_histogram(values[values.isfinite()][None], FINE_BINS)


def _weight_histogram(layer: AnalyzedLayer, model: fx.GraphModule, bins: int) -> list[TensorHistogram]:
    """Return the histogram of a layer's weight with the batch norm folded in; [] if the weight is not quantized."""
    part = get_quantized_part(model, layer)
    if part is None:
        return []
    with torch.no_grad():
        weight, _ = part.fold_norm()
    return [_make_tensor_histogram(layer.name, "weight", "", _fine_histogram(weight), part.weight_quant, bins)]


def _make_tensor_histogram(
    name: str, role: str, stub: str, histogram: Histogram, quantizer: QuantizerBase, bins: int
) -> TensorHistogram:
    edges, counts = _group_bins(histogram, bins)
    code_range = get_code_range(quantizer)
    low = high = None
    if code_range is not None:
        low, high = float(code_range[0].min()), float(code_range[1].max())
    return TensorHistogram(name, role, stub, edges, counts, low, high)


def _group_bins(histogram: Histogram, bins: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return edges and counts of at most `bins` groups of fine bins, from the first to the last one with a value."""
    fine_counts, width = histogram.counts[0], float(bin_width(histogram)[0])
    filled = fine_counts.nonzero().view(-1)
    first = last = FINE_BINS // 2
    if filled.numel():
        first, last = int(filled[0]), int(filled[-1])
    fine_count = last - first + 1
    fine_per_group = ceil(fine_count / bins)
    group_count = ceil(fine_count / fine_per_group)
    padded = torch.zeros(group_count * fine_per_group, dtype=torch.int64)
    padded[:fine_count] = fine_counts[first : last + 1].cpu()
    edges = tuple((first - FINE_BINS // 2 + index * fine_per_group) * width for index in range(group_count + 1))
    return edges, tuple(padded.view(group_count, fine_per_group).sum(1).tolist())
