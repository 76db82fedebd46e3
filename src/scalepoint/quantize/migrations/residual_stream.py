"""The residual stream of a transformer: everything that is connected by adds, with what writes to it and what reads it.

    writer (linear, embedding, parameter) -> + -> norm -> reader (linear)
                                             |            all that a rotation of the stream has to be merged into
                                             + -> norm -> ...

Found by flooding the graph from the input of a norm. Values have their channels on one axis, counted from the last;
where an operation moves axes, numbers sent through it tell where the channels go.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scalepoint.graph import Operation
from scalepoint.numerics.rotation import make_hadamard, make_rotation
from scalepoint.quantize.migrations.channel_trace import MOVES, UNCHANGED, channel_axis, numbers_along
from scalepoint.quantize.migrations.layers import NORMS, RewritableLayer, RewritableNorm, give_parameter, give_quantizer
from scalepoint.quantize.migrations.migration import MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedGraph, RecordedOperation
from scalepoint.quantize.operations import WEIGHT_PRODUCTS


class StreamRefusedError(Exception):
    """Why a stream cannot be rotated."""


@dataclass
class ResidualStream:
    """A residual stream of a width; readers come with the norm before them, None where they read it directly."""

    name: str
    width: int
    layers: list[RewritableLayer] = field(default_factory=list)  # that write
    tables: list[tuple[Tensor, int, RecordedOperation]] = field(
        default_factory=list
    )  # looked up or added, on which axis, by whom
    norms: list[RewritableNorm] = field(default_factory=list)
    readers: list[tuple[RewritableLayer, RewritableNorm | None]] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        layers = [*self.layers, *(reader for reader, _ in self.readers)]
        owned = [each for layer in layers for each in layer.tensors()]
        return [*owned, *(table for table, _, _ in self.tables), *(t for norm in self.norms for t in norm.own_affine())]

    def rotate(self) -> str:
        keeps_mean = any(norm.kind == "layer_norm" for norm in self.norms)
        r = make_rotation(self.width, keeps_mean=keeps_mean).to(self.readers[0][0].weight.device)
        for reader, norm in self.readers:
            _fold_norm(norm, reader)
            matrix = reader.matrix()[0, :, :, 0]
            matrix.copy_(matrix.double() @ r)
        for norm in self.norms:
            _reset_norm(norm)
        for layer in self.layers:
            matrix = layer.matrix()[0]
            matrix.copy_(torch.einsum("ock,of->fck", matrix.double(), r))
            if layer.bias is not None:
                layer.bias.copy_(layer.bias.double() @ r)
        for table, axis, _ in self.tables:
            table.copy_((table.double().movedim(axis, -1) @ r).movedim(-1, axis))
        how = "random orthogonal" if make_hadamard(self.width) is None else "Hadamard"
        writers = len(self.layers) + len(self.tables)
        return f"width {self.width} ({how}), {writers} writers, {len(self.norms)} norms, {len(self.readers)} readers"


def _fold_norm(norm: RewritableNorm | None, reader: RewritableLayer) -> None:
    """The norm's weight and bias into what reads it."""
    if norm is None:
        return
    gain, shift = norm.parts()
    matrix = reader.matrix()[0, :, :, 0]
    if shift is not None and bool(shift.any()):
        reader.shift_outputs(matrix.double() @ shift.double())
    if gain is not None:
        matrix.copy_(matrix.double() * gain.double())


def _reset_norm(norm: RewritableNorm) -> None:
    gain, shift = norm.parts()
    if gain is not None:
        gain.fill_(1.0)
    if shift is not None:
        shift.zero_()


def find_streams(scene: MigrationContext) -> MigrationSites:
    """A stream for each norm whose input is in none yet."""
    found, seen = MigrationSites(), set[int]()
    for op in scene.flow.ops:
        if op.kind not in NORMS or op.inputs[0] in seen or op.shape is None:
            continue
        flood = _StreamSearch(scene.flow, op.shape[-1])
        name = f"the stream of {op.name}"
        try:
            stream = flood.from_norm(op, name)
            if _untie_embeddings(scene, stream):
                stream = _StreamSearch(scene.flow, op.shape[-1]).from_norm(op, name)
            _check_stream(scene, stream)
            found.sites.append(stream)
        except StreamRefusedError as error:
            found.refuse(name, str(error))
        seen |= set(flood.axes)
    return found


