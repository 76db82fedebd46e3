"""sensitivity: how much each layer's quantization moves the output.

one_at_a_time   Only the quantizers of one layer are on: one run of the data a layer.
                score = metric(float) - metric(this layer quantized), or without a metric the output's noise to signal,
                sum (x - y)^2 / sum x^2.
proxy           One pass, without gradients. At each node n of the graph, x the inputs in float, x' in the running
                quantized model, f the node without its quantizers and q with them:
                    noise(n)   = sum |q(x') - f(x)|^2
                    own(n)     = sum |q(x') - f(x')|^2              what its own quantizers add
                    gain(n)    = sum |f(x') - f(x)|^2 / sum_i noise(i), i the nodes it reads
                    weight(n)  = sum_r gain(r) weight(r), r the nodes that read it; 1 / sum y^2 at an output y
                score = sum own(n) weight(n) over the layer's stubs and weight: the noise to signal that it is expected
                to put on the output, if noises do not cancel. A stub that several layers read counts for each. A gain
                is the same for all elements of a tensor: where a model reads one token of many, as a class token,
                scores are within a factor of a few, and layers of nearly the same score may change places.
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
from scalepoint.analysis.statistics import ErrorSums, merge_over_ranks
from scalepoint.errors import UsageError, short_repr
from scalepoint.quantize.config import QuantConfig
from scalepoint.quantize.feeding import Data, check_data, feed_data, read_first_inputs
from scalepoint.quantize.quantize_model import quantize
from scalepoint.quantize.quantizers import QuantizerBase
from scalepoint.quantize.record import has_record
from scalepoint.quantize.shadow_models import copy_with_shared_parameters, wrap_with_signature
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target

MIN_COST = 1e-4  # of a layer without products and weights, so that a gain is divided by something
Metric = Callable[[Callable[..., Any]], float]


@dataclass(frozen=True)
class Sensitivity:
    """How much the quantization of one layer costs; a larger score is worse."""

    name: str
    score: float
    kind: str
    macs: int | None
    parameters: int
    cost: float  # the layer's share of the MACs or of the parameters, whichever is larger
    gain_per_cost: float  # score / cost
    metric: float | None = None  # the caller's metric with only this layer quantized

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: _finite_or_none(value) for name, value in vars(self).items()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        raise UsageError(f"how={short_repr(how)}: use 'proxy' or 'one_at_a_time'")
    if metric is not None and how == "proxy":
        raise UsageError("the proxy has no use for a metric: pass how='one_at_a_time', or leave the metric away")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UsageError(f"limit={short_repr(limit)}: a number of layers, from 1")
    passes = (not has_record(model)) + (how == "proxy" or limit is not None) + (how != "proxy")
    check_data(data, passes=passes)
    quantized = _quantize_if_float(model, data, target, config, max_batches, progress)
    check_has_active_quantizers(quantized)
    layers = _find_quantized_layers(quantized)
    tried = list(layers)
    if how == "proxy" or (limit is not None and limit < len(layers)):
        rows = _rank_layers(layers, _proxy_scores(quantized, tried, data, max_batches, progress))[:limit]
        if how == "proxy":
            return rows
        tried = [row.name for row in rows]
    if metric is None:
        return _rank_layers(layers, _noise_one_at_a_time(quantized, tried, data, max_batches, progress))
    found = _metric_one_at_a_time(quantized, tried, metric)
    base = found.pop("")
    rows = _rank_layers(layers, {name: base - value for name, value in found.items()})
    return [replace(row, metric=found[row.name]) for row in rows]


def _quantize_if_float(
    model: nn.Module,
    data: Any,
    target: str | Target,
    config: QuantConfig | None,
    max_batches: int | None,
    progress: bool | None,
) -> fx.GraphModule:
    """The model itself if it is quantized; else a calibrated one of it."""
    if isinstance(model, fx.GraphModule) and has_record(model):
        return model
    if callable(data):
        raise UsageError("a float model is captured with the first batch: pass batches, or a quantized model")
    args, kwargs = read_first_inputs(model, data)
    return quantize(
        model, args, config, forward_loop=data, target=target, kwargs=kwargs, max_batches=max_batches, progress=progress
    )


def _find_quantized_layers(model: fx.GraphModule) -> dict[str, AnalyzedLayer]:
    """The layers that have a quantizer which is on."""
    switched = {name for each in get_quantizers(model) if each.enabled for name in each.consumers}
    found: dict[str, AnalyzedLayer] = {}
    for layer in get_layers(model):
        if layer.name in switched:
            found.setdefault(layer.name, layer)  # one that is called twice has one place
    return found


def _rank_layers(layers: dict[str, AnalyzedLayer], scores: dict[str, float]) -> list[Sensitivity]:
    """Ranked; NaN, a model that broke, comes first, and equals stay in graph order."""
    macs = sum(layer.macs or 0 for layer in layers.values()) or 1
    parameters = sum(layer.parameters for layer in layers.values()) or 1
    rows = []
    for name, layer in layers.items():
        if name in scores:
            cost = max((layer.macs or 0) / macs, layer.parameters / parameters, MIN_COST)
            score = scores[name]
            rows.append(Sensitivity(name, score, layer.kind, layer.macs, layer.parameters, cost, score / cost))
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row.score) else -row.score)


@contextmanager
def _layer_enabled(quantizers: Sequence[QuantizerBase], name: str) -> Iterator[None]:
    """The quantizers of one layer on; they were off and are off again."""
    chosen = [each for each in quantizers if name in each.consumers]
    for each in chosen:
        each.enabled = True
    try:
        yield
    finally:
        for each in chosen:
            each.enabled = False


def _copy_with_quantizers_off(quantized: fx.GraphModule) -> tuple[fx.GraphModule, list[QuantizerBase]]:
    """A twin with all off, and those of its quantizers that are on in the model."""
    model = copy_with_shared_parameters(quantized, quantizing=False)
    pairs = zip(get_quantizers(quantized), get_quantizers(model), strict=True)
    return model, [own for given, own in pairs if given.enabled]


def _metric_one_at_a_time(quantized: fx.GraphModule, tried: Sequence[str], metric: Metric) -> dict[str, float]:
    """The metric with each layer quantized alone; under "" that of the float model."""
    model, quantizers = _copy_with_quantizers_off(quantized)
    found: dict[str, float] = {}
    with distributed.phase("one layer at a time") as step:
        for name in distributed.shard(["", *tried]):
            with _layer_enabled(quantizers, name), distributed.single_process():
                found[name] = _run_metric(metric, model)
        step.value = found
    merged = {name: value for part in step.values for name, value in part.items()}
    return {name: merged[name] for name in ("", *tried)}


def _run_metric(metric: Metric, run: nn.Module) -> float:
    run.eval()
    with torch.inference_mode(False), torch.no_grad():
        value = metric(run)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"the metric gave {short_repr(value)}: it returns a number, larger for a better model"
        ) from None


class _OneLayerNoise(nn.Module):
    """For each batch the float outputs, then those with each layer quantized alone; only sums are kept."""

    def __init__(self, quantized: fx.GraphModule, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.quantizers = _copy_with_quantizers_off(quantized)
        self.found = {name: ErrorSums() for name in names}

    def forward(self, *inputs: Any) -> Any:
        reference = self._run(inputs)
        for name, agreement in self.found.items():
            with _layer_enabled(self.quantizers, name):
                agreement.add(reference, self._run(inputs))
        return reference

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        return fx.Interpreter(self.model).run(*inputs, enable_io_processing=False)


def _noise_one_at_a_time(
    quantized: fx.GraphModule, tried: Sequence[str], data: Any, max_batches: int | None, progress: bool | None
) -> dict[str, float]:
    inner = _OneLayerNoise(quantized, tried)
    feed_data(
        wrap_with_signature(quantized, inner), data, "one layer at a time", max_batches=max_batches, progress=progress,
        merge=lambda: merge_over_ranks(list(inner.found.values())),
    )  # fmt: skip
    return {name: _noise_to_signal(each.noise, each.signal) for name, each in inner.found.items()}


def _noise_to_signal(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


def _proxy_scores(
    quantized: fx.GraphModule, names: Sequence[str], data: Any, max_batches: int | None, progress: bool | None
) -> dict[str, float]:
    flow = measure_noise_flow(quantized, data, max_batches=max_batches, progress=progress)
    weights = flow.weights(quantized.graph)
    scores = dict.fromkeys(names, 0.0)
    for node, own in flow.own.items():
        module = quantized.get_submodule(str(node.target))
        readers = {name for each in get_quantizers(module) for name in each.consumers}
        for name in readers & scores.keys():
            scores[name] += own * weights[node]
    return scores
