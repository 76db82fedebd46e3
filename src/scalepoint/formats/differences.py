"""Describes, for warnings and reports, how an exported file differs from the model: dtypes, state, removed casts."""

from typing import Any

from torch import Tensor, fx

from scalepoint.compat.torch_names import pytree
from scalepoint.formats.float32 import CONVERTED_DTYPES
from scalepoint.graph.constant_nodes import find_written_buffers
from scalepoint.graph.origin import get_origin
from scalepoint.numerics import dtype_name

MAX_NAMES = 3  # in one sentence


def describe_differences(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """Return one sentence for each difference: float32 instead of other dtypes, and buffers that are not updated."""
    return (*_describe_dtypes(model, inputs), *_describe_state(model))


def _describe_dtypes(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves(inputs)
    if len(names) != len(leaves):
        names = [str(index) for index in range(len(leaves))]
    input_dtypes = {
        name: leaf.dtype
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.dtype in CONVERTED_DTYPES
    }
    model_dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dtype in CONVERTED_DTYPES}
    if not input_dtypes and not model_dtypes:
        return ()
    dtype_names = " and ".join(sorted({dtype_name(dtype) for dtype in (*input_dtypes.values(), *model_dtypes)}))
    advice = f": feed {_join_names(list(input_dtypes))} as float32" if input_dtypes else ""
    subject = "the model computes in" if model_dtypes else "the inputs of the model are"
    sentence = (
        f"{subject} {dtype_names}, but everything in the file that is not quantized is float32, including inputs and "
        f"outputs{advice}"
    )
    return (sentence,)


def _describe_state(model: fx.GraphModule) -> tuple[str, ...]:
    buffers = find_written_buffers(model.graph)
    if not buffers:
        return ()
    sentence = (
        f"the model's forward writes {_join_names(buffers)}, but a file has no state between two calls: every call "
        "starts with the same values. Make each changing tensor an input and an output of the model"
    )
    return (sentence,)


def describe_removed_casts(model: fx.GraphModule) -> tuple[str, ...]:
    """Return a sentence about torch.autocast blocks that capture removed. Capture has already warned about them."""
    locations = get_origin(model).ignored_autocast
    if not locations:
        return ()
    return (f"torch.autocast at {_join_names(list(locations))} is removed: the file does not cast there",)


def _join_names(names: list[str]) -> str:
    hidden_count = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {hidden_count} more" if hidden_count > 0 else "")
