"""Models that create buffers or caches in their first forward: run the copy once if a trace alone fails.

A trace calls forward more than once. The first call stores fake tensors in attributes. They have no values, and a
second call that reads them would put constants without values into the graph.
"""

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from scalepoint.compat.torch_names import FakeTensor, pytree
from scalepoint.errors import CaptureError
from scalepoint.graph.dry_run import BoundInputs, clone_tensors
from scalepoint.graph.dynamic_axes import Axes
from scalepoint.graph.module_state import restore_attributes
from scalepoint.graph.torch_export import export, export_logs_silenced
from scalepoint.support.torch_state import caller_dtype


def export_after_first_run(
    model: nn.Module, example: BoundInputs, wide: BoundInputs, *, dynamic: bool, axes: Axes
) -> ExportedProgram:
    """Export our copy of a model, after a first run if it needs one.

    If the export fails or the program lacks values, the model is run on the `wide` inputs (those with a batch of two).
    It is exported again if the run created new tensors.
    """
    first_error: CaptureError | None = None
    try:
        names = dict(model.named_buffers()).keys()
        with restore_attributes(model):
            program = export(model, *example, dynamic, axes)
            # torch.export records a buffer that the trace creates as a write in every call
            creates_buffers = dict(model.named_buffers()).keys() != names
        if not creates_buffers and not _lacks_values(program):
            return program
    except CaptureError as error:
        first_error = error
    if not _creates_tensors(model, wide) and first_error is not None:
        raise first_error
    with restore_attributes(model):
        return export(model, *example, dynamic, axes)


def _lacks_values(program: ExportedProgram) -> bool:
    return any(isinstance(value, FakeTensor) for value in (*program.constants.values(), *program.state_dict.values()))


def _creates_tensors(model: nn.Module, inputs: BoundInputs) -> bool:
    """Run the model once and return whether it stored new tensors. Buffers that it had keep their values.

    Unlike `dry_run`, new buffers stay: the next export needs them.
    """
    args, kwargs = clone_tensors(inputs)
    before = _stored_tensors(model)
    originals = [(module, dict(module._buffers)) for module in model.modules()]
    for module, buffers in originals:
        for name, value in buffers.items():
            module._buffers[name] = None if value is None else value.clone()
    try:
        with export_logs_silenced(), caller_dtype(), torch.no_grad():
            model(*args, **kwargs)
    except Exception:  # user code can raise any exception; the error of the export says more
        return False
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)
    return _stored_tensors(model) != before


def _stored_tensors(model: nn.Module) -> set[tuple[str, str, int]]:
    """Return module path, attribute name and id of all tensors in public attributes and buffers."""
    stored: set[tuple[str, str, int]] = set()
    for path, module in model.named_modules():
        public_attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for name, value in {**public_attributes, **module._buffers}.items():
            leaves = pytree.tree_leaves(value) if isinstance(value, dict | list | tuple) else (value,)
            stored |= {(path, name, id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)}
    return stored
