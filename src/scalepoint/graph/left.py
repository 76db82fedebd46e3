"""Submodules that stay as they are: not looked into, called as one module, float.

For the time of the export a left module is replaced by one opaque operator whose output shapes were seen in a real run;
afterwards the graph calls the module itself. The first axis as long as the batch follows the batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from scalepoint.errors import CaptureError, UsageError, nearest
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.nodes import inherit_meta


@dataclass(frozen=True)
class Seen:
    """A left module, and the outputs it gave: shapes with the batch marked, dtypes, whether it was a single tensor."""

    key: int
    name: str
    module: nn.Module
    shapes: tuple[tuple[int | None, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_single: bool
    macs: int = 0  # of one call


_SEEN: WeakValueDictionary[int, Seen] = WeakValueDictionary()  # by key, as long as a capture holds them
_KEYS = count()


@torch.library.custom_op("scalepoint::left", mutates_args=())
def _left(inputs: list[Tensor], key: int) -> list[Tensor]:
    outputs = _SEEN[key].module(*inputs)
    return [output.clone() for output in ([outputs] if _SEEN[key].is_single else outputs)]


@_left.register_fake
def _(inputs: list[Tensor], key: int) -> list[Tensor]:
    seen = _SEEN[key]
    return [
        inputs[0].new_empty([inputs[0].shape[0] if size is None else size for size in shape], dtype=dtype)
        for shape, dtype in zip(seen.shapes, seen.dtypes, strict=True)
    ]


class _Left(nn.Module):
    """Stands in for a left module while the model is exported."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, *inputs: Tensor) -> Any:
        outputs = torch.ops.scalepoint.left(list(inputs), self.seen.key)
        return outputs[0] if self.seen.is_single else tuple(outputs)


@contextmanager
def replaced(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Seen, ...]]:
    """The model with opaque stand-ins for these submodules; gives what was seen of each."""
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(f"leave={list(names)}: no submodule {name!r}: {nearest(name, filter(None, modules))}")
    left = _record(model, {name: modules[name] for name in names}, args, kwargs)
    _SEEN.update({seen.key: seen for seen in left})
    try:
        for seen in left:
            _set(model, seen.name, _Left(seen))
        yield left
    finally:
        for seen in left:
            _set(model, seen.name, seen.module)


def restore(graph_module: fx.GraphModule, left: Sequence[Seen]) -> None:
    """Call the left modules themselves instead of the operator."""
    by_key = {seen.key: seen for seen in left}
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.scalepoint.left.default:
            continue
        inputs, key = node.args
        seen = by_key[key]
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(seen.name, tuple(inputs))
        inherit_meta(call, node, kind="left", path=seen.name, macs=seen.macs)
        if seen.is_single:
            for user in list(node.users):
                user.replace_all_uses_with(call)
                graph_module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(call)
        graph_module.graph.erase_node(node)


def _record(
    model: nn.Module, left: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Seen, ...]:
    """Run the model once and keep what each left module gave, and the products that it took."""
    found: dict[str, Seen] = {}
    calls = dict.fromkeys(left, 0)
    hooks = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            given = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
            if not (inputs and all(isinstance(value, Tensor) for value in (*inputs, *given))):
                raise CaptureError(f"leave={name!r}: a left module takes tensors by place and gives tensors")
            shapes = tuple(_following(tuple(output.shape), inputs[0].shape[0]) for output in given)
            dtypes = tuple(output.dtype for output in given)
            found[name] = Seen(next(_KEYS), name, module, shapes, dtypes, isinstance(outputs, Tensor))
            calls[name] += 1

        hooks.append(module.register_forward_hook(hook))

    for name, module in left.items():
        watch(name, module)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            dry_run(model, args, kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    missing = set(left) - set(found)
    if missing:
        raise CaptureError(f"leave={sorted(missing)}: never called by the model on these inputs")
    flops = {path.partition(".")[2]: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
    return tuple(replace(seen, macs=flops.get(name, 0) // 2 // calls[name]) for name, seen in found.items())


def _following(shape: tuple[int, ...], batch: int) -> tuple[int | None, ...]:
    """The shape with its first axis that is as long as the batch marked by None."""
    place = shape.index(batch) if batch in shape else len(shape)
    return (*shape[:place], None, *shape[place + 1 :])[: len(shape)]


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent).add_module(leaf, module)
