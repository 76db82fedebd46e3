"""sensitivity: how much the quantization of each layer changes the output.

one_at_a_time   Only the quantizers of one layer are on: one run of the data per layer.
                score = metric(float) - metric(this layer quantized), or without a metric the output's noise to signal,
                sum (x - y)^2 / sum x^2.
proxy           One pass without gradients; see noise_flow.py for own(n) and weight(n).
                score = sum own(n) weight(n) over the layer's activation quantizers and its weight: the noise to signal
                that it is expected to add to the output, if noises do not cancel. An activation quantizer that several
                layers read counts for each of them. A gain is the same for all elements of a tensor. So if a model
                reads one token of many (a class token), scores can be wrong by a small factor, and layers with nearly
                equal scores may swap places.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from scalepoint import distributed
from scalepoint.analysis.layers import AnalyzedLayer, check_has_active_quantizers, get_layers, get_quantizers
from scalepoint.analysis.noise_flow import measure_noise_flow
from scalepoint.analysis.statistics import ErrorSums, finite_or_none, merge_over_ranks
from scalepoint.errors import UsageError, short_repr
from scalepoint.quantize.batches import Data, check_data, read_first_inputs
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.feeding import feed_data
from scalepoint.quantize.quantize_model import quantize
from scalepoint.quantize.quantizers import QuantizerBase
from scalepoint.quantize.record import has_record
from scalepoint.quantize.shadow_models import copy_with_shared_parameters, wrap_with_signature
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target

MIN_COST = 1e-4  # of a layer without products and weights, so that its gain per cost is finite
Metric = Callable[[Callable[..., Any]], float]


@dataclass(frozen=True)
class Sensitivity:
    """How much the quantization of one layer harms the output.

    Attributes:
        name: Name of the layer.
        score: The harm; a larger score is worse.
        kind: Kind of operation.
        macs: Multiply-accumulates of one forward.
        parameters: Number of weights.
        cost: The layer's share of the MACs or of the parameters, whichever is larger.
        gain_per_cost: score / cost.
        metric: The caller's metric with only this layer quantized.
    """

    name: str
    score: float
    kind: str
    macs: int | None
    parameters: int
    cost: float
    gain_per_cost: float
    metric: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: finite_or_none(value) for name, value in vars(self).items()}


@serialized
@distributed.participating()
def sensitivity(
    model: nn.Module,
    data: Data,
    metric: Metric | None = None,
    *,
    how: Literal["proxy", "one_at_a_time"] = "proxy",
    limit: int | None = None,
    target: str | Target = "onnxruntime",
    config: QuantConfig | None = None,
    max_batches: int | None = None,
    progress: bool | None = None,
) -> list[Sensitivity]:
    """Rank the quantized layers of a model, the most sensitive first. The model stays unchanged.

    Args:
        model: A quantized model, or a float one, which is quantized first on the same data.
        data: As for `calibrate`.
        metric: `metric(run)` returns a score, larger is better; `run` is called like the model.
        how: "proxy" estimates from one pass; "one_at_a_time" quantizes one layer at a time and measures.
        limit: Return this many rows. With "one_at_a_time" only this many layers are tried, the first of the proxy.
        target: The target for a float model.
        config: The config for a float model.
        max_batches: Stop after this many batches.
        progress: Show a progress bar. None shows it on a terminal only.

    Returns:
        One row per layer.
    """
    if how not in ("proxy", "one_at_a_time"):
        raise UsageError(f"how= must be 'proxy' or 'one_at_a_time', got {short_repr(how)}")
    if metric is not None and how == "proxy":
        raise UsageError("metric= is not used with how='proxy': pass how='one_at_a_time', or omit metric=")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UsageError(f"limit= must be a number of layers from 1, got {short_repr(limit)}")
    is_float, runs_proxy = not has_record(model), how == "proxy" or limit is not None
    # Calibration of a float model, the proxy, and one layer at a time each read the data once.
    check_data(data, passes=sum((is_float, runs_proxy, how == "one_at_a_time")))
    quantized = _quantize_if_float(model, data, target, config, max_batches, progress)
    check_has_active_quantizers(quantized)
    layers = _find_quantized_layers(quantized)
    names = list(layers)
    if how == "proxy" or (limit is not None and limit < len(layers)):
        most_sensitive = _rank_layers(layers, _proxy_scores(quantized, names, data, max_batches, progress))[:limit]
        if how == "proxy":
            return most_sensitive
        names = [row.name for row in most_sensitive]  # only these are quantized one at a time
    if metric is None:
        return _rank_layers(layers, _noise_one_at_a_time(quantized, names, data, max_batches, progress))
    values = _metric_one_at_a_time(quantized, names, metric)
    float_value = values.pop("")
    rows = _rank_layers(layers, {name: float_value - value for name, value in values.items()})
    return [replace(row, metric=values[row.name]) for row in rows]


def _quantize_if_float(
    model: nn.Module,
    data: Any,
    target: str | Target,
    config: QuantConfig | None,
    max_batches: int | None,
    progress: bool | None,
) -> fx.GraphModule:
    """Return a quantized model as it is; quantize and calibrate a float model."""
    if isinstance(model, fx.GraphModule) and has_record(model):
        return model
    if callable(data):
        raise UsageError(
            "data= must be batches if the model is a float model, because it is captured with the first batch: pass "
            "batches, or a quantized model"
        )
    args, kwargs = read_first_inputs(model, data)
    return quantize(
        model, args, config, forward_loop=data, target=target, kwargs=kwargs, max_batches=max_batches, progress=progress
    )


def _find_quantized_layers(model: fx.GraphModule) -> dict[str, AnalyzedLayer]:
    """Return the layers with at least one active quantizer, by name."""
    active = {name for quantizer in get_quantizers(model) if quantizer.enabled for name in quantizer.consumers}
    layers: dict[str, AnalyzedLayer] = {}
    for layer in get_layers(model):
        if layer.name in active:
            layers.setdefault(layer.name, layer)  # a layer that is called twice counts once
    return layers


def _rank_layers(layers: dict[str, AnalyzedLayer], scores: dict[str, float]) -> list[Sensitivity]:
    """Return rows sorted by score. NaN, a broken model, comes first; equal scores stay in graph order."""
    total_macs = sum(layer.macs or 0 for layer in layers.values()) or 1
    total_parameters = sum(layer.parameters for layer in layers.values()) or 1
    rows = []
    for name, layer in layers.items():
        if name in scores:
            score = scores[name]
            cost = max((layer.macs or 0) / total_macs, layer.parameters / total_parameters, MIN_COST)
            rows.append(
                Sensitivity(
                    name=name,
                    score=score,
                    kind=layer.kind,
                    macs=layer.macs,
                    parameters=layer.parameters,
                    cost=cost,
                    gain_per_cost=score / cost,
                )
            )
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row.score) else -row.score)


@contextmanager
def _layer_enabled(quantizers: Sequence[QuantizerBase], name: str) -> Iterator[None]:
    """A context in which the quantizers of one layer are on. They are off before and after."""
    of_layer = [quantizer for quantizer in quantizers if name in quantizer.consumers]
    for quantizer in of_layer:
        quantizer.enabled = True
    try:
        yield
    finally:
        for quantizer in of_layer:
            quantizer.enabled = False


def _copy_with_quantizers_off(quantized: fx.GraphModule) -> tuple[fx.GraphModule, list[QuantizerBase]]:
    """Return a copy of the model with all quantizers off, and those of its quantizers that are on in the model."""
    model = copy_with_shared_parameters(quantized, quantizing=False)
    pairs = zip(get_quantizers(quantized), get_quantizers(model), strict=True)
    return model, [copied for original, copied in pairs if original.enabled]


def _metric_one_at_a_time(quantized: fx.GraphModule, names: Sequence[str], metric: Metric) -> dict[str, float]:
    """Return the metric with each layer quantized alone; under "" that of the float model. Ranks share the layers."""
    model, quantizers = _copy_with_quantizers_off(quantized)
    values: dict[str, float] = {}
    with distributed.phase("one layer at a time") as step:
        for name in distributed.shard(["", *names]):
            with _layer_enabled(quantizers, name), distributed.single_process():
                values[name] = _run_metric(metric, model)
        step.value = values
    merged = {name: value for part in step.values for name, value in part.items()}
    return {name: merged[name] for name in ("", *names)}


def _run_metric(metric: Metric, run: nn.Module) -> float:
    run.eval()
    with torch.inference_mode(False), torch.no_grad():
        value = metric(run)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"metric= must return a number that is larger for a better model, got {short_repr(value)}"
        ) from None


class _OneLayerNoise(nn.Module):
    """Runs each batch in float, then with each layer quantized alone, and adds up the errors of the outputs."""

    def __init__(self, quantized: fx.GraphModule, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.quantizers = _copy_with_quantizers_off(quantized)
        self.sums = {name: ErrorSums() for name in names}

    def forward(self, *inputs: Any) -> Any:
        reference = self._run(inputs)
        for name, sums in self.sums.items():
            with _layer_enabled(self.quantizers, name):
                sums.add(reference, self._run(inputs))
        return reference

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        return fx.Interpreter(self.model).run(*inputs, enable_io_processing=False)


def _noise_one_at_a_time(
    quantized: fx.GraphModule, names: Sequence[str], data: Any, max_batches: int | None, progress: bool | None
) -> dict[str, float]:
    """Return noise to signal at the output with each layer quantized alone."""
    inner = _OneLayerNoise(quantized, names)
    feed_data(
        wrap_with_signature(quantized, inner), data, "one layer at a time", max_batches=max_batches, progress=progress,
        merge=lambda: merge_over_ranks(list(inner.sums.values())),
    )  # fmt: skip
    return {name: _noise_to_signal(sums.noise, sums.signal) for name, sums in inner.sums.items()}


def _noise_to_signal(noise: float, signal: float) -> float:
    if signal:
        return noise / signal
    return math.inf if noise else 0.0


def _proxy_scores(
    quantized: fx.GraphModule, names: Sequence[str], data: Any, max_batches: int | None, progress: bool | None
) -> dict[str, float]:
    flow = measure_noise_flow(quantized, data, max_batches=max_batches, progress=progress)
    weights = flow.weights(quantized.graph)
    scores = dict.fromkeys(names, 0.0)
    for node, own_noise in flow.own_noise.items():
        module = quantized.get_submodule(str(node.target))
        readers = {name for quantizer in get_quantizers(module) for name in quantizer.consumers}
        for name in readers & scores.keys():
            scores[name] += own_noise * weights[node]
    return scores
