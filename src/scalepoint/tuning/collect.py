"""The moments of a layer, from both streams at its place in the walk.

    wanted = W x + d,   d = r - r~        r, r~ the other operand of the add that the layer feeds, where it is at hand

Layers that read one value (q, k, v) share one pass over it; a weight that is used at several places has one sum over
all of them, and is solved at the last.
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

MIN_SAMPLES_TO_SPLIT = 10  # with fewer, single rows are held out instead of whole samples
ROWS_PER_CHUNK = 4096  # rows that are gathered at once
SumsT = TypeVar("SumsT", MomentSums, ResidualSums)


@dataclass(frozen=True)
class LayerUse:
    """A quantized layer at a node."""

    node: fx.Node
    place: str
    layer: QuantizedLayer


@dataclass(frozen=True)
class AddedOperand:
    """What the other side of an add lacks at every row, and what it is there where a norm reads the sum."""

    drift: Tensor | None
    side: Tensor | None

    def of(self, wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the layer's outputs should be at these rows, and what the rows count."""
        weights = None if self.side is None else row_weights((wanted + self.side[rows]).flatten(1)).view(-1)
        return (wanted if self.drift is None else wanted + self.drift[rows]), weights


@dataclass
class RowCollector:
    """Rows of the layers of one walk."""

    walk: StreamWalk
    rows: int
    holdout: float
    names: dict[str, str]
    against_itself: bool = False  # the outputs should be those of the float weight in the quantized stream
    uses: list[LayerUse] = field(default_factory=list)
    nan_hint: str = "Mend the data, or leave such batches out: on_nan='skip'"
    _open: dict[int, tuple[MomentSums, MomentSums]] = field(default_factory=dict)  # of weights with uses to come
    _shifts: dict[int, tuple[ResidualSums, ResidualSums]] = field(default_factory=dict)
    _shared: dict[int, tuple[Moments | None, Moments | None]] = field(default_factory=dict)  # of layers to come

    def __post_init__(self) -> None:
        found = [(node, self.walk.get_layer(node)) for node in self.walk.graph.nodes]
        self.uses = [LayerUse(node, *layer) for node, layer in found if layer is not None]

    def uses_of(self, layer: QuantizedLayer) -> list[fx.Node]:
        """Where the layer's weight multiplies, in graph order."""
        return [use.node for use in self.uses if use.layer.weight_quant is layer.weight_quant]

    def is_awaited(self, use: LayerUse, nodes: Collection[fx.Node]) -> bool:
        """Whether layers outside of these nodes need what is seen at this use."""
        shape = get_geometry(use.layer)
        readers = (
            [] if shape is None else [other.node for other, _ in self._readers(use, GroupedLayer(use.layer, shape))]
        )
        return any(node not in nodes for node in (*self.uses_of(use.layer), *readers))

    def is_held(self, numbers: Tensor) -> Tensor:
        """Which samples judge."""
        return hash_to_uniform(numbers, salt=1) < self.holdout

    def residuals(self, use: LayerUse, shape: GroupedLayer) -> tuple[ResidualSums, ResidualSums]:
        """What a bias can take up, of the rows that are fitted and of those that judge; no products are made."""
        key, float_weight = id(use.layer.weight_quant), shape.weight()
        sums, weight = self._shifts.pop(key, (ResidualSums(), ResidualSums())), float_weight.to(torch.float32)
        values = shape.start(float_weight).values.to(torch.float32)
        with distributed.phase("residuals"):
            for held, noisy, wanted, weights in self._parts(use, shape, weight):
                sums[held].add(torch.einsum("rgn,gon->rgo", noisy, values), wanted, weights)
        if use.node is not self.uses_of(use.layer)[-1]:
            self._shifts[key] = sums
        return _fit_and_holdout((sums[0].merged(), sums[1].merged()))

    def moments(self, use: LayerUse, shape: GroupedLayer) -> tuple[Moments | None, Moments | None]:
        """Moments of nine tenths of the rows, and of the rest, of all uses up to this one."""
        known = self._shared.pop(id(use.layer), None)
        if known is not None:
            return known
        together = self._readers(use, shape)
        weight = torch.cat([each.weight() for _, each in together], 1).to(torch.float32)
        key = id(use.layer.weight_quant)
        is_plain = weight.shape[1] > weight.shape[2] and not self._is_alone(use) and not self._is_added(use)
        through = weight if is_plain else None
        sums = self._open.pop(key, (MomentSums(through), MomentSums(through)))
        with distributed.phase("moments"):
            for held, noisy, wanted, weights in self._parts(use, shape, None if is_plain else weight):
                sums[held].add(noisy, wanted, weights)
        is_last = use.node is self.uses_of(use.layer)[-1]
        if not is_last:
            self._open[key] = sums
        fit, judge = _fit_and_holdout((sums[0].merged(), sums[1].merged()))
        first = fit.moments(is_done=is_last)
        second = first if judge is fit else judge.moments(is_done=is_last)
        start = 0
        for other, each in together:
            part = slice(start, start + each.size[1])
            start = part.stop
            self._shared[id(other.layer)] = first and first.of(part), second and second.of(part)
        return self._shared.pop(id(use.layer))

    def is_shared(self, moments: Moments) -> bool:
        """Whether layers to come have the same inputs."""
        return any(first is not None and first.made is moments.made for first, _ in self._shared.values())

    def _readers(self, use: LayerUse, shape: GroupedLayer) -> list[tuple[LayerUse, GroupedLayer]]:
        """The use, and those to come that read the same value in the same way."""
        found = [(use, shape)]
        if self._is_alone(use) or self._is_added(use):
            return found
        source = self.walk.find_source(use.node, use.layer)
        for other in self.uses[self.uses.index(use) + 1 :]:
            geometry = get_geometry(other.layer)
            is_like = geometry == shape.geometry and self.walk.find_source(other.node, other.layer) is source
            is_solved = is_like and not self._is_alone(other) and not self._is_added(other)
            if geometry is not None and is_solved and not explain_refusal(other, geometry):
                found.append((other, GroupedLayer(other.layer, geometry)))
        return found

    def _is_added(self, use: LayerUse) -> bool:
        """Whether what its outputs should be, or what its rows count, depends on what it is added to."""
        return find_changed_operand(self.walk, use) is not None or find_normed_operand(self.walk, use) is not None

    def _is_alone(self, use: LayerUse) -> bool:
        return len(self.uses_of(use.layer)) > 1 or self.walk.find_source(use.node, use.layer) is None

    def _parts(
        self, use: LayerUse, shape: GroupedLayer, weight: Tensor | None
    ) -> Iterator[tuple[bool, Tensor, Tensor, Tensor | None]]:
        """Whether rows judge, the rows in the quantized stream, what the outputs should be, and what each row counts.

        `weight` may be of several layers that read the same; without one the rows of the float stream are given.
        """
        geometry, walk = shape.geometry, self.walk
        shapes = [walk.capture_input(use.node, use.place, each, noisy=True).shape for each in range(walk.batch_count)]
        counts = [geometry.count(each) for each in shapes]
        has_pairs = not self.against_itself and self._is_paired(use, shapes)
        parts = distributed.gather_values("rows", [counts, has_pairs])
        befores, total = distributed.batch_offsets([counts_of_rank for counts_of_rank, _ in parts])
        is_paired = all(has_pairs_on_rank for _, has_pairs_on_rank in parts)
        groups, _, size = shape.size
        share = min(1.0, limit_row_count(self.rows, groups, size) / max(total, 1))
        is_by_sample = walk.sample_count >= MIN_SAMPLES_TO_SPLIT
        for index, (count, before, first) in enumerate(zip(counts, befores, walk.first_samples, strict=True)):
            noisy, samples = walk.capture_input(use.node, use.place, index, noisy=True), walk.samples_per_batch[index]
            exact = walk.capture_input(use.node, use.place, index, noisy=False) if is_paired else noisy
            places = sample_rows(before, count, 1, share)
            numbers = before + places
            if is_by_sample and samples and count % samples == 0:
                numbers = first + places // (count // samples)
            beside = (
                self._beside(use, shape, index, count) if is_paired or self.against_itself else AddedOperand(None, None)
            )
            is_own = is_paired and weight is not None and weight.shape[1] == shape.size[1]
            own = self._outputs(use, shape, index, count) if is_own else None
            held = self.is_held(numbers)
            for is_held in (False, True):
                chosen = places[held == is_held]
                for start in range(0, len(chosen), ROWS_PER_CHUNK):
                    part = chosen[start : start + ROWS_PER_CHUNK]
                    pair = geometry.rows(exact, part), geometry.rows(noisy, part)
                    self.check_finite(self.names.get(use.node.name, use.place), pair)
                    wanted = pair[0]
                    if weight is not None:
                        wanted = torch.einsum("rgn,gon->rgo", wanted, weight) if own is None else own[part]
                    yield is_held, pair[1], *beside.of(wanted, part)

    def _outputs(self, use: LayerUse, shape: GroupedLayer, index: int, count: int) -> Tensor | None:
        """What the float layer gives in one batch, without its bias, where that is what its node gives."""
        layer, is_whole = use.layer, len(self.walk.get_parts(use.node)) == 1
        value = self.walk.float_value(use.node, index) if is_whole and layer.norm is None else None
        if not isinstance(value, Tensor):
            return None
        rows = shape.geometry.outputs(value, torch.arange(count), count, shape.size[1])
        return rows if rows is None or layer.bias is None else rows - layer.bias.detach().reshape(rows.shape[1:])

    def _is_paired(self, use: LayerUse, shapes: Sequence[torch.Size]) -> bool:
        """Whether the rows of both streams are those of one another: an expert may be sent others when its router is
        quantized. Then its outputs should be those of the float weight for the rows that it gets."""
        walk = self.walk
        return all(
            walk.capture_input(use.node, use.place, n, noisy=False).shape == each for n, each in enumerate(shapes)
        )

    def _beside(self, use: LayerUse, shape: GroupedLayer, index: int, count: int) -> "AddedOperand":
        """What the layer is added to in one batch."""
        walk, geometry, outputs = self.walk, shape.geometry, shape.size[1]

        def rows(value: Any) -> Tensor | None:
            return geometry.outputs(value, torch.arange(count), count, outputs) if isinstance(value, Tensor) else None

        other, stream = None if self.against_itself else find_changed_operand(walk, use), find_normed_operand(walk, use)
        drift = None
        if other is not None and isinstance(exact := walk.get_value(other, index, noisy=False), Tensor):
            found = walk.get_value(other, index, noisy=True)
            drift = rows(exact - found) if found.shape == exact.shape else None
        side = None if stream is None else rows(walk.get_value(stream, index, noisy=False))
        bias = use.layer.fold_norm()[1]
        if side is not None and bias is not None:
            side = side + bias.detach().reshape(side.shape[1:])
        return AddedOperand(drift, side)

    def check_finite(self, name: str, values: Sequence[Tensor]) -> None:
        """Raise NonFiniteError if an input of this layer holds NaN or infinity."""
        if not all(bool(rows.sum().isfinite()) or bool(rows.isfinite().all()) for rows in values):
            raise NonFiniteError(f"{name}: its input holds NaN or infinity. {self.nan_hint}")


