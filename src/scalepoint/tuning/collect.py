"""Collects the moments of a layer from both streams, when the walk is at its node.

    target = W x + d,   d = r - r~        r, r~: the other operand of the residual add that the layer feeds

d lets the layer correct what the quantized stream already lacks; it is zero if r is not computed yet, or the same in
both streams. Layers that read one value (q, k, v) share one pass over it. A weight that several nodes use has one sum
over all of them, and is solved at the last one. Rows are either fitted (the layer is solved on them) or held out
(solutions are compared on them). ~ or "noisy" is the quantized stream, "exact" the float stream.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.errors import NonFiniteError
from scalepoint.graph import Operation
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.tuning.moments import Moments, MomentSums, ResidualSums
from scalepoint.tuning.problem import GroupedLayer
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.rows import Geometry, get_geometry, hash_to_uniform, limit_row_count, sample_rows
from scalepoint.tuning.walk import StreamWalk

MIN_SAMPLES_TO_SPLIT = 10  # with fewer samples, single rows are held out instead of whole samples
ROWS_PER_CHUNK = 4096  # rows that are gathered at once
SumsT = TypeVar("SumsT", MomentSums, ResidualSums)


@dataclass(frozen=True)
class LayerUse:
    """A quantized layer at one node of the graph; `path` is its path in the model."""

    node: fx.Node
    path: str
    layer: QuantizedLayer


@dataclass(frozen=True)
class AddedOperand:
    """The other operand of the add that a layer feeds, for all rows of a batch.

    Attributes:
        drift: Its float value minus its quantized value; None for zero.
        value: Its float value, if a norm reads the sum.
    """

    drift: Tensor | None
    value: Tensor | None

    def adjust_targets(self, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets of these rows with the drift added, and the weights of the rows."""
        weights = None if self.value is None else row_weights((targets + self.value[rows]).flatten(1)).view(-1)
        return (targets if self.drift is None else targets + self.drift[rows]), weights


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
    # Sums of fitted and of held-out rows, by id of the weight quantizer, for weights that later nodes use too.
    _unfinished_moments: dict[int, tuple[MomentSums, MomentSums]] = field(default_factory=dict)
    _unfinished_residuals: dict[int, tuple[ResidualSums, ResidualSums]] = field(default_factory=dict)
    # Moments of later layers that read the same value, by id of the layer.
    _shared_moments: dict[int, tuple[Moments | None, Moments | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = [(node, self.walk.get_layer(node)) for node in self.walk.graph.nodes]
        self.uses = [LayerUse(node, *layer) for node, layer in layers if layer is not None]

    def uses_of(self, layer: QuantizedLayer) -> list[fx.Node]:
        """Return the nodes that multiply by the layer's weight, in graph order."""
        return [use.node for use in self.uses if use.layer.weight_quant is layer.weight_quant]

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

    def collect_residuals(self, use: LayerUse, grouped: GroupedLayer) -> tuple[ResidualSums, ResidualSums]:
        """Return sums of target minus output, of fitted and held-out rows. They need no products, unlike moments."""
        key, float_weight = id(use.layer.weight_quant), grouped.weight()
        sums = self._unfinished_residuals.pop(key, (ResidualSums(), ResidualSums()))
        weight = float_weight.to(torch.float32)
        values = grouped.current_solution(float_weight).values.to(torch.float32)  # what the present codes stand for
        with distributed.phase("residuals"):
            for chunk in self._iterate_rows(use, grouped, weight):
                outputs = torch.einsum("rgn,gon->rgo", chunk.noisy, values)
                sums[chunk.is_holdout].add(outputs, chunk.targets, chunk.row_weights)
        if use.node is not self.uses_of(use.layer)[-1]:
            self._unfinished_residuals[key] = sums
        return _fit_and_holdout((sums[0].merge_ranks(), sums[1].merge_ranks()))

    def collect_moments(self, use: LayerUse, grouped: GroupedLayer) -> tuple[Moments | None, Moments | None]:
        """Return the moments of the fitted and of the held-out rows, over all uses of the weight up to this one."""
        shared = self._shared_moments.pop(id(use.layer), None)
        if shared is not None:  # collected with an earlier layer that reads the same value
            return shared
        # Layers with one input are collected together: their weights are stacked along the outputs.
        readers = self._find_readers(use, grouped)
        weight = torch.cat([reader.weight() for _, reader in readers], 1).to(torch.float32)
        key = id(use.layer.weight_quant)
        # With more outputs than inputs, it is cheaper to add up the inputs and to multiply by the weight at the end.
        # That needs targets that are W x alone, of one value.
        has_more_outputs = weight.shape[1] > weight.shape[2]
        adds_inputs = has_more_outputs and not self._has_own_input(use) and not self._depends_on_add(use)
        sums_weight = weight if adds_inputs else None
        sums = self._unfinished_moments.pop(key, (MomentSums(sums_weight), MomentSums(sums_weight)))
        with distributed.phase("moments"):
            for chunk in self._iterate_rows(use, grouped, None if adds_inputs else weight):
                sums[chunk.is_holdout].add(chunk.noisy, chunk.targets, chunk.row_weights)
        is_last = use.node is self.uses_of(use.layer)[-1]
        if not is_last:  # the next use adds its rows to these sums
            self._unfinished_moments[key] = sums
        fit_sums, holdout_sums = _fit_and_holdout((sums[0].merge_ranks(), sums[1].merge_ranks()))
        fit = fit_sums.to_moments(is_done=is_last)
        holdout = fit if holdout_sums is fit_sums else holdout_sums.to_moments(is_done=is_last)
        first_output = 0
        for reader, reader_grouped in readers:
            outputs = slice(first_output, first_output + reader_grouped.size[1])
            first_output = outputs.stop
            self._shared_moments[id(reader.layer)] = (
                fit and fit.select_outputs(outputs),
                holdout and holdout.select_outputs(outputs),
            )
        return self._shared_moments.pop(id(use.layer))

    def has_later_readers(self, moments: Moments) -> bool:
        """Whether later layers share these moments."""
        return any(fit is not None and fit.cache is moments.cache for fit, _ in self._shared_moments.values())

    def _find_readers(self, use: LayerUse, grouped: GroupedLayer) -> list[tuple[LayerUse, GroupedLayer]]:
        """Return the use, and later ones that read the same value in the same way."""
        readers = [(use, grouped)]
        if self._has_own_input(use) or self._depends_on_add(use):
            return readers
        source = self.walk.find_source(use.node, use.layer)
        # Only later layers: the rows of earlier ones were collected when the walk was there.
        for later in self.uses[self.uses.index(use) + 1 :]:
            geometry = get_geometry(later.layer)
            reads_the_same = geometry == grouped.geometry and self.walk.find_source(later.node, later.layer) is source
            if geometry is None or not reads_the_same:
                continue
            if self._has_own_input(later) or self._depends_on_add(later) or explain_refusal(later, geometry):
                continue
            readers.append((later, GroupedLayer(later.layer, geometry)))
        return readers

    def _depends_on_add(self, use: LayerUse) -> bool:
        """Whether the targets or the row weights of a layer depend on the other operand of an add."""
        return find_changed_operand(self.walk, use) is not None or find_normed_operand(self.walk, use) is not None

    def _has_own_input(self, use: LayerUse) -> bool:
        """Whether a layer cannot share rows: its weight is used several times, or its input is inside of a group."""
        return len(self.uses_of(use.layer)) > 1 or self.walk.find_source(use.node, use.layer) is None

    def _iterate_rows(self, use: LayerUse, grouped: GroupedLayer, weight: Tensor | None) -> Iterator[RowChunk]:
        """Sample the rows of a layer in both streams.

        Args:
            use: The layer and its node.
            grouped: Its shape in groups.
            weight: Computes the targets; may be stacked of several layers. None: targets are rows of the float stream.
        """
        geometry, walk = grouped.geometry, self.walk
        plan = self._plan_rows(use, grouped)
        _, outputs, _ = grouped.size
        for index, (count, offset) in enumerate(zip(plan.counts, plan.offsets, strict=True)):
            noisy = walk.capture_input(use.node, use.path, index, noisy=True)
            exact = walk.capture_input(use.node, use.path, index, noisy=False) if plan.is_paired else noisy
            rows = sample_rows(offset, count, plan.share)
            is_held_out = self._is_row_held_out(rows, index, count, offset)
            operand = AddedOperand(drift=None, value=None)
            if plan.is_paired or self.uses_quantized_inputs:
                operand = self._added_operand(use, grouped, index, count)
            # The float stream has the outputs already, unless `weight` is stacked of several layers.
            has_outputs = plan.is_paired and weight is not None and weight.shape[1] == outputs
            float_outputs = self._float_outputs(use, grouped, index, count) if has_outputs else None
            for is_holdout in (False, True):
                selected = rows[is_held_out == is_holdout]
                for start in range(0, len(selected), ROWS_PER_CHUNK):
                    chunk = selected[start : start + ROWS_PER_CHUNK]
                    exact_rows, noisy_rows = geometry.rows(exact, chunk), geometry.rows(noisy, chunk)
                    self.check_finite(self.names.get(use.node.name, use.path), (exact_rows, noisy_rows))
                    targets = exact_rows
                    if float_outputs is not None:
                        targets = float_outputs[chunk]
                    elif weight is not None:
                        targets = torch.einsum("rgn,gon->rgo", exact_rows, weight)
                    yield RowChunk(is_holdout, noisy_rows, *operand.adjust_targets(targets, chunk))

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

    def _float_outputs(self, use: LayerUse, grouped: GroupedLayer, index: int, count: int) -> Tensor | None:
        """Return output rows of the float layer without its bias; None if the node's value is something else."""
        layer, is_alone = use.layer, len(self.walk.get_parts(use.node)) == 1
        value = self.walk.float_value(use.node, index) if is_alone and layer.norm is None else None
        if not isinstance(value, Tensor):
            return None
        rows = grouped.geometry.output_rows(value, torch.arange(count), count, grouped.size[1])
        return rows if rows is None or layer.bias is None else rows - layer.bias.detach().reshape(rows.shape[1:])

    def _has_same_shapes(self, use: LayerUse, shapes: Sequence[torch.Size]) -> bool:
        """Whether the rows of the two streams correspond.

        They do not where the data selects rows: a quantized router may send other tokens to an expert than the float
        router. The targets are then W x~: the float weight for the rows that the expert gets.
        """
        inputs = (self.walk.capture_input(use.node, use.path, index, noisy=False) for index in range(len(shapes)))
        return all(exact.shape == shape for exact, shape in zip(inputs, shapes, strict=True))

    def _added_operand(self, use: LayerUse, grouped: GroupedLayer, index: int, count: int) -> AddedOperand:
        """Return the other operand of the add that a layer feeds, in one batch."""
        walk, geometry, outputs = self.walk, grouped.geometry, grouped.size[1]

        def to_rows(value: Any) -> Tensor | None:
            if not isinstance(value, Tensor):
                return None
            return geometry.output_rows(value, torch.arange(count), count, outputs)

        drift = None
        changed_node = None if self.uses_quantized_inputs else find_changed_operand(walk, use)
        if changed_node is not None:
            exact, noisy = (walk.get_value(changed_node, index, noisy=noisy) for noisy in (False, True))
            if isinstance(exact, Tensor) and noisy.shape == exact.shape:
                drift = to_rows(exact - noisy)
        normed_node = find_normed_operand(walk, use)
        value = None if normed_node is None else to_rows(walk.get_value(normed_node, index, noisy=False))
        _, bias = use.layer.fold_norm()
        if value is not None and bias is not None:
            value = value + bias.detach().reshape(value.shape[1:])  # targets have no bias, what the norm reads has
        return AddedOperand(drift, value)

    def check_finite(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Raise NonFiniteError if an input of this layer contains NaN or infinity."""
        # A sum is much faster than isfinite on every value. If the sum is not finite, it may only have overflowed.
        if not all(bool(rows.sum().isfinite()) or bool(rows.isfinite().all()) for rows in inputs):
            raise NonFiniteError(f"{name}: its input contains NaN or infinity. {self.nan_hint}")


def explain_refusal(use: LayerUse, geometry: Geometry | None) -> str:
    """Return the reason why a layer cannot be tuned; "" if it can."""
    quant = use.layer.weight_quant
    if quant.quantizer.is_disabled():
        return quant.quantizer.reason
    if quant.chosen is not None:
        return "its codes were chosen before: quantize the model again to choose new ones"
    if quant.spec.qformulation != "zp":
        return "its codes are relative to a minimum, not to a zero point"
    if geometry is None:
        return "it pads with values other than zeros"
    if any(layer.kind == EMBEDDING for layer in use.layer.sharing_layers):
        return "its weight is an embedding table too"
    return ""


def find_changed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """Return the other operand of the add that a layer feeds if it has a value that differs between the streams."""
    operand, _ = _find_add(walk, use)  # the other operand and the sum
    if operand is None or operand in walk.same_nodes or not walk.has_value(operand):
        return None
    return operand


def find_normed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """Return the other operand of the add that a layer feeds, if it is computed already and a norm reads the sum."""
    operand, sum_node = _find_add(walk, use)
    if operand is None or sum_node is None or not walk.has_value(operand) or not feeds_norm(walk, sum_node):
        return None
    return operand


def _find_add(walk: StreamWalk, use: LayerUse) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the other operand of the add that a layer feeds, and the node of the sum; None without such an add."""
    return _find_add_in_group(walk, use) or _find_add_after(walk, use.node) or (None, None)


def _find_add_in_group(walk: StreamWalk, use: LayerUse) -> tuple[fx.Node, fx.Node] | None:
    """Return an add that is fused with the layer."""
    parts, inputs = walk.get_parts(use.node), use.node.args
    if len(parts) < 2 or parts[0] is not use.layer or not _is_add(parts[1]) or len(inputs) != 2:
        return None
    return (inputs[1], use.node) if isinstance(inputs[1], fx.Node) else None


def _find_add_after(walk: StreamWalk, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return an add that alone reads the node, directly or behind an activation quantizer."""
    if len(walk.get_parts(node)) != 1 or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if walk.get_stub(user) is not None:  # the layer's output is quantized before it is added
        node = user
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
    first_part = next(iter(walk.get_parts(user)), None) or walk.get_module(user)
    operands = [operand for operand in user.args if isinstance(operand, fx.Node)]
    if not _is_add(first_part) or len(operands) != 2 or len(user.all_input_nodes) != 2 or node not in operands:
        return None
    return next(operand for operand in operands if operand is not node), user


def _is_add(part: Any) -> bool:
    # alpha scales the second operand of torch.add, and the targets above assume a plain sum.
    return isinstance(part, Operation) and part.kind == "add" and part.arguments.get("alpha", 1) == 1


def _fit_and_holdout(sums: tuple[SumsT, SumsT]) -> tuple[SumsT, SumsT]:
    """Return the sums of fitted and held-out rows. If one has no rows, the other one is used for both."""
    fit, holdout = sums
    return (fit if fit.count else holdout), (holdout if holdout.count else fit)
