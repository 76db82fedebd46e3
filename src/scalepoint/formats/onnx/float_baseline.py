"""Writes the float model the way most people export it: the baseline that a quantized file is compared with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.compat.onnx_log import onnx_log_silenced
from scalepoint.compat.torch_names import pytree
from scalepoint.formats.format import ExportRequest
from scalepoint.graph.module_state import cache_disabled, eval_mode, fused_attention_disabled
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.support.torch_state import caller_dtype


class FlattenedModel(nn.Module):
    """A wrapper whose inputs and outputs are a flat list of tensors, without nesting."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, Any]) -> None:
        super().__init__()
        self.model = model
        self.leaves, self.structure = pytree.tree_flatten(inputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensor_iterator = iter(tensors)
        leaves = [next(tensor_iterator) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(leaf for leaf in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(leaf, Tensor))


def write_baseline(model: nn.Module, path: Path, request: ExportRequest) -> None:
    """Write the model with torch.onnx.export for the shapes of the example. Errors of torch are not caught.

    The file has the free axes of the request, because a file with fixed sizes is faster than one with free sizes.
    It uses the older exporter (dynamo=False), which takes about a second.
    """
    flat = FlattenedModel(model, request.inputs)
    tensors = tuple(leaf for leaf in flat.leaves if isinstance(leaf, Tensor))
    with (
        eval_mode(model),
        torch.no_grad(),
        export_logs_silenced(),
        onnx_log_silenced(),
        fused_attention_disabled(model),  # it has no form in ONNX
        cache_disabled(model),
        caller_dtype(),
    ):
        torch.onnx.export(
            flat,
            tensors,
            str(path),
            dynamo=False,
            input_names=list(request.names) or None,
            dynamic_axes={name: list(axes) for name, axes in request.free_axes.items()} or None,
        )
