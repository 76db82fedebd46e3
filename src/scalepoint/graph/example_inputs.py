"""Check inputs before they are used: dense tensors with values, and token ids that the model has rows for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import CaptureError, TensorError
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.module_state import eval_mode

EMBEDDING_ERROR = "index out of range in self"  # torch 2.13: an id without a row; IndexErrors of lists read differently


def check_dense(value: Tensor) -> None:
    """Raise for sparse and nested tensors: no layer here takes them, and most functions of torch fail on them."""
    if value.is_nested:
        raise TensorError("a nested tensor cannot be an input: pad it with torch.nested.to_padded_tensor(x, 0.0)")
    if value.layout != torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise TensorError(f"a tensor of layout {kind} cannot be an input: make it dense with x.to_dense()")


def check_values(value: Tensor) -> None:
    """Raise for a tensor on the meta device, which has a shape and no values."""
    if value.is_meta:
        raise TensorError(
            f"a tensor of shape {tuple(value.shape)} on the meta device has no values: pass a real tensor, such as "
            "torch.randn(x.shape)"
        )


def check_example(model: nn.Module, inputs: tuple[Any, Any]) -> None:
    """Raise for example inputs without values, and for token ids that no embedding of the model has a row for.

    torch.export ignores values, so ids out of range would be found only when the file is verified. The model is run
    here only if it has an embedding.
    """
    for value in _tensors(inputs):
        check_dense(value)
        check_values(value)
    if not has_ids(inputs) or not any(True for _ in _embedding_rows(model)):
        return
    try:
        with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            dry_run(model, *inputs)
    except Exception as error:  # user code can raise any exception; capture reports it with the line
        if message := describe_ids_out_of_range(error, model, inputs):
            raise CaptureError(f"the example inputs: {message}") from error


def describe_ids_out_of_range(error: Exception, model: nn.Module, inputs: Any) -> str:
    """Describe the ids that an embedding refused, and the embeddings of the model; "" for every other error."""
    if not isinstance(error, IndexError) or EMBEDDING_ERROR not in str(error) or not has_ids(inputs):
        return ""
    ranges = [
        f"{tuple(value.shape)} {value.dtype} with ids from {int(value.min())} to {int(value.max())}"
        for value in _tensors(inputs)
        if _has_id_dtype(value) and value.numel()
    ]
    message = f"an id is out of range: {', '.join(ranges)}"
    embeddings = sorted((rows, name) for name, rows in _embedding_rows(model))
    if not embeddings:
        return message
    rows, name = embeddings[0]
    return f"{message}; the smallest embedding, {name}, takes ids below {rows}"


def has_ids(inputs: Any) -> bool:
    """Whether one of the inputs may be token ids, by its dtype."""
    return any(map(_has_id_dtype, _tensors(inputs)))


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _has_id_dtype(value: Tensor) -> bool:
    return value.dtype in (torch.int64, torch.int32)


def _embedding_rows(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of rows of every embedding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield name or type(module).__name__, module.num_embeddings
