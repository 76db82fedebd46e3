"""What a layer loses at each width: the error of its output after the solver, all widths on the same moments.

    loss(V) = E |W x~ - V x~ - shift|^2          x~ what reaches the layer in the quantized net, on held-out rows

H = E[x~ x~'] does not depend on bits, so one walk over the data serves every width. Scales are searched and codes
chosen by GPTQ, as tuning will do it; the descent after that lowers all widths alike and is left away. Pair-safe codes
are left to the descent by GPTQ, so that they get it here, too.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.quantize.feeding import Data
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import WeightFakeQuantize
from scalepoint.quantize.record import record_of
from scalepoint.spec import QuantizationSpec
from scalepoint.support.progress import phase
from scalepoint.tuning.collect import LayerUse, RowCollector
from scalepoint.tuning.moments import Moments
from scalepoint.tuning.problem import GroupedLayer, Problem
from scalepoint.tuning.rows import Geometry, get_geometry
from scalepoint.tuning.steps import find_step
from scalepoint.tuning.walk import StreamWalk

QUICK_STEPS = ("scale", "gptq")
MAX_ROWS, HOLDOUT_SHARE = 8_192, 0.1
MEMORY_BYTES = 2_000_000_000
LOSS_PER_BIT = 4.0  # a bit is worth 6 dB where nothing could be measured

Losses = dict[QuantizationSpec, float]  # each over the error of the running codes


def measure_losses(
    model: fx.GraphModule,
    specs: Mapping[str, Sequence[QuantizationSpec]],
    data: Data,
    *,
    steps: Sequence[str] | None,
    max_batches: int | None,
    skip_nan: bool,
    progress: bool | None,
) -> tuple[dict[str, Losses], dict[str, float]]:
    """For each layer the error at every spec over that of the codes that the model has now, and the latter over the
    energy of the layer's output. `steps` are those of tuning; none of them: the intercept alone; None: nearest codes,
    as they are."""
    walk = StreamWalk(model, memory=MEMORY_BYTES)
    names = record_of(model).names
    found: dict[str, Losses] = {}
    levels: dict[str, float] = {}
    collector = RowCollector(walk, MAX_ROWS, HOLDOUT_SHARE, names, against_itself=True)
    layers = {use.node: use for use in collector.uses if names.get(use.node.name) in specs}
    try:
        walk.read_data(model, data, max_batches=max_batches, skip_nan=skip_nan, progress=progress)
        with phase("measuring widths", total=len(layers), unit="layers", show=progress) as running:
            for node in model.graph.nodes:
                name = names.get(node.name, "")
                if node in layers:
                    if name not in found:
                        found[name], levels[name] = _LayerMeasurement(collector, layers[node], steps).losses(
                            specs[name]
                        )
                    running.advance()
                walk.advance(node)
    finally:
        walk.activation_store.close()
    return found, levels


class _LayerMeasurement:
    """One layer where the walk stands."""

    def __init__(self, collector: RowCollector, use: LayerUse, steps: Sequence[str] | None) -> None:
        self.collector, self.use, self.steps = collector, use, steps
        self.live = use.layer

    def losses(self, specs: Sequence[QuantizationSpec]) -> tuple[Losses, float]:
        own = self.live.weight_quant.spec
        geometry = get_geometry(self.live)
        shape = None if geometry is None else GroupedLayer(self.live, geometry)
        fit, judge = (None, None) if shape is None else self.collector.moments(self.use, shape)
        if geometry is None or shape is None or fit is None or judge is None:
            return {spec: LOSS_PER_BIT ** (own.n_bits - spec.n_bits) for spec in specs}, 1.0
        weight = shape.weight()
        now = _current_error(self.live, geometry, judge)
        found = _compute_over_ranks(
            specs, lambda spec: self._loss(_requantize_layer(self.live, spec), geometry, weight, fit, judge)
        )
        energy = float(judge.wanted.sum())
        scale = now if now > 0 else energy or 1.0
        return {spec: loss / scale for spec, loss in found.items()}, now / energy if now > 0 and energy else 1.0

    def _loss(self, layer: QuantizedLayer, geometry: Geometry, weight: Tensor, fit: Moments, judge: Moments) -> float:
        least = _current_error(layer, geometry, judge)
        if self.steps is None or layer.weight_quant.spec.qformulation != "zp":
            return least
        shape = GroupedLayer(layer, geometry)
        now, codes = shape.start(weight), shape.codes()
        problem = Problem(
            name=self.use.place, weight=weight, codes=codes, fit=fit, judge=judge,
            has_own_scales=shape.has_own_scales, has_intercept=True,
        )  # fmt: skip
        whole = float(judge.wanted.sum())
        for step in ("", *self.steps, *(("descend",) if self.steps and codes.partners is not None else ())):
            now = find_step(step).run(problem, now) if step else now
            least = min(least, problem.error(now) * whole)
        return least


def _compute_over_ranks(specs: Sequence[QuantizationSpec], loss: Callable[[QuantizationSpec], float]) -> Losses:
    """The loss of each spec; every rank computes some of them."""
    with distributed.phase("losses") as step:
        step.value = [loss(spec) for spec in distributed.shard(specs)]
    return dict(zip(specs, distributed.interleave(step.values), strict=True))


def _requantize_layer(live: QuantizedLayer, spec: QuantizationSpec) -> QuantizedLayer:
    """The same layer with another quantizer, frozen."""
    axis = 1 if live.kind == "conv_transpose" else 0
    layer = QuantizedLayer(live.operation, live.norm, WeightFakeQuantize([], spec=spec, channel_axis=axis))
    layer.weight_quant.name = live.weight_quant.name
    layer.weight_quant.enabled = True
    layer.module_refs["input"] = live.module_refs["input"]
    layer.freeze()
    layer.training = False
    return layer


def _current_error(layer: QuantizedLayer, geometry: Geometry, judge: Moments) -> float:
    """The squared error of the codes that a layer has."""
    quant = layer.weight_quant
    values = geometry.by_group(quant.values(layer.get_deployed().codes).to(torch.float64))
    return float(judge.error(values, judge.mismatch(values)).sum())
