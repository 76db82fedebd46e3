"""Cross-layer equalization (Nagel et al. 2019): two layers share the range of each channel between them.

    s_i = sqrt(r1_i / r2_i)        rows of W1 and b1 / s, columns of W2 * s; r: the largest weight of a row, of a column

Repeated over all pairs until no factor changes by 5 %, so that chains (depthwise triples) converge too. Between the two
layers there may be operations that commute with scaling: ReLU, leaky ReLU, pools, moves. A clamp (ReLU6) does not: its
channels are scaled only if neither the old nor the new values come near the clamp on the data. Channels with zero
weights are not scaled.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scalepoint.graph import Operation
from scalepoint.quantize.migrations.channel_trace import CLAMPS, MOVES, POOLS, RECTIFIERS, UNCHANGED, channel_axis
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedOperation
from scalepoint.quantize.migrations.scaling_sites import ScalingSite, find_scaling_sites

MAX_ROUNDS = 20
CONVERGED_CHANGE = 0.05
DEAD_CHANNEL_SHARE = 1e-6  # of the largest range: a smaller one counts as zero
UNSCALABLE = 2.0  # as the smallest s of a channel: anything above 1 excludes the channel
CLAMP_HEADROOM = 1.25  # the largest observed value times this must stay below a clamp


def passes_scales(op: RecordedOperation) -> bool:
    """Whether channels may be followed through an operation."""
    if op.kind in ("mul", "div"):
        return len(op.inputs) == 1
    return op.kind in UNCHANGED | MOVES | RECTIFIERS | CLAMPS | POOLS or op.kind == "mean"


def find_sites(context: MigrationContext) -> MigrationSites:
    result = find_scaling_sites(context, passes_scales, norms=False)
    _exclude_clamped_channels(context, result)
    return result


def _exclude_clamped_channels(context: MigrationContext, result: MigrationSites) -> None:
    """Exclude channels that reach a clamp on the data; refuse a site without other channels."""
    clamped = [site for site in result.sites if site.clamps]
    extremes = {id(site): ChannelExtremes(channel_axis(site.source.op)) for site in clamped}
    context.observe("looking at clamps", {site.source.module: extremes[id(site)].observe for site in clamped})
    for site in clamped:
        site.measured = min_scale(site, extremes[id(site)])
        site.free &= site.measured <= 1
        if not bool(site.free.any()):
            clamp = site.clamps[0]
            result.sites.remove(site)
            result.refuse(site.name, f"all channels reach the clamp of {clamp.name} ({clamp.kind})")


def min_scale(site: ScalingSite, extremes: "ChannelExtremes") -> Tensor:
    """Return the smallest s of each channel with which no clamp is reached; above 1 if one is reached already."""
    least = torch.zeros(site.trace.channels, dtype=torch.float64)
    if any(op.kind in ("mul", "div") for op in site.trace.passed):
        return least + UNSCALABLE  # the clamp reads other values than those observed at the source
    for op in site.clamps:
        low, high = _clamp_limits(op)
        for_high = extremes.high * CLAMP_HEADROOM / high if high > 0 else torch.full_like(least, UNSCALABLE)
        if low < 0:
            for_low = extremes.low * CLAMP_HEADROOM / low
        else:  # a lower limit of 0 (ReLU6) commutes with scaling; one above 0 never does
            for_low = torch.full_like(least, UNSCALABLE if low > 0 else 0.0)
        least = torch.maximum(least, torch.maximum(for_high, for_low))
    return least


def _clamp_limits(op: RecordedOperation) -> tuple[float, float]:
    if op.kind == "relu6":
        return 0.0, 6.0
    settings = op.module.arguments if isinstance(op.module, Operation) else vars(op.module)
    low, high = settings.get("min_val", -1), settings.get("max_val", 1)  # the defaults of hardtanh
    return float(low), float(high)


class ChannelExtremes:
    """The smallest and the largest value of each channel of a layer's output."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.low = self.high = torch.zeros((), dtype=torch.float32)

    def observe(self, _: Tensor, output: Tensor) -> None:
        rows = output.movedim(self.axis, -1).flatten(0, -2)
        if len(rows):
            low, high = rows.amin(0).double().cpu(), rows.amax(0).double().cpu()
            is_first = not self.low.ndim
            self.low = low if is_first else torch.minimum(self.low, low)
            self.high = high if is_first else torch.maximum(self.high, high)


def equalize(context: MigrationContext, sites: Sequence[ScalingSite]) -> list[str]:
    totals = [torch.ones(site.trace.channels, dtype=torch.float64) for site in sites]
    for _ in range(MAX_ROUNDS):
        largest_change = 0.0
        for index, site in enumerate(sites):
            s = compute_factors(site)
            if site.measured is not None:  # all rounds together stay above the limit for the clamp
                s = torch.maximum(s * totals[index], site.measured) / totals[index]
            s = torch.where(site.free, s, 1.0)
            site.scale(s)
            totals[index] *= s
            largest_change = max(largest_change, float((s - 1).abs().max()))
        if largest_change < CONVERGED_CHANGE:
            break
    return [_describe_factors(site, s) for site, s in zip(sites, totals, strict=True)]


def compute_factors(site: ScalingSite) -> Tensor:
    """Return s of the formula above; 1 for channels with zero weights."""
    first = site.source.output_ranges()  # type: ignore[union-attr]  # a layer: norms were not requested
    second = site.reduce_to_channels([reader.input_ranges() for reader, _ in site.readers], "amax")
    is_dead = (first <= DEAD_CHANNEL_SHARE * first.max()) | (second <= DEAD_CHANNEL_SHARE * second.max())
    return torch.where(is_dead, 1.0, (first / second.clamp(min=1e-300)).sqrt())


def _describe_factors(site: ScalingSite, s: Tensor) -> str:
    changed = int(((s - 1).abs() > 1e-3).sum())
    clamp = f", through {site.clamps[0].kind}" if site.clamps else ""
    return f"{changed} of {len(s)} channels, factors {float(s.min()):.3g} to {float(s.max()):.3g}{clamp}"


EQUALIZE = Migration("equalize", find_sites, equalize)
