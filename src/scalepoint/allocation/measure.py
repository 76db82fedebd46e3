"""Measures every layer at every precision on one calibrated model: the error that it adds to the output, and its cost.

    error  = noise to signal at the output  =  own(n) weight(n) loss(width) / loss(now)  +  the noise of its inputs
    size   = codes, scales and zero points in bytes         time = MACs * bits of the wider operand / 32

A width is one precision of a layer. own(n), the noise that node n adds, and weight(n), its share at the output, are
those of sensitivity by proxy (`analysis/noise_flow.py`). They are measured with all weights at 8 bits where the target
runs that: noise is small there, so that it adds up. A wider input is assumed to lose 6 dB of noise per bit.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any, Literal

from torch import fx

from scalepoint.allocation.layer_losses import QUICK_STEPS, measure_losses
from scalepoint.allocation.precision_options import (
    UNCHANGED,
    LayerOptions,
    PrecisionOption,
    add_choices,
    add_higher_precisions,
    build_option,
    group_by_layer,
    group_layers_sharing_precision,
    is_weight_overridden,
)
from scalepoint.allocation.widths import Width, WidthRow, Widths
from scalepoint.analysis.noise_flow import NoiseFlow, measure_noise_flow
from scalepoint.errors import UsageError
from scalepoint.operation_coverage import CoverageRow
from scalepoint.patterns import Point
from scalepoint.quantize import Override, QuantConfig, calibrate, insert_qdq
from scalepoint.quantize.batches import Data
from scalepoint.quantize.insert import get_weight_key, make_decisions
from scalepoint.quantize.macs import get_shape
from scalepoint.quantize.operations import get_weight_shape
from scalepoint.quantize.placement import Decision
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.record import record_of
from scalepoint.quantize.weight_size import count_weight_bits
from scalepoint.spec import QuantizationSpec
from scalepoint.targets import Target
from scalepoint.transformation import TransformationResult

MAX_FLOW_BATCHES = 4  # batches on which the noise flow is measured
BROKEN_MODEL_ERROR = 1e12  # the error of a layer whose measured error is not finite
FLOAT_BITS = 32
WIDE_WEIGHTS = "int8"


def measure_widths(
    result: TransformationResult,
    config: QuantConfig,
    target: Target,
    choices: Sequence[str] | None,
    data: Data,
    *,
    steps: Sequence[str] | None = QUICK_STEPS,
    max_batches: int | None = None,
    on_nan: Literal["error", "skip"] = "error",
    progress: bool | None = None,
) -> Widths:
    """Measure error and cost of every layer of a transformed model at several precisions.

    Args:
        result: The transformed model.
        config: The config to start from. A layer whose weight an override names keeps that precision.
        target: The target, which decides what a precision costs and which ones it can run.
        choices: Names of precisions. None: the present one, and all that are more precise.
        data: As for `calibrate`.
        steps: Steps of tuning that choose the codes before the error is measured.
        max_batches: Use at most this many batches.
        on_nan: What to do with batches that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.

    Returns:
        The table, from which the best allocation within a budget is chosen.
    """
    decisions, rows, coverage = make_decisions(result.model, result.matches, config, target)
    layers = group_by_layer(decisions)
    if choices is None:
        for layer in layers:
            add_higher_precisions(layer, config, target)
    else:
        layers = [
            layer for layer in layers if layer.first.weight is not None and not is_weight_overridden(layer, config)
        ]
        add_choices(layers, choices, config, target)
    if not layers:
        raise UsageError(
            "no layer has a choice: overrides of the config set the weights of all layers that are quantized. Remove "
            "some, or omit the budget"
        )
    measured = _NoiseMeasurement(result, config, target, layers)
    measured.run(data, steps, max_batches, on_nan, progress)
    macs: dict[str, float] = dict.fromkeys((layer.name for layer in layers), 0.0)
    fixed: list[tuple[Decision, CoverageRow | None]] = []  # what has no choice
    for decision in decisions:
        row = rows.get(decision.site.node)
        if decision.site.name in macs:
            macs[decision.site.name] += _count_work(row, decision.site.node)
        else:
            fixed.append((decision, row))
    width_rows = tuple(_make_row(group, measured, macs) for group in group_layers_sharing_precision(layers))
    # A layer without a choice may use a weight of a layer with one: it is counted there.
    keys_with_choice = {get_weight_key(layer.first.site) for layer in layers if layer.first.weight is not None}
    float_size = _float_bytes(result.model)
    other_macs = sum(row.macs or 0 for row in coverage.operations if row.name not in macs)
    rest_size = float_size - sum(FLOAT_BITS / 8 * row.weights for row in width_rows)
    rest_time: float = other_macs
    for decision, row in fixed:
        has_own_weight = decision.weight is not None and get_weight_key(decision.site) not in keys_with_choice
        rest_size -= _saved_bytes(decision, target) if has_own_weight else 0.0
        if row is not None:
            rest_time -= (row.macs or 0) * (1 - _operand_bits(decision, has_own_weight) / FLOAT_BITS)
    return Widths(
        width_rows,
        float_size=float_size,
        float_time=sum(macs.values()) + other_macs,
        rest_size=max(rest_size, 0.0),
        rest_time=max(rest_time, 0.0),
    )


def _saved_bytes(decision: Decision, target: Target) -> float:
    """Return how many bytes smaller than in float a quantized weight is."""
    shape = get_weight_shape(decision.site.part)
    return _weight_bytes(None, shape, target) - _weight_bytes(decision.weight, shape, target)


def _operand_bits(decision: Decision, has_own_weight: bool) -> int:
    """Return the bits of the wider operand of an operation without a choice."""
    if decision.weight is None and decision.site.role is not None:
        return FLOAT_BITS
    bits = max((spec.n_bits for point, _, spec in decision.points if point != Point.OUTPUT), default=FLOAT_BITS)
    return max(bits, decision.weight.n_bits) if has_own_weight and decision.weight is not None else bits


def _count_work(row: CoverageRow | None, node: fx.Node) -> float:
    """Return the multiply-accumulates of an operation; for one without products, the number of its values."""
    if row is not None and row.macs:
        return float(row.macs)
    shape = get_shape(node)
    return float(prod(shape)) if shape else 0.0


def _float_bytes(model: fx.GraphModule) -> float:
    """Return the bytes of all parameters and float buffers in float32. A shared tensor counts once."""
    tensors = (*model.parameters(), *model.buffers())
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in tensors if tensor.is_floating_point()}
    return FLOAT_BITS / 8 * sum(sizes.values())


def _make_row(group: Sequence[LayerOptions], measured: "_NoiseMeasurement", macs: Mapping[str, float]) -> WidthRow:
    """Return the row of layers that must have the same precision, with the precisions that all of them can have."""
    refused = {name: reason for layer in group for name, reason in layer.refused.items()}
    shapes = {layer.name: get_weight_shape(layer.first.site.part) for layer in group if layer.first.weight is not None}
    is_one_weight = measured.share_a_weight(group)
    weights = prod(next(iter(shapes.values()))) if is_one_weight else sum(map(prod, shapes.values()))
    options_by_layer = [{option.name: option for option in layer.options} for layer in group]
    widths = []
    for name in options_by_layer[0]:
        if not all(name in options for options in options_by_layer):
            continue
        pairs = [(layer, options[name]) for layer, options in zip(group, options_by_layer, strict=True)]
        _, first = pairs[0]
        sizes = [
            _weight_bytes(option.weight, shapes[layer.name], measured.target)
            for layer, option in pairs
            if layer.name in shapes
        ]
        widths.append(
            Width(
                name=name,
                bits=float(first.bits),
                error=sum(measured.error(layer, option) for layer, option in pairs),
                size=sizes[0] if is_one_weight else sum(sizes),
                time=sum(macs[layer.name] * option.operand_bits / FLOAT_BITS for layer, option in pairs),
                override={key: _to_override_value(value) for key, value in first.override.items()},
            )
        )
    return WidthRow(tuple(layer.name for layer in group), group[0].first.site.kind, weights, tuple(widths), refused)


def _to_override_value(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, QuantizationSpec) else value


def _weight_bytes(spec: QuantizationSpec | None, shape: tuple[int, ...], target: Target) -> float:
    return (FLOAT_BITS * prod(shape) if spec is None else count_weight_bits(spec, shape, target)) / 8


class _NoiseMeasurement:
    """The noise that each layer adds to the output of a model with wide weights, and its loss at each spec."""

    def __init__(
        self, result: TransformationResult, config: QuantConfig, target: Target, layers: Sequence[LayerOptions]
    ) -> None:
        self.layers, self.config, self.target, self.result = layers, config, target, result
        self.model: fx.GraphModule = insert_qdq(
            result.model, result.matches, self._wide_config(), target=target, copy=True
        )

    def _wide_config(self) -> QuantConfig:
        """Return the config with 8 bits for all weights that have a choice, or with their widest precision."""
        overrides = []
        for layer in self.layers:
            if layer.first.weight is None:
                continue
            wide = LayerOptions(layer.name, layer.decisions)
            try:
                add_choices([wide], (WIDE_WEIGHTS,), self.config, self.target)
                overrides.append(Override(name=layer.name, **wide.options[0].override))
            except ValueError:  # the target does not run 8-bit weights here
                options = [option for option in layer.options if option.weight is not None] or layer.options
                override = max(options, key=lambda option: option.bits).override
                overrides += [Override(name=layer.name, **override)] if override else []
        return self.config.model_copy(update={"overrides": (*self.config.overrides, *overrides)})

    def run(
        self,
        data: Data,
        steps: Sequence[str] | None,
        max_batches: int | None,
        on_nan: Literal["error", "skip"],
        progress: bool | None,
    ) -> None:
        """Calibrate the model and measure the noise and the losses."""
        # Without bias correction: the codes of every precision are solved with a bias shift of their own.
        calibrate(
            self.model, data, max_batches=max_batches, on_nan=on_nan, progress=progress, freeze_weights=True,
            correct_bias=False,
        )  # fmt: skip
        flow_batches = min(max_batches or MAX_FLOW_BATCHES, MAX_FLOW_BATCHES)
        flow = measure_noise_flow(self.model, data, max_batches=flow_batches, progress=False)
        self._collect_noise(flow)
        specs = {
            layer.name: list(dict.fromkeys(option.weight for option in layer.options if option.weight is not None))
            for layer in self.layers
        }
        self.losses, self.levels = measure_losses(
            self.model,
            {name: specs_of_layer for name, specs_of_layer in specs.items() if specs_of_layer},
            data,
            steps=steps,
            max_batches=max_batches,
            skip_nan=on_nan == "skip",
            progress=progress,
        )

    def _collect_noise(self, flow: NoiseFlow) -> None:
        """Collect the noise at the output that the weight of each layer causes, and the quantizers of its inputs."""
        names, weights = record_of(self.model).names, flow.weights(self.model.graph)
        self.weight_noise: dict[str, float] = {}
        self.input_noise: dict[str, float] = {}
        self.silent: set[str] = set()  # layers whose weights cause no noise with 8 bits, such as all-zero ones
        for node, own_noise in flow.own_noise.items():
            module = self.model.get_submodule(str(node.target))
            if not isinstance(module, QuantStub):
                name = names.get(node.name, "")
                self.weight_noise[name] = self.weight_noise.get(name, 0.0) + own_noise * weights[node]
                if not own_noise:
                    self.silent.add(name)
                continue
            # An activation quantizer: its noise is split over the layers that read it; the rest, if the quantizer is
            # at the output of a layer, counts for that layer.
            remaining = own_noise * weights[node]
            for reader in node.users:
                if names.get(reader.name) in module.consumers:  # never the output node, which has no gain
                    part = own_noise * flow.gain(reader) * weights[reader]
                    self._add_input_noise(names[reader.name], part)
                    remaining -= part
            source = node.all_input_nodes[0]
            if names.get(source.name) in module.consumers:
                self._add_input_noise(names[source.name], max(remaining, 0.0))

    def _add_input_noise(self, name: str, noise: float) -> None:
        self.input_noise[name] = self.input_noise.get(name, 0.0) + noise

    def share_a_weight(self, group: Sequence[LayerOptions]) -> bool:
        """Whether the layers of a group all use one weight."""
        weights = [getattr(layer.first.site.part, "weight", None) for layer in group]
        addresses = {None if weight is None else weight.data_ptr() for weight in weights}
        return len(group) > 1 and len(addresses) == 1

    def error(self, layer: LayerOptions, option: PrecisionOption) -> float:
        """Return the noise to signal that a layer is expected to add to the output."""
        error = 0.0
        if option.weight is not None:
            present = self.weight_noise.get(layer.name, 0.0)
            if layer.name in self.silent:  # it has no noise at the model's output: use that at its own output
                present = self.levels.get(layer.name, 0.0)
            error += present * self.losses.get(layer.name, {}).get(option.weight, 0.0)
        if option.inputs:
            present_inputs = build_option(layer, UNCHANGED, {}, self.config, self.target).inputs
            added_bits = min(spec.n_bits for spec in option.inputs) - min(spec.n_bits for spec in present_inputs)
            error += self.input_noise.get(layer.name, 0.0) * 4.0**-added_bits  # 6 dB per bit
        return error if isfinite(error) else BROKEN_MODEL_ERROR
