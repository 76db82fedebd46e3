"""Passes over a translated ONNX graph before it is saved. `run_passes` lists them in order."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from scalepoint.compat.torch_onnx import NAME_SCOPES_KEY
from scalepoint.formats.onnx.graph_edits import (
    add_constant,
    find_only_reader,
    find_producer,
    pads_with_zeros,
    replace_node,
)
from scalepoint.formats.onnx.precision import convert_floats

MAX_SMALL_ELEMENTS = 1024  # translate_program has already merged equal constants up to this size
SAMPLED_ELEMENTS = 1024  # of a large constant, compared before all elements are
# of codes: torch has no tensors of the narrow ones, so the exporter writes wider codes and a Cast
_CODE_TYPES = ("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT4E2M1")


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
    remove_unused_initializers(model)
    model.ir_version = ir_version
    model.producer_name = "scalepoint"
    model.producer_version = ""


def fold_casts(model: Any) -> None:
    """Replace Cast(stored codes) by an initializer of the narrow type. Runtimes fold casts to wider types."""
    graph = model.graph
    for node in list(graph):
        codes = node.inputs[0] if node.op_type == "Cast" else None
        if codes is None or codes.const_value is None or not codes.is_initializer():
            continue
        dtype = ir.DataType(node.attributes["to"].as_int())
        if dtype.name not in _CODE_TYPES or codes.dtype.bitwidth < dtype.bitwidth:
            continue
        narrow = codes
        if codes.dtype != dtype:
            array = codes.const_value.numpy().astype(dtype.numpy())
            narrow = add_constant(graph, f"{codes.name}.{dtype.name.lower()}", array, dtype)
        ir.convenience.replace_all_uses_with(node.outputs[0], narrow)
        graph.remove(node, safe=True)


def share_embedding_codes(model: Any) -> None:
    """Let a tied head read the codes of its embedding table through a Transpose, which runtimes fold on load."""
    codes = [value for value in model.graph.initializers.values() if _is_codes(value)]
    tables = [value for value in codes if _is_gathered(value)]
    for value in codes:
        table = next((table for table in tables if table is not value and _is_transpose(value, table)), None)
        if table is not None:
            node = ir.node("Transpose", [table], {"perm": [1, 0]})
            node.outputs[0].name, node.outputs[0].shape = f"{value.name}.transposed", value.shape
            node.outputs[0].type = value.type
            model.graph.insert_before(value.uses()[0].node, node)
            ir.convenience.replace_all_uses_with(value, node.outputs[0])


def _is_codes(value: Any) -> bool:
    dtype = None if value.const_value is None else value.const_value.dtype
    return dtype == ir.DataType.INT8 and len(value.shape) == 2 and bool(value.uses())


def _is_gathered(value: Any) -> bool:
    """Whether a Gather reads rows of this value: it is the table of an embedding."""
    return any(use.node.op_type == "Gather" and use.idx == 0 for use in value.uses())


def _is_transpose(first: Any, second: Any) -> bool:
    """Whether one constant matrix is the transpose of the other."""
    if tuple(first.shape) != tuple(second.shape)[::-1]:
        return False
    return np.array_equal(first.const_value.numpy(), second.const_value.numpy().T)


def share_equal_initializers(model: Any) -> None:
    """Store large constants with equal bytes once: torch writes a copy of a weight for each call of its layer."""
    by_sample: dict[Any, list[tuple[Any, np.ndarray]]] = {}
    for value in list(model.graph.initializers.values()):
        if value.const_value.size <= MAX_SMALL_ELEMENTS or value.is_graph_output():
            continue
        array = value.const_value.numpy()
        positions = np.arange(0, array.size, max(1, array.size // SAMPLED_ELEMENTS))
        sample = array[np.unravel_index(positions, array.shape)].tobytes()
        candidates = by_sample.setdefault((value.dtype, array.shape, sample), [])
        equal = next((other for other, other_array in candidates if _are_bits_equal(array, other_array)), None)
        if equal is None:
            candidates.append((value, array))
        else:
            ir.convenience.replace_all_uses_with(value, equal)
            model.graph.initializers.pop(value.name)


def _are_bits_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Compare bit by bit: -0.0 differs from 0.0, and a NaN equals itself."""
    first_bytes, second_bytes = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second))
    return np.array_equal(first_bytes, second_bytes)


