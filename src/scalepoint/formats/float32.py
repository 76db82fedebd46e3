"""Converts float16, bfloat16 and float64 models to float32 before they are written.

Q/DQ operators of ONNX are combined with float32 operators only. With `float_dtype` everything that is not quantized is
converted to 16 bits afterwards, for compilers that compute in the dtypes of the file.
"""

from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.compat.torch_names import pytree
from scalepoint.graph import Operation

CONVERTED_DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def needs_float32(model: fx.GraphModule) -> bool:
    """Whether a parameter is not float32. Buffers do not count: a model may have a float64 table on purpose."""
    return any(parameter.dtype in CONVERTED_DTYPES for parameter in model.parameters())


def convert_to_float32(model: fx.GraphModule) -> fx.GraphModule:
    """Convert tensors and dtype arguments in place. The model must not share its parameters with another model."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in CONVERTED_DTYPES:
            tensor.data = tensor.data.to(torch.float32)
    for module in model.modules():
        if isinstance(module, Operation):
            module.arguments = {name: _replace_dtype(value) for name, value in module.arguments.items()}
    for node in model.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _replace_dtype)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _replace_dtype)
    model.recompile()
    return model


def _replace_dtype(value: Any) -> Any:
    return torch.float32 if value in CONVERTED_DTYPES and isinstance(value, torch.dtype) else value


def inputs_to_float32(inputs: Any) -> Any:
    """Convert inputs to the dtypes that the file takes."""
    return pytree.tree_map(_to_float32, inputs)


def _to_float32(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in CONVERTED_DTYPES else value
