"""Collects the moments of a layer from both streams, when the walk is at its node.

    target = W x + d         x: a row of the float stream ("exact"), d: see residual_adds.py
    moments of (x~, target)  x~: the row of the quantized stream ("noisy") at the same position

Layers that read one value (q, k, v) share one pass over it. A weight that several nodes use has one sum over all of
them, and is solved at the last one. Rows are either fitted (the layer is solved on them) or held out (solutions are
compared on them).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.errors import NonFiniteError
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec.palette import is_palette
from scalepoint.tuning.grouped_layer import GroupedLayer
from scalepoint.tuning.moments import Moments, MomentSums, ResidualSums
from scalepoint.tuning.residual_adds import AddedOperand, depends_on_add, read_added_operand
from scalepoint.tuning.rows import Geometry, get_geometry, hash_to_uniform, limit_row_count, sample_rows
from scalepoint.tuning.walk import LayerUse, StreamWalk

MIN_SAMPLES_TO_SPLIT = 10  # with fewer samples, single rows are held out instead of whole samples
ROWS_PER_CHUNK = 4096  # rows that are gathered at once
SumsT = TypeVar("SumsT", MomentSums, ResidualSums)


@dataclass(frozen=True)
class RowChunk:
    """Some rows of one layer and batch.

    Attributes:
        is_holdout: Whether they are held out.
        noisy: Rows of the quantized stream.
        targets: The outputs to approximate; rows of the float stream if the caller passed no weight.
        row_weights: The weight of each row; 1 if None.
    """

    is_holdout: bool
    noisy: Tensor
    targets: Tensor
    row_weights: Tensor | None


@dataclass(frozen=True)
class _SplitSums(Generic[SumsT]):
    """Sums over the fitted rows, and over the held-out rows."""

    fit: SumsT
    holdout: SumsT

    def add(self, chunk: RowChunk, values: Tensor) -> None:
        sums = self.holdout if chunk.is_holdout else self.fit
        sums.add(values, chunk.targets, chunk.row_weights)

    def merge_ranks(self) -> tuple[SumsT, SumsT]:
        """Return both sums over all ranks. If one has no rows, the other one is used for both."""
        fit, holdout = self.fit.merge_ranks(), self.holdout.merge_ranks()
        return (fit if fit.count else holdout), (holdout if holdout.count else fit)


@dataclass(frozen=True)
class _RowPlan:
    """Which rows of a layer are collected.

    Attributes:
        counts: Rows of each batch of this rank.
        offsets: Number of the first row of each of these batches, counted over all ranks.
        share: Share of the rows that are used.
        is_paired: Whether the rows of the two streams correspond. If not, the targets are W x~.
    """

    counts: list[int]
    offsets: list[int]
    share: float
    is_paired: bool


@dataclass(frozen=True)
class _LayerBatch:
    """What the rows of a layer are gathered from, in one batch.

    Attributes:
        exact, noisy: The input of the layer in both streams.
        operand: The other operand of the add that the layer feeds.
        float_outputs: Output rows of the float layer without its bias; None if they must be computed.
    """

    exact: Tensor
    noisy: Tensor
    operand: AddedOperand
    float_outputs: Tensor | None


@dataclass
class RowCollector:
    """Collects rows of the layers of one walk.

    Attributes:
        walk: The two streams.
        max_rows: Rows per layer.
        holdout: Share of the samples that are held out.
        names: Name of every node, for messages.
        uses_quantized_inputs: Take W x~ as target instead of W x, to measure the error of the codes alone.
        uses: All quantized layers in graph order.
        nan_hint: End of the message about non-finite inputs.
    """

    walk: StreamWalk
    max_rows: int
    holdout: float
    names: dict[str, str]
    uses_quantized_inputs: bool = False
    uses: list[LayerUse] = field(default_factory=list)
    nan_hint: str = "Correct the data, or leave such batches out: on_nan='skip'"
    # By id of the weight quantizer, for weights that later nodes use too.
    _unfinished_moments: dict[int, _SplitSums[MomentSums]] = field(default_factory=dict)
    _unfinished_residuals: dict[int, _SplitSums[ResidualSums]] = field(default_factory=dict)
    # Moments (fitted, held out) of later layers that read the same value, by id of the layer.
    _shared_moments: dict[int, tuple[Moments | None, Moments | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        uses = (self.walk.get_layer(node) for node in self.walk.graph.nodes)
        self.uses = [use for use in uses if use is not None]

    def uses_of(self, layer: QuantizedLayer) -> list[fx.Node]:
        """Return the nodes that multiply by the layer's weight, in graph order."""
        return [use.node for use in self.uses if use.layer.weight_quant is layer.weight_quant]

    def is_last_use(self, use: LayerUse) -> bool:
        """Whether no later node multiplies by the layer's weight."""
        return use.node is self.uses_of(use.layer)[-1]

    def is_needed_later(self, use: LayerUse, nodes: Collection[fx.Node]) -> bool:
        """Whether layers outside of `nodes` need the rows of this use."""
        geometry = get_geometry(use.layer)
        readers: list[fx.Node] = []
        if geometry is not None:
            readers = [reader.node for reader, _ in self._find_readers(use, GroupedLayer(use.layer, geometry))]
        return any(node not in nodes for node in (*self.uses_of(use.layer), *readers))

    def is_held_out(self, numbers: Tensor) -> Tensor:
        """Return which of the samples (or rows) with these numbers are held out."""
        return hash_to_uniform(numbers, salt=1) < self.holdout

    def check_finite(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Raise NonFiniteError if an input of this layer contains NaN or infinity."""
        # A sum is much faster than isfinite on every value. If the sum is not finite, it may only have overflowed.
        if not all(bool(rows.sum().isfinite()) or bool(rows.isfinite().all()) for rows in inputs):
            raise NonFiniteError(f"{name}: its input contains NaN or infinity. {self.nan_hint}")

    # -- sums over rows -----------------------------------------------------------------------------------------------

    def collect_residuals(self, use: LayerUse, grouped: GroupedLayer) -> tuple[ResidualSums, ResidualSums]:
        """Return sums of target minus output, of fitted and held-out rows. They need no products, unlike moments."""
        key, float_weight = id(use.layer.weight_quant), grouped.weight()
        sums = self._unfinished_residuals.pop(key, None) or _SplitSums(ResidualSums(), ResidualSums())
        weight = float_weight.to(torch.float32)
        values = grouped.current_solution(float_weight).values.to(torch.float32)  # what the present codes stand for
        with distributed.phase("residuals"):
            for chunk in self._iterate_rows(use, grouped, weight):
                sums.add(chunk, torch.einsum("rgn,gon->rgo", chunk.noisy, values))
        if not self.is_last_use(use):
            self._unfinished_residuals[key] = sums
        return sums.merge_ranks()

    def collect_moments(self, use: LayerUse, grouped: GroupedLayer) -> tuple[Moments | None, Moments | None]:
        """Return the moments of the fitted and of the held-out rows, over all uses of the weight up to this one."""
        shared = self._shared_moments.pop(id(use.layer), None)
        if shared is not None:  # collected with an earlier layer that reads the same value
            return shared
        # Layers with one input are collected together: their weights are stacked along the outputs.
        readers = self._find_readers(use, grouped)
        weight = torch.cat([reader.weight() for _, reader in readers], 1).to(torch.float32)
        fit, holdout = self._compute_moments(use, grouped, weight)
        first_output = 0
        for reader, reader_grouped in readers:
            outputs = slice(first_output, first_output + reader_grouped.size[1])
            first_output = outputs.stop
            self._shared_moments[id(reader.layer)] = (
                fit and fit.select_outputs(outputs),
                holdout and holdout.select_outputs(outputs),
            )
        return self._shared_moments.pop(id(use.layer))

    def _compute_moments(
        self, use: LayerUse, grouped: GroupedLayer, weight: Tensor
    ) -> tuple[Moments | None, Moments | None]:
        """Pass over the rows of a layer. `weight` computes the targets; it may be stacked of several layers."""
        key = id(use.layer.weight_quant)
        # With more outputs than inputs, it is cheaper to add up the inputs and to multiply by the weight at the end.
        # That needs targets that are W x alone, of one value.
        has_more_outputs = weight.shape[1] > weight.shape[2]
        adds_inputs = has_more_outputs and self._can_share_rows(use)
        sums_weight = weight if adds_inputs else None
        sums = self._unfinished_moments.pop(key, None) or _SplitSums(MomentSums(sums_weight), MomentSums(sums_weight))
        with distributed.phase("moments"):
            for chunk in self._iterate_rows(use, grouped, None if adds_inputs else weight):
                sums.add(chunk, chunk.noisy)
        is_last = self.is_last_use(use)
        if not is_last:  # the next use adds its rows to these sums
            self._unfinished_moments[key] = sums
        fit_sums, holdout_sums = sums.merge_ranks()
        fit = fit_sums.to_moments(is_done=is_last)
        return fit, fit if holdout_sums is fit_sums else holdout_sums.to_moments(is_done=is_last)

    def has_later_readers(self, moments: Moments) -> bool:
        """Whether later layers share these moments."""
        return any(fit is not None and fit.cache is moments.cache for fit, _ in self._shared_moments.values())

    def _find_readers(self, use: LayerUse, grouped: GroupedLayer) -> list[tuple[LayerUse, GroupedLayer]]:
        """Return the use, and later ones that read the same value in the same way."""
        readers = [(use, grouped)]
        if not self._can_share_rows(use):
            return readers
        source = self.walk.find_source(use.node, use.layer)
        # Only later layers: the rows of earlier ones were collected when the walk was there.
        for later in self.uses[self.uses.index(use) + 1 :]:
            geometry = get_geometry(later.layer)
            reads_the_same = geometry == grouped.geometry and self.walk.find_source(later.node, later.layer) is source
            if geometry is None or not reads_the_same:
                continue
            if self._can_share_rows(later) and not explain_refusal(later, geometry):
                readers.append((later, GroupedLayer(later.layer, geometry)))
        return readers

    def _can_share_rows(self, use: LayerUse) -> bool:
        """Whether the rows and targets of a layer depend on nothing but its weight and the value of one node.

        They depend on more if the weight is used several times, if the input is inside of a fused group, or if the
        layer feeds an add.
        """
        if len(self.uses_of(use.layer)) > 1 or self.walk.find_source(use.node, use.layer) is None:
            return False
        return not depends_on_add(self.walk, use)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _iterate_rows(self, use: LayerUse, grouped: GroupedLayer, weight: Tensor | None) -> Iterator[RowChunk]:
        """Sample the rows of a layer in both streams.

        Args:
            use: The layer and its node.
            grouped: Its shape in groups.
            weight: Computes the targets; may be stacked of several layers. None: targets are rows of the float stream.
        """
        plan = self._plan_rows(use, grouped)
        # The float stream has the outputs already, unless `weight` is stacked of several layers.
        reads_outputs = plan.is_paired and weight is not None and weight.shape[1] == grouped.size[1]
        for index, (count, offset) in enumerate(zip(plan.counts, plan.offsets, strict=True)):
            batch = self._read_batch(use, grouped, index, plan, reads_outputs=reads_outputs)
            rows = sample_rows(offset, count, plan.share)
            is_held_out = self._is_row_held_out(rows, index, count, offset)
            for is_holdout, chunk_rows in _split_rows(rows, is_held_out):
                exact = grouped.geometry.rows(batch.exact, chunk_rows)
                noisy = grouped.geometry.rows(batch.noisy, chunk_rows)
                self.check_finite(self.names.get(use.node.name, use.path), (exact, noisy))
                if batch.float_outputs is not None:
                    targets = batch.float_outputs[chunk_rows]
                elif weight is not None:
                    targets = torch.einsum("rgn,gon->rgo", exact, weight)
                else:
                    targets = exact
                yield RowChunk(is_holdout, noisy, *batch.operand.adjust_targets(targets, chunk_rows))
            del batch  # else its tensors stay in memory while the next batch is read

    def _plan_rows(self, use: LayerUse, grouped: GroupedLayer) -> _RowPlan:
        """Count the rows of all ranks, and choose which share of them is used."""
        walk = self.walk
        shapes = [walk.capture_input(use.node, use.path, index, noisy=True).shape for index in range(walk.batch_count)]
        counts = [grouped.geometry.count_rows(shape) for shape in shapes]
        has_pairs = not self.uses_quantized_inputs and self._has_same_shapes(use, shapes)
        parts = distributed.gather_values("rows", [counts, has_pairs])
        offsets, total = distributed.batch_offsets([counts_of_rank for counts_of_rank, _ in parts])
        # All ranks must do the same: if rows differ between the streams on one rank, no rank compares them.
        is_paired = all(has_pairs_on_rank for _, has_pairs_on_rank in parts)
        groups, _, size = grouped.size
        share = min(1.0, limit_row_count(self.max_rows, groups, size) / max(total, 1))
        return _RowPlan(counts, offsets, share, is_paired)

    def _has_same_shapes(self, use: LayerUse, shapes: Sequence[torch.Size]) -> bool:
        """Whether the rows of the two streams correspond.

        They do not where the data selects rows: a quantized router may send other tokens to an expert than the float
        router. The targets are then W x~: the float weight for the rows that the expert gets.
        """
        inputs = (self.walk.capture_input(use.node, use.path, index, noisy=False) for index in range(len(shapes)))
        return all(exact.shape == shape for exact, shape in zip(inputs, shapes, strict=True))

    def _read_batch(
        self, use: LayerUse, grouped: GroupedLayer, index: int, plan: _RowPlan, *, reads_outputs: bool
    ) -> _LayerBatch:
        walk, count = self.walk, plan.counts[index]
        noisy = walk.capture_input(use.node, use.path, index, noisy=True)
        exact = walk.capture_input(use.node, use.path, index, noisy=False) if plan.is_paired else noisy
        operand = AddedOperand()
        if plan.is_paired or self.uses_quantized_inputs:
            has_drift = not self.uses_quantized_inputs
            operand = read_added_operand(walk, use, grouped, index, count, has_drift=has_drift)
        float_outputs = self._float_outputs(use, grouped, index, count) if reads_outputs else None
        return _LayerBatch(exact, noisy, operand, float_outputs)

    def _float_outputs(self, use: LayerUse, grouped: GroupedLayer, index: int, count: int) -> Tensor | None:
        """Return output rows of the float layer without its bias; None if the node's value is something else."""
        layer, is_alone = use.layer, len(self.walk.get_parts(use.node)) == 1
        if not is_alone or layer.norm is not None:
            return None
        rows = grouped.output_rows(self.walk.float_value(use.node, index), count)
        return rows if rows is None or layer.bias is None else rows - layer.bias.detach().reshape(rows.shape[1:])

    def _is_row_held_out(self, rows: Tensor, index: int, count: int, offset: int) -> Tensor:
        """Return which rows of a batch are held out: all rows of a held-out sample, if there are enough samples.

        Rows and samples are counted over all ranks, so the result depends neither on the batch size nor on the number
        of ranks.
        """
        samples = self.walk.samples_per_batch[index]
        if self.walk.sample_count < MIN_SAMPLES_TO_SPLIT or not samples or count % samples:
            return self.is_held_out(offset + rows)
        rows_per_sample = count // samples
        return self.is_held_out(self.walk.first_samples[index] + rows // rows_per_sample)


def _split_rows(rows: Tensor, is_held_out: Tensor) -> Iterator[tuple[bool, Tensor]]:
    """Yield (False, some fitted rows) until there are no more, then (True, some held-out rows)."""
    for is_holdout in (False, True):
        selected = rows[is_held_out == is_holdout]
        for start in range(0, len(selected), ROWS_PER_CHUNK):
            yield is_holdout, selected[start : start + ROWS_PER_CHUNK]


def explain_refusal(use: LayerUse, geometry: Geometry | None) -> str:
    """Return the reason why a layer cannot be tuned; "" if it can."""
    quant = use.layer.weight_quant
    if quant.quantizer.is_disabled():
        return quant.quantizer.reason
    if quant.chosen is not None:
        return "its codes were chosen before: quantize the model again to choose new ones"
    if quant.spec.qformulation != "zp":
        return "its codes are relative to a minimum, not to a zero point"
    if geometry is None and quant.sparsity is not None:
        return "its palette is of pruned weights"
    if geometry is None and is_palette(quant.spec):
        return "its tables or vectors are not those of whole groups of output channels"
    if geometry is None:
        return "it pads with values other than zeros"
    if any(layer.kind == EMBEDDING for layer in use.layer.sharing_layers):
        return "its weight is an embedding table too"
    return ""
