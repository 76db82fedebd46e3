"""The loss of a layer at each precision: the error of its output after the solver. All precisions share the moments.

    loss(V) = E |W x~ - V x~ - shift|^2          W the float weight, V the values of its codes, shift the change of the
                                                 bias, x~ the layer's input in the quantized model, on held-out rows

H = E[x~ x~'] does not depend on the number of bits, so one walk over the data is enough. V are the nearest codes. If
steps are passed and the codes have a zero point, the steps try better ones, by default as tuning will do: search the
scales, then GPTQ. Tuning also runs "descend", which lowers all precisions about equally: it is left out here, except
for pair-safe codes, which GPTQ leaves to it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.quantize.batches import Data
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import WeightFakeQuantize
from scalepoint.quantize.record import record_of
from scalepoint.spec import QuantizationSpec
from scalepoint.support.progress import phase
from scalepoint.tuning.collect import RowCollector
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.moments import Moments
from scalepoint.tuning.problem import LayerProblem
from scalepoint.tuning.rows import Geometry, get_geometry
from scalepoint.tuning.steps import find_step
from scalepoint.tuning.walk import LayerUse, StreamWalk

QUICK_STEPS = ("scale", "gptq")
MAX_ROWS = 8_192  # rows of the input that are collected for each layer
HOLDOUT_SHARE = 0.1  # of the rows: the error is measured on these, codes are solved on the others
MEMORY_BYTES = 2_000_000_000  # of the activations that the walk keeps in memory
LOSS_PER_BIT = 4.0  # assumed if nothing could be measured: a bit is worth 6 dB


def measure_losses(
    model: fx.GraphModule,
    specs: Mapping[str, Sequence[QuantizationSpec]],
    data: Data,
    *,
    steps: Sequence[str] | None,
    max_batches: int | None,
    skip_nan: bool,
    progress: bool | None,
) -> tuple[dict[str, dict[QuantizationSpec, float]], dict[str, float]]:
    """Measure the loss of layers at each of several specs of their weight.

    Args:
        model: A calibrated model.
        specs: Layer -> the specs.
        data: As for `calibrate`.
        steps: Steps of tuning that choose the codes. None: the nearest codes.
            (): the nearest codes, with a bias shift that corrects the mean error.
        max_batches: Use at most this many batches.
        skip_nan: Leave out batches that contain NaN or infinity.
        progress: Show a progress bar.

    Returns:
        For each layer the losses, relative to the error of the codes that the model has now; and for each layer the
        error of these codes over the variance of the layer's output.
    """
    walk = StreamWalk(model, memory=MEMORY_BYTES)
    names = record_of(model).names
    losses: dict[str, dict[QuantizationSpec, float]] = {}
    levels: dict[str, float] = {}
    collector = RowCollector(walk, MAX_ROWS, HOLDOUT_SHARE, names, uses_quantized_inputs=True)
    uses = {use.node: use for use in collector.uses if names.get(use.node.name) in specs}
    try:
        walk.read_data(model, data, max_batches=max_batches, skip_nan=skip_nan, progress=progress)
        with phase("measuring losses", total=len(uses), unit="layers", show=progress) as running:
            for node in model.graph.nodes:
                name = names.get(node.name, "")
                if node in uses:
                    if name not in losses:  # a layer that is called twice is measured at its first call
                        measurement = _LayerMeasurement(collector, uses[node], steps)
                        losses[name], levels[name] = measurement.measure(specs[name])
                    running.advance()
                walk.advance(node)
    finally:
        walk.activation_store.close()
    return losses, levels


class _LayerMeasurement:
    """Measures one layer, when the walk is at its node."""

    def __init__(self, collector: RowCollector, use: LayerUse, steps: Sequence[str] | None) -> None:
        self.collector, self.use, self.steps = collector, use, steps
        self.layer = use.layer

    def measure(self, specs: Sequence[QuantizationSpec]) -> tuple[dict[QuantizationSpec, float], float]:
        """Return each spec's loss relative to the present error, and the present error over the output's variance."""
        geometry = get_geometry(self.layer)
        if geometry is None:
            return self._assume_losses(specs), 1.0
        grouped = GroupedLayer(self.layer, geometry)
        fit, holdout = self.collector.collect_moments(self.use, grouped)
        if fit is None or holdout is None:
            return self._assume_losses(specs), 1.0
        weight = grouped.weight()
        present_error = _current_error(self.layer, geometry, holdout)
        errors = _compute_over_ranks(
            specs, lambda spec: self._solved_error(_requantize_layer(self.layer, spec), geometry, weight, fit, holdout)
        )
        variance = float(holdout.target_variance.sum())
        # The present codes may be exact (an all-zero weight): then the losses are relative to the variance.
        reference = present_error if present_error > 0 else variance or 1.0
        level = present_error / variance if present_error > 0 and variance else 1.0
        return {spec: error / reference for spec, error in errors.items()}, level

    def _assume_losses(self, specs: Sequence[QuantizationSpec]) -> dict[QuantizationSpec, float]:
        n_bits = self.layer.weight_quant.spec.n_bits
        return {spec: LOSS_PER_BIT ** (n_bits - spec.n_bits) for spec in specs}

    def _solved_error(
        self, layer: QuantizedLayer, geometry: Geometry, weight: Tensor, fit: Moments, holdout: Moments
    ) -> float:
        """Return the least squared error of the nearest codes and of the steps' solutions."""
        least_error = _current_error(layer, geometry, holdout)
        if self.steps is None or layer.weight_quant.spec.qformulation != "zp":
            return least_error  # the solver works on codes with a zero point
        grouped = GroupedLayer(layer, geometry)
        solution, grid = grouped.current_solution(weight), grouped.code_grid()
        problem = LayerProblem(
            name=self.use.path, weight=weight, grid=grid, fit=fit, holdout=holdout,
            can_change_scales=grouped.can_change_scales, has_intercept=True,
        )  # fmt: skip
        variance = float(holdout.target_variance.sum())
        least_error = min(least_error, problem.error(solution) * variance)
        steps = [*self.steps, "descend"] if self.steps and grid.partners is not None else self.steps
        for step in steps:
            solution = find_step(step).run(problem, solution)
            least_error = min(least_error, problem.error(solution) * variance)
        return least_error


def _compute_over_ranks(
    specs: Sequence[QuantizationSpec], compute: Callable[[QuantizationSpec], float]
) -> dict[QuantizationSpec, float]:
    """Compute a value for each spec; every rank computes some of them."""
    with distributed.phase("losses") as step:
        step.value = [compute(spec) for spec in distributed.shard(specs)]
    return dict(zip(specs, distributed.interleave(step.values), strict=True))


def _requantize_layer(layer: QuantizedLayer, spec: QuantizationSpec) -> QuantizedLayer:
    """Return a frozen copy of a layer with another weight quantizer."""
    channel_axis = 1 if layer.kind == "conv_transpose" else 0
    quant = WeightFakeQuantize([], spec=spec, channel_axis=channel_axis)
    copy = QuantizedLayer(layer.operation, layer.norm, quant)
    copy.weight_quant.name = layer.weight_quant.name
    copy.weight_quant.enabled = True
    copy.module_refs["input"] = layer.module_refs["input"]
    copy.freeze()
    copy.training = False
    return copy


def _current_error(layer: QuantizedLayer, geometry: Geometry, moments: Moments) -> float:
    """Return the squared error of the codes that a layer has, with the mismatch of the means."""
    quant = layer.weight_quant
    values = geometry.to_groups(quant.values(layer.get_deployed().codes).to(torch.float64))
    return float(moments.error(values, moments.mean_mismatch(values)).sum())
