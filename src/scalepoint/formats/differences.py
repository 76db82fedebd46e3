"""What a file does otherwise than the model that it was made of, in words for warnings and reports."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from scalepoint.formats.float32 import CONVERTED_DTYPES, needs_float32
from scalepoint.graph.nodes import find_written_buffers
from scalepoint.graph.origin import get_origin

MAX_NAMES = 3


def describe_differences(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """One sentence for each: its types, what it does not keep."""
    return (*_describe_dtypes(model, inputs), *_describe_state(model))


def _describe_dtypes(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves(inputs)
    named_leaves = zip(names, leaves, strict=False) if len(names) == len(leaves) else enumerate(leaves)
    input_dtypes = {
        str(name): leaf.dtype
        for name, leaf in named_leaves
        if isinstance(leaf, Tensor) and leaf.dtype in CONVERTED_DTYPES
    }
    model_dtypes = (
        {leaf.dtype for leaf in model.parameters() if leaf.dtype in CONVERTED_DTYPES} if needs_float32(model) else set()
    )
    if not input_dtypes and not model_dtypes:
        return ()
    dtype_names = " and ".join(sorted({_dtype_name(leaf) for leaf in (*input_dtypes.values(), *model_dtypes)}))
    advice = f": feed {_join_names(list(input_dtypes))} as float32" if input_dtypes else ""
    subject = "the model computes" if model_dtypes else "the model is fed"
    return (
        f"{subject} in {dtype_names}, the file in float32 wherever it is not quantized, inputs and outputs too{advice}",
    )


def _describe_state(model: fx.GraphModule) -> tuple[str, ...]:
    written = find_written_buffers(model.graph)
    if not written:
        return ()
    sentence = (
        f"the model's forward writes {_join_names(written)}, and a file keeps nothing between two calls: each begins "
        "with the same values. Give what changes as an input, and take it as an output"
    )
    return (sentence,)


def describe_removed_casts(model: fx.GraphModule) -> tuple[str, ...]:
    """What it does not cast, of which capture has warned."""
    places = get_origin(model).uncast
    return (f"torch.autocast at {_join_names(list(places))} is left out: the file casts nothing",) if places else ()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join_names(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
