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
from scalepoint.quantize.migrations.flow import Op
from scalepoint.quantize.migrations.migration import Found, Migration, Scene
from scalepoint.quantize.migrations.seams import Seam, find_seams
from scalepoint.quantize.migrations.trace import CLAMPS, MOVES, POOLS, RECTIFIES, SAME, channel_axis

ROUNDS = 20
SETTLED = 0.05
DEAD = 1e-6  # of the largest range
HEADROOM = 1.25  # how far the largest value that was seen stays from a clamp


def passes(op: Op) -> bool:
    if op.kind in ("mul", "div"):
        return len(op.inputs) == 1
    return op.kind in SAME | MOVES | RECTIFIES | CLAMPS | POOLS or op.kind == "mean"


def find(scene: Scene) -> Found:
    found = find_seams(scene, passes, norms=False)
    _spare_clamps(scene, found)
    return found


def _spare_clamps(scene: Scene, found: Found) -> None:
    """Channels that reach a clamp are not scaled; a seam that has no other is refused."""
    clamped = [seam for seam in found.sites if seam.clamps]
    seen = {id(seam): Extremes(channel_axis(seam.source.op)) for seam in clamped}
    scene.watch("looking at clamps", {seam.source.module: seen[id(seam)].take for seam in clamped})
    for seam in clamped:
        reach = least_scale(seam, seen[id(seam)])
        seam.measured = reach
        seam.free &= reach <= 1
        if not bool(seam.free.any()):
            found.sites.remove(seam)
            found.refuse(seam.name, f"all channels reach the clamp of {seam.clamps[0].name} ({seam.clamps[0].kind})")


def least_scale(seam: Seam, seen: "Extremes") -> Tensor:
    """What s must be at least, for each channel, so that no clamp is reached; above 1 where it is reached already."""
    least = torch.zeros(seam.trace.channels, dtype=torch.float64)
    if any(op.kind in ("mul", "div") for op in seam.trace.passed):
        return least + 2  # what the clamp sees is not what the source gives
    for op in seam.clamps:
        low, high = _limits(op)
        above = seen.high * HEADROOM / high if high > 0 else torch.full_like(least, 2)
        below = seen.low * HEADROOM / low if low < 0 else torch.full_like(least, 2.0 if low > 0 else 0.0)
        least = torch.maximum(least, torch.maximum(above, below))
    return least


def _limits(op: Op) -> tuple[float, float]:
    if op.kind == "relu6":
        return 0.0, 6.0
    given = op.module.arguments if isinstance(op.module, Operation) else vars(op.module)
    low, high = given.get("min_val", -1), given.get("max_val", 1)
    return float(low), float(high)


class Extremes:
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


def apply(scene: Scene, seams: Sequence[Seam]) -> list[str]:
    total = [torch.ones(seam.trace.channels, dtype=torch.float64) for seam in seams]
    for _ in range(ROUNDS):
        moved = 0.0
        for index, seam in enumerate(seams):
            s = factors(seam)
            if seam.measured is not None:
                s = torch.maximum(s * total[index], seam.measured) / total[index]
            s = torch.where(seam.free, s, 1.0)
            seam.scale(s)
            total[index] *= s
            moved = max(moved, float((s - 1).abs().max()))
        if moved < SETTLED:
            break
    return [_said(seam, s) for seam, s in zip(seams, total, strict=True)]


def factors(seam: Seam) -> Tensor:
    first = seam.source.output_ranges()  # type: ignore[union-attr]  # no norms were asked for
    second = seam.gathered([reader.input_ranges() for reader, _ in seam.readers], "amax")
    is_dead = (first <= DEAD * first.max()) | (second <= DEAD * second.max())
    return torch.where(is_dead, 1.0, (first / second.clamp(min=1e-300)).sqrt())


def _said(seam: Seam, s: Tensor) -> str:
    moved = int(((s - 1).abs() > 1e-3).sum())
    between = f", through {seam.clamps[0].kind}" if seam.clamps else ""
    return f"{moved} of {len(s)} channels, factors {float(s.min()):.3g} to {float(s.max()):.3g}{between}"


EQUALIZE = Migration("equalize", find, apply)
