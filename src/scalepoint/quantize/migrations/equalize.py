"""Cross-layer equalization (Nagel et al. 2019): two layers share the range of each channel between them.

    s_i = sqrt(r1_i / r2_i)        rows of W1 and b1 / s, columns of W2 * s; r: the largest weight of a row, of a column

repeated over all pairs until no factor moves by 5 %, so that chains (depthwise triples) settle too. Between the two
stands what scales along: ReLU, leaky ReLU, pools, moves, or nothing. A clamp (ReLU6) does not; its channels are scaled
only as far as the data shows that neither the old nor the new values come near it. Dead channels are left alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scalepoint.graph import Operation
from scalepoint.quantize.migrations.channel_trace import CLAMPS, MOVES, POOLS, RECTIFIES, UNCHANGED, channel_axis
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedOperation
from scalepoint.quantize.migrations.scaling_sites import ScalingSite, find_scaling_sites

MAX_ROUNDS = 20
CONVERGED_CHANGE = 0.05
DEAD_CHANNEL_SHARE = 1e-6  # of the largest range
CLAMP_HEADROOM = 1.25  # how far the largest value that was seen stays from a clamp


def passes_scales(op: RecordedOperation) -> bool:
    if op.kind in ("mul", "div"):
        return len(op.inputs) == 1
    return op.kind in UNCHANGED | MOVES | RECTIFIES | CLAMPS | POOLS or op.kind == "mean"


def find_sites(scene: MigrationContext) -> MigrationSites:
    found = find_scaling_sites(scene, passes_scales, norms=False)
    _exclude_clamped_channels(scene, found)
    return found


def _exclude_clamped_channels(scene: MigrationContext, found: MigrationSites) -> None:
    """Channels that reach a clamp are not scaled; a seam that has no other is refused."""
    clamped = [seam for seam in found.sites if seam.clamps]
    seen = {id(seam): ChannelExtremes(channel_axis(seam.source.op)) for seam in clamped}
    scene.watch("looking at clamps", {seam.source.module: seen[id(seam)].take for seam in clamped})
    for seam in clamped:
        reach = min_scale(seam, seen[id(seam)])
        seam.measured = reach
        seam.free &= reach <= 1
        if not bool(seam.free.any()):
            found.sites.remove(seam)
            found.refuse(seam.name, f"all channels reach the clamp of {seam.clamps[0].name} ({seam.clamps[0].kind})")


def min_scale(seam: ScalingSite, seen: "ChannelExtremes") -> Tensor:
    """What s must be at least, for each channel, so that no clamp is reached; above 1 where it is reached already."""
    least = torch.zeros(seam.trace.channels, dtype=torch.float64)
    if any(op.kind in ("mul", "div") for op in seam.trace.passed):
        return least + 2  # what the clamp sees is not what the source gives
    for op in seam.clamps:
        low, high = _clamp_limits(op)
        above = seen.high * CLAMP_HEADROOM / high if high > 0 else torch.full_like(least, 2)
        below = seen.low * CLAMP_HEADROOM / low if low < 0 else torch.full_like(least, 2.0 if low > 0 else 0.0)
        least = torch.maximum(least, torch.maximum(above, below))
    return least


def _clamp_limits(op: RecordedOperation) -> tuple[float, float]:
    if op.kind == "relu6":
        return 0.0, 6.0
    given = op.module.arguments if isinstance(op.module, Operation) else vars(op.module)
    low, high = given.get("min_val", -1), given.get("max_val", 1)
    return float(low), float(high)


class ChannelExtremes:
    """The least and the largest value of each channel of what passes."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.low = self.high = torch.zeros((), dtype=torch.float32)

    def take(self, _: Tensor, output: Tensor) -> None:
        rows = output.movedim(self.axis, -1).flatten(0, -2)
        if len(rows):
            low, high = rows.amin(0).double().cpu(), rows.amax(0).double().cpu()
            is_first = not self.low.ndim
            self.low = low if is_first else torch.minimum(self.low, low)
            self.high = high if is_first else torch.maximum(self.high, high)


def equalize(scene: MigrationContext, seams: Sequence[ScalingSite]) -> list[str]:
    total = [torch.ones(seam.trace.channels, dtype=torch.float64) for seam in seams]
    for _ in range(MAX_ROUNDS):
        moved = 0.0
        for index, seam in enumerate(seams):
            s = compute_factors(seam)
            if seam.measured is not None:
                s = torch.maximum(s * total[index], seam.measured) / total[index]
            s = torch.where(seam.free, s, 1.0)
            seam.scale(s)
            total[index] *= s
            moved = max(moved, float((s - 1).abs().max()))
        if moved < CONVERGED_CHANGE:
            break
    return [_describe_factors(seam, s) for seam, s in zip(seams, total, strict=True)]


def compute_factors(seam: ScalingSite) -> Tensor:
    first = seam.source.output_ranges()  # type: ignore[union-attr]  # no norms were asked for
    second = seam.gathered([reader.input_ranges() for reader, _ in seam.readers], "amax")
    is_dead = (first <= DEAD_CHANNEL_SHARE * first.max()) | (second <= DEAD_CHANNEL_SHARE * second.max())
    return torch.where(is_dead, 1.0, (first / second.clamp(min=1e-300)).sqrt())


def _describe_factors(seam: ScalingSite, s: Tensor) -> str:
    moved = int(((s - 1).abs() > 1e-3).sum())
    between = f", through {seam.clamps[0].kind}" if seam.clamps else ""
    return f"{moved} of {len(s)} channels, factors {float(s.min()):.3g} to {float(s.max()):.3g}{between}"


EQUALIZE = Migration("equalize", find_sites, equalize)
