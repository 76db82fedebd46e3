"""Every layer at every width, measured once on one calibrated model: what it puts on the output, and what it costs.

    error  = noise to signal at the output  =  own(n) weight(n) loss(width) / loss(now)  +  the noise of its inputs
    size   = codes and scales in bytes           time = MACs * bits of the wider operand / 32

own and weight are those of sensitivity by proxy (`analysis/noise_flow.py`), measured with all weights at 8 bits where
the target runs that: noise is small there, so that it adds up. A wider input is assumed to lose 6 dB of noise per bit.
"""

from collections.abc import Collection, Mapping, Sequence
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
from scalepoint.quantize.feeding import Data
from scalepoint.quantize.insert import get_weight_key, make_decisions
from scalepoint.quantize.macs import get_shape
from scalepoint.quantize.operations import get_weight_shape
from scalepoint.quantize.placement import Decision
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.record import record_of
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationSpec
from scalepoint.targets import Target
from scalepoint.transformation import TransformationResult

MAX_FLOW_BATCHES = 4  # of the data: enough to see how noise flows
BROKEN_MODEL_ERROR = 1e12  # the error of what breaks the model
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
        layers = [each for each in layers if each.first.weight is not None and not is_weight_overridden(each, config)]
        add_choices(layers, choices, config, target)
    if not layers:
        raise UsageError("no layer has a choice: the config names the weights of all that are quantized")
    measured = _NoiseMeasurement(result, config, target, layers)
    measured.run(data, steps, max_batches, on_nan, progress)
    macs: dict[str, float] = dict.fromkeys((layer.name for layer in layers), 0.0)
    fixed = []
    for decision in decisions:
        if decision.site.name in macs:
            macs[decision.site.name] += _count_work(rows.get(decision.site.node), decision.site.node)
        else:
            fixed.append((decision, rows.get(decision.site.node)))
    made = tuple(_make_row(group, measured, macs) for group in group_layers_sharing_precision(layers))
    others = sum(row.macs or 0 for row in coverage.operations if row.name not in macs)
    owned = {get_weight_key(layer.first.site) for layer in layers if layer.first.weight is not None}
    return _add_fixed_costs(made, result.model, fixed, owned, sum(macs.values()), others)


def _add_fixed_costs(
    made: tuple[WidthRow, ...],
    model: fx.GraphModule,
    fixed: Sequence[tuple[Decision, CoverageRow | None]],
    owned: Collection[int],
    own: float,
    others: float,
) -> Widths:
    """What has no choice costs what it is: in float, or quantized as the config says."""
    size = _float_bytes(model)
    rest = size - sum(FLOAT_BITS / 8 * row.weights for row in made)
    time = others
    for decision, row in fixed:
        bits = max((spec.n_bits for point, _, spec in decision.points if point != Point.OUTPUT), default=FLOAT_BITS)
        if decision.weight is not None and get_weight_key(decision.site) not in owned:
            shape = get_weight_shape(decision.site.part)
            rest -= FLOAT_BITS / 8 * prod(shape) - _weight_bytes(decision.weight, shape)
            bits = max(bits, decision.weight.n_bits)
        elif decision.weight is None and decision.site.role is not None:
            bits = FLOAT_BITS
        time -= (row.macs or 0) * (1 - bits / FLOAT_BITS) if row is not None else 0.0
    return Widths(made, size, own + others, max(rest, 0.0), max(time, 0.0))


def _count_work(row: CoverageRow | None, node: fx.Node) -> float:
    """MACs; of what multiplies nothing, its values."""
    if row is not None and row.macs:
        return float(row.macs)
    shape = get_shape(node)
    return float(prod(shape)) if shape else 0.0


