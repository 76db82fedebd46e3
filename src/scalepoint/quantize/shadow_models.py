"""Copies of a quantized model with their own state, and wrappers that are called like it."""

import copy
from typing import Any

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import copy_codegen
from scalepoint.quantize.quantizers import QuantizerBase


def copy_with_shared_parameters(model: fx.GraphModule, *, quantizing: bool = True) -> fx.GraphModule:
    """Copy a model in eval mode: buffers and switches are copied, parameters are shared.

    Args:
        model: A model with quantizers.
        quantizing: False disables all quantizers of the copy, so that it computes the float model.
    """
    with torch.inference_mode(False):  # the caller may run in inference mode, whose tensors cannot be written later
        shared = {id(parameter): parameter for parameter in model.parameters()}
        shadow: fx.GraphModule = copy.deepcopy(model, shared)
        if any(module.training for module in shadow.modules()):
            shadow.eval()  # only if needed: eval() computes the scale of every weight again
        for module in shadow.modules():
            if isinstance(module, QuantizerBase):
                module.enabled = quantizing and module.enabled
    return shadow


def wrap_with_signature(model: fx.GraphModule, inner: nn.Module, *, gives_outputs: bool = True) -> fx.GraphModule:
    """Wrap a module with flat inputs and outputs, so that it is called like the model.

    Args:
        model: The model whose signature the wrapper has.
        inner: Called with the flat inputs of the model; its flat outputs become outputs in the structure of the model.
        gives_outputs: False if `inner` returns something else, which the wrapper returns as it is.
    """
    graph = fx.Graph()
    codegen: Any = copy_codegen(model.graph)
    if not gives_outputs and hasattr(codegen, "pytree_info"):
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
    graph.set_codegen(codegen)
    inputs = [graph.node_copy(node) for node in model.graph.nodes if node.op == "placeholder"]
    graph.output(graph.call_module("inner", tuple(inputs)))
    owner = nn.Module()
    owner.inner = inner
    return fx.GraphModule(owner, graph)
