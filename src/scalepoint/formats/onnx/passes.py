"""Passes over the exported graph before it is saved: integer constants, node names, and no data of this machine."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from scalepoint.compat.torch_onnx import NAME_SCOPES_KEY
from scalepoint.formats.onnx.precision import convert_floats

# Smaller constants are already shared by simplify. As many elements of a large one are compared before all are.
MAX_SMALL_ELEMENTS = 1024
_NUMPY_TYPES = {
    "INT4": ml_dtypes.int4,
    "UINT4": ml_dtypes.uint4,
    "INT2": ml_dtypes.int2,
    "UINT2": ml_dtypes.uint2,
    "FLOAT4E2M1": ml_dtypes.float4_e2m1fn,
    "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn,
    "FLOAT8E5M2": ml_dtypes.float8_e5m2,
    "INT8": np.int8,
    "UINT8": np.uint8,
}


def run_passes(model: Any, ir_version: int, float_dtype: str = "float32") -> None:
    """Run all passes in order."""
    fold_casts(model)
    share_embedding_codes(model)
    fold_pads(model)
    use_global_pools(model)
    pool_without_extra_axis(model)
    if float_dtype != "float32":
        convert_floats(model, float_dtype)
    share_equal_initializers(model)
    name_nodes(model)
    strip_debug_metadata(model)
    remove_unused(model)
    model.ir_version = ir_version
    model.producer_name = "scalepoint"
    model.producer_version = ""


def fold_casts(model: Any) -> None:
    """Replace Cast(stored codes) by an initializer of the narrow type. Runtimes fold casts to wider types."""
    graph = model.graph
    converted: dict[tuple[str, str], Any] = {}
    for node in list(graph):
        if node.op_type != "Cast" or node.inputs[0] is None or node.inputs[0].const_value is None:
            continue
        dtype = ir.DataType(node.attributes["to"].as_int())
        source = node.inputs[0]
        if dtype.name not in _NUMPY_TYPES or not source.is_initializer() or source.dtype.bitwidth < dtype.bitwidth:
            continue
        key = (source.name, dtype.name)
        if key not in converted:
            converted[key] = _convert_initializer(graph, source, dtype)
        ir.convenience.replace_all_uses_with(node.outputs[0], converted[key])
        graph.remove(node, safe=True)


def _convert_initializer(graph: Any, source: Any, dtype: Any) -> Any:
    array = source.const_value.numpy()
    if source.const_value.dtype == dtype:
        return source
    name = f"{source.name}.{dtype.name.lower()}"
    tensor = ir.Tensor(array.astype(_NUMPY_TYPES[dtype.name]), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=source.shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def share_embedding_codes(model: Any) -> None:
    """Let a tied head read the codes of its embedding table through a Transpose, which runtimes fold on load."""
    codes = [value for value in model.graph.initializers.values() if _is_codes(value)]
    tables = [value for value in codes if _is_gathered(value)]
    for value in codes:
        for table in tables:
            is_same = value is not table and tuple(value.shape) == tuple(table.shape)[::-1]
            if is_same and np.array_equal(value.const_value.numpy(), table.const_value.numpy().T):
                node = ir.node("Transpose", [table], {"perm": [1, 0]})
                node.outputs[0].name, node.outputs[0].shape = f"{value.name}.transposed", value.shape
                node.outputs[0].type = value.type
                model.graph.insert_before(value.uses()[0].node, node)
                ir.convenience.replace_all_uses_with(value, node.outputs[0])
                break


def _is_gathered(value: Any) -> bool:
    """Whether a Gather reads rows of this value: it is the table of an embedding."""
    return any(use.node.op_type == "Gather" and use.idx == 0 for use in value.uses())


def _is_codes(value: Any) -> bool:
    dtype = None if value.const_value is None else value.const_value.dtype
    return dtype == ir.DataType.INT8 and len(value.shape) == 2 and bool(value.uses())


def share_equal_initializers(model: Any) -> None:
    """Store large constants with equal bytes once: torch writes a copy of a weight for each call of its layer."""
    by_sample: dict[Any, list[tuple[Any, np.ndarray]]] = {}
    for value in list(model.graph.initializers.values()):
        if value.const_value.size <= MAX_SMALL_ELEMENTS or value.is_graph_output():
            continue
        array = value.const_value.numpy()
        positions = np.arange(0, array.size, max(1, array.size // MAX_SMALL_ELEMENTS))
        sample = array[np.unravel_index(positions, array.shape)].tobytes()
        candidates = by_sample.setdefault((value.dtype, array.shape, sample), [])
        same = next((other for other, other_array in candidates if _are_bits_equal(array, other_array)), None)
        if same is None:
            candidates.append((value, array))
            continue
        ir.convenience.replace_all_uses_with(value, same)
        model.graph.initializers.pop(value.name)


def _are_bits_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Compare bit by bit: -0.0 differs from 0.0, and a NaN equals itself."""
    first_bytes, second_bytes = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second))
    return np.array_equal(first_bytes, second_bytes)


def fold_pads(model: Any) -> None:
    """Move zero padding of an image into the convolution that reads it, which can pad both ends differently."""
    for conv in list(model.graph):
        pad_and_extents = _find_pad(conv) if conv.op_type == "Conv" else None
        if pad_and_extents is None:
            continue
        pad, extents = pad_and_extents
        conv_pads = list(conv.attributes["pads"].as_ints()) if "pads" in conv.attributes else [0] * len(extents)
        auto_pad = conv.attributes["auto_pad"].as_string() if "auto_pad" in conv.attributes else "NOTSET"
        if len(conv_pads) != len(extents) or auto_pad != "NOTSET":
            continue
        total = [conv_pad + extent for conv_pad, extent in zip(conv_pads, extents, strict=True)]
        conv.attributes["pads"] = ir.AttrInt64s("pads", total)
        _skip_pad(conv, pad)
    _remove_unread_nodes(model)


