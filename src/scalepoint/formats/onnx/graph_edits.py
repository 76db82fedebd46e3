"""Functions on ONNX graphs (onnx_ir) that the passes and rewrites of this package share."""

from typing import Any

import numpy as np
import onnx_ir as ir

from scalepoint.errors import GraphError


def find_producer(value: Any, operator: str) -> Any:
    """Return the node that computes a value, if it is of this operator; else None. The value may be None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def find_only_reader(node: Any) -> Any:
    """Return the node that alone reads the first output of a node; None if others read it, or the model returns it."""
    uses = node.outputs[0].uses()
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None


def has_blocks(dequantize: Any) -> bool:
    """Whether a DequantizeLinear has scales per block. From opset 21 on, block_size is 0 if it has not."""
    return bool(dequantize.attributes.get_int("block_size", 0) > 0)


def pads_with_zeros(pad: Any) -> bool:
    """Whether a Pad pads all axes, and with zeros."""
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    has_axes = len(pad.inputs) > 3 and pad.inputs[3] is not None
    is_zero = value is None or (value.const_value is not None and not value.const_value.numpy().any())
    return pad.attributes.get_string("mode", "constant") == "constant" and is_zero and not has_axes


def add_constant(graph: Any, name: str, array: np.ndarray, dtype: Any = None) -> Any:
    """Return the constant with this name; it is added if the graph does not have it yet.

    Raises:
        GraphError: The graph has another constant with this name.
    """
    tensor = ir.Tensor(array, dtype=dtype, name=name)
    if name not in graph.initializers:
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    constant = graph.initializers[name]
    if constant.dtype != tensor.dtype or not np.array_equal(constant.const_value.numpy(), tensor.numpy()):
        raise GraphError(f"two different constants have the name {name!r}")
    return constant


def insert_before(node: Any, new_node: Any, shape: Any, tensor_type: Any, name: str | None = None) -> Any:
    """Insert a node before `node`, as a part of the same layer, and return its output.

    Args:
        node: The node before which the new one is inserted.
        new_node: The new node.
        shape: The shape of its output.
        tensor_type: The type of its output.
        name: The name of its output; None: a generated one.
    """
    output = new_node.outputs[0]
    output.shape, output.type, output.name = shape, tensor_type, name
    new_node.metadata_props.update(node.metadata_props)  # contains the layer, after which nodes are named
    node.graph.insert_before(node, new_node)
    return output


def replace_node(old: Any, *new_nodes: Any) -> None:
    """Replace a node by a chain of nodes whose outputs all have the shape and type of its output."""
    for node in new_nodes:
        node.outputs[0].shape, node.outputs[0].type = old.outputs[0].shape, old.outputs[0].type
        node.metadata_props.update(old.metadata_props)
    ir.convenience.replace_nodes_and_values(
        old.graph, old, [old], new_nodes, [old.outputs[0]], [new_nodes[-1].outputs[0]]
    )