def explain_refusal(use: LayerUse, geometry: Geometry | None) -> str:
    """The reason to leave a layer as it is; "" when there is none."""
    quant = use.layer.weight_quant
    reasons = (
        (quant.quantizer.is_disabled(), quant.quantizer.reason),
        (quant.chosen is not None, "its codes were chosen before: quantize anew to choose again"),
        (quant.spec.qformulation != "zp", "its codes are relative to a minimum, not to a zero point"),
        (geometry is None, "it pads with other things than zeros"),
        (any(each.kind == EMBEDDING for each in use.layer.sharing_layers), "its weight is a table of embeddings, too"),
    )
    return next((why for is_so, why in reasons if is_so), "")


def find_changed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """The other operand of the add that a layer feeds, when both streams have it already and it is not one in both."""
    found, _ = _find_add(walk, use)
    if found is None or found in walk.same_nodes or not walk.has_value(found):
        return None
    return found


def find_normed_operand(walk: StreamWalk, use: LayerUse) -> fx.Node | None:
    """The other operand of the add that a layer feeds, when it is at hand and a norm reads the sum."""
    found, total = _find_add(walk, use)
    if found is None or total is None or not walk.has_value(found) or not feeds_norm(walk, total):
        return None
    return found


def _find_add(walk: StreamWalk, use: LayerUse) -> tuple[fx.Node | None, fx.Node | None]:
    """The other operand, and the sum."""
    return _find_add_in_group(walk, use) or _find_add_after(walk, use.node) or (None, None)