def _skip_pad(conv: Any, pad: Any) -> None:
    """Let the convolution read the input of the Pad, through the same Q/DQ pair; equal pairs are not chained."""
    dequantize = conv.inputs[0].producer()
    if dequantize is pad:
        conv.replace_input_with(0, pad.inputs[0])
        return
    source = pad.inputs[0].producer()
    if source is not None and source.op_type == "DequantizeLinear" and source.inputs[1] is dequantize.inputs[1]:
        conv.replace_input_with(0, pad.inputs[0])
    else:
        quantize = dequantize.inputs[0].producer()
        quantize.replace_input_with(0, pad.inputs[0])
        for value in (*quantize.outputs, *dequantize.outputs):
            value.shape = pad.inputs[0].shape


def _find_pad(conv: Any) -> tuple[Any, list[int]] | None:
    """Return the zero Pad that a convolution reads, directly or through Q/DQ (which keeps zero), and its extents."""
    node = conv.inputs[0].producer() if conv.inputs[0] is not None else None
    if node is not None and node.op_type == "DequantizeLinear":
        quantize = node.inputs[0].producer()
        if quantize is None or quantize.op_type != "QuantizeLinear" or len(node.outputs[0].uses()) > 1:
            return None
        node = quantize.inputs[0].producer()
    if node is None or node.op_type != "Pad" or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    value = node.inputs[2] if len(node.inputs) > 2 else None
    is_zero = value is None or (value.const_value is not None and not value.const_value.numpy().any())
    pads = node.inputs[1].const_value
    if mode != "constant" or not is_zero or pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    extents = [int(extent) for extent in pads.numpy().reshape(-1)]
    half = len(extents) // 2
    begin, end = extents[:half], extents[half:]
    pads_batch_or_channels = any((*begin[:2], *end[:2]))
    crops = min(extents) < 0
    if pads_batch_or_channels or crops:
        return None
    return node, [*begin[2:], *end[2:]]


def _remove_unread_nodes(model: Any) -> None:
    """Remove nodes whose outputs are not read."""
    outputs = set(model.graph.outputs)
    for node in reversed(list(model.graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            model.graph.remove(node, safe=True)


def use_global_pools(model: Any) -> None:
    """Replace ReduceMean over height and width by GlobalAveragePool, for which runtimes have an int8 kernel."""
    for node in list(model.graph):
        if node.op_type != "ReduceMean" or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        axes = node.inputs[1].const_value
        rank = None if node.inputs[0].shape is None else len(node.inputs[0].shape)
        keeps_axes = "keepdims" not in node.attributes or node.attributes["keepdims"].as_int() == 1
        if axes is None or rank != 4 or not keeps_axes:
            continue
        if sorted(int(axis) % 4 for axis in axes.numpy().reshape(-1)) == [2, 3]:
            pool = ir.Node("", "GlobalAveragePool", [node.inputs[0]], name=node.name)
            pool.outputs[0].shape, pool.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            pool.metadata_props.update(node.metadata_props)
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [pool], [node.outputs[0]], [pool.outputs[0]]
            )


def pool_without_extra_axis(model: Any) -> None:
    """Replace Unsqueeze -> GlobalAveragePool -> Squeeze, as torch pools over one axis, by GlobalAveragePool."""
    for pool in list(model.graph):
        users = [use.node for use in pool.outputs[0].uses()]
        before = pool.inputs[0].producer() if pool.op_type == "GlobalAveragePool" and pool.inputs[0] else None
        if before is None or len(users) != 1 or (before.op_type, users[0].op_type) != ("Unsqueeze", "Squeeze"):
            continue
        if not (_is_third_of_four(before.inputs[1]) and _is_third_of_four(*users[0].inputs[1:])):
            continue
        direct = ir.Node("", "GlobalAveragePool", [before.inputs[0]], name=pool.name)
        output = users[0].outputs[0]
        direct.outputs[0].shape, direct.outputs[0].type = output.shape, output.type
        direct.metadata_props.update(pool.metadata_props)
        ir.convenience.replace_nodes_and_values(
            model.graph, users[0], [users[0], pool], [direct], [output], [direct.outputs[0]]
        )
        if not before.outputs[0].uses():
            model.graph.remove(before, safe=True)


def _is_third_of_four(axes: Any = None) -> bool:
    """Whether the axes of an Unsqueeze or Squeeze are the first of two spatial ones."""
    return axes is not None and axes.const_value is not None and axes.const_value.numpy().tolist() in ([2], [-2])


def name_nodes(model: Any) -> None:
    """Name nodes after their modules: layer1.0.conv1/Conv."""
    counts: Counter[str] = Counter()
    for node in model.graph:
        name = f"{_read_scope(node)}/{node.op_type}".lstrip("/")
        node.name = f"{name}_{counts[name]}" if counts[name] else name
        counts[name] += 1


def _read_scope(node: Any) -> str:
    text = node.metadata_props.get(NAME_SCOPES_KEY, "")
    scopes: Sequence[str] = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    return scopes[-2] if len(scopes) > 1 else ""


def strip_debug_metadata(model: Any) -> None:
    """Remove stack traces and paths of this machine."""
    for item in (model, model.graph, *model.graph, *model.graph.inputs, *model.graph.outputs):
        item.metadata_props.clear()
    for node in model.graph:
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
        value.doc_string = None


def remove_unused(model: Any) -> None:
    """Remove initializers that are not read."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            model.graph.initializers.pop(name)
