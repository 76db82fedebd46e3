"""Runs the simulation (the fake-quantized model in PyTorch) that files are compared with."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import UsageError
from scalepoint.graph.dry_run import BoundInputs
from scalepoint.graph.example_inputs import describe_ids_out_of_range
from scalepoint.graph.module_state import eval_mode
from scalepoint.quantize.quantizers import QuantStub


def simulate(model: nn.Module, inputs: BoundInputs) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Run the simulation.

    Args:
        model: The fake-quantized model.
        inputs: Positional and keyword inputs: (args, kwargs).

    Returns:
        The outputs, and the codes of every enabled stub, one tensor per call: [] for a stub with a float dtype or
        several scales, whose codes are not compared.
    """
    codes: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(_record_outputs(codes.setdefault(name, [])))
        for name, module in model.named_modules()
        if isinstance(module, QuantStub) and module.enabled
    ]
    try:
        with eval_mode(model), torch.no_grad():
            outputs = pytree.tree_leaves(model(*inputs[0], **inputs[1]))
    except IndexError as error:
        if message := describe_ids_out_of_range(error, model, inputs):
            raise UsageError(f"the inputs cannot be used: {message}") from error
        raise
    finally:
        for handle in handles:
            handle.remove()
    return [torch.as_tensor(value) for value in outputs if isinstance(value, Tensor | float | int)], codes


def _record_outputs(calls: list[Tensor]) -> Any:
    """Return a forward hook that adds the codes of a stub's output to `calls`, if it has integers and one scale."""

    def record(stub: QuantStub, inputs: Any, output: Tensor) -> None:
        if not stub.quantizer.grid.format.is_float and stub.scale.ndim == 0:
            calls.append(((output / stub.scale).round() + stub.zero_point).to(torch.int32))

    return record


def to_file_array(tensor: Tensor) -> np.ndarray:
    """Convert to the array that a file takes or returns: float16, bfloat16 and float64 become float32."""
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).numpy()


def build_feeds(model: nn.Module, inputs: BoundInputs) -> dict[str, np.ndarray]:
    """Return the tensors among the inputs, by the names of the file's inputs.

    Values that are not tensors are constants in the file. A keyword argument gets the keys of its path as its name.
    """
    placeholders = (
        [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
        if isinstance(model, fx.GraphModule)
        else []
    )
    leaves = pytree.tree_leaves(inputs[0])
    # A captured graph has one placeholder per leaf of args and kwargs, in this order. Without it leaves are numbered.
    names = placeholders if len(placeholders) >= len(leaves) else map(str, range(len(leaves)))
    values = dict(zip(names, leaves, strict=False))
    for path, leaf in pytree.tree_flatten_with_path(inputs[1])[0]:
        values["_".join(map(_key_text, path))] = leaf
    return {name: to_file_array(value) for name, value in values.items() if isinstance(value, Tensor)}


def _key_text(key: Any) -> str:
    """Return the text of one key of a pytree path: "mask" for a key of a dict, "0" for an index of a list."""
    return str(getattr(key, "key", getattr(key, "idx", key)))
