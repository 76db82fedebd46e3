"""Places where a scale a channel can go from one layer into the next: source -> what scales along -> readers.

f(x / s) = f(x) / s      W x = (W diag(s)) (x / s)

"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.quantize.migrations.channel_trace import CLAMPS, ChannelTrace, channel_axis, trace_channels
from scalepoint.quantize.migrations.layers import NORMS, RewritableLayer, RewritableNorm
from scalepoint.quantize.migrations.migration import MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import FOREIGN, RecordedOperation
from scalepoint.quantize.operations import WEIGHT_PRODUCTS


@dataclass
class ScalingSite:
    """A source, the layers that read it with the channel that each of their inputs is, and the channels that may
    be scaled."""

    source: RewritableLayer | RewritableNorm
    readers: list[tuple[RewritableLayer, Tensor]]
    free: Tensor
    trace: ChannelTrace
    measured: Any = None  # what a migration saw of it in the data

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {', '.join(reader.name for reader, _ in self.readers)}"

    def tensors(self) -> list[Tensor]:
        return [*self.source.tensors(), *(each for reader, _ in self.readers for each in reader.tensors())]

    def scale(self, s: Tensor) -> None:
        """Divide what the source gives by s, and multiply what reads it."""
        s = torch.where(self.free, s.double(), 1.0)
        self.source.scale_outputs(1 / s)
        for reader, columns in self.readers:
            reader.scale_inputs(gather_scales(s, columns))

    def gathered(self, values: Sequence[Tensor], how: str) -> Tensor:
        """One value a channel of the source, of values of the readers' inputs: the largest, or the mean."""
        columns = torch.cat([each for _, each in self.readers])
        own, all_values = columns != FOREIGN, torch.cat([each.double() for each in values])
        start = torch.zeros(self.trace.channels, dtype=torch.float64)
        return start.scatter_reduce(0, columns[own], all_values[own], how, include_self=False)

    @property
    def clamps(self) -> list[RecordedOperation]:
        return [op for op in self.trace.passed if op.kind in CLAMPS]


def gather_scales(values: Tensor, columns: Tensor) -> Tensor:
    """The value of each input of a reader; 1 for what comes from elsewhere."""
    return torch.where(columns == FOREIGN, 1.0, values[columns.clamp(min=0)])


def find_scaling_sites(
    scene: MigrationContext,
    through: Callable[[RecordedOperation], bool],
    *,
    norms: bool,
    why_not: Callable[[RecordedOperation], str] = lambda op: "",
) -> MigrationSites:
    """All seams of a model: from every layer (and norm) to the layers that read it."""
    found, flow = MigrationSites(), scene.flow
    for op in flow.ops:
        is_norm = norms and op.kind in NORMS
        if not is_norm and (op.kind not in WEIGHT_PRODUCTS or len(op.inputs) != 1):
            continue
        source = RewritableNorm(op) if is_norm else RewritableLayer(op)
        trace = trace_channels(flow, op, channel_axis(op), through)
        for reader, columns in list(trace.readers):
            why = why_not(reader) or RewritableLayer(reader).why_fixed(flow)
            if why:
                trace.pin(columns, why)
        trace.readers = [(r, c) for r, c in trace.readers if not trace.is_pinned(c)]
        free = trace.free
        why = source.why_fixed(flow) or ("" if bool(free.any()) else trace.why)
        if why:
            found.refuse(op.name, why)
        else:
            readers = [(RewritableLayer(reader), columns) for reader, columns in trace.readers]
            found.sites.append(ScalingSite(source, readers, free, trace))
    return found
