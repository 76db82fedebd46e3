"""High-bias absorption (Nagel et al. 2019): what a ReLU always lets through goes from one bias into the next.

    c_i = max(0, least y_i seen)        relu(y) = relu(y - c) + c:    b1 - c,  b2 + W2 c

Activations then start near zero and need less range. c is the least value of the data, not a quantile, so that the
float output stays. A reader that pads with zeros is refused: what it pads with would have to be c.
"""

from collections.abc import Sequence

import torch

from scalepoint.graph import Operation
from scalepoint.quantize.migrations.channel_trace import MOVES, UNCHANGED, channel_axis
from scalepoint.quantize.migrations.equalize import ChannelExtremes
from scalepoint.quantize.migrations.layers import RewritableLayer
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import FOREIGN, RecordedOperation
from scalepoint.quantize.migrations.scaling_sites import ScalingSite, find_scaling_sites


def passes_shifts(op: RecordedOperation) -> bool:
    return op.kind in UNCHANGED | MOVES or op.kind in ("relu", "max_pool", "adaptive_avg_pool", "mean")


def find_sites(scene: MigrationContext) -> MigrationSites:
    found = find_scaling_sites(scene, passes_shifts, norms=False, why_not=_explain_refusal)
    for seam in list(found.sites):
        kinds = [op.kind for op in seam.trace.passed if op.kind not in UNCHANGED | MOVES]
        why = next((why for reader, _ in seam.readers if (why := reader.why_no_bias())), "")
        if kinds[:1] != ["relu"]:
            why = "no ReLU follows it"
        if why or seam.source.why_no_bias():
            found.sites.remove(seam)
            found.refuse(seam.name, why or seam.source.why_no_bias())
    _measure_minima(scene, found)
    return found


def _explain_refusal(op: RecordedOperation) -> str:
    given = op.module.operation if op.module is not None and hasattr(op.module, "operation") else op.module
    padding = given.arguments.get("padding", 0) if isinstance(given, Operation) else getattr(given, "padding", 0)
    if op.kind == "conv_transpose":
        return f"{op.name} is transposed: its borders see fewer values"
    is_padded = padding not in (0, "valid") and any(each not in (0, "valid") for each in _as_sequence(padding))
    return f"{op.name} pads with zeros" if is_padded else ""


def _as_sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _measure_minima(scene: MigrationContext, found: MigrationSites) -> None:
    """The least value of each channel; where none is above zero there is nothing to absorb."""
    seen = {id(seam): ChannelExtremes(channel_axis(seam.source.op)) for seam in found.sites}
    scene.watch("looking at biases", {seam.source.module: seen[id(seam)].take for seam in found.sites})
    for seam in list(found.sites):
        seam.measured = torch.where(seam.free, seen[id(seam)].low.nan_to_num(nan=0.0).clamp(min=0), 0.0)
        if not bool((seam.measured > 0).any()):
            found.sites.remove(seam)
            found.refuse(seam.name, "no channel is always above zero")
            continue
        for layer in (seam.source, *(reader for reader, _ in seam.readers)):
            layer.give_bias()


def absorb_biases(scene: MigrationContext, seams: Sequence[ScalingSite]) -> list[str]:
    for seam in seams:
        c = seam.measured
        assert isinstance(seam.source, RewritableLayer)  # noqa: S101  # norms are not asked for
        seam.source.shift_outputs(-c)
        for reader, columns in seam.readers:
            own = torch.where(columns == FOREIGN, 0.0, c[columns.clamp(min=0)])
            weight = reader.folded().cpu()
            reader.shift_outputs((weight.sum(3) * own.view(weight.shape[0], 1, -1)).sum(2).reshape(-1))
    return [f"{int((seam.measured > 0).sum())} of {seam.trace.channels} channels" for seam in seams]


ABSORB = Migration("absorb", find_sites, absorb_biases)
