"""A file computes in float32, whatever the model does: half, bfloat16 and double models are written so.

Operators of ONNX take Q/DQ and float32 beside each other and nothing else in between; what is not quantized may be
narrowed afterwards, for compilers that run the types of the file (`float_dtype`).
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from scalepoint.graph import Operation

CONVERTED_DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def needs_float32(model: fx.GraphModule) -> bool:
    """Whether the model has another type: that of its parameters; a table in double alone is the model's own affair."""
    return any(parameter.dtype in CONVERTED_DTYPES for parameter in model.parameters())


def convert_to_float32(model: fx.GraphModule) -> fx.GraphModule:
    """In place: tensors, and the types that the graph names. Its parameters must be its own."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in CONVERTED_DTYPES:
            tensor.data = tensor.data.to(torch.float32)
    for module in model.modules():
        if isinstance(module, Operation):
            module.arguments = {name: _replace_dtype(value) for name, value in module.arguments.items()}
    for node in model.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(each, _replace_dtype) for each in (node.args, node.kwargs))
    model.recompile()
    return model


def _replace_dtype(value: Any) -> Any:
    return torch.float32 if value in CONVERTED_DTYPES and isinstance(value, torch.dtype) else value


def inputs_to_float32(inputs: Any) -> Any:
    """The same inputs as the file takes them."""
    return pytree.tree_map(_to_float32, inputs)


def _to_float32(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in CONVERTED_DTYPES else value
