"""The walk over a program: every operation becomes those of LiteRT that the table of forms has for it.

constants            computed now, once
quantize, dequantize forms of a value: codes, or floats where somebody asks for them
conv, add, mean, ..  integer operators where their operands have codes and their result gets some, else float ones
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

import scalepoint.formats.operators  # noqa: F401  # registers torch.ops.scalepoint.quantize
from scalepoint.errors import TargetError
from scalepoint.formats.litert.schema import QuantizationParameters
from scalepoint.formats.litert.tensors import TensorWriter
from scalepoint.formats.litert.values import (
    DataDependentSizeError,
    DynamicExtent,
    FixedBatchError,
    QuantizedConstant,
    Value,
    model_order,
    read_extent,
    read_shape,
    to_numpy_name,
)
from scalepoint.graph.user_traceback import describe_location, get_operation_name

aten, own = torch.ops.aten, torch.ops.scalepoint
OperationWriter = Callable[["Walk", fx.Node], Any]
OPERATION_WRITERS: dict[Any, OperationWriter] = {}
NONE, RELU, RELU6 = 0, 1, 3  # activations that an operator takes in, by their numbers in the schema


def writes(*targets: Any) -> Callable[[OperationWriter], OperationWriter]:
    """Let a function write these operations."""

    def keep(function: OperationWriter) -> OperationWriter:
        OPERATION_WRITERS.update(dict.fromkeys(targets, function))
        return function

    return keep


FILL_OPERATIONS = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
FILL_LIKE_OPERATIONS = (  # of the shape of another tensor, whatever its values
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip


def _dynamic_as_one(value: Any) -> Any:
    """One for what is free: whoever reads it broadcasts."""
    if isinstance(value, Value):
        return torch.empty([_dynamic_as_one(size) for size in value.shape], dtype=getattr(torch, value.kind))
    return 1 if isinstance(value, DynamicExtent) else value


class UnsupportedOperationError(Exception):
    """Why an operation has no form, in words that follow it."""


@dataclass(frozen=True)
class FusedEnding:
    """What follows an operation and is done by its operator: an activation, the rounding to codes."""

    node: fx.Node  # the last that is done
    activation: int
    codes: QuantizationParameters | None


class Walk(TensorWriter):
    """One file, from one program."""

    def __init__(self, program: ExportedProgram, batch: int) -> None:
        super().__init__()
        self.program, self.batch = program, batch
        self.known: dict[fx.Node, Any] = {}
        self.owned: set[int] = set()  # constants that the model holds, not those that are computed of them
        self.quantizers: dict[str, Value] = {}  # their codes, by the names that verify has for them
        self.outputs: list[Any] = []
        self.why_fixed = ""  # why the batch is that of the example where it was to be free

    # the walk --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Write everything but the outputs, which are left in `outputs`."""
        held = {each.arg.name: each.target for each in self.program.graph_signature.input_specs if each.target}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = self._placeholder(node, held.get(node.name))
            elif node.op == "output":
                self.outputs = [self.known[each] if isinstance(each, fx.Node) else each for each in node.args[0]]
            elif node.op == "get_attr":
                self.known[node] = None  # the graph of a branch
            elif node not in self.known:
                self.known[node] = self._write_node(node)
            if node.target is own.quantize.default:
                self._note_quantizer(node)

    def _placeholder(self, node: fx.Node, name: Any) -> Any:
        if name is not None:
            held = {**self.program.state_dict, **self.program.constants}
            tensor = self.name_constant(held[name].detach(), str(name))
            self.owned.add(id(tensor))
            return tensor
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        shape, kind = self.shape_and_dtype(node)
        place = self.file.tensor(node.name, shape, kind)
        self.inputs[node.name] = made = Value(shape, kind, {model_order(len(shape)): place})
        return made

    def _write_node(self, node: fx.Node) -> Any:
        try:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise UnsupportedOperationError("has branches")
            found = self._fold_constant(node)
            if found is not None:
                return found
            if node.target not in OPERATION_WRITERS and any(
                isinstance(self.known[each], DynamicExtent) for each in node.all_input_nodes
            ):
                raise FixedBatchError(f"{node.target} is told the batch")
            if node.target not in OPERATION_WRITERS:
                raise UnsupportedOperationError("has no form in a .tflite file")
            return OPERATION_WRITERS[node.target](self, node)
        except (UnsupportedOperationError, DataDependentSizeError) as error:
            raise unsupported_operation(node, str(error)) from error

    def _fold_constant(self, node: fx.Node) -> Any:
        """The value of an operation over constants alone, or a size; None for others."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            return read_extent(node.meta["val"], self.batch)
        if node.target in (own.dequantize.default, own.quantize.default):
            return None
        given = [self.known[each] for each in node.all_input_nodes]
        is_like = node.target in FILL_LIKE_OPERATIONS
        is_filled = is_like or node.target in FILL_OPERATIONS  # as long as the batch, the same for every sample
        if not is_filled and not all(
            isinstance(each, Tensor | int) and not isinstance(each, DynamicExtent) for each in given
        ):
            return None
        if is_filled and not is_like and any(isinstance(each, Value) for each in given):
            return None
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda each: _dynamic_as_one(self.argument(each))
        )
        function: Any = node.target
        with torch.no_grad():
            made = function(*args, **kwargs)
        return self.name_constant(made, node.name) if isinstance(made, Tensor) else made

    def _note_quantizer(self, node: fx.Node) -> None:
        value, scale = self.known[node], self.argument(node.args[1])
        if isinstance(value, Value):
            stub = self.names.get(id(scale), node.name).removesuffix(".scale")
            calls = [name for name in self.quantizers if name.rpartition("/")[0] == stub]
            self.quantizers[f"{stub}/QuantizeLinear" + (f"_{len(calls)}" if calls else "")] = value

    # what forms ask for ----------------------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """An argument as what it is in the file."""
        return self.known[value] if isinstance(value, fx.Node) else value

    def is_parameter(self, value: Tensor) -> bool:
        return id(value) in self.owned

    def first(self, node: fx.Node) -> Any:
        """The first operand, a constant as a value too."""
        found = self.dequantized(x) if isinstance(x := self.argument(node.args[0]), QuantizedConstant) else x
        if not isinstance(found, Tensor):
            return found
        return Value(tuple(found.shape), to_numpy_name(found.dtype), {model_order(found.ndim): self.take(found)})

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """By name, with defaults; nodes as what they are in the file."""
        function: Any = node.target
        named = function._schema.arguments
        given = {each.name: each.default_value for each in named}
        given |= dict(zip((each.name for each in named), node.args, strict=False)) | dict(node.kwargs)
        found: dict[str, Any] = fx.node.map_aggregate(given, self.argument)
        return found

    def shape_and_dtype(self, node: fx.Node) -> tuple[tuple[int, ...], str]:
        """Shape and type of what a node gives."""
        value = node.meta["val"]
        return read_shape(value, self.batch), to_numpy_name(value.dtype)

    def ending(self, node: fx.Node, *, folds: bool = True) -> FusedEnding:
        """The activation and the quantizer after a node, where nobody else reads what is in between."""
        end, activation = node, NONE
        reader = _sole_reader(node)
        if folds and reader is not None and (found := _folded_activation(reader)):
            end, activation = reader, found
            reader = _sole_reader(end)
        if reader is not None and reader.target is own.quantize.default and reader.args[0] is end:
            return FusedEnding(reader, activation, self.parameters(reader))
        return FusedEnding(end, activation, None)

    def close(self, node: fx.Node, ending: FusedEnding, value: Value) -> Value:
        """What an operator gave that did all until the ending."""
        each = node
        while each is not ending.node:
            self.known[each] = value
            each = next(iter(each.users))
        self.known[each] = value
        return value

    def parameters(self, node: fx.Node) -> QuantizationParameters:
        """Of a quantize or dequantize of activations."""
        scale, zero = map(self.argument, node.args[1:3])
        return QuantizationParameters(scale.detach().to(torch.float32).reshape(()).numpy(), int(zero))


def unsupported_operation(node: fx.Node, why: str) -> TargetError:
    """The operation as the user wrote it, where, and the way out."""
    return TargetError(
        f"{get_operation_name(node)}{describe_location(node)} {why}: target 'litert' cannot run it in any precision. "
        "Write that line with other operations, or deploy for 'onnxruntime'"
    )


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
        given = dict(zip(("min", "max"), node.args[1:], strict=False))
        given |= {name.removesuffix("_val"): value for name, value in node.kwargs.items()}
        limits: Any = (given.get("min"), given.get("max"))
        return {(0, 6): RELU6, (0, None): RELU}.get(limits, NONE)  # (None, 0) is no ReLU
    return NONE
