"""Places where one scale or shift per channel can move from a layer or norm into the layers that read it.

f(x / s) = f(x) / s      W x = (W diag(s)) (x / s)         f: the operations in between
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.quantize.migrations.channel_trace import CLAMPS, ChannelTrace, channel_axis, trace_channels
from scalepoint.quantize.migrations.layers import RewritableLayer, RewritableNorm
from scalepoint.quantize.migrations.migration import MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import FOREIGN, RecordedOperation
from scalepoint.quantize.operations import WEIGHT_PRODUCTS
from scalepoint.quantize.smooth import MULTIPLIES_BY_NUMBER, NORM_KINDS, multiplies_by_number


@dataclass
class ScalingSite:
    """A source and the layers that read it.

    Attributes:
        source: The layer or norm whose outputs are divided.
        readers: The layers whose inputs are multiplied, with the source channel of each of their inputs.
        free: Mask of the channels that may be scaled.
        trace: How the channels get to the readers.
        measured: What a migration measured on data for this site; each migration stores a type of its own here.
    """

    source: RewritableLayer | RewritableNorm
    readers: list[tuple[RewritableLayer, Tensor]]
    free: Tensor
    trace: ChannelTrace
    measured: Any = None

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {', '.join(reader.name for reader, _ in self.readers)}"

    def tensors(self) -> list[Tensor]:
        return [*self.source.tensors(), *(tensor for reader, _ in self.readers for tensor in reader.tensors())]

    def scale(self, s: Tensor) -> None:
        """Divide the outputs of the source by s, and multiply the inputs of the readers."""
        s = torch.where(self.free, s.double(), 1.0)
        self.source.scale_outputs(1 / s)
        for reader, columns in self.readers:
            reader.scale_inputs(gather_scales(s, columns))

    def reduce_to_channels(self, values: Sequence[Tensor], reduction: str) -> Tensor:
        """Compute one value per channel of the source from one value per input of each reader.

        Args:
            values: The values of each reader.
            reduction: "amax" or "mean", over all inputs that read a channel.
        """
        columns = torch.cat([reader_columns for _, reader_columns in self.readers])
        is_from_source = columns != FOREIGN  # an input that comes from elsewhere has no channel of the source
        all_values = torch.cat([reader_values.double() for reader_values in values])
        start = torch.zeros(self.trace.channels, dtype=torch.float64)
        return start.scatter_reduce(
            0, columns[is_from_source], all_values[is_from_source], reduction, include_self=False
        )

    @property
    def clamps(self) -> list[RecordedOperation]:
        """The clamping activations between the source and the readers."""
        return [op for op in self.trace.passed if op.kind in CLAMPS]


def gather_scales(scales: Tensor, columns: Tensor) -> Tensor:
    """Return the scale of each input of a reader; 1 for inputs that do not come from the source."""
    return torch.where(columns == FOREIGN, 1.0, scales[columns.clamp(min=0)])


def find_scaling_sites(
    context: MigrationContext,
    passes: Callable[[RecordedOperation], bool],
    *,
    norms: bool,
    explain_refusal: Callable[[RecordedOperation], str] = lambda op: "",
) -> MigrationSites:
    """Find all scaling sites of a model.

    Args:
        context: The model.
        passes: Whether the scale (or shift) may pass an operation.
        norms: Whether norms may be sources too.
        explain_refusal: Why a reader cannot be used; "" if it can.
    """
    result, graph = MigrationSites(), context.graph
    for op in graph.operations:
        is_norm = norms and op.kind in NORM_KINDS
        # Sources are norms and layers with a weight of their own; a product of two tensors has two inputs.
        if not is_norm and (op.kind not in WEIGHT_PRODUCTS or len(op.inputs) != 1):
            continue
        source = RewritableNorm(op) if is_norm else RewritableLayer(op)
        trace = trace_channels(graph, op, channel_axis(op), passes)
        for reader, columns in list(trace.readers):
            reason = explain_refusal(reader) or RewritableLayer(reader).explain_fixed(graph)
            if reason:
                trace.pin(columns, reason)  # the channels that it reads keep scale 1
        trace.readers = [(reader, columns) for reader, columns in trace.readers if not trace.is_pinned(columns)]
        free = trace.free
        has_no_weight = is_norm and multiplies_by_number(op.module)
        reason = MULTIPLIES_BY_NUMBER if has_no_weight else source.explain_fixed(graph)
        reason = reason or ("" if bool(free.any()) else trace.reason)
        if reason:
            result.refuse(op.name, reason)
        else:
            readers = [(RewritableLayer(reader), columns) for reader, columns in trace.readers]
            result.sites.append(ScalingSite(source, readers, free, trace))
    return result