def fold_pads(model: Any) -> None:
    """Move zero padding of an image into the convolution that reads it, which can pad both ends differently."""
    for conv in list(model.graph):
        pad = _find_pad(conv) if conv.op_type == "Conv" else None
        amounts = None if pad is None else _read_spatial_pads(pad)
        if amounts is None or conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            continue
        conv_pads = conv.attributes.get_ints("pads", [0] * len(amounts))
        if len(conv_pads) == len(amounts):
            total = [conv_pad + amount for conv_pad, amount in zip(conv_pads, amounts, strict=True)]
            conv.attributes["pads"] = ir.AttrInt64s("pads", total)
            _skip_pad(conv, pad)
    RemoveUnusedNodesPass()(model)


def _find_pad(conv: Any) -> Any:
    """Return the zero Pad that a convolution reads, directly or through Q/DQ (which keeps zero), or None."""
    value = conv.inputs[0]
    dequantize = find_producer(value, "DequantizeLinear")
    if dequantize is not None:
        quantize = find_producer(dequantize.inputs[0], "QuantizeLinear")
        if quantize is None or len(dequantize.outputs[0].uses()) > 1:  # others read the padded tensor too
            return None
        value = quantize.inputs[0]
    pad = find_producer(value, "Pad")
    return pad if pad is not None and pads_with_zeros(pad) else None


def _read_spatial_pads(pad: Any) -> list[int] | None:
    """Return begin and end of the spatial axes, as a Conv has them; None if the Pad does anything else."""
    amounts = None if len(pad.inputs) < 2 or pad.inputs[1] is None else pad.inputs[1].const_value
    if amounts is None:
        return None
    pads = [int(amount) for amount in amounts.numpy().reshape(-1)]
    half = len(pads) // 2
    begin, end = pads[:half], pads[half:]
    pads_batch_or_channels = any((*begin[:2], *end[:2]))
    crops = min(pads) < 0
    return None if pads_batch_or_channels or crops else [*begin[2:], *end[2:]]


def _skip_pad(conv: Any, pad: Any) -> None:
    """Let the convolution read the input of the Pad, through the same Q/DQ pair; equal pairs are not chained."""
    dequantize = conv.inputs[0].producer()
    if dequantize is pad:
        conv.replace_input_with(0, pad.inputs[0])
        return
    source = find_producer(pad.inputs[0], "DequantizeLinear")
    if source is not None and source.inputs[1] is dequantize.inputs[1]:
        conv.replace_input_with(0, pad.inputs[0])
    else:
        quantize = dequantize.inputs[0].producer()
        quantize.replace_input_with(0, pad.inputs[0])
        for value in (*quantize.outputs, *dequantize.outputs):
            value.shape = pad.inputs[0].shape


def use_global_pools(model: Any) -> None:
    """Replace ReduceMean over height and width by GlobalAveragePool, for which runtimes have an int8 kernel."""
    for node in list(model.graph):
        if node.op_type != "ReduceMean" or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        axes, shape = node.inputs[1].const_value, node.inputs[0].shape
        is_image = shape is not None and len(shape) == 4
        if axes is None or not is_image or not node.attributes.get_int("keepdims", 1):
            continue
        if sorted(int(axis) % 4 for axis in axes.numpy().reshape(-1)) == [2, 3]:
            replace_node(node, ir.node("GlobalAveragePool", [node.inputs[0]]))


def pool_without_extra_axis(model: Any) -> None:
    """Replace Unsqueeze -> GlobalAveragePool -> Squeeze, as torch pools over one axis, by GlobalAveragePool."""
    for pool in list(model.graph):
        before = find_producer(pool.inputs[0], "Unsqueeze") if pool.op_type == "GlobalAveragePool" else None
        squeeze = find_only_reader(pool)
        if before is None or squeeze is None or squeeze.op_type != "Squeeze":
            continue
        if not (_is_third_of_four(before.inputs[1]) and _is_third_of_four(*squeeze.inputs[1:])):
            continue
        direct = ir.Node("", "GlobalAveragePool", [before.inputs[0]], name=pool.name)
        output = squeeze.outputs[0]
        direct.outputs[0].shape, direct.outputs[0].type = output.shape, output.type
        direct.metadata_props.update(pool.metadata_props)
        ir.convenience.replace_nodes_and_values(
            model.graph, squeeze, [squeeze, pool], [direct], [output], [direct.outputs[0]]
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
    """Return the module of a node, from metadata such as "['', 'layer1', 'layer1.conv', 'convolution']"."""
    text = node.metadata_props.get(NAME_SCOPES_KEY, "")
    scopes: Sequence[str] = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    return scopes[-2] if len(scopes) > 1 else ""  # the last one is the operation


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


def remove_unused_initializers(model: Any) -> None:
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            model.graph.initializers.pop(name)
