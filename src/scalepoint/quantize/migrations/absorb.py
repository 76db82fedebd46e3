"""High-bias absorption (Nagel et al. 2019): a constant that a ReLU always passes moves from one bias into the next.

    c_i = max(0, smallest y_i observed)        relu(y) = relu(y - c) + c:    b1 - c,  b2 + W2 c

Activations then start near zero and need less range. c is the smallest value on the data and not a quantile, so that
the float output stays the same. A reader that pads with zeros is refused: it would have to pad with c.
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
    """Whether channels may be followed through an operation."""
    return op.kind in UNCHANGED | MOVES or op.kind in ("relu", "max_pool", "adaptive_avg_pool", "mean")


def find_sites(context: MigrationContext) -> MigrationSites:
    result = find_scaling_sites(context, passes_shifts, norms=False, explain_refusal=_explain_refusal)
    for site in list(result.sites):
        reason = _explain_refused_site(site)
        if reason:
            result.sites.remove(site)
            result.refuse(site.name, reason)
    _measure_minima(context, result)
    return result


def _explain_refused_site(site: ScalingSite) -> str:
    kinds = [op.kind for op in site.trace.passed if op.kind not in UNCHANGED | MOVES]
    if kinds[:1] != ["relu"]:
        return "no ReLU follows it"
    layers = [*(reader for reader, _ in site.readers), site.source]
    reasons = [layer.explain_no_bias() for layer in layers if isinstance(layer, RewritableLayer)]
    return next(filter(None, reasons), "")


def _explain_refusal(op: RecordedOperation) -> str:
    """Why a reader cannot be used; "" if it can."""
    if op.kind == "conv_transpose":
        return f"{op.name} is a transposed convolution: positions at its borders sum fewer values"
    module = op.module.operation if op.module is not None and hasattr(op.module, "operation") else op.module
    padding = module.arguments.get("padding", 0) if isinstance(module, Operation) else getattr(module, "padding", 0)
    is_padded = padding not in (0, "valid") and any(size not in (0, "valid") for size in _as_sequence(padding))
    return f"{op.name} pads with zeros" if is_padded else ""


def _as_sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _measure_minima(context: MigrationContext, result: MigrationSites) -> None:
    """Measure the smallest value of each channel; refuse sites where none is above zero."""
    extremes = {id(site): ChannelExtremes(channel_axis(site.source.op)) for site in result.sites}
    context.observe("looking at biases", {site.source.module: extremes[id(site)].observe for site in result.sites})
    for site in list(result.sites):
        minima = extremes[id(site)].low.nan_to_num(nan=0.0).clamp(min=0)
        site.measured = torch.where(site.free, minima, 0.0)
        if not bool((site.measured > 0).any()):
            result.sites.remove(site)
            result.refuse(site.name, "no channel is always above zero")
            continue
        for layer in (site.source, *(reader for reader, _ in site.readers)):
            layer.give_bias()


def absorb_biases(context: MigrationContext, sites: Sequence[ScalingSite]) -> list[str]:
    for site in sites:
        c = site.measured
        assert isinstance(site.source, RewritableLayer)  # noqa: S101  # norms were not requested
        site.source.shift_outputs(-c)
        for reader, columns in site.readers:
            c_of_inputs = torch.where(columns == FOREIGN, 0.0, c[columns.clamp(min=0)])
            matrix = reader.folded_matrix().cpu()
            reader.shift_outputs((matrix.sum(3) * c_of_inputs.view(matrix.shape[0], 1, -1)).sum(2).reshape(-1))
    return [f"{int((site.measured > 0).sum())} of {site.trace.channels} channels" for site in sites]


ABSORB = Migration("absorb", find_sites, absorb_biases)
