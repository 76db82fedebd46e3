"""Rotations that are merged into the weights (QuaRot, Ashkboos et al. 2024): they spread outliers over all channels.

    R1, the residual stream of a pre-norm transformer:   x -> x R,   writers W -> R^T W, b -> R^T b,   readers W -> W R
        norm(x R) = norm(x) R without its weight g and bias h: first  W -> W diag(g), b -> b + W h,  g = 1, h = 0
        RMS norm: any orthogonal R; layer norm: one with R 1 = 1, which keeps the mean and so commutes with the norm
    R2, in each head between v and o:   rows of v -> R2^T W,   columns of o -> W R2

All in float64. A stream through an operation that does not commute with R is refused. A tied embedding is untied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.numerics.rotation import make_rotation
from scalepoint.quantize.migrations.channel_trace import (
    MOVES,
    SUMS,
    UNCHANGED,
    ChannelTrace,
    get_value_input,
    trace_channels,
)
from scalepoint.quantize.migrations.layers import RewritableLayer
from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedOperation
from scalepoint.quantize.migrations.residual_stream import ResidualStream, describe_rotation, find_streams


@dataclass
class AttentionHeads:
    """The layers v and o of an attention.

    Attributes:
        source: The layer that computes v.
        readers: The layers that read the attention.
        channels: Channels of v, one row per head.
    """

    source: RewritableLayer
    readers: list[RewritableLayer]
    channels: Tensor

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {', '.join(reader.name for reader in self.readers)}"

    def tensors(self) -> list[Tensor]:
        return [*self.source.tensors(), *(tensor for reader in self.readers for tensor in reader.tensors())]

    def rotate(self) -> str:
        """Apply R2 to every head. Returns a note."""
        size = self.channels.shape[1]
        rotation = make_rotation(size).to(self.source.weight.device)
        for tensor in (self.source.matrix()[0, :, :, 0], self.source.bias):
            if tensor is not None:
                rows = tensor[self.channels].double()
                tensor[self.channels] = torch.einsum("he...,ef->hf...", rows, rotation).to(tensor.dtype)
        for reader in self.readers:
            matrix = reader.matrix()[0, :, :, 0]
            rotated = torch.unflatten(matrix.double(), 1, (-1, size)) @ rotation
            matrix.copy_(rotated.flatten(1))
        return f"{len(self.channels)} heads of {size} ({describe_rotation(size)})"


def find_sites(context: MigrationContext) -> MigrationSites:
    result = find_streams(context)
    for op in context.graph.operations:
        if op.kind == "linear" and len(op.inputs) == 1:
            _find_heads(context, op, result)
    return result


def _find_heads(context: MigrationContext, op: RecordedOperation, result: MigrationSites) -> None:
    """Add the heads whose v this layer computes, or the reason why they cannot be rotated."""
    graph = context.graph
    trace = trace_channels(graph, op, -1, lambda passed: passed.kind in UNCHANGED | MOVES or passed.kind in SUMS)
    sums = [passed for passed in trace.passed if passed.kind in SUMS]
    if not sums:
        return
    source, readers = RewritableLayer(op), [RewritableLayer(reader) for reader, _ in trace.readers]
    channels = _find_head_channels(trace, sums)
    reason = next(filter(None, (layer.explain_fixed(graph) for layer in (source, *readers))), "")
    if not reason:
        reason = _explain_refused_heads(trace, sums, channels)
    if reason or channels is None:
        result.refuse(f"{op.name} -> {', '.join(reader.name for reader in readers) or '?'}", reason)
    else:
        result.sites.append(AttentionHeads(source, readers, channels))


def _explain_refused_heads(trace: ChannelTrace, sums: Sequence[RecordedOperation], channels: Tensor | None) -> str:
    """Return why the heads cannot be rotated; "" if they can."""
    if any(reader.kind != "linear" for reader, _ in trace.readers):
        return "a layer that reads the attention is not linear"
    if len(sums) > 1:
        return "several attentions read it"
    if channels is None or not trace.readers:
        return trace.reason
    if not all(_has_whole_heads(columns, channels) for _, columns in trace.readers):
        return "the heads are not next to each other in the input of a layer that reads them"
    return ""


def _find_head_channels(trace: ChannelTrace, sums: Sequence[RecordedOperation]) -> Tensor | None:
    """Return the channels of each head; None if several attentions read them, or not all of them are free."""
    if len(sums) != 1:
        return None
    numbers = trace.numbers[get_value_input(sums[0])]
    channels: Tensor = torch.unique(numbers[..., 0, :].reshape(-1, numbers.shape[-1]), dim=0)
    is_disjoint = channels.numel() == torch.unique(channels).numel() and int(channels.min()) >= 0
    return channels if is_disjoint and bool(trace.free[channels].all()) else None


def _has_whole_heads(columns: Tensor, channels: Tensor) -> bool:
    """Whether the inputs of a reader are whole heads, one after the other, with their channels in order."""
    size = channels.shape[1]
    if len(columns) % size:
        return False
    heads = {tuple(head) for head in channels.tolist()}
    return all(tuple(head) in heads for head in columns.view(-1, size).tolist())


def rotate(context: MigrationContext, sites: Sequence[ResidualStream | AttentionHeads]) -> list[str]:
    return [site.rotate() for site in sites]


ROTATE = Migration("rotate", find_sites, rotate)
