"""Converts the float tensors of a graph to 16 bits, for compilers that use the types of the file.

Every float32 tensor becomes float16 or bfloat16, including scales; TensorRT 11 needs this. Inputs and outputs of the
model stay float32, with a Cast. Operands that an operator takes only in float32 stay too (the scales of Resize).
"""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from scalepoint.errors import ExportError

FLOAT = ir.DataType.FLOAT
_FLOAT_TYPES = {  # name -> (type, numpy type, name in operator schemas)
    "float16": (ir.DataType.FLOAT16, np.float16, "tensor(float16)"),
    "bfloat16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16, "tensor(bfloat16)"),
}


def convert_floats(model: Any, name: str) -> None:
    """Convert float32 tensors to the type with this name, in place."""
    dtype, numpy_type, schema_type = _FLOAT_TYPES[name]
    graph, opset = model.graph, model.opset_imports[""]
    if any(isinstance(attribute.value, ir.Graph) for node in graph for attribute in node.attributes.values()):
        raise ExportError(f"float_dtype={name} cannot be used with branches or loops (If, Loop): use float32")
    # Every float32 value -> its original constant, or None if it is computed.
    constants_of_narrowed = {value: value.const_value for value in _list_values(graph) if value.dtype == FLOAT}
    outputs = list(graph.outputs)  # the values before any Cast is inserted
    for value in constants_of_narrowed:
        if not value.is_graph_input():
            _retype(value, dtype, numpy_type)
    for node in list(graph):
        if node.op_type in ("Constant", "ConstantOfShape"):
            _retype_constant(node, dtype, numpy_type)
        for key in ("to", "output_dtype"):
            if key in node.attributes and node.attributes[key].as_int() == FLOAT:
                node.attributes[key] = ir.AttrInt64(key, dtype)
        _insert_casts(graph, node, opset, constants_of_narrowed, (dtype, schema_type))
    _keep_float32_interface(graph, outputs, constants_of_narrowed, dtype)


def _list_values(graph: Any) -> list[Any]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _retype(value: Any, dtype: Any, numpy_type: Any) -> None:
    value.dtype = dtype
    if value.const_value is not None:
        array = _round_array(value.const_value.numpy(), numpy_type)
        value.const_value = ir.Tensor(array, dtype=dtype, name=value.name)


def _round_array(array: Any, numpy_type: Any) -> Any:
    """Round to a 16-bit type. Finite values stay finite (masks are the lowest float32), and no value becomes 0."""
    limits = ml_dtypes.finfo(numpy_type)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):
        clipped = np.where(np.isfinite(array), np.clip(array, float(limits.min), float(limits.max)), array)
        rounded = clipped.astype(numpy_type)
    became_zero = (rounded == 0) & (array != 0)
    smallest = np.copysign(np.float32(limits.smallest_subnormal), array).astype(numpy_type)
    return np.where(became_zero, smallest, rounded)


def _retype_constant(node: Any, dtype: Any, numpy_type: Any) -> None:
    attribute = node.attributes.get("value")
    if attribute is not None and attribute.as_tensor().dtype == FLOAT:
        tensor = ir.Tensor(_round_array(attribute.as_tensor().numpy(), numpy_type), dtype=dtype)
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _insert_casts(
    graph: Any, node: Any, opset: int, constants_of_narrowed: dict[Any, Any], float_type: tuple[Any, str]
) -> None:
    """Insert casts around a node whose schema does not allow the 16-bit type for an operand or result."""
    dtype, schema_type = float_type
    schema, is_two_level = _find_schema(node, opset), _is_two_level(node)
    for position, value in enumerate(node.inputs):
        is_allowed = position != 1 if is_two_level else _allows(schema and schema.inputs, position, schema_type)
        if value in constants_of_narrowed and not is_allowed:
            node.replace_input_with(position, _to_float32(graph, node, value, constants_of_narrowed[value]))
    for position, value in enumerate(node.outputs):
        is_allowed = not is_two_level and _allows(schema and schema.outputs, position, schema_type)
        if value in constants_of_narrowed and _computes_scale(node):  # its reader takes the float32 scale as it is
            value.dtype = FLOAT
            del constants_of_narrowed[value]
        elif value in constants_of_narrowed and not is_allowed:
            cast = ir.node("Cast", [value], {"to": dtype}, name=f"{node.name}/from_float")
            _redirect_readers(value, cast, dtype)
            value.dtype = FLOAT
            del constants_of_narrowed[value]
            constants_of_narrowed[cast.outputs[0]] = None  # a reader that needs float32 gets a Cast of it
            graph.insert_after(node, cast)


def _allows(formal_parameters: Any, position: int, schema_type: str) -> bool:
    """Whether an operator's inputs (or outputs) allow a type at a position; true for an operator without a schema."""
    if not formal_parameters:
        return True
    return schema_type in formal_parameters[min(position, len(formal_parameters) - 1)].types  # the last may be variadic


def _is_two_level(node: Any) -> bool:
    """Whether a node (de)quantizes in two levels (NVFP4): its tensor scale (input 1) and its result need float32."""
    is_fp4 = node.op_type == "DequantizeLinear" and node.inputs[0].dtype == ir.DataType.FLOAT4E2M1
    return is_fp4 or node.op_type == "TRT_FP4DynamicQuantize" or _computes_scale(node)


def _computes_scale(node: Any) -> bool:
    """Whether the result of a node is only used as the scale of another DequantizeLinear."""
    uses = node.outputs[0].uses() if node.op_type == "DequantizeLinear" else ()
    return bool(uses) and all(use.node.op_type == "DequantizeLinear" and use.idx == 1 for use in uses)


def _to_float32(graph: Any, node: Any, value: Any, original: Any) -> Any:
    """Return the value in float32: the original constant, or a Cast of a computed value."""
    if original is not None:
        constant = ir.Value(
            name=f"{value.name}.float32", shape=value.shape, type=ir.TensorType(FLOAT), const_value=original
        )
        if constant.name not in graph.initializers:
            graph.register_initializer(constant)
        return graph.initializers[constant.name]
    cast = ir.node("Cast", [value], {"to": FLOAT}, name=f"{node.name}/to_float")
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(FLOAT), value.shape
    graph.insert_before(node, cast)
    return cast.outputs[0]


def _find_schema(node: Any, opset: int) -> Any:
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        return onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _redirect_readers(value: Any, cast: Any, dtype: Any) -> None:
    """Let all readers of a value read its Cast instead."""
    output = cast.outputs[0]
    output.type, output.shape = ir.TensorType(dtype), value.shape
    for use in list(value.uses()):
        if use.node is not cast:
            use.node.replace_input_with(use.idx, output)


def _keep_float32_interface(graph: Any, outputs: list[Any], constants_of_narrowed: dict[Any, Any], dtype: Any) -> None:
    """Cast inputs from float32 and outputs to float32."""
    first = next(iter(graph), None)
    for value in graph.inputs:
        if value in constants_of_narrowed and value.uses():
            cast = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}/narrow")
            _redirect_readers(value, cast, dtype)
            graph.insert_before(first, cast)
    for position, value in enumerate(outputs):
        if value in constants_of_narrowed and not value.is_graph_input():
            name = value.name
            value.name = f"{name}_narrow"
            cast = ir.node("Cast", [value], {"to": FLOAT}, name=f"{name}/widen")
            output = cast.outputs[0]
            output.name, output.type, output.shape = name, ir.TensorType(FLOAT), value.shape
            graph.append(cast)
            graph.outputs[position] = output