def _find_add_in_group(walk: StreamWalk, use: LayerUse) -> tuple[fx.Node, fx.Node] | None:
    parts = walk.get_parts(use.node)
    is_added = len(parts) > 1 and parts[0] is use.layer and _is_add(parts[1])
    inputs = use.node.args
    is_found = is_added and len(inputs) == 2 and isinstance(inputs[1], fx.Node)
    return (inputs[1], use.node) if is_found else None  # type: ignore[return-value]  # a node, as just seen


def _find_add_after(walk: StreamWalk, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    if len(walk.get_parts(node)) != 1 or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if walk.get_stub(user) is not None:
        node = user
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
    first = next(iter(walk.get_parts(user)), None) or walk.get_module(user)
    operands = [each for each in user.args if isinstance(each, fx.Node)]
    if not _is_add(first) or len(operands) != 2 or len(user.all_input_nodes) != 2 or node not in operands:
        return None
    return next(each for each in operands if each is not node), user


def _is_add(part: Any) -> bool:
    return isinstance(part, Operation) and part.kind == "add" and part.arguments.get("alpha", 1) == 1


def _fit_and_holdout(sums: tuple[SumsT, SumsT]) -> tuple[SumsT, SumsT]:
    """Too few to hold any out: what is fitted judges; all held out: what judges is fitted."""
    fit, judge = sums
    return (fit if fit.count else judge), (judge if judge.count else fit)
