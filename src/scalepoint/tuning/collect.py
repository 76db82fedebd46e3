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
from scalepoint.quantize.parts import TABLE
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.tuning.moments import Moments, Residuals, Sums
from scalepoint.tuning.normed import is_normed, row_weights
from scalepoint.tuning.problem import Shape
from scalepoint.tuning.rows import Geometry, chosen_rows, enough, geometry_of, uniform
from scalepoint.tuning.walk import Walk

FEW_SAMPLES = 10  # with fewer, single rows are held out instead of whole samples
CHUNK = 4096  # rows that are gathered at once
T = TypeVar("T", Sums, Residuals)


@dataclass(frozen=True)
class Use:
    """A quantized layer at a node."""

    node: fx.Node
    place: str
    layer: QuantizedWeighted


@dataclass(frozen=True)
class Beside:
    """What the other side of an add lacks at every row, and what it is there where a norm reads the sum."""

    drift: Tensor | None
    side: Tensor | None

    def of(self, wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the layer's outputs should be at these rows, and what the rows count."""
        weights = None if self.side is None else row_weights((wanted + self.side[rows]).flatten(1)).view(-1)
        return (wanted if self.drift is None else wanted + self.drift[rows]), weights


@dataclass
class Collector:
    """Rows of the layers of one walk."""

    walk: Walk
    rows: int
    holdout: float
    names: dict[str, str]
    against_itself: bool = False  # the outputs should be those of the float weight in the quantized stream
    uses: list[Use] = field(default_factory=list)
    nan_hint: str = "Mend the data, or leave such batches out: on_nan='skip'"
    _open: dict[int, tuple[Sums, Sums]] = field(default_factory=dict)  # of weights with uses to come
    _shifts: dict[int, tuple[Residuals, Residuals]] = field(default_factory=dict)
    _shared: dict[int, tuple[Moments | None, Moments | None]] = field(default_factory=dict)  # of layers to come

    def __post_init__(self) -> None:
        found = [(node, self.walk.layer(node)) for node in self.walk.graph.nodes]
        self.uses = [Use(node, *layer) for node, layer in found if layer is not None]

    def uses_of(self, layer: QuantizedWeighted) -> list[fx.Node]:
        """Where the layer's weight multiplies, in graph order."""
        return [use.node for use in self.uses if use.layer.weight_quant is layer.weight_quant]

    def is_awaited(self, use: Use, nodes: Collection[fx.Node]) -> bool:
        """Whether layers outside of these nodes need what is seen at this use."""
        shape = geometry_of(use.layer)
        readers = [] if shape is None else [other.node for other, _ in self._readers(use, Shape(use.layer, shape))]
        return any(node not in nodes for node in (*self.uses_of(use.layer), *readers))

    def is_held(self, numbers: Tensor) -> Tensor:
        """Which samples judge."""
        return uniform(numbers, salt=1) < self.holdout

    def residuals(self, use: Use, shape: Shape) -> tuple[Residuals, Residuals]:
        """What a bias can take up, of the rows that are fitted and of those that judge; no products are made."""
        key, float_weight = id(use.layer.weight_quant), shape.weight()
        sums, weight = self._shifts.pop(key, (Residuals(), Residuals())), float_weight.to(torch.float32)
        values = shape.start(float_weight).values.to(torch.float32)
        with distributed.phase("residuals"):
            for held, noisy, wanted, weights in self._parts(use, shape, weight):
                sums[held].add(torch.einsum("rgn,gon->rgo", noisy, values), wanted, weights)
        if use.node is not self.uses_of(use.layer)[-1]:
            self._shifts[key] = sums
        return _both((sums[0].merged(), sums[1].merged()))

    def moments(self, use: Use, shape: Shape) -> tuple[Moments | None, Moments | None]:
        """Moments of nine tenths of the rows, and of the rest, of all uses up to this one."""
        known = self._shared.pop(id(use.layer), None)
        if known is not None:
            return known
        together = self._readers(use, shape)
        weight = torch.cat([each.weight() for _, each in together], 1).to(torch.float32)
        key = id(use.layer.weight_quant)
        is_plain = weight.shape[1] > weight.shape[2] and not self._is_alone(use) and not self._is_added(use)
        through = weight if is_plain else None
        sums = self._open.pop(key, (Sums(through), Sums(through)))
        with distributed.phase("moments"):
            for held, noisy, wanted, weights in self._parts(use, shape, None if is_plain else weight):
                sums[held].add(noisy, wanted, weights)
        is_last = use.node is self.uses_of(use.layer)[-1]
        if not is_last:
            self._open[key] = sums
        fit, judge = _both((sums[0].merged(), sums[1].merged()))
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

    def _readers(self, use: Use, shape: Shape) -> list[tuple[Use, Shape]]:
        """The use, and those to come that read the same value in the same way."""
        found = [(use, shape)]
        if self._is_alone(use) or self._is_added(use):
            return found
        source = self.walk.source(use.node, use.layer)
        for other in self.uses[self.uses.index(use) + 1 :]:
            geometry = geometry_of(other.layer)
            is_like = geometry == shape.geometry and self.walk.source(other.node, other.layer) is source
            is_solved = is_like and not self._is_alone(other) and not self._is_added(other)
            if geometry is not None and is_solved and not why_not(other, geometry):
                found.append((other, Shape(other.layer, geometry)))
        return found

    def _is_added(self, use: Use) -> bool:
        """Whether what its outputs should be, or what its rows count, depends on what it is added to."""
        return other_side(self.walk, use) is not None or normed_side(self.walk, use) is not None

    def _is_alone(self, use: Use) -> bool:
        return len(self.uses_of(use.layer)) > 1 or self.walk.source(use.node, use.layer) is None

    def _parts(
        self, use: Use, shape: Shape, weight: Tensor | None
    ) -> Iterator[tuple[bool, Tensor, Tensor, Tensor | None]]:
        """Whether rows judge, the rows in the quantized stream, what the outputs should be, and what each row counts.

        `weight` may be of several layers that read the same; without one the rows of the float stream are given.
        """
        geometry, walk = shape.geometry, self.walk
        shapes = [walk.input(use.node, use.place, each, noisy=True).shape for each in range(walk.count)]
        counts = [geometry.count(each) for each in shapes]
        has_pairs = not self.against_itself and self._is_paired(use, shapes)
        parts = distributed.gather_values("rows", [counts, has_pairs])
        befores, total = distributed.batch_offsets([counts_of_rank for counts_of_rank, _ in parts])
        is_paired = all(has_pairs_on_rank for _, has_pairs_on_rank in parts)
        groups, _, size = shape.size
        share = min(1.0, enough(self.rows, groups, size) / max(total, 1))
        is_by_sample = walk.sample_count >= FEW_SAMPLES
        for index, (count, before, first) in enumerate(zip(counts, befores, walk.firsts, strict=True)):
            noisy, samples = walk.input(use.node, use.place, index, noisy=True), walk.samples[index]
            exact = walk.input(use.node, use.place, index, noisy=False) if is_paired else noisy
            places = chosen_rows(before, count, 1, share)
            numbers = before + places
            if is_by_sample and samples and count % samples == 0:
                numbers = first + places // (count // samples)
            beside = self._beside(use, shape, index, count) if is_paired or self.against_itself else Beside(None, None)
            is_own = is_paired and weight is not None and weight.shape[1] == shape.size[1]
            own = self._outputs(use, shape, index, count) if is_own else None
            held = self.is_held(numbers)
            for is_held in (False, True):
                chosen = places[held == is_held]
                for start in range(0, len(chosen), CHUNK):
                    part = chosen[start : start + CHUNK]
                    pair = geometry.rows(exact, part), geometry.rows(noisy, part)
                    self.check_finite(self.names.get(use.node.name, use.place), pair)
                    wanted = pair[0]
                    if weight is not None:
                        wanted = torch.einsum("rgn,gon->rgo", wanted, weight) if own is None else own[part]
                    yield is_held, pair[1], *beside.of(wanted, part)

    def _outputs(self, use: Use, shape: Shape, index: int, count: int) -> Tensor | None:
        """What the float layer gives in one batch, without its bias, where that is what its node gives."""
        layer, is_whole = use.layer, len(self.walk.parts(use.node)) == 1
        value = self.walk.exact(use.node, index) if is_whole and layer.norm is None else None
        if not isinstance(value, Tensor):
            return None
        rows = shape.geometry.outputs(value, torch.arange(count), count, shape.size[1])
        return rows if rows is None or layer.bias is None else rows - layer.bias.detach().reshape(rows.shape[1:])

    def _is_paired(self, use: Use, shapes: Sequence[torch.Size]) -> bool:
        """Whether the rows of both streams are those of one another: an expert may be sent others when its router is
        quantized. Then its outputs should be those of the float weight for the rows that it gets."""
        walk = self.walk
        return all(walk.input(use.node, use.place, n, noisy=False).shape == each for n, each in enumerate(shapes))

    def _beside(self, use: Use, shape: Shape, index: int, count: int) -> "Beside":
        """What the layer is added to in one batch."""
        walk, geometry, outputs = self.walk, shape.geometry, shape.size[1]

        def rows(value: Any) -> Tensor | None:
            return geometry.outputs(value, torch.arange(count), count, outputs) if isinstance(value, Tensor) else None

        other, stream = None if self.against_itself else other_side(walk, use), normed_side(walk, use)
        drift = None
        if other is not None and isinstance(exact := walk.value(other, index, noisy=False), Tensor):
            found = walk.value(other, index, noisy=True)
            drift = rows(exact - found) if found.shape == exact.shape else None
        side = None if stream is None else rows(walk.value(stream, index, noisy=False))
        bias = use.layer.folded()[1]
        if side is not None and bias is not None:
            side = side + bias.detach().reshape(side.shape[1:])
        return Beside(drift, side)

    def check_finite(self, name: str, values: Sequence[Tensor]) -> None:
        """Raise NonFiniteError if an input of this layer holds NaN or infinity."""
        if not all(bool(rows.sum().isfinite()) or bool(rows.isfinite().all()) for rows in values):
            raise NonFiniteError(f"{name}: its input holds NaN or infinity. {self.nan_hint}")


def why_not(use: Use, geometry: Geometry | None) -> str:
    """The reason to leave a layer as it is; "" when there is none."""
    quant = use.layer.weight_quant
    reasons = (
        (quant.quantizer.is_disabled(), quant.quantizer.reason),
        (quant.chosen is not None, "its codes were chosen before: quantize anew to choose again"),
        (quant.spec.qformulation != "zp", "its codes are relative to a minimum, not to a zero point"),
        (geometry is None, "it pads with other things than zeros"),
        (any(each.kind == TABLE for each in use.layer.sharing), "its weight is a table of embeddings, too"),
    )
    return next((why for is_so, why in reasons if is_so), "")


def other_side(walk: Walk, use: Use) -> fx.Node | None:
    """The other operand of the add that a layer feeds, when both streams have it already and it is not one in both."""
    found, _ = _added(walk, use)
    if found is None or found in walk.same or not walk.has(found):
        return None
    return found


def normed_side(walk: Walk, use: Use) -> fx.Node | None:
    """The other operand of the add that a layer feeds, when it is at hand and a norm reads the sum."""
    found, total = _added(walk, use)
    if found is None or total is None or not walk.has(found) or not is_normed(walk, total):
        return None
    return found


def _added(walk: Walk, use: Use) -> tuple[fx.Node | None, fx.Node | None]:
    """The other operand, and the sum."""
    return _in_own_group(walk, use) or _after(walk, use.node) or (None, None)


def _in_own_group(walk: Walk, use: Use) -> tuple[fx.Node, fx.Node] | None:
    parts = walk.parts(use.node)
    is_added = len(parts) > 1 and parts[0] is use.layer and _is_add(parts[1])
    inputs = use.node.args
    is_found = is_added and len(inputs) == 2 and isinstance(inputs[1], fx.Node)
    return (inputs[1], use.node) if is_found else None  # type: ignore[return-value]  # a node, as just seen


def _after(walk: Walk, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    if len(walk.parts(node)) != 1 or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if walk.stub(user) is not None:
        node = user
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
    first = next(iter(walk.parts(user)), None) or walk.module(user)
    operands = [each for each in user.args if isinstance(each, fx.Node)]
    if not _is_add(first) or len(operands) != 2 or len(user.all_input_nodes) != 2 or node not in operands:
        return None
    return next(each for each in operands if each is not node), user


def _is_add(part: Any) -> bool:
    return isinstance(part, Operation) and part.kind == "add" and part.arguments.get("alpha", 1) == 1


def _both(sums: tuple[T, T]) -> tuple[T, T]:
    """Too few to hold any out: what is fitted judges; all held out: what judges is fitted."""
    fit, judge = sums
    return (fit if fit.count else judge), (judge if judge.count else fit)
