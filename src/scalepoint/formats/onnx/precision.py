"""Converts the float tensors of a graph to 16 bits, for compilers that use the types of the file.

Every float32 tensor becomes float16 or bfloat16, including scales; TensorRT 11 needs this. Inputs and outputs of the
model stay float32, with a Cast. Operands that an operator takes only in float32 stay too (the scales of Resize).
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from scalepoint.errors import ExportError
from scalepoint.formats.onnx.graph_edits import add_constant

FLOAT = ir.DataType.FLOAT


def convert_floats(model: Any, name: str) -> None:
    """Convert float32 tensors to the type with this name, in place."""
    graph = model.graph
    if any(isinstance(attribute.value, ir.Graph) for node in graph for attribute in node.attributes.values()):
        raise ExportError(f"float_dtype={name} cannot be used with branches or loops (If, Loop): use float32")
    outputs = list(graph.outputs)  # the values before any Cast is inserted
    conversion = _FloatConversion(graph, model.opset_imports[""], name, ir.DataType[name.upper()])
    conversion.retype_values()
    for node in list(graph):
        conversion.retype_attributes(node)
        conversion.cast_inputs(node)
        conversion.cast_outputs(node)
    conversion.keep_float32_interface(outputs)


@dataclass
class _FloatConversion:
    """The conversion of one graph.

    Attributes:
        graph: The graph.
        opset: Its opset.
        name: The name of the 16-bit type.
        dtype: The 16-bit type.
        originals: Every converted value -> the float32 constant that it was, or None if it is computed.
    """

    graph: Any
    opset: int
    name: str
    dtype: Any
    originals: dict[Any, Any] = field(default_factory=dict)

    def retype_values(self) -> None:
        """Convert constants, and declare all other float32 values as 16-bit ones. Casts are inserted later."""
        graph = self.graph
        node_outputs = [value for node in graph for value in node.outputs]
        for value in (*graph.inputs, *graph.initializers.values(), *node_outputs):
            if value.dtype == FLOAT:
                self.originals[value] = value.const_value
        for value, constant in self.originals.items():
            if value.is_graph_input():
                continue
            value.dtype = self.dtype
            if constant is not None:
                value.const_value = ir.Tensor(self.round(constant.numpy()), dtype=self.dtype, name=value.name)

    def round(self, array: Any) -> Any:
        """Round to 16 bits. Finite values stay finite (masks are the lowest float32), and no value becomes 0."""
        numpy_type = self.dtype.numpy()
        limits = ml_dtypes.finfo(numpy_type)  # type: ignore[no-untyped-call]
        with np.errstate(over="ignore"):
            clipped = np.where(np.isfinite(array), np.clip(array, float(limits.min), float(limits.max)), array)
            rounded = clipped.astype(numpy_type)
        became_zero = (rounded == 0) & (array != 0)
        smallest = np.copysign(np.float32(limits.smallest_subnormal), array).astype(numpy_type)
        return np.where(became_zero, smallest, rounded)

    def retype_attributes(self, node: Any) -> None:
        """Convert float32 tensors and types in the attributes of a node."""
        tensor = node.attributes.get_tensor("value") if node.op_type in ("Constant", "ConstantOfShape") else None
        if tensor is not None and tensor.dtype == FLOAT:
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(self.round(tensor.numpy()), dtype=self.dtype))
        for key in ("to", "output_dtype"):
            if node.attributes.get_int(key) == FLOAT:
                node.attributes[key] = ir.AttrInt64(key, self.dtype)

    def cast_inputs(self, node: Any) -> None:
        """Give a node the float32 form of converted operands that its schema does not allow in 16 bits."""
        schema, is_two_level = self._find_schema(node), _is_two_level(node)
        for position, value in enumerate(node.inputs):
            is_allowed = position != 1 if is_two_level else self._allows(schema and schema.inputs, position)
            if value in self.originals and not is_allowed:
                node.replace_input_with(position, self._to_float32(node, value))

    def cast_outputs(self, node: Any) -> None:
        """Cast results to 16 bits that a node computes in float32. Scales of a second level stay float32."""
        schema, is_two_level = self._find_schema(node), _is_two_level(node)
        for position, value in enumerate(node.outputs):
            is_allowed = not is_two_level and self._allows(schema and schema.outputs, position)
            if value not in self.originals or is_allowed:
                continue
            value.dtype = FLOAT
            del self.originals[value]
            if not _computes_scale(node):
                cast = ir.node("Cast", [value], {"to": self.dtype})
                self._redirect_readers(value, cast)
                self.originals[cast.outputs[0]] = None  # a later node that needs float32 gets a Cast of it
                self.graph.insert_after(node, cast)

    def _find_schema(self, node: Any) -> Any:
        if node.domain not in ("", "ai.onnx"):
            return None
        try:
            return onnx.defs.get_schema(node.op_type, self.opset, "")
        except onnx.defs.SchemaError:
            return None

    def _allows(self, formal_parameters: Any, position: int) -> bool:
        """Whether an operator allows the 16-bit type for an input or output; true for an operator without a schema."""
        if not formal_parameters:
            return True
        parameter = formal_parameters[min(position, len(formal_parameters) - 1)]  # the last may be variadic
        return f"tensor({self.name})" in parameter.types

    def _to_float32(self, node: Any, value: Any) -> Any:
        """Return a converted value in float32: its original constant, or a Cast of a computed value."""
        original = self.originals[value]
        if original is not None:
            return add_constant(self.graph, f"{value.name}.float32", original.numpy())
        cast = ir.node("Cast", [value], {"to": FLOAT})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(FLOAT), value.shape
        self.graph.insert_before(node, cast)
        return cast.outputs[0]

    def _redirect_readers(self, value: Any, cast: Any) -> None:
        """Let all readers of a value read its Cast instead."""
        output = cast.outputs[0]
        output.type, output.shape = ir.TensorType(self.dtype), value.shape
        for use in list(value.uses()):
            if use.node is not cast:
                use.node.replace_input_with(use.idx, output)

    def keep_float32_interface(self, outputs: list[Any]) -> None:
        """Cast inputs from float32 and outputs to float32."""
        first = next(iter(self.graph), None)
        for value in self.graph.inputs:
            if value in self.originals and value.uses():
                cast = ir.node("Cast", [value], {"to": self.dtype})
                self._redirect_readers(value, cast)
                self.graph.insert_before(first, cast)
        for position, value in enumerate(outputs):
            if value in self.originals and not value.is_graph_input():
                name = value.name
                value.name = f"{name}_narrow"
                cast = ir.node("Cast", [value], {"to": FLOAT})
                output = cast.outputs[0]
                output.name, output.type, output.shape = name, ir.TensorType(FLOAT), value.shape
                self.graph.append(cast)
                self.graph.outputs[position] = output


def _is_two_level(node: Any) -> bool:
    """Whether a node (de)quantizes in two levels (NVFP4): its tensor scale (input 1) and its result need float32."""
    is_fp4 = node.op_type == "DequantizeLinear" and node.inputs[0].dtype == ir.DataType.FLOAT4E2M1
    return is_fp4 or node.op_type == "TRT_FP4DynamicQuantize" or _computes_scale(node)


def _computes_scale(node: Any) -> bool:
    """Whether the result of a node is only used as the scale of another DequantizeLinear."""
    uses = node.outputs[0].uses() if node.op_type == "DequantizeLinear" else ()
    return bool(uses) and all(use.node.op_type == "DequantizeLinear" and use.idx == 1 for use in uses)
