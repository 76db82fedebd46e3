"""The residual stream of a transformer: all values that adds connect, the layers that write it, and those that read it.

    writer (linear, embedding, parameter) -> + -> norm -> reader (linear)
                                             |            a rotation of the stream is merged into all of these
                                             + -> norm -> ...

A flood fill of the graph finds it, from the input of a norm. A value is the result of an operation, named by the index
of the operation. It has its channels on one axis, counted from the end. Where an operation moves axes, channel numbers
that are sent through it show the new axis.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scalepoint.graph import Operation
from scalepoint.numerics.rotation import make_hadamard, make_rotation
from scalepoint.quantize.migrations.channel_trace import MOVES, UNCHANGED, channel_axis, numbers_along
from scalepoint.quantize.migrations.layers import RewritableLayer, RewritableNorm, give_parameter, give_quantizer
from scalepoint.quantize.migrations.migration import MigrationContext, MigrationSites
from scalepoint.quantize.migrations.recorded_graph import RecordedGraph, RecordedOperation
from scalepoint.quantize.operations import WEIGHT_PRODUCTS
from scalepoint.quantize.smooth import NORM_KINDS


class StreamRefusedError(Exception):
    """A stream cannot be rotated; the message says why."""


@dataclass(frozen=True)
class WrittenTable:
    """A parameter that is looked up or added, so that it writes to the stream.

    Attributes:
        tensor: Its values.
        axis: The axis of the channels.
        op: The operation that reads it.
    """

    tensor: Tensor
    axis: int
    op: RecordedOperation


@dataclass
class ResidualStream:
    """A residual stream.

    Attributes:
        name: Its name in reports.
        width: Number of channels.
        writers: Layers that write to it.
        tables: Parameters that write to it.
        norms: Norms that read it.
        readers: Layers that read it, with the norm before them; None if they read it directly.
    """

    name: str
    width: int
    writers: list[RewritableLayer] = field(default_factory=list)
    tables: list[WrittenTable] = field(default_factory=list)
    norms: list[RewritableNorm] = field(default_factory=list)
    readers: list[tuple[RewritableLayer, RewritableNorm | None]] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        layers = [*self.writers, *(reader for reader, _ in self.readers)]
        return [
            *(tensor for layer in layers for tensor in layer.tensors()),
            *(table.tensor for table in self.tables),
            *(tensor for norm in self.norms for tensor in norm.affine_tensors()),
        ]

    def rotate(self) -> str:
        """Merge a rotation into all writers and readers. Returns a note."""
        keeps_mean = any(norm.kind == "layer_norm" for norm in self.norms)
        rotation = make_rotation(self.width, keeps_mean=keeps_mean).to(self.readers[0][0].weight.device)
        for reader, norm in self.readers:
            _fold_norm(norm, reader)
            matrix = reader.matrix()[0, :, :, 0]
            matrix.copy_(matrix.double() @ rotation)
        for norm in self.norms:
            _reset_norm(norm)
        for writer in self.writers:
            matrix = writer.matrix()[0]
            matrix.copy_(torch.einsum("ock,of->fck", matrix.double(), rotation))
            if writer.bias is not None:
                writer.bias.copy_(writer.bias.double() @ rotation)
        for table in self.tables:
            rotated = table.tensor.double().movedim(table.axis, -1) @ rotation
            table.tensor.copy_(rotated.movedim(-1, table.axis))
        writer_count = len(self.writers) + len(self.tables)
        return (
            f"width {self.width} ({describe_rotation(self.width)}), {writer_count} writers, {len(self.norms)} norms, "
            f"{len(self.readers)} readers"
        )


def describe_rotation(size: int) -> str:
    return "random orthogonal" if make_hadamard(size) is None else "Hadamard"


def _fold_norm(norm: RewritableNorm | None, reader: RewritableLayer) -> None:
    """Multiply the weight and bias of a norm into a layer that reads it."""
    if norm is None:
        return
    gain, shift = norm.affine()
    matrix = reader.matrix()[0, :, :, 0]
    if shift is not None and bool(shift.any()):
        reader.shift_outputs(matrix.double() @ shift.double())
    if gain is not None:
        matrix.copy_(matrix.double() * gain.double())


def _reset_norm(norm: RewritableNorm) -> None:
    """Set the weight of a norm to ones and its bias to zeros, after they were folded into all readers."""
    gain, shift = norm.affine()
    if gain is not None:
        gain.fill_(1.0)
    if shift is not None:
        shift.zero_()


def find_streams(context: MigrationContext) -> MigrationSites:
    """Find the streams, starting at each norm whose input is in no stream yet."""
    result, visited = MigrationSites(), set[int]()
    for op in context.graph.operations:
        if op.kind not in NORM_KINDS or op.inputs[0] in visited or op.shape is None:
            continue
        search = _StreamSearch(context.graph, op.shape[-1])
        name = f"the stream of {op.name}"
        try:
            stream = search.find_stream(op, name)
            if _untie_embeddings(context, stream):
                stream = _StreamSearch(context.graph, op.shape[-1]).find_stream(op, name)
            _check_stream(context, stream)
            result.sites.append(stream)
        except StreamRefusedError as error:
            result.refuse(name, str(error))
        visited |= set(search.axes)
    return result


class _StreamSearch:
    """A flood fill over all values that are connected by operations that commute with a rotation.

    Attributes:
        axes: Visited value -> axis of its channels.
        norm_before: Visited value -> the norm whose result it is; None in the stream itself.
        pending: Visited values whose neighbours are not visited yet.
        writers, tables, norms, readers: What the search found so far; see ResidualStream. By index of the operation.
    """

    def __init__(self, graph: RecordedGraph, width: int) -> None:
        self.graph, self.width = graph, width
        self.axes: dict[int, int] = {}
        self.norm_before: dict[int, RecordedOperation | None] = {}
        self.pending: list[int] = []
        self.writers: dict[int, RecordedOperation] = {}
        self.tables: list[WrittenTable] = []
        self.norms: dict[int, RecordedOperation] = {}
        self.readers: dict[int, tuple[RecordedOperation, RecordedOperation | None]] = {}

    def find_stream(self, norm: RecordedOperation, name: str) -> ResidualStream:
        """Find the stream that a norm reads."""
        self._visit(norm.inputs[0], axis=-1, norm_before=None)
        while self.pending:
            index = self.pending.pop()
            op, axis, norm_before = self.graph.operations[index], self.axes[index], self.norm_before[index]
            if op is not norm_before:  # the result of a norm: its input is visited by `_visit_reader`
                self._visit_source(op, axis, norm_before)
            for reader in self.graph.readers.get(index, []):
                self._visit_reader(reader, axis, norm_before)
        norms = {index: RewritableNorm(op) for index, op in self.norms.items()}
        readers = []
        for op, norm_before in self.readers.values():
            rewritable_norm = None if norm_before is None else norms[norm_before.index]
            readers.append((RewritableLayer(op), rewritable_norm))
        writers = [RewritableLayer(op) for op in self.writers.values()]
        if not readers or not (writers or self.tables):
            raise StreamRefusedError("no layer that a rotation could be merged into writes it, or none reads it")
        return ResidualStream(name, self.width, writers, list(self.tables), list(norms.values()), readers)

    def _visit(self, index: int, axis: int, norm_before: RecordedOperation | None) -> None:
        """Add a value to the stream, or to the values behind a norm."""
        op = self.graph.operations[index]
        if index in self.axes:
            if self.norm_before[index] is not norm_before:
                raise StreamRefusedError(f"{op.name} joins values before a norm with values after it")
            return
        if op.shape is None or len(op.shape) < -axis or op.shape[axis] != self.width:
            raise StreamRefusedError(f"{op.name} ({op.kind}) does not have {self.width} channels there")
        self.axes[index], self.norm_before[index] = axis, norm_before
        self.pending.append(index)

    def _visit_source(self, op: RecordedOperation, axis: int, norm_before: RecordedOperation | None) -> None:
        """Visit the inputs of the operation that computes a value, or note that it writes to the stream."""
        if op.kind in UNCHANGED or self._multiplies_by_number(op):
            self._visit(op.inputs[0], axis, norm_before)
        elif op.kind == "add":
            self._check_add(op, norm_before)
            self.tables += [WrittenTable(tensor, axis, op) for tensor in self._added_parameters(op, axis)]
            for source in op.inputs:
                self._visit(source, axis, norm_before)
        elif op.kind in MOVES or op.kind == "mean":
            for source in op.inputs:
                if self.graph.operations[source].shape is not None:
                    self._visit(source, self._axis_before(op, source, axis), norm_before)
        elif norm_before is not None:
            raise StreamRefusedError(f"{op.name} ({op.kind}) joins the values after a norm")
        else:
            self._add_writer(op, axis)

    def _add_writer(self, op: RecordedOperation, axis: int) -> None:
        if op.kind in WEIGHT_PRODUCTS and axis == channel_axis(op):
            self.writers[op.index] = op
        elif op.kind == "embedding" and axis == -1:
            self.tables.append(WrittenTable(op.operation.weight, axis=-1, op=op))
        elif op.node.op == "get_attr":
            self.tables.append(WrittenTable(self._get_attribute(op), axis, op))
        else:
            reason = "a norm writes to it: not a pre-norm model" if op.kind in NORM_KINDS else f"{op.kind} writes to it"
            raise StreamRefusedError(f"{op.name}: {reason}")

    def _visit_reader(self, op: RecordedOperation, axis: int, norm_before: RecordedOperation | None) -> None:
        """Visit the result of an operation that reads a value, or note that it reads the stream."""
        if op.kind in UNCHANGED or op.kind == "add" or self._multiplies_by_number(op):
            self._visit(op.index, axis, norm_before)
        elif op.kind in MOVES or op.kind == "mean":
            self._visit(op.index, self._axis_after(op, axis), norm_before)
        elif op.kind in ("linear", "head") and axis == channel_axis(op):
            self.readers[op.index] = (op, norm_before)
        elif op.kind in NORM_KINDS and axis == -1 and norm_before is None:
            self.norms[op.index] = op
            self._visit(op.index, axis=-1, norm_before=op)
        else:
            what = "it is an output of the model" if op.kind == "output" else f"{op.name} ({op.kind}) reads it"
            raise StreamRefusedError(f"{what}, which does not commute with a rotation")

    def _check_add(self, op: RecordedOperation, norm_before: RecordedOperation | None) -> None:
        settings = op.module.settings if isinstance(op.module, Operation) else {}
        if norm_before is not None:
            raise StreamRefusedError(f"{op.name} adds to the result of {norm_before.name}: not a pre-norm model")
        if any(value not in (1, None) or name != "alpha" for name, value in settings.items()):
            raise StreamRefusedError(f"{op.name} adds something that does not commute with a rotation")

    def _added_parameters(self, op: RecordedOperation, axis: int) -> list[Tensor]:
        """Return the parameters that an add adds."""
        tensors = op.module.tensors() if isinstance(op.module, Operation) else []
        if any(tensor.ndim < -axis or tensor.shape[axis] != self.width for tensor in tensors):
            raise StreamRefusedError(f"{op.name} adds a tensor that does not have {self.width} channels")
        return tensors

    def _multiplies_by_number(self, op: RecordedOperation) -> bool:
        """Whether an operation multiplies by one number, which commutes with everything."""
        if op.kind not in ("mul", "div") or len(op.inputs) != 1 or not isinstance(op.module, Operation):
            return False
        is_numerator = op.kind == "mul" or op.argument_name(0) in ("self", "input")
        return is_numerator and not op.module.tensors()

    def _get_attribute(self, op: RecordedOperation) -> Tensor:
        owner, _, attribute = str(op.node.target).rpartition(".")
        value: Tensor = getattr(self.graph.model.get_submodule(owner), attribute)
        return value

    def _number_inputs(self, op: RecordedOperation, axis: int) -> dict[int, Tensor]:
        """Return channel numbers along an axis, for each input that has as many channels there as the stream."""
        numbers = {}
        for index in op.inputs:
            shape = self.graph.operations[index].shape
            if shape is not None and len(shape) >= -axis and shape[axis] == self.width:
                sizes = [1] * len(shape)
                sizes[axis] = self.width
                numbers[index] = torch.arange(self.width).view(sizes).expand(shape)
        return numbers

    def _axis_after(self, op: RecordedOperation, axis: int) -> int:
        """Return the axis of the channels in the result of an operation that moves values, from that in its inputs."""
        numbers = self._send(op, self._number_inputs(op, axis))
        if numbers is not None:
            for new_axis in range(-1, -numbers.ndim - 1, -1):
                if self._has_all_channels(numbers, new_axis):
                    return new_axis
        raise StreamRefusedError(f"{op.name} ({op.kind}) mixes channels with something else")

    def _axis_before(self, op: RecordedOperation, source: int, axis: int) -> int:
        """Return the axis of the channels in an input of an operation that moves values, from that in its result."""
        shape = self.graph.operations[source].shape or ()
        for old_axis in range(-1, -len(shape) - 1, -1):
            numbered = self._number_inputs(op, old_axis) if shape[old_axis] == self.width else {}
            numbers = self._send(op, numbered) if source in numbered else None
            if numbers is not None and self._has_all_channels(numbers, axis):
                return old_axis
        raise StreamRefusedError(f"{op.name} ({op.kind}) mixes channels with something else")

    def _send(self, op: RecordedOperation, numbers: dict[int, Tensor]) -> Tensor | None:
        """Send channel numbers through an operation."""
        if op.kind == "mean":  # torch averages floats only
            numbers = {index: input_numbers.double() for index, input_numbers in numbers.items()}
        result = self.graph.rerun(op, numbers)
        return result if isinstance(result, Tensor) else None

    def _has_all_channels(self, numbers: Tensor, axis: int) -> bool:
        """Whether the channels lie on an axis, all and in order."""
        if numbers.ndim < -axis or numbers.shape[axis] != self.width:
            return False
        along = numbers_along(numbers.round().long() if numbers.is_floating_point() else numbers, axis)
        return along is not None and torch.equal(along, torch.arange(self.width))


def _untie_embeddings(context: MigrationContext, stream: ResidualStream) -> bool:
    """Give layers that share a weight with an embedding a weight of their own. Returns whether there were any.

    The two are rotated differently: the weight of the norm is folded into the head only.
    """
    paths = {id(module): path for path, module in context.model.named_modules()}
    tables = {table.tensor.data_ptr(): table.op for table in stream.tables}
    tied = [reader for reader, _ in stream.readers if reader.weight.data_ptr() in tables]
    for reader in tied:
        table = tables[reader.weight.data_ptr()]
        operations = (table.operation, reader.operation)
        owner = next((operation for operation in operations if _can_own_weight(operation)), None)
        if owner is None or context.graph.uses[reader.weight.data_ptr()] > 2:
            raise StreamRefusedError(f"{reader.name} is tied to {table.name} and cannot be untied")
        give_parameter(owner, "weight", reader.weight)
        give_quantizer(context.model, owner)
        if not isinstance(owner, Operation):
            context.added.append(f"{paths[id(owner)]}.weight")
    if tied:
        context.graph = RecordedGraph(context.model, context.probes[0])
    return bool(tied)


def _can_own_weight(operation: object) -> bool:
    """Whether an operation can get its own weight without an effect on others."""
    if isinstance(operation, Operation):
        return "weight" in operation.arguments and not operation.is_computed
    return isinstance(operation, nn.Linear | nn.Embedding)


def _check_stream(context: MigrationContext, stream: ResidualStream) -> None:
    """Check that everything that is written belongs to the stream alone, and is saved with the model.

    Readers without a bias get one if a norm's bias will be folded into them.
    """
    graph = context.graph
    saved = {tensor.data_ptr() for tensor in context.model.state_dict().values()}
    for layer in (*stream.writers, *(reader for reader, _ in stream.readers)):
        _refuse_if(layer.explain_fixed(graph))
        if layer.norm is not None or layer.groups > 1 or layer.kind == "conv_transpose":
            raise StreamRefusedError(f"{layer.name} has a batch norm or groups, which do not commute with a rotation")
    for norm in stream.norms:
        _refuse_if(norm.explain_fixed(graph))
    for table in stream.tables:
        if graph.is_shared([table.tensor]):
            raise StreamRefusedError(f"the tensor that {table.op.name} adds or looks up is used elsewhere too")
        if table.tensor.data_ptr() not in saved:
            raise StreamRefusedError(f"the buffer that {table.op.name} adds is not saved with the model")
    for reader, norm_before in stream.readers:
        shift = None if norm_before is None else norm_before.affine()[1]
        if shift is not None and bool(shift.any()):
            _refuse_if(reader.explain_no_bias())
            reader.give_bias()


def _refuse_if(reason: str) -> None:
    if reason:
        raise StreamRefusedError(reason)
