"""AWQ (Lin et al. 2024): columns that meet large activations get finer steps.

    s_j = mean|x_j|^a, normalised by sqrt(max s * min s),  a in 0, 0.05 .. 0.95
    the a with the least  |(Q(W diag(s)) - W diag(s)) diag(1/s) X|^2 + step_x(s)^2 / 12 * |W diag(s)|^2

X are rows of the calibration data, Q the quantizers of the layers that read it, step_x the step of a quantized input.
a = 0 changes nothing, is always among them, and stays on ties. The scales go into a norm or a layer before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scalepoint.graph.nodes import get_kind
from scalepoint.quantize.migrations.channel_trace import MOVES, POOLS, RECTIFIES, SUMS, UNCHANGED
from scalepoint.quantize.migrations.layers import RewritableLayer
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedOperation
from scalepoint.quantize.migrations.scaling_sites import ScalingSite, find_scaling_sites, gather_scales
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize

EXPONENTS = tuple(step / 20 for step in range(20))
MIN_MEAN = 1e-4
MIN_ROWS = 1024  # of the data, by which candidates are compared


def passes_scales(op: RecordedOperation) -> bool:
    return op.kind in UNCHANGED | MOVES | RECTIFIES | POOLS or op.kind in ("mul", "div", "mean", *SUMS)


def find_sites(scene: MigrationContext) -> MigrationSites:
    found = find_scaling_sites(scene, passes_scales, norms=True, why_not=_explain_refusal)
    for seam in list(found.sites):
        if not any(_is_quantized(reader) for reader, _ in seam.readers):
            found.sites.remove(seam)
            found.refuse(seam.name, "no weight that reads it is quantized")
    _sample_inputs(scene, found.sites)
    return found


def _explain_refusal(op: RecordedOperation) -> str:
    return "" if op.kind in ("linear", "head") else f"{op.name} is no linear layer ({op.kind})"


def _is_quantized(layer: RewritableLayer) -> bool:
    return isinstance(layer.module, QuantizedLayer) and not layer.module.weight_quant.quantizer.is_disabled()


class RowSample:
    """Every k-th row of what goes into a layer, with k so that at most ROWS to twice as many are kept, and the mean
    magnitude and the extremes of all rows."""

    def __init__(self, axis: int) -> None:
        self.axis, self.kept, self.step, self.count = axis, [], 1, 0
        self.mean = self.low = self.high = torch.zeros((), dtype=torch.float32)

    kept: list[Tensor]

    def take(self, given: Tensor, _: Tensor) -> None:
        rows = given.movedim(self.axis, -1).flatten(0, -2).float().cpu()
        if not len(rows):
            return
        is_first, before = not self.count, self.count
        self.low = rows.amin(0) if is_first else torch.minimum(self.low, rows.amin(0))
        self.high = rows.amax(0) if is_first else torch.maximum(self.high, rows.amax(0))
        self.count += len(rows)
        self.mean = self.mean + (rows.abs().double().mean(0) - self.mean) * (len(rows) / self.count)
        self.kept.append(rows[-before % self.step :: self.step].clone())
        while sum(map(len, self.kept)) > 2 * MIN_ROWS:
            self.kept, self.step = [torch.cat(self.kept)[::2]], self.step * 2


def _sample_inputs(scene: MigrationContext, seams: Sequence[ScalingSite]) -> None:
    """Rows of each reader's inputs; readers of one tensor have one."""
    watched: dict[nn.Module, Callable[[Tensor, Tensor], None]] = {}
    by_tensor: dict[int, RowSample] = {}
    for seam in seams:
        for reader, _ in seam.readers:
            source = reader.op.inputs[0]
            if source not in by_tensor:
                by_tensor[source] = RowSample(-1 if reader.kind == "linear" else 1)
                watched[reader.module] = by_tensor[source].take
        seam.measured = [by_tensor[reader.op.inputs[0]] for reader, _ in seam.readers]
    scene.watch("looking at activations", watched)


def apply_awq(scene: MigrationContext, seams: Sequence[ScalingSite]) -> list[str]:
    notes = []
    for seam in seams:
        mean = seam.gathered([rows.mean for rows in seam.measured], "mean")
        errors = {a: sum(_iterate_errors(scene, seam, compute_scales(seam, mean, a))) for a in EXPONENTS}
        best = min(EXPONENTS, key=lambda a: (errors[a] >= errors[0.0] * (1 - 1e-9), errors[a], a))
        best = best if errors[best] < errors[0.0] * (1 - 1e-9) else 0.0
        seam.scale(compute_scales(seam, mean, best))
        notes.append(f"a = {best:g}, error {errors[best] / errors[0.0] if errors[0.0] else 1:.2f} of before")
    return notes


def compute_scales(seam: ScalingSite, mean: Tensor, a: float) -> Tensor:
    """s of each channel of the source; a channel that is always zero, or may not be scaled, keeps 1."""
    is_used = seam.free & (mean > 0)
    if a == 0 or not bool(is_used.any()):
        return torch.ones_like(mean)
    s = (mean / mean[is_used].mean()).clamp(min=MIN_MEAN) ** a
    s = s / (s[is_used].max() * s[is_used].min()).sqrt()
    return torch.where(is_used, s, 1.0)


def _iterate_errors(scene: MigrationContext, seam: ScalingSite, s: Tensor) -> Iterator[float]:
    for (reader, columns), rows in zip(seam.readers, seam.measured, strict=True):
        if not _is_quantized(reader):
            continue
        each = gather_scales(s, columns).float()
        x = torch.cat(rows.kept) / each
        weight = reader.folded()[0, :, :, 0].float().cpu() * each
        off = quantize_weight(reader, weight) - weight
        noise = (x @ off.T).square().sum() / len(x)
        step = _input_step(scene, reader, rows.low / each, rows.high / each)
        yield float(noise + step**2 / 12 * weight.square().sum())


def quantize_weight(reader: RewritableLayer, weight: Tensor) -> Tensor:
    """A weight (out, in) as its layer would keep it."""
    quant: WeightFakeQuantize = reader.module.weight_quant  # type: ignore[assignment]  # it is quantized
    shaped = weight.to(reader.weight.device)
    with _unfrozen(quant):
        found: Tensor = quant(shaped[:, :, None, None] if reader.kind == "head" else shaped)
    return found.reshape(weight.shape).cpu()


@contextmanager
def _unfrozen(quant: WeightFakeQuantize) -> Iterator[None]:
    before = {name: value.clone() for name, value in quant.state_dict().items()}
    quant.unfreeze()
    quant.enabled = True
    try:
        yield
    finally:
        quant.load_state_dict(before)


def _input_step(scene: MigrationContext, reader: RewritableLayer, low: Tensor, high: Tensor) -> float:
    """The step that a stub of the input will have, with ranges as they are."""
    source = reader.op.node.args[0]
    module = scene.model.get_submodule(str(source.target)) if get_kind(source) == "quant" else None  # type: ignore[union-attr, arg-type]
    if not isinstance(module, QuantStub) or module.quantizer.grid.format.is_float or module.is_fixed:
        return 0.0
    least, most = float(low.min().clamp(max=0)), float(high.max().clamp(min=0))
    width = most - least if module.spec.qscheme == "asymmetric" else 2 * max(most, -least)
    return width / (module.spec.quant_max - module.spec.quant_min)


AWQ = Migration("awq", find_sites, apply_awq)
