"""GraphWriter: writes an exported program as LiteRT operators, operation by operation.

constants              are computed here, once
quantize, dequantize   become forms of a value: codes, or floats where an operation needs floats
conv, add, mean, ..    become integer operators if their operands and their result are quantized, else float operators

The modules of this package register a function for each operation in OPERATION_WRITERS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

import scalepoint.formats.operators  # noqa: F401  # registers torch.ops.scalepoint.quantize
from scalepoint.compat.torch_names import HigherOrderOperator
from scalepoint.errors import TargetError
from scalepoint.formats.litert.schema import DynamicExtent, QuantizationParameters
from scalepoint.formats.litert.tensors import TensorWriter
from scalepoint.formats.litert.values import (
    DataDependentSizeError,
    FixedBatchError,
    QuantizedConstant,
    Value,
    model_order,
    read_extent,
    read_shape,
)
from scalepoint.graph.user_traceback import describe_location, get_operation_name
from scalepoint.numerics import dtype_name

aten, scalepoint_ops = torch.ops.aten, torch.ops.scalepoint
OperationWriter = Callable[["GraphWriter", fx.Node], Any]
OPERATION_WRITERS: dict[Any, OperationWriter] = {}
NO_ACTIVATION, RELU, RELU6 = 0, 1, 3  # ActivationFunctionType of the schema

FILL_OPERATIONS = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
FILL_LIKE_OPERATIONS = (  # read the shape of a tensor, but not its values
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip


def writes(*operations: Any) -> Callable[[OperationWriter], OperationWriter]:
    """Decorator: register a function as the writer of these operations."""

    def register(function: OperationWriter) -> OperationWriter:
        OPERATION_WRITERS.update(dict.fromkeys(operations, function))
        return function

    return register


class UnsupportedOperationError(Exception):
    """An operation cannot be written. The message continues a sentence that starts with the operation."""


@dataclass(frozen=True)
class FusedEnding:
    """The operations after an operator that the operator does itself: an activation, and the rounding to codes."""

    node: fx.Node  # the last of these operations
    activation: int
    quantization: QuantizationParameters | None


class GraphWriter(TensorWriter):
    """Writes one program to one file."""

    def __init__(self, program: ExportedProgram, batch_size: int) -> None:
        super().__init__()
        self.program, self.batch_size = program, batch_size
        self.values: dict[fx.Node, Any] = {}  # what each node is in the file: a Value, a constant, a number
        self.quantizers: dict[str, Value] = {}  # codes of activations, by the name that `verify` uses
        self.outputs: list[Any] = []
        self.fixed_batch_reason = ""  # why a dynamic batch was not possible
        self._parameter_ids: set[int] = set()  # ids of tensors that belong to the model

    def run(self) -> None:
        """Write all operations. The results of the program are stored in `outputs`."""
        targets = {spec.arg.name: spec.target for spec in self.program.graph_signature.input_specs if spec.target}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._add_placeholder(node, targets.get(node.name))
            elif node.op == "output":
                self.outputs = [self.argument(output) for output in node.args[0]]
            elif node.op == "get_attr":
                self.values[node] = None  # the graph of a branch
            elif node not in self.values:
                self.values[node] = self._write_operation(node)
            if node.target is scalepoint_ops.quantize.default:
                self._record_quantizer(node)

    def _add_placeholder(self, node: fx.Node, parameter_name: Any) -> Any:
        """Return a parameter, or add an input of the model."""
        if parameter_name is not None:
            tensors = {**self.program.state_dict, **self.program.constants}
            tensor = self.name_constant(tensors[parameter_name].detach(), str(parameter_name))
            self._parameter_ids.add(id(tensor))
            return tensor
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            return fake
        shape, dtype = self.shape_and_dtype(node)
        index = self.file.add_tensor(node.name, shape, dtype)
        self.inputs[node.name] = Value(shape, dtype, {model_order(len(shape)): index})
        return self.inputs[node.name]

    def _write_operation(self, node: fx.Node) -> Any:
        try:
            if isinstance(node.target, HigherOrderOperator):
                raise UnsupportedOperationError("has branches")
            constant = self._fold_constant(node)
            if constant is not None:
                return constant
            if node.target in OPERATION_WRITERS:
                return OPERATION_WRITERS[node.target](self, node)
            if any(isinstance(self.values[operand], DynamicExtent) for operand in node.all_input_nodes):
                raise FixedBatchError(f"{node.target} takes the batch size as a number")
            raise UnsupportedOperationError("is not supported in .tflite files")
        except (UnsupportedOperationError, DataDependentSizeError) as error:
            raise unsupported_operation(node, str(error)) from error

    def _fold_constant(self, node: fx.Node) -> Any:
        """Compute a size or an operation on constants; None for other operations."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            return read_extent(node.meta["val"], self.batch_size)
        if node.target in (scalepoint_ops.dequantize.default, scalepoint_ops.quantize.default):
            return None
        operands = [self.values[operand] for operand in node.all_input_nodes]
        if node.target in FILL_OPERATIONS:
            can_fold = not any(isinstance(operand, Value) for operand in operands)
        elif node.target in FILL_LIKE_OPERATIONS:
            can_fold = True
        else:
            can_fold = all(
                isinstance(operand, Tensor | int) and not isinstance(operand, DynamicExtent) for operand in operands
            )
        if not can_fold:
            return None
        # A fill of the batch has the same values for every sample: one sample is enough, its readers broadcast it.
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda value: _dynamic_as_one(self.argument(value))
        )
        function: Any = node.target
        with torch.no_grad():
            result = function(*args, **kwargs)
        return self.name_constant(result, node.name) if isinstance(result, Tensor) else result

    def _record_quantizer(self, node: fx.Node) -> None:
        """Remember the codes of a quantizer as NAME/QuantizeLinear, as ONNX files name them; _1, _2 for later calls."""
        value, scale = self.values[node], self.argument(node.args[1])
        if isinstance(value, Value):
            stub = self.constant_names.get(id(scale), node.name).removesuffix(".scale")
            earlier_calls = [name for name in self.quantizers if name.rpartition("/")[0] == stub]
            suffix = f"_{len(earlier_calls)}" if earlier_calls else ""
            self.quantizers[f"{stub}/QuantizeLinear{suffix}"] = value

    # Methods that operation writers call

    def argument(self, value: Any) -> Any:
        """Return what a node is in the file; an argument that is not a node is returned unchanged."""
        return self.values[value] if isinstance(value, fx.Node) else value

    def is_parameter(self, value: Tensor) -> bool:
        """Whether a constant belongs to the model, so that it was not computed here."""
        return id(value) in self._parameter_ids

    def first_operand(self, node: fx.Node) -> Any:
        """Return the first operand; a constant is stored and returned as a Value."""
        operand = self.argument(node.args[0])
        if isinstance(operand, QuantizedConstant):
            operand = self.dequantize(operand)
        return self.as_value(operand) if isinstance(operand, Tensor) else operand

    def arguments(self, node: fx.Node) -> dict[str, Any]:
        """Return all arguments by name, with defaults; nodes are replaced by what they are in the file."""
        function: Any = node.target
        parameters = function._schema.arguments
        arguments = {parameter.name: parameter.default_value for parameter in parameters}
        arguments |= dict(zip((parameter.name for parameter in parameters), node.args, strict=False))
        arguments |= node.kwargs
        replaced: dict[str, Any] = fx.node.map_aggregate(arguments, self.argument)
        return replaced

    def shape_and_dtype(self, node: fx.Node) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of the result of a node."""
        value = node.meta["val"]
        return read_shape(value, self.batch_size), dtype_name(value.dtype)

    def find_ending(self, node: fx.Node, *, folds_activation: bool = True) -> FusedEnding:
        """Find the activation and the quantizer that follow a node and are the only readers of its result."""
        last, activation = node, NO_ACTIVATION
        reader = _only_reader(node)
        if folds_activation and reader is not None and _folded_activation(reader) != NO_ACTIVATION:
            last, activation = reader, _folded_activation(reader)
            reader = _only_reader(last)
        if reader is not None and reader.target is scalepoint_ops.quantize.default and reader.args[0] is last:
            return FusedEnding(reader, activation, self.read_quantization(reader))
        return FusedEnding(last, activation, None)

    def set_result(self, node: fx.Node, ending: FusedEnding, result: Value) -> Value:
        """Assign the result of an operator to its node and to the operations that are fused into the operator.

        Writes a QUANTIZE first if the ending has a quantizer and the operator computed in float.
        """
        if ending.quantization is not None and result.quantization is None:
            result = self.quantize(result, ending.quantization)
        while node is not ending.node:
            self.values[node] = result
            node = next(iter(node.users))
        self.values[node] = result
        return result

    def read_quantization(self, node: fx.Node) -> QuantizationParameters:
        """Return the parameters of a quantize or dequantize of activations."""
        scale, zero_point = map(self.argument, node.args[1:3])
        return QuantizationParameters(scale.detach().to(torch.float32).reshape(()).numpy(), int(zero_point))


def unsupported_operation(node: fx.Node, why: str) -> TargetError:
    """Build the error for an operation: its name, its line in the user's code, the reason, and what to do."""
    return TargetError(
        f"{get_operation_name(node)}{describe_location(node)} {why}: target 'litert' cannot run it in any precision. "
        "Write that line with other operations, or deploy for 'onnxruntime'"
    )


def _dynamic_as_one(value: Any) -> Any:
    """Replace a value by an empty tensor of its shape, with 1 for every dynamic extent."""
    if isinstance(value, Value):
        return torch.empty([_dynamic_as_one(size) for size in value.shape], dtype=getattr(torch, value.dtype))
    return 1 if isinstance(value, DynamicExtent) else value


def _only_reader(node: fx.Node) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _folded_activation(node: fx.Node) -> int:
    """Return the activation that the operator before this node can do itself, or NO_ACTIVATION."""
    if node.target in (aten.relu.default, aten.relu_.default):
        return RELU
    if node.target is aten.relu6.default:
        return RELU6
    if node.target in (aten.clamp.default, aten.hardtanh.default, aten.clamp_min.default):
        limits = dict(zip(("min", "max"), node.args[1:], strict=False))
        limits |= {name.removesuffix("_val"): value for name, value in node.kwargs.items()}
        low_and_high: Any = (limits.get("min"), limits.get("max"))
        return {(0, 6): RELU6, (0, None): RELU}.get(low_and_high, NO_ACTIVATION)
    return NO_ACTIVATION
