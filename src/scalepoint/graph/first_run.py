"""Models that make buffers or caches in their first forward: run the copy once if a trace alone fails.

A trace calls the forward more than once. The first call stores tensors of the trace in attributes. They have no values,
and a second call that reads them would put constants without values into the graph.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from scalepoint.compat.torch_names import FakeTensor, pytree
from scalepoint.errors import CaptureError
from scalepoint.graph.dynamic_axes import Axes
from scalepoint.graph.module_state import restore_attributes
from scalepoint.graph.torch_export import export, export_logs_silenced
from scalepoint.support.torch_state import caller_dtype

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def export_after_first_run(
    model: nn.Module, given: Inputs, wide: Inputs, *, dynamic: bool, axes: Axes
) -> ExportedProgram:
    """Export our copy of a model. If that fails or the program lacks values, run the model on the `wide` inputs, and
    export it again if the run made new tensors."""
    failed: CaptureError | None = None
    try:
        names = dict(model.named_buffers()).keys()
        with restore_attributes(model):
            program = export(model, *given, dynamic, axes)
            is_late = dict(model.named_buffers()).keys() != names  # torch.export takes such a buffer for a write
        if not is_late and not _lacks_values(program):
            return program
    except CaptureError as error:
        failed = error
    if not _makes_tensors(model, wide) and failed is not None:
        raise failed
    with restore_attributes(model):
        return export(model, *given, dynamic, axes)


def _lacks_values(program: ExportedProgram) -> bool:
    return any(isinstance(value, FakeTensor) for value in (*program.constants.values(), *program.state_dict.values()))


def _makes_tensors(model: nn.Module, inputs: Inputs) -> bool:
    """Run the model once. Buffers that it had keep their values; returns whether it has other tensors now."""
    args, kwargs = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)
    before = _tensors(model)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    for module, own in buffers:
        module._buffers.update({name: None if value is None else value.clone() for name, value in own.items()})
    try:
        with export_logs_silenced(), caller_dtype(), torch.no_grad():
            model(*args, **kwargs)
    except Exception:  # the user's code raises what it likes; the error of the export says more
        return False
    finally:
        for module, own in buffers:
            module._buffers.update(own)
    return _tensors(model) != before


def _tensors(model: nn.Module) -> set[tuple[str, str, int]]:
    """The places of tensors in attributes and buffers, by their identity."""
    places: set[tuple[str, str, int]] = set()
    for path, module in model.named_modules():
        held = {**{name: value for name, value in vars(module).items() if not name.startswith("_")}, **module._buffers}
        for name, value in held.items():
            leaves = pytree.tree_leaves(value) if isinstance(value, dict | list | tuple) else (value,)
            places |= {(path, name, id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)}
    return places
