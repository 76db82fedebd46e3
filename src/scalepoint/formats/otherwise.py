"""What a file does otherwise than the model that it was made of, in words for warnings and reports."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from scalepoint.formats.single import OTHERS, needs_single
from scalepoint.graph.nodes import find_written_buffers
from scalepoint.graph.origin import get_origin

FEW = 3


def otherwise(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """One sentence for each: its types, what it does not keep."""
    return (*_types(model, inputs), *_state(model))


def _types(model: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    leaves = pytree.tree_leaves(inputs)
    taken = zip(names, leaves, strict=False) if len(names) == len(leaves) else enumerate(leaves)
    given = {str(name): each.dtype for name, each in taken if isinstance(each, Tensor) and each.dtype in OTHERS}
    own = {each.dtype for each in model.parameters() if each.dtype in OTHERS} if needs_single(model) else set()
    if not given and not own:
        return ()
    kinds = " and ".join(sorted({_name(each) for each in (*given.values(), *own)}))
    feed = f": feed {_few(list(given))} as float32" if given else ""
    what = "the model computes" if own else "the model is fed"
    return (f"{what} in {kinds}, the file in float32 wherever it is not quantized, inputs and outputs too{feed}",)


def _state(model: fx.GraphModule) -> tuple[str, ...]:
    written = find_written_buffers(model.graph)
    if not written:
        return ()
    said = (
        f"the model's forward writes {_few(written)}, and a file keeps nothing between two calls: each begins with the "
        "same values. Give what changes as an input, and take it as an output"
    )
    return (said,)


def uncast(model: fx.GraphModule) -> tuple[str, ...]:
    """What it does not cast, of which capture has warned."""
    places = get_origin(model).uncast
    return (f"torch.autocast at {_few(list(places))} is left out: the file casts nothing",) if places else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(names: list[str]) -> str:
    more = len(names) - FEW
    return ", ".join(names[:FEW]) + (f" and {more} more" if more > 0 else "")
