"""AWQ (Lin et al. 2024): weight columns that meet large activations get finer steps.

    s_j = mean|x_j|^a, normalised by sqrt(max s * min s),  a in 0, 0.05 .. 0.95
    the a with the least  |(Q(W diag(s)) - W diag(s)) diag(1/s) X|^2 + step_x(s)^2 / 12 * |W diag(s)|^2

X are rows of the calibration data, Q the weight quantizers of the layers that read it, step_x the step of a quantized
input. a = 0 changes nothing; it is always a candidate and wins ties. The scales move into a norm or layer before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scalepoint.graph.nodes import get_kind
from scalepoint.quantize.migrations.channel_trace import MOVES, POOLS, RECTIFIERS, SUMS, UNCHANGED
from scalepoint.quantize.migrations.layers import RewritableLayer
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedOperation
from scalepoint.quantize.migrations.scaling_sites import ScalingSite, find_scaling_sites, gather_scales
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize

EXPONENTS = tuple(step / 20 for step in range(20))
MIN_MEAN = 1e-4  # of a channel, relative to the average channel
MIN_ROWS = 1024  # rows of the data on which candidates are compared; at most twice as many
MIN_IMPROVEMENT = 1e-9  # relative; a smaller improvement is rounding


def passes_scales(op: RecordedOperation) -> bool:
    """Whether channels may be followed through an operation."""
    return op.kind in UNCHANGED | MOVES | RECTIFIERS | POOLS or op.kind in ("mul", "div", "mean", *SUMS)


def find_sites(context: MigrationContext) -> MigrationSites:
    result = find_scaling_sites(context, passes_scales, norms=True, explain_refusal=_explain_refusal)
    for site in list(result.sites):
        if not any(_is_quantized(reader) for reader, _ in site.readers):
            result.sites.remove(site)
            result.refuse(site.name, "no weight that reads it is quantized")
    _sample_inputs(context, result.sites)
    return result


def _explain_refusal(op: RecordedOperation) -> str:
    """Return why a reader cannot be used; "" if it can."""
    return "" if op.kind in ("linear", "head") else f"{op.name} is not a linear layer ({op.kind})"


def _is_quantized(layer: RewritableLayer) -> bool:
    return isinstance(layer.module, QuantizedLayer) and not layer.module.weight_quant.quantizer.is_disabled()


class RowSample:
    """Statistics of all input rows of a layer, and every k-th row.

    k doubles whenever there are more than 2 * MIN_ROWS rows, so their number stays between the two.
    """

    def __init__(self, axis: int) -> None:
        self.axis, self.step, self.count = axis, 1, 0
        self.sample: list[Tensor] = []
        self.mean = self.low = self.high = torch.zeros((), dtype=torch.float32)  # mean magnitude and extremes

    def observe(self, inputs: Tensor, _: Tensor) -> None:
        rows = inputs.movedim(self.axis, -1).flatten(0, -2).float().cpu()
        if not len(rows):
            return
        is_first, count_before = not self.count, self.count
        self.low = rows.amin(0) if is_first else torch.minimum(self.low, rows.amin(0))
        self.high = rows.amax(0) if is_first else torch.maximum(self.high, rows.amax(0))
        self.count += len(rows)
        self.mean = self.mean + (rows.abs().double().mean(0) - self.mean) * (len(rows) / self.count)
        self.sample.append(rows[-count_before % self.step :: self.step].clone())
        while sum(map(len, self.sample)) > 2 * MIN_ROWS:
            self.sample, self.step = [torch.cat(self.sample)[::2]], self.step * 2


def _sample_inputs(context: MigrationContext, sites: Sequence[ScalingSite]) -> None:
    """Sample the inputs of each reader. Readers of one tensor share a sample."""
    observers: dict[nn.Module, Callable[[Tensor, Tensor], None]] = {}
    samples: dict[int, RowSample] = {}  # by the operation that computes the input
    for site in sites:
        for reader, _ in site.readers:
            source = reader.op.inputs[0]
            if source not in samples:
                samples[source] = RowSample(-1 if reader.kind == "linear" else 1)
                observers[reader.module] = samples[source].observe
        site.measured = [samples[reader.op.inputs[0]] for reader, _ in site.readers]
    context.observe("looking at activations", observers)


def apply_awq(context: MigrationContext, sites: Sequence[ScalingSite]) -> list[str]:
    notes = []
    for site in sites:
        mean = site.reduce_to_channels([sample.mean for sample in site.measured], "mean")
        errors = {a: sum(_iterate_errors(context, site, compute_scales(site, mean, a))) for a in EXPONENTS}
        unscaled_error = errors[0.0]  # with a = 0 all scales are 1
        best = min(EXPONENTS, key=lambda a: (errors[a], a))
        if errors[best] >= unscaled_error * (1 - MIN_IMPROVEMENT):
            best = 0.0
        site.scale(compute_scales(site, mean, best))
        ratio = errors[best] / unscaled_error if unscaled_error else 1
        notes.append(f"a = {best:g}, error {ratio:.2f} of before")
    return notes


def compute_scales(site: ScalingSite, mean: Tensor, a: float) -> Tensor:
    """Return s of each channel of the source; 1 for a channel that is always zero or must not be scaled."""
    is_used = site.free & (mean > 0)
    if a == 0 or not bool(is_used.any()):
        return torch.ones_like(mean)
    s = (mean / mean[is_used].mean()).clamp(min=MIN_MEAN) ** a
    s = s / (s[is_used].max() * s[is_used].min()).sqrt()
    return torch.where(is_used, s, 1.0)


def _iterate_errors(context: MigrationContext, site: ScalingSite, s: Tensor) -> Iterator[float]:
    """Yield the error of each quantized reader with the scales s."""
    for (reader, columns), sample in zip(site.readers, site.measured, strict=True):
        if not _is_quantized(reader):
            continue
        input_scales = gather_scales(s, columns).float()
        x = torch.cat(sample.sample) / input_scales
        weight = reader.folded_matrix()[0, :, :, 0].float().cpu() * input_scales
        weight_error = quantize_weight(reader, weight) - weight
        output_error = (x @ weight_error.T).square().sum() / len(x)
        step = _input_step(context, reader, sample.low / input_scales, sample.high / input_scales)
        # The rounding errors of x are uniform within a step: their mean square is step^2 / 12.
        yield float(output_error + step**2 / 12 * weight.square().sum())


def quantize_weight(reader: RewritableLayer, weight: Tensor) -> Tensor:
    """Return a weight (out, in) rounded as the quantizer of the layer would round it."""
    quant: WeightFakeQuantize = reader.module.weight_quant  # type: ignore[assignment]  # the layer is quantized
    shaped = weight.to(reader.weight.device)
    with _unfrozen(quant):
        rounded: Tensor = quant(shaped[:, :, None, None] if reader.kind == "head" else shaped)
    return rounded.reshape(weight.shape).cpu()


@contextmanager
def _unfrozen(quant: WeightFakeQuantize) -> Iterator[None]:
    """A context in which a weight quantizer is on and computes its scales from the weight."""
    state = {name: value.clone() for name, value in quant.state_dict().items()}
    quant.unfreeze()
    quant.enabled = True
    try:
        yield
    finally:
        quant.load_state_dict(state)


def _input_step(context: MigrationContext, reader: RewritableLayer, low: Tensor, high: Tensor) -> float:
    """Return the step that the activation quantizer of the input will have with this range; 0 if there is none."""
    source = reader.op.node.args[0]
    module = context.model.get_submodule(str(source.target)) if get_kind(source) == "quant" else None  # type: ignore[union-attr, arg-type]
    if not isinstance(module, QuantStub) or module.quantizer.grid.format.is_float or module.is_fixed:
        return 0.0
    smallest, largest = float(low.min().clamp(max=0)), float(high.max().clamp(min=0))
    width = largest - smallest if module.spec.qscheme == "asymmetric" else 2 * max(largest, -smallest)
    return width / (module.spec.quant_max - module.spec.quant_min)


AWQ = Migration("awq", find_sites, apply_awq)