class _StreamSearch:
    """Visits all values that are connected without anything that a rotation cannot pass."""

    def __init__(self, flow: RecordedGraph, width: int) -> None:
        self.flow, self.width = flow, width
        self.axes: dict[int, int] = {}
        self.owner: dict[
            int, RecordedOperation | None
        ] = {}  # the norm behind which a value stands; None in the stream itself
        self.pending: list[int] = []
        self.writers: dict[int, RecordedOperation] = {}
        self.tables: list[tuple[Tensor, int, RecordedOperation]] = []
        self.norms: dict[int, RecordedOperation] = {}
        self.readers: dict[int, tuple[RecordedOperation, RecordedOperation | None]] = {}

    def from_norm(self, op: RecordedOperation, name: str) -> ResidualStream:
        """The stream that a norm reads."""
        self.visit(op.inputs[0], -1, None)
        while self.pending:
            self._spread(self.pending.pop())
        norms = {index: RewritableNorm(op) for index, op in self.norms.items()}
        readers = [
            (RewritableLayer(op), None if owner is None else norms[owner.index]) for op, owner in self.readers.values()
        ]
        layers = [RewritableLayer(op) for op in self.writers.values()]
        if not readers or not (layers or self.tables):
            raise StreamRefusedError("nothing writes it or nothing reads it that could take a rotation")
        return ResidualStream(name, self.width, layers, list(self.tables), list(norms.values()), readers)

    def visit(self, index: int, axis: int, owner: RecordedOperation | None) -> None:
        op = self.flow.ops[index]
        if index in self.axes:
            if self.owner[index] is not owner:
                raise StreamRefusedError(f"{op.name} joins what comes before a norm and what comes after it")
            return
        if op.shape is None or len(op.shape) < -axis or op.shape[axis] != self.width:
            raise StreamRefusedError(f"{op.name} ({op.kind}) has not {self.width} channels there")
        self.axes[index], self.owner[index] = axis, owner
        self.pending.append(index)

    def _spread(self, index: int) -> None:
        op, axis, owner = self.flow.ops[index], self.axes[index], self.owner[index]
        if op is not owner:
            self._came_from(op, axis, owner)
        for reader in self.flow.readers.get(index, []):
            self._goes_to(reader, index, axis, owner)

    def _came_from(self, op: RecordedOperation, axis: int, owner: RecordedOperation | None) -> None:
        """Who gives this value."""
        if op.kind in UNCHANGED or self._is_by_number(op):
            self.visit(op.inputs[0], axis, owner)
        elif op.kind == "add":
            self._check_add(op, owner)
            self.tables += [(tensor, axis, op) for tensor in self._held(op, axis)]
            for source in op.inputs:
                self.visit(source, axis, owner)
        elif op.kind in MOVES or op.kind == "mean":
            for source in op.inputs:
                if self.flow.ops[source].shape is not None:
                    self.visit(source, self._axis_before(op, source, axis), owner)
        elif owner is not None:
            raise StreamRefusedError(f"{op.name} ({op.kind}) joins what comes after a norm")
        else:
            self._written_by(op, axis)

    def _written_by(self, op: RecordedOperation, axis: int) -> None:
        if op.kind in WEIGHT_PRODUCTS and axis == channel_axis(op):
            self.writers[op.index] = op
        elif op.kind == "embedding" and axis == -1:
            self.tables.append((op.operation.weight, -1, op))
        elif op.node.op == "get_attr":
            self.tables.append((self._attribute(op), axis, op))
        else:
            why = "a norm writes into it: not a pre-norm model" if op.kind in NORMS else f"{op.kind} writes into it"
            raise StreamRefusedError(f"{op.name}: {why}")

    def _goes_to(self, op: RecordedOperation, index: int, axis: int, owner: RecordedOperation | None) -> None:
        """Who takes this value."""
        if op.kind in UNCHANGED or op.kind == "add" or self._is_by_number(op):
            self.visit(op.index, axis, owner)
        elif op.kind in MOVES or op.kind == "mean":
            self.visit(op.index, self._axis_after(op, index, axis), owner)
        elif op.kind in ("linear", "head") and axis == channel_axis(op):
            self.readers[op.index] = (op, owner)
        elif op.kind in NORMS and axis == -1 and owner is None:
            self.norms[op.index] = op
            self.visit(op.index, -1, op)
        else:
            what = "it is an output of the model" if op.kind == "output" else f"{op.name} ({op.kind}) reads it"
            raise StreamRefusedError(f"{what}, which does not commute with a rotation")

    def _check_add(self, op: RecordedOperation, owner: RecordedOperation | None) -> None:
        given = op.module.settings if isinstance(op.module, Operation) else {}
        if owner is not None:
            raise StreamRefusedError(f"{op.name} adds to what comes after {owner.name}: not a pre-norm model")
        if any(value not in (1, None) or name != "alpha" for name, value in given.items()):
            raise StreamRefusedError(f"{op.name} adds something that does not commute with a rotation")

    def _held(self, op: RecordedOperation, axis: int) -> list[Tensor]:
        """Parameters that an add adds."""
        held = op.module.tensors() if isinstance(op.module, Operation) else []
        if any(tensor.ndim < -axis or tensor.shape[axis] != self.width for tensor in held):
            raise StreamRefusedError(f"{op.name} adds a tensor that has not {self.width} channels")
        return held

    def _is_by_number(self, op: RecordedOperation) -> bool:
        """Whether it multiplies by a number, which commutes with everything."""
        if op.kind not in ("mul", "div") or len(op.inputs) != 1 or not isinstance(op.module, Operation):
            return False
        is_first = op.kind == "mul" or op.argument(0) in ("self", "input")
        return is_first and not op.module.tensors()

    def _attribute(self, op: RecordedOperation) -> Tensor:
        owner, _, leaf = str(op.node.target).rpartition(".")
        value: Tensor = getattr(self.flow.model.get_submodule(owner), leaf)
        return value

    def _numbered(self, op: RecordedOperation, axis: int) -> dict[int, Tensor]:
        """Every tensor that an operation takes, with its channels on an axis numbered."""
        made = {}
        for index in op.inputs:
            shape = self.flow.ops[index].shape
            if shape is not None and len(shape) >= -axis and shape[axis] == self.width:
                sizes = [1] * len(shape)
                sizes[axis] = self.width
                made[index] = torch.arange(self.width).view(sizes).expand(shape)
        return made

    def _axis_after(self, op: RecordedOperation, source: int, axis: int) -> int:
        after = self._sent(op, self._numbered(op, axis))
        if after is not None:
            for each in range(-1, -after.ndim - 1, -1):
                if self._is_numbered(after, each):
                    return each
        raise StreamRefusedError(f"{op.name} ({op.kind}) mixes channels with something else")

    def _axis_before(self, op: RecordedOperation, source: int, axis: int) -> int:
        shape = self.flow.ops[source].shape or ()
        for each in range(-1, -len(shape) - 1, -1):
            given = self._numbered(op, each) if shape[each] == self.width else {}
            after = self._sent(op, given) if source in given else None
            if after is not None and self._is_numbered(after, axis):
                return each
        raise StreamRefusedError(f"{op.name} ({op.kind}) mixes channels with something else")

    def _sent(self, op: RecordedOperation, given: dict[int, Tensor]) -> Tensor | None:
        if op.kind == "mean":
            after = self.flow.again(op, {index: ids.double() for index, ids in given.items()})
        else:
            after = self.flow.again(op, given)
        return after if isinstance(after, Tensor) else None

    def _is_numbered(self, ids: Tensor, axis: int) -> bool:
        if ids.ndim < -axis or ids.shape[axis] != self.width:
            return False
        numbers = numbers_along(ids.round().long() if ids.is_floating_point() else ids, axis)
        return numbers is not None and torch.equal(numbers, torch.arange(self.width))


