"""The walk over a program: every operation becomes those of LiteRT that the table of forms has for it.

    constants            computed now, once
    quantize, dequantize forms of a value: codes, or floats where somebody asks for them
    conv, add, mean, ..  integer operators where their operands have codes and their result gets some, else float ones
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from scalepoint.errors import TargetError
from scalepoint.formats.litert.schema import File, Quantized
from scalepoint.formats.litert.values import Free, Held, NotFreeError, Order, Value, extent_of, kind_of_dtype, plain, shape_of
from scalepoint.formats.onnx.refusal import operation_of, place_of

aten, own = torch.ops.aten, torch.ops.scalepoint
Form = Callable[["Walk", fx.Node], Any]
FORMS: dict[Any, Form] = {}
NONE, RELU, RELU6 = 0, 1, 3  # activations that an operator takes in, by their numbers in the schema
SUFFIXES = (".codes", ".weight", ".bias", ".scale", ".zero_point")


def form(*targets: Any) -> Callable[[Form], Form]:
    """Let a function write these operations."""

    def keep(function: Form) -> Form:
        FORMS.update(dict.fromkeys(targets, function))
        return function

    return keep


FILLED = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)


def _once(value: Any) -> Any:
    """One for what is free: whoever reads it broadcasts."""
    return 1 if isinstance(value, Free) else value


class UnfitError(Exception):
    """Why an operation has no form, in words that follow it."""


@dataclass(frozen=True)
class Ending:
    """What follows an operation and is done by its operator: an activation, the rounding to codes."""

    node: fx.Node  # the last that is done
    activation: int
    codes: Quantized | None


class Walk:
    """One file, from one program."""

    def __init__(self, program: ExportedProgram, batch: int) -> None:
        self.program, self.batch, self.file = program, batch, File()
        self.known: dict[fx.Node, Any] = {}
        self.constants: dict[tuple[int, Order], int] = {}
        self.alive: list[Any] = []  # an id is that of one constant as long as it lives
        self.names: dict[int, str] = {}
        self.inputs: dict[str, Value] = {}
        self.quantizers: dict[str, Value] = {}  # their codes, by the names that verify has for them
        self.outputs: list[Any] = []

    # the walk --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Write everything but the outputs, which are left in `outputs`."""
        held = {each.arg.name: each.target for each in self.program.graph_signature.input_specs if each.target}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = self._placeholder(node, held.get(node.name))
            elif node.op == "output":
                self.outputs = [self.known[each] if isinstance(each, fx.Node) else each for each in node.args[0]]
            elif node not in self.known:
                self.known[node] = self._written(node)
            if node.target is own.quantize.default:
                self._note_quantizer(node)

    def _placeholder(self, node: fx.Node, name: Any) -> Any:
        if name is not None:
            tensor = {**self.program.state_dict, **self.program.constants}[name].detach()
            self.names[id(tensor)] = str(name)
            self.alive.append(tensor)
            return tensor
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape, kind = self.like(node)
        place = self.file.tensor(node.name, shape, kind)
        self.inputs[node.name] = made = Value(shape, kind, {plain(len(shape)): place})
        return made

    def _written(self, node: fx.Node) -> Any:
        try:
            found = self._folded(node)
            if found is not None:
                return found
            if node.target not in FORMS:
                raise UnfitError("has no form in a .tflite file")
            return FORMS[node.target](self, node)
        except UnfitError as error:
            raise refused(node, str(error)) from error

    def _folded(self, node: fx.Node) -> Any:
        """The value of an operation over constants alone, or a size; None for others."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            return extent_of(node.meta["val"], self.batch)
        if node.target in (own.dequantize.default, own.quantize.default):
            return None
        given = [self.known[each] for each in node.all_input_nodes]
        is_filled = node.target in FILLED  # as long as the batch, the same for every sample
        if not is_filled and not all(isinstance(each, Tensor | int) and not isinstance(each, Free) for each in given):
            return None
        if is_filled and any(isinstance(each, Value) for each in given):
            return None
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda each: _once(self._known(each)))
        function: Any = node.target
        with torch.no_grad():
            made = function(*args, **kwargs)
        if isinstance(made, Tensor):
            self.alive.append(made)
            self.names[id(made)] = node.name
        return made

    def _known(self, value: Any) -> Any:
        return self.known[value] if isinstance(value, fx.Node) else value

    def _note_quantizer(self, node: fx.Node) -> None:
        value, scale = self.known[node], self.known[node.args[1]]
        if isinstance(value, Value):
            stub = self.names.get(id(scale), node.name).removesuffix(".scale")
            calls = [name for name in self.quantizers if name.rpartition("/")[0] == stub]
            self.quantizers[f"{stub}/QuantizeLinear" + (f"_{len(calls)}" if calls else "")] = value

    # what forms ask for ----------------------------------------------------------------------------------------------

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """By name, with defaults; nodes as what they are in the file."""
        function: Any = node.target
        named = function._schema.arguments
        given = {each.name: each.default_value for each in named}
        given |= dict(zip((each.name for each in named), node.args, strict=False)) | dict(node.kwargs)
        found: dict[str, Any] = fx.node.map_aggregate(given, self._known)
        return found

    def like(self, node: fx.Node) -> tuple[tuple[int, ...], str]:
        """Shape and type of what a node gives."""
        value = node.meta["val"]
        return shape_of(value, self.batch), kind_of_dtype(value.dtype)

    def ending(self, node: fx.Node, *, folds: bool = True) -> Ending:
        """The activation and the quantizer after a node, where nobody else reads what is in between."""
        end, activation = node, NONE
        reader = _sole_reader(node)
        if folds and reader is not None and (found := _folded_activation(reader)):
            end, activation = reader, found
            reader = _sole_reader(end)
        if reader is not None and reader.target is own.quantize.default and reader.args[0] is end:
            return Ending(reader, activation, self.parameters(reader))
        return Ending(end, activation, None)

    def close(self, node: fx.Node, ending: Ending, value: Value) -> Value:
        """What an operator gave that did all until the ending."""
        each = node
        while each is not ending.node:
            self.known[each] = value
            each = next(iter(each.users))
        self.known[each] = value
        return value

    def parameters(self, node: fx.Node) -> Quantized:
        """Of a quantize or dequantize of activations."""
        scale, zero = (self.known[each] for each in node.args[1:3])
        return Quantized(np.float32(scale.reshape(-1)[0].item()), int(zero.reshape(-1)[0].item()))

    def name(self, node: fx.Node) -> str:
        return node.name

    # tensors ---------------------------------------------------------------------------------------------------------

    def constant(self, data: Tensor | np.ndarray, name: str = "constant") -> int:
        array = data.detach().cpu().contiguous().numpy() if isinstance(data, Tensor) else data
        return self.file.constant(name, array)

    def ints(self, values: Sequence[int]) -> int:
        return self.file.constant("sizes", np.array(values, np.int32))

    def take(self, value: Any, order: Order | None = None) -> int:
        """The place of a tensor whose axes stand in this order: as the model has them unless told."""
        if isinstance(value, Held):
            return self.file.constant(value.name, value.data, value.quantized, value.kind)
        if isinstance(value, Tensor):
            return self._constant(value, order or plain(value.ndim))
        wanted = order or plain(value.rank)
        if wanted not in value.stored:
            value.stored[wanted] = self._reordered(value, wanted)
        return value.stored[wanted]

    def _constant(self, value: Tensor, order: Order) -> int:
        key = (id(value), order)
        if key not in self.constants:
            name = self.names.get(id(value), "constant")
            self.alive.append(value)
            self.constants[key] = self.constant(value.permute(order), name)
        return self.constants[key]

    def _reordered(self, value: Value, wanted: Order) -> int:
        before = value.order
        shape = [value.shape[axis] for axis in wanted]
        source = value.stored[before]
        made = self.file.tensor("transposed", shape, "int8" if value.codes else value.kind, value.codes)
        is_integer = value.codes is not None
        if _wide(before, value.shape) == _wide(wanted, value.shape):
            self.file.operation("RESHAPE", [source, self.ints(sizes(shape))], [made], is_integer, {})
        else:
            axes = self.ints([before.index(axis) for axis in wanted])
            self.file.operation("TRANSPOSE", [source, axes], [made], is_integer, {})
        return made

    def float_of(self, value: Any) -> Any:
        """Where codes stand for floats, the floats."""
        if isinstance(value, Held):
            made = torch.from_numpy(value.values)
            self.names[id(made)] = value.name
            self.alive.append(made)
            return made
        if not isinstance(value, Value) or value.codes is None:
            return value
        if value.as_float is None:
            order = value.order
            value.as_float = self.emit("DEQUANTIZE", [value.stored[order]], value.shape, value.kind, order=order)
        return value.as_float

    def emit(
        self,
        operator: str,
        inputs: Sequence[int],
        shape: Sequence[int],
        kind: str,
        *,
        order: Order | None = None,
        codes: Quantized | None = None,
        name: str = "",
        is_integer: bool | None = None,
        **options: Any,
    ) -> Value:
        """An operator, and what it gives: a value of this shape, stored in this order."""
        order = order or plain(len(shape))
        place = self.file.tensor(
            name or operator.lower(), [shape[axis] for axis in order], "int8" if codes else kind, codes
        )
        integer = codes is not None if is_integer is None else is_integer
        self.file.operation(operator, inputs, [place], integer, options)
        return Value(tuple(shape), kind, {order: place}, codes)

    def reshaped(self, value: Value, shape: Sequence[int], order: Order | None = None) -> Value:
        """The same numbers, row by row as the model sees them, in another shape, stored in this order."""
        order = order or plain(len(shape))
        same = next((each for each in value.stored if _is_plain(each, value.shape)), plain(value.rank))
        source = self.take(value, same)
        target = [shape[axis] for axis in order]
        return self.emit("RESHAPE", [source, self.ints(sizes(target))], shape, value.kind, order=order, codes=value.codes)

    def batch_of_zeros(self, rank: int) -> Value:
        """As long as the batch, with extents of one besides: what is added to it is repeated for every sample."""
        source = next(
            (each for each in self.inputs.values() if each.rank and isinstance(each.shape[0], Free)), None
        )
        if source is None:
            raise NotFreeError("no input has a batch")
        begin, size = [0] * source.rank, [-1, *[1] * (source.rank - 1)]
        ones = [1] * source.rank
        ones[0] = source.shape[0]
        made = self.emit("SLICE", [self.take(source), self.ints(begin), self.ints(size)], ones, source.kind)
        if source.kind != "float32":
            made = self.emit("CAST", [self.take(made)], made.shape, "float32", **self.cast(source.kind, "float32"))
        zero = self.constant(np.zeros(1, np.float32))
        flat = self.emit("MUL", [self.take(made), zero], made.shape, "float32")
        return self.reshaped(flat, [source.shape[0], *[1] * (rank - 1)])

    def cast(self, given: str, wanted: str) -> dict[str, int]:
        """The options of a CAST."""
        from scalepoint.formats.litert.schema import TYPES  # noqa: PLC0415

        types = self.file.schema.TensorType
        return {"inDataType": getattr(types, TYPES[given]), "outDataType": getattr(types, TYPES[wanted])}


def sizes(shape: Sequence[int]) -> list[int]:
    """Of a RESHAPE: one extent may be free."""
    found = [-1 if isinstance(each, Free) else int(each) for each in shape]
    if found.count(-1) > 1:
        raise NotFreeError(f"a reshape to {found}")
    return found


def refused(node: fx.Node, why: str) -> TargetError:
    """The operation as the user wrote it, where, and the way out."""
    return TargetError(
        f"{operation_of(node)}{place_of(node)} {why}: target 'litert' cannot run it in any precision. Write that line "
        "with other operations, or deploy for 'onnxruntime'"
    )


def _wide(order: Order, shape: Sequence[int]) -> list[int]:
    """The axes that are longer than one, in order."""
    return [axis for axis in order if isinstance(shape[axis], Free) or shape[axis] != 1]


def _is_plain(order: Order, shape: Sequence[int]) -> bool:
    return _wide(order, shape) == _wide(plain(len(shape)), shape)


def _sole_reader(node: fx.Node) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _folded_activation(node: fx.Node) -> int:
    """The number of an activation that operators take in, 0 for other operations."""
    if node.target in (aten.relu.default, aten.relu_.default):
        return RELU
    if node.target is aten.relu6.default:
        return RELU6
    if node.target in (aten.clamp.default, aten.hardtanh.default, aten.clamp_min.default):
        limits = [*node.args[1:], *(node.kwargs.get(each) for each in ("min", "max", "min_val", "max_val"))]
        given = tuple(each for each in limits if each is not None)
        return {(0, 6): RELU6, (0,): RELU}.get(given, NONE)
    return NONE


def elements(shape: Sequence[int]) -> int:
    return prod(shape)


def is_true(given: Mapping[str, Any], name: str) -> bool:
    return bool(given.get(name))
