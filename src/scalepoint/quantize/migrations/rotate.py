"""Rotations (QuaRot, Ashkboos et al. 2024) that are merged into the weights: outliers are spread over all channels.

    R1, the residual stream of a pre-norm transformer:   x -> x R,   writers W -> R^T W, b -> R^T b,   readers W -> W R
        norm(x R) = norm(x) R without its weight g and bias h: first  W -> W diag(g), b -> b + W h,  g = 1, h = 0
        RMS norm: any orthogonal R; layer norm: one with R 1 = 1, which leaves the mean and with it the norm as it is
    R2, in each head between v and o:   rows of v -> R2^T W,   columns of o -> W R2

All in float64. A stream that passes what does not commute with R is refused; a tied embedding is untied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.numerics.rotation import make_hadamard, make_rotation
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
from scalepoint.quantize.migrations.residual_stream import ResidualStream, find_streams


@dataclass
class AttentionHeads:
    """v and o of an attention: `blocks` are the rows of v, one line a head."""

    source: RewritableLayer
    readers: list[RewritableLayer]
    blocks: Tensor

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {', '.join(reader.name for reader in self.readers)}"

    def tensors(self) -> list[Tensor]:
        return [*self.source.tensors(), *(each for reader in self.readers for each in reader.tensors())]

    def rotate(self) -> str:
        size = self.blocks.shape[1]
        r = make_rotation(size).to(self.source.weight.device)
        for tensor in (self.source.matrix()[0, :, :, 0], self.source.bias):
            if tensor is not None:
                rows = tensor[self.blocks].double()
                tensor[self.blocks] = torch.einsum("he...,ef->hf...", rows, r).to(tensor.dtype)
        for reader in self.readers:
            matrix = reader.matrix()[0, :, :, 0]
            turned = torch.unflatten(matrix.double(), 1, (-1, size)) @ r
            matrix.copy_(turned.flatten(1))
        return f"{len(self.blocks)} heads of {size} ({describe_rotation(size)})"


def describe_rotation(size: int) -> str:
    return "random orthogonal" if make_hadamard(size) is None else "Hadamard"


def find_sites(scene: MigrationContext) -> MigrationSites:
    found = find_streams(scene)
    for op in scene.flow.ops:
        if op.kind == "linear" and len(op.inputs) == 1:
            _find_heads(scene, op, found)
    return found


def _find_heads(scene: MigrationContext, op: RecordedOperation, found: MigrationSites) -> None:
    flow = scene.flow
    trace = trace_channels(flow, op, -1, lambda each: each.kind in UNCHANGED | MOVES or each.kind in SUMS)
    sums = [each for each in trace.passed if each.kind in SUMS]
    if not sums:
        return
    source, readers = RewritableLayer(op), [RewritableLayer(reader) for reader, _ in trace.readers]
    blocks = _find_head_channels(trace, sums)
    why = next((why for layer in (source, *readers) if (why := layer.why_fixed(flow))), "")
    if any(reader.kind != "linear" for reader in readers):
        why = why or "what reads the attention is no linear layer"
    if blocks is None or not readers:
        why = why or ("several attentions read it" if len(sums) > 1 else trace.why)
    elif not all(_has_heads(columns, blocks) for _, columns in trace.readers):
        why = why or "the heads do not lie side by side in what reads them"
    if why or blocks is None:
        found.refuse(f"{op.name} -> {', '.join(reader.name for reader in readers) or '?'}", why)
    else:
        found.sites.append(AttentionHeads(source, readers, blocks))


def _find_head_channels(trace: ChannelTrace, sums: Sequence[RecordedOperation]) -> Tensor | None:
    """The channels of each head, where one attention alone reads them and all that it reads is free."""
    if len(sums) != 1:
        return None
    ids = trace.ids[get_value_input(sums[0])]
    blocks: Tensor = torch.unique(ids[..., 0, :].reshape(-1, ids.shape[-1]), dim=0)
    is_whole = blocks.numel() == torch.unique(blocks).numel() and int(blocks.min()) >= 0
    return blocks if is_whole and bool(trace.free[blocks].all()) else None


def _has_heads(columns: Tensor, blocks: Tensor) -> bool:
    size = blocks.shape[1]
    if len(columns) % size:
        return False
    lines = {tuple(line) for line in blocks.tolist()}
    return all(tuple(line) in lines for line in columns.view(-1, size).tolist())


def rotate(scene: MigrationContext, sites: Sequence[ResidualStream | AttentionHeads]) -> list[str]:
    return [site.rotate() for site in sites]


ROTATE = Migration("rotate", find_sites, rotate)
