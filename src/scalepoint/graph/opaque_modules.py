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

from scalepoint.errors import CaptureError, UsageError, did_you_mean
from scalepoint.graph.dry_run import dry_run
from scalepoint.graph.nodes import inherit_meta


@dataclass(frozen=True)
class OpaqueModule:
    """A left module, and the outputs it gave: shapes with the batch marked, dtypes, whether it was a single tensor."""

    key: int
    name: str
    module: nn.Module
    shapes: tuple[tuple[int | None, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_single: bool
    macs: int = 0  # of one call


_OPAQUE_MODULES: WeakValueDictionary[int, OpaqueModule] = (
    WeakValueDictionary()
)  # by key, as long as a capture holds them
_KEYS = count()


@torch.library.custom_op("scalepoint::left", mutates_args=())
def _call_opaque(inputs: list[Tensor], key: int) -> list[Tensor]:
    outputs = _OPAQUE_MODULES[key].module(*inputs)
    return [output.clone() for output in ([outputs] if _OPAQUE_MODULES[key].is_single else outputs)]


@_call_opaque.register_fake
def _(inputs: list[Tensor], key: int) -> list[Tensor]:
    seen = _OPAQUE_MODULES[key]
    return [
        inputs[0].new_empty([inputs[0].shape[0] if size is None else size for size in shape], dtype=dtype)
        for shape, dtype in zip(seen.shapes, seen.dtypes, strict=True)
    ]


class _OpaqueStandIn(nn.Module):
    """Stands in for a left module while the model is exported."""

    def __init__(self, seen: OpaqueModule) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, *inputs: Tensor) -> Any:
        outputs = torch.ops.scalepoint.left(list(inputs), self.seen.key)
        return outputs[0] if self.seen.is_single else tuple(outputs)


@contextmanager
def opaque_modules_replaced(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[OpaqueModule, ...]]:
    """The model with opaque stand-ins for these submodules; gives what was seen of each."""
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(f"leave={list(names)}: no submodule {name!r}: {did_you_mean(name, filter(None, modules))}")
    left = _record_outputs(model, {name: modules[name] for name in names}, args, kwargs)
    _OPAQUE_MODULES.update({seen.key: seen for seen in left})
    try:
        for seen in left:
            _set_submodule(model, seen.name, _OpaqueStandIn(seen))
        yield left
    finally:
        for seen in left:
            _set_submodule(model, seen.name, seen.module)


def restore_opaque_modules(graph_module: fx.GraphModule, left: Sequence[OpaqueModule]) -> None:
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


def _record_outputs(
    model: nn.Module, left: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpaqueModule, ...]:
    """Run the model once and keep what each left module gave, and the products that it took."""
    opaque: dict[str, OpaqueModule] = {}
    calls = dict.fromkeys(left, 0)
    hooks = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            given = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
            if not (inputs and all(isinstance(value, Tensor) for value in (*inputs, *given))):
                raise CaptureError(f"leave={name!r}: a left module takes tensors by place and gives tensors")
            shapes = tuple(_mark_batch_axis(tuple(output.shape), inputs[0].shape[0]) for output in given)
            dtypes = tuple(output.dtype for output in given)
            opaque[name] = OpaqueModule(next(_KEYS), name, module, shapes, dtypes, isinstance(outputs, Tensor))
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
    missing = set(left) - set(opaque)
    if missing:
        raise CaptureError(f"leave={sorted(missing)}: never called by the model on these inputs")
    flops = {path.partition(".")[2]: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
    return tuple(replace(seen, macs=flops.get(name, 0) // 2 // calls[name]) for name, seen in opaque.items())


def _mark_batch_axis(shape: tuple[int, ...], batch: int) -> tuple[int | None, ...]:
    """The shape with its first axis that is as long as the batch marked by None."""
    place = shape.index(batch) if batch in shape else len(shape)
    return (*shape[:place], None, *shape[place + 1 :])[: len(shape)]


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent).add_module(leaf, module)
