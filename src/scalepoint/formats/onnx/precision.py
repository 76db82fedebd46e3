"""The float remainder of an exported graph in 16 bits, for compilers that run the types of the file (TensorRT 11).

Every float32 tensor of the graph becomes fp16 or bf16, scales included. Inputs and outputs of the model keep their
type, behind a Cast; so does what an operator takes in float32 alone, as its schema says (the scales of Resize).
"""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from scalepoint.errors import ExportError

FLOAT = ir.DataType.FLOAT
_FLOAT_TYPES = {
    "float16": (ir.DataType.FLOAT16, np.float16, "tensor(float16)"),
    "bfloat16": (ir.DataType.BFLOAT16, ml_dtypes.bfloat16, "tensor(bfloat16)"),
}


def convert_floats(model: Any, name: str) -> None:
    """Turn float32 into the named type, in place."""
    kind, numpy_type, allowed = _FLOAT_TYPES[name]
    graph, opset = model.graph, model.opset_imports[""]
    if any(isinstance(each.value, ir.Graph) for node in graph for each in node.attributes.values()):
        raise ExportError(f"float_dtype={name}: the graph has branches or loops (If, Loop), which stay float32")
    narrow = {value: value.const_value for value in _list_values(graph) if value.dtype == FLOAT}
    outputs = list(graph.outputs)
    for value in narrow:
        if not value.is_graph_input():
            _retype(value, kind, numpy_type)
    for node in list(graph):
        if node.op_type in ("Constant", "ConstantOfShape"):
            _retype_constant(node, kind, numpy_type)
        for key in ("to", "output_dtype"):
            if key in node.attributes and node.attributes[key].as_int() == FLOAT:
                node.attributes[key] = ir.AttrInt64(key, kind)
        _insert_casts(graph, node, opset, narrow, (kind, allowed))
    _keep_float32_interface(graph, outputs, narrow, kind)


def _list_values(graph: Any) -> list[Any]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _retype(value: Any, kind: Any, numpy_type: Any) -> None:
    value.dtype = kind
    if value.const_value is not None:
        value.const_value = ir.Tensor(_round_array(value.const_value.numpy(), numpy_type), dtype=kind, name=value.name)


def _round_array(array: Any, numpy_type: Any) -> Any:
    """Rounded; what is finite stays finite (masks are the lowest float32), and a positive scale does not become 0."""
    limits = ml_dtypes.finfo(numpy_type)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):
        inside = np.where(np.isfinite(array), np.clip(array, float(limits.min), float(limits.max)), array)
        rounded = inside.astype(numpy_type)
    lost = (rounded == 0) & (array != 0)
    tiny = np.copysign(np.float32(limits.smallest_subnormal), array).astype(numpy_type)
    return np.where(lost, tiny, rounded)


def _retype_constant(node: Any, kind: Any, numpy_type: Any) -> None:
    found = node.attributes.get("value")
    if found is not None and found.as_tensor().dtype == FLOAT:
        tensor = ir.Tensor(_round_array(found.as_tensor().numpy(), numpy_type), dtype=kind)
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _insert_casts(graph: Any, node: Any, opset: int, narrow: dict[Any, Any], chosen: tuple[Any, str]) -> None:
    """Casts where the operator's schema has no 16-bit type for an operand."""
    kind, allowed = chosen
    schema, is_two_level = _find_schema(node, opset), _is_two_level(node)
    for place, value in enumerate(node.inputs):
        formal = schema and schema.inputs[min(place, len(schema.inputs) - 1)]
        if value in narrow and (place == 1 if is_two_level else formal and allowed not in formal.types):
            node.replace_input_with(place, _to_float32(graph, node, value, narrow[value]))
    for place, value in enumerate(node.outputs):
        formal = schema and schema.outputs[min(place, len(schema.outputs) - 1)]
        if value in narrow and _computes_scale(node):
            value.dtype = FLOAT
            del narrow[value]
        elif value in narrow and (is_two_level or (formal and allowed not in formal.types)):
            cast = ir.node("Cast", [value], {"to": kind}, name=f"{node.name}/from_float")
            _redirect_readers(value, cast, kind)
            value.dtype = FLOAT
            graph.insert_after(node, cast)


def _is_two_level(node: Any) -> bool:
    """NVFP4: the scale of the tensor is too fine for 16 bits, and what is scaled twice leaves as float32."""
    is_fp4 = node.op_type == "DequantizeLinear" and node.inputs[0].dtype == ir.DataType.FLOAT4E2M1
    return is_fp4 or node.op_type == "TRT_FP4DynamicQuantize" or _computes_scale(node)


def _computes_scale(node: Any) -> bool:
    """Whether all that a node gives is the scale of another one."""
    uses = node.outputs[0].uses() if node.op_type == "DequantizeLinear" else ()
    return bool(uses) and all(use.node.op_type == "DequantizeLinear" and use.idx == 1 for use in uses)


def _to_float32(graph: Any, node: Any, value: Any, original: Any) -> Any:
    """The value in float32: the stored numbers themselves, or a Cast of what is computed."""
    if original is not None:
        wide = ir.Value(
            name=f"{value.name}.float32", shape=value.shape, type=ir.TensorType(FLOAT), const_value=original
        )
        if wide.name not in graph.initializers:
            graph.register_initializer(wide)
        return graph.initializers[wide.name]
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


def _redirect_readers(value: Any, cast: Any, kind: Any) -> None:
    """All readers of a value read the Cast of it."""
    made = cast.outputs[0]
    made.type, made.shape = ir.TensorType(kind), value.shape
    for use in list(value.uses()):
        if use.node is not cast:
            use.node.replace_input_with(use.idx, made)


def _keep_float32_interface(graph: Any, outputs: list[Any], narrow: dict[Any, Any], kind: Any) -> None:
    """Who calls the model gives and gets float32."""
    first = next(iter(graph), None)
    for value in graph.inputs:
        if value in narrow and value.uses():
            cast = ir.node("Cast", [value], {"to": kind}, name=f"{value.name}/narrow")
            _redirect_readers(value, cast, kind)
            graph.insert_before(first, cast)
    for place, value in enumerate(outputs):
        if value in narrow and not value.is_graph_input():
            name = value.name
            value.name = f"{name}_narrow"
            cast = ir.node("Cast", [value], {"to": FLOAT}, name=f"{name}/widen")
            made = cast.outputs[0]
            made.name, made.type, made.shape = name, ir.TensorType(FLOAT), value.shape
            graph.append(cast)
            graph.outputs[place] = made
