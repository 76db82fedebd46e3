"""The option `leave=`: submodules that are not captured. The graph calls each as one opaque module, in float.

    record the outputs in one run -> replace the module by one custom operator -> torch.export -> call the module again

The operator needs output shapes: they are those of the run. The first axis as long as the batch follows the batch.
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
from scalepoint.graph.kinds import OPAQUE
from scalepoint.graph.nodes import inherit_meta


@dataclass(frozen=True)
class OpaqueModule:
    """A module of `leave=`, and the outputs that it returned in a run."""

    key: int  # the argument by which the operator finds the module
    name: str
    module: nn.Module
    shapes: tuple[tuple[int | None, ...], ...]  # of the outputs; None is the batch
    dtypes: tuple[torch.dtype, ...]
    is_single: bool  # whether it returns a tensor, not a tuple
    macs: int = 0  # of one call


# Arguments of an operator are tensors and numbers, so it gets a key into this table. Entries live as long as a capture.
_OPAQUE_MODULES: WeakValueDictionary[int, OpaqueModule] = WeakValueDictionary()
_KEYS = count()


@torch.library.custom_op("scalepoint::left", mutates_args=())
def _call_opaque(inputs: list[Tensor], key: int) -> list[Tensor]:
    outputs = _OPAQUE_MODULES[key].module(*inputs)
    return [output.clone() for output in ([outputs] if _OPAQUE_MODULES[key].is_single else outputs)]


@_call_opaque.register_fake
def _(inputs: list[Tensor], key: int) -> list[Tensor]:
    opaque = _OPAQUE_MODULES[key]
    outputs = []
    for shape, dtype in zip(opaque.shapes, opaque.dtypes, strict=True):
        sizes = [inputs[0].shape[0] if size is None else size for size in shape]  # None: the batch size
        outputs.append(inputs[0].new_empty(sizes, dtype=dtype))
    return outputs


class _OpaqueStandIn(nn.Module):
    """The module that replaces an opaque module while the model is exported. It calls the operator."""

    def __init__(self, opaque: OpaqueModule) -> None:
        super().__init__()
        self.opaque = opaque

    def forward(self, *inputs: Tensor) -> Any:
        outputs = torch.ops.scalepoint.left(list(inputs), self.opaque.key)
        return outputs[0] if self.opaque.is_single else tuple(outputs)


@contextmanager
def opaque_modules_replaced(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[OpaqueModule, ...]]:
    """Replace these submodules by stand-ins that call the opaque operator, and yield the recorded modules."""
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(f"leave={list(names)}: no submodule {name!r}: {did_you_mean(name, filter(None, modules))}")
    opaque_modules = _record_outputs(model, {name: modules[name] for name in names}, args, kwargs)
    _OPAQUE_MODULES.update({opaque.key: opaque for opaque in opaque_modules})
    try:
        for opaque in opaque_modules:
            _set_submodule(model, opaque.name, _OpaqueStandIn(opaque))
        yield opaque_modules
    finally:
        for opaque in opaque_modules:
            _set_submodule(model, opaque.name, opaque.module)


def restore_opaque_modules(graph_module: fx.GraphModule, opaque_modules: Sequence[OpaqueModule]) -> None:
    """Replace calls of the operator by calls of the modules themselves."""
    by_key = {opaque.key: opaque for opaque in opaque_modules}
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.scalepoint.left.default:
            continue
        inputs, key = node.args
        opaque = by_key[key]
        with graph_module.graph.inserting_before(node):
            call = graph_module.graph.call_module(opaque.name, tuple(inputs))
        inherit_meta(call, node, kind=OPAQUE, path=opaque.name, macs=opaque.macs)
        if opaque.is_single:
            for user in list(node.users):
                user.replace_all_uses_with(call)
                graph_module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(call)
        graph_module.graph.erase_node(node)


def _record_outputs(
    model: nn.Module, modules: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpaqueModule, ...]:
    """Run the model once and record the outputs and the MACs of these modules."""
    recorded: dict[str, OpaqueModule] = {}
    calls = dict.fromkeys(modules, 0)
    hooks = []

    def add_hook(name: str, module: nn.Module) -> None:
        def record(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = (output,) if isinstance(output, Tensor) else tuple(output)
            if not (inputs and all(isinstance(value, Tensor) for value in (*inputs, *outputs))):
                raise CaptureError(
                    f"leave={name!r}: the submodule must take tensors as positional inputs and return tensors"
                )
            shapes = tuple(_mark_batch_axis(tuple(value.shape), inputs[0].shape[0]) for value in outputs)
            dtypes = tuple(value.dtype for value in outputs)
            recorded[name] = OpaqueModule(next(_KEYS), name, module, shapes, dtypes, isinstance(output, Tensor))
            calls[name] += 1

        hooks.append(module.register_forward_hook(record))

    for name, module in modules.items():
        add_hook(name, module)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            dry_run(model, args, kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    missing = set(modules) - set(recorded)
    if missing:
        raise CaptureError(f"leave={sorted(missing)}: the model does not call these submodules for these inputs")
    flops: dict[str, int] = {}
    for path, counts in counter.get_flop_counts().items():
        _, _, name = path.partition(".")  # the first part of a path is the class of the model
        flops[name] = sum(counts.values())
    # A MAC is two FLOPs.
    return tuple(replace(opaque, macs=flops.get(name, 0) // 2 // calls[name]) for name, opaque in recorded.items())


def _mark_batch_axis(shape: tuple[int, ...], batch: int) -> tuple[int | None, ...]:
    """Replace the first axis that is as long as the batch by None."""
    if batch not in shape:
        return shape
    axis = shape.index(batch)
    return (*shape[:axis], None, *shape[axis + 1 :])


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent).add_module(leaf, module)
