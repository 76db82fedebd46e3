"""Stand-ins for a quantized model: a twin with a state of its own, and a module that is called as the model is."""

import copy
from typing import Any

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import copy_codegen
from scalepoint.quantize.quantizers import QuantizerBase


def copy_with_shared_parameters(model: fx.GraphModule, *, quantizing: bool = True) -> fx.GraphModule:
    """The same graph over the same parameters, in eval, with its own state; quantizing=False switches it to float."""
    with torch.inference_mode(False):  # switches that can be written, wherever this is called
        made: fx.GraphModule = copy.deepcopy(model, {id(each): each for each in model.parameters()})
        if any(module.training for module in made.modules()):
            made.eval()  # looks at every weight, which a model in eval has done
        for module in made.modules():
            if isinstance(module, QuantizerBase):
                module.enabled = quantizing and module.enabled
    return made


def wrap_with_signature(model: fx.GraphModule, inner: nn.Module, *, gives_outputs: bool = True) -> fx.GraphModule:
    """A module that is called as the model is, and hands its flat inputs to `inner`, whose flat outputs it returns;
    gives_outputs=False where `inner` gives none of the model's."""
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