def _float_bytes(model: fx.GraphModule) -> float:
    """The bytes of all parameters and float buffers in float32."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()}
    return 4.0 * sum(each.numel() for each in tensors.values())


def _make_row(group: Sequence[LayerOptions], measured: "_NoiseMeasurement", macs: Mapping[str, float]) -> WidthRow:
    """Partners together: the ways that all of them have."""
    refused = {name: why for layer in group for name, why in layer.refused.items()}
    names = [way.name for way in group[0].ways if all(way.name in {each.name for each in o.ways} for o in group)]
    shapes = {layer.name: get_weight_shape(layer.first.site.part) for layer in group if layer.first.weight is not None}
    weights = prod(next(iter(shapes.values()))) if measured.share_a_weight(group) else sum(map(prod, shapes.values()))
    widths = []
    for name in names:
        ways = [next(way for way in layer.ways if way.name == name) for layer in group]
        pairs = list(zip(group, ways, strict=True))
        error = sum(measured.error(layer, way) for layer, way in pairs)
        sizes = [_weight_bytes(way.weight, shapes[layer.name]) for layer, way in pairs if layer.name in shapes]
        size = sizes[0] if measured.share_a_weight(group) else sum(sizes)
        time = sum(macs[layer.name] * way.widest / FLOAT_BITS for layer, way in pairs)
        said = {key: _to_override_value(value) for key, value in ways[0].said.items()}
        widths.append(Width(name, float(ways[0].bits), error, size, time, said))
    return WidthRow(tuple(each.name for each in group), group[0].first.site.kind, weights, tuple(widths), refused)


def _to_override_value(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, QuantizationSpec) else value


def _weight_bytes(spec: QuantizationSpec | None, shape: tuple[int, ...]) -> float:
    """Codes, scales in float32, and zero points where they are not zero."""
    count = prod(shape)
    if spec is None:
        return FLOAT_BITS / 8 * count
    granularity = spec.granularity
    scales = 1.0
    if isinstance(granularity, PerBlockGranularity):
        extents = granularity.get_block_size(shape)
        scales = count / prod(extents)
    elif isinstance(granularity, PerChannelGranularity):
        scales = float(shape[granularity.axis or 0])
    zero = scales * spec.n_bits / 8 if spec.qscheme == "asymmetric" else 0.0
    return count * spec.n_bits / 8 + 4 * scales + zero


class _NoiseMeasurement:
    """How noise flows with wide weights, and the loss of each layer at each of its specs."""

    def __init__(
        self, result: TransformationResult, config: QuantConfig, target: Target, layers: Sequence[LayerOptions]
    ) -> None:
        self.layers, self.config, self.target, self.result = layers, config, target, result
        self.model: fx.GraphModule = insert_qdq(
            result.model, result.matches, self._wide_config(), target=target, copy=True
        )

    def _wide_config(self) -> QuantConfig:
        """All weights that have a choice at 8 bits, or at the widest that is left."""
        more = []
        for layer in self.layers:
            if layer.first.weight is None:
                continue
            tried = LayerOptions(layer.name, layer.decisions)
            try:
                add_choices([tried], (WIDE_WEIGHTS,), self.config, self.target)
                more.append(Override(name=layer.name, **tried.ways[0].said))
            except ValueError:
                own = [way for way in layer.ways if way.weight is not None] or layer.ways
                said = max(own, key=lambda way: way.bits).said
                more += [Override(name=layer.name, **said)] if said else []
        return self.config.model_copy(update={"overrides": (*self.config.overrides, *more)})

    def run(
        self,
        data: Data,
        steps: Sequence[str] | None,
        max_batches: int | None,
        on_nan: Literal["error", "skip"],
        progress: bool | None,
    ) -> None:
        # Every width is solved with a bias of its own, from uncorrected ones.
        calibrate(
            self.model, data, max_batches=max_batches, on_nan=on_nan, progress=progress, freeze_weights=True,
            correct_bias=False,
        )  # fmt: skip
        few = min(max_batches or MAX_FLOW_BATCHES, MAX_FLOW_BATCHES)
        flow = measure_noise_flow(self.model, data, max_batches=few, progress=False)
        self._collect(flow)
        specs = {
            layer.name: [*dict.fromkeys(way.weight for way in layer.ways if way.weight is not None)]
            for layer in self.layers
        }
        self.losses, self.levels = measure_losses(
            self.model,
            {name: found for name, found in specs.items() if found},
            data,
            steps=steps,
            max_batches=max_batches,
            skip_nan=on_nan == "skip",
            progress=progress,
        )

    def _collect(self, flow: NoiseFlow) -> None:
        """The noise of each layer's weight and of its inputs, at the output."""
        names, weights = record_of(self.model).names, flow.weights(self.model.graph)
        self.of_weight: dict[str, float] = {}
        self.of_inputs: dict[str, float] = {}
        self.silent: set[str] = set()
        for node, own in flow.own.items():
            module = self.model.get_submodule(str(node.target))
            if not isinstance(module, QuantStub):
                name = names.get(node.name, "")
                self.of_weight[name] = self.of_weight.get(name, 0.0) + own * weights[node]
                if not own:
                    self.silent.add(name)
                continue
            left = own * weights[node]
            for reader in node.users:
                if names.get(reader.name) in module.consumers:  # never the output node, which has no gain
                    part = own * flow.gain(reader) * weights[reader]
                    self._add_input(names[reader.name], part)
                    left -= part
            source = node.all_input_nodes[0]
            if names.get(source.name) in module.consumers:
                self._add_input(names[source.name], max(left, 0.0))

    def _add_input(self, name: str, part: float) -> None:
        self.of_inputs[name] = self.of_inputs.get(name, 0.0) + part

    def share_a_weight(self, group: Sequence[LayerOptions]) -> bool:
        parts = [getattr(layer.first.site.part, "weight", None) for layer in group]
        return len(group) > 1 and len({None if each is None else each.data_ptr() for each in parts}) == 1

    def error(self, layer: LayerOptions, way: PrecisionOption) -> float:
        """The noise to signal that a layer is expected to put on the output."""
        found = 0.0
        if way.weight is not None:
            scale = self.of_weight.get(layer.name, 0.0)
            if layer.name in self.silent:
                scale = self.levels.get(layer.name, 0.0)
            found += scale * self.losses.get(layer.name, {}).get(way.weight, 0.0)
        if way.inputs:
            before = build_option(layer, UNCHANGED, {}, self.config, self.target).inputs
            more = min(each.n_bits for each in way.inputs) - min(each.n_bits for each in before)
            found += self.of_inputs.get(layer.name, 0.0) * 4.0**-more
        return found if isfinite(found) else BROKEN_MODEL_ERROR