def _untie_embeddings(scene: MigrationContext, stream: ResidualStream) -> bool:
    """Give a head that shares the table of an embedding, or that, a weight of its own; whether there was one."""
    paths = {id(module): path for path, module in scene.model.named_modules()}
    tables = {table.data_ptr(): source for table, _, source in stream.tables}
    tied = [reader for reader, _ in stream.readers if reader.weight.data_ptr() in tables]
    for reader in tied:
        table = tables[reader.weight.data_ptr()]
        owner = next((each for each in (table.operation, reader.operation) if _can_own_weight(each)), None)
        if owner is None or scene.flow.uses[reader.weight.data_ptr()] > 2:
            raise StreamRefusedError(f"{reader.name} is tied to {table.name} and cannot be untied")
        give_parameter(owner, "weight", reader.weight)
        give_quantizer(scene.model, owner)
        if not isinstance(owner, Operation):
            scene.added.append(f"{paths[id(owner)]}.weight")
    if tied:
        scene.flow = RecordedGraph(scene.model, scene.probes[0])
    return bool(tied)


def _can_own_weight(operation: object) -> bool:
    """Whether it can be given a weight without anything else noticing."""
    if isinstance(operation, Operation):
        return "weight" in operation.arguments and not operation.is_computed
    return isinstance(operation, nn.Linear | nn.Embedding)


def _check_stream(scene: MigrationContext, stream: ResidualStream) -> None:
    """Everything that is written belongs to the stream alone, and is saved with the model."""
    flow = scene.flow
    saved = {tensor.data_ptr() for tensor in scene.model.state_dict().values()}
    for layer in (*stream.layers, *(reader for reader, _ in stream.readers)):
        _refuse_if(layer.why_fixed(flow))
        if layer.norm is not None or layer.groups > 1 or layer.kind == "conv_transpose":
            raise StreamRefusedError(f"{layer.name} has a batch norm or groups, which do not commute with a rotation")
    for norm in stream.norms:
        _refuse_if(norm.why_fixed(flow))
    for table, _, source in stream.tables:
        if flow.is_shared([table]):
            raise StreamRefusedError(f"what {source.name} adds or looks up is used elsewhere too")
        if table.data_ptr() not in saved:
            raise StreamRefusedError(f"what {source.name} adds is a buffer that is not saved with the model")
    for reader, before in stream.readers:
        shift = None if before is None else before.parts()[1]
        if shift is not None and bool(shift.any()):
            _refuse_if(reader.why_no_bias())
            reader.give_bias()


def _refuse_if(why: str) -> None:
    if why:
        raise StreamRefusedError(why)
