"""The names that a file shows: those that the model gives, the same whatever was quantized.

inputs    arguments of forward; x_0 and x_key where one is nested
outputs   keys and fields of what forward returns, else output_0, output_1, ..
axes      those of dynamic_axes; batch; sequence for the second axis of token inputs; else input_axis
"""

import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from torch.export import ExportedProgram

from scalepoint.errors import ExportError
from scalepoint.formats.interface_names import input_names, output_names, unused_name
from scalepoint.graph.dynamic_axes import BATCH, SEQUENCE, Axes

_WORD = re.compile(r"[A-Za-z_]\w*")


def name_interface(model: Any, program: ExportedProgram, axes: Axes | None = None) -> None:
    """Rename inputs, outputs and axes of the graph, in place; `axes` names those that are free by name."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    inputs = input_names(program)
    inputs = inputs if len(inputs) == len(graph.inputs) else [value.name for value in graph.inputs]
    outputs = output_names(program, len(graph.outputs))
    new_names = [*inputs, *(unused_name(name, set(inputs)) for name in outputs)]
    interface = [*graph.inputs, *graph.outputs]
    for value in values:  # whatever has one of these names gives it up
        if value.name in new_names and not any(value is other for other in interface):
            value.name = unused_name(value.name, {other.name for other in values} | set(new_names))
    for place, (value, name) in enumerate(zip(interface, new_names, strict=True)):
        if value.name != name:
            value.name = f"interface {place}"  # two may change places
    for value, name in zip(interface, new_names, strict=True):
        value.name = name
    _name_axes(graph, values, axes or {})


def _name_axes(graph: Any, values: Sequence[Any], axes: Axes) -> None:
    """Symbols by the first axis that has them, after those that are named; expressions of them are rewritten."""
    names = _match_named_axes(graph, axes)
    for value in (*graph.inputs, *graph.outputs):
        for axis, size in enumerate(value.shape or ()):
            symbol = "" if isinstance(size, int) else str(size.value)
            if _WORD.fullmatch(symbol) and symbol not in names:
                name = _name_axis(value, axis)
                names[symbol] = name if name not in names.values() else f"{value.name}_{name}"
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_rename_size(size, names) for size in value.shape])


def _match_named_axes(graph: Any, axes: Axes) -> dict[str, str]:
    """Symbols of the axes that were named, by which the file must have them; one name may have several."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for axis, name in axes.get(value.name, {}).items():
            size = value.shape[axis]
            if isinstance(size, int):
                raise ExportError(
                    f"dynamic_axes: axis {axis} ({name}) of {value.name!r} is {size} in the file, though it is free in "
                    "the graph: an operation became one of fixed sizes on its way into ONNX"
                )
            names.setdefault(str(size.value), name)
    return names


def _name_axis(value: Any, axis: int) -> str:
    is_tokens = value.is_graph_input() and len(value.shape) == 2 and not value.dtype.is_floating_point()
    return BATCH if axis == 0 else SEQUENCE if axis == 1 and is_tokens else f"{value.name}_{axis}"


def _rename_size(size: Any, names: dict[str, str]) -> Any:
    if isinstance(size, int) or size.value is None:
        return size
    return ir.SymbolicDim(_WORD.sub(lambda match: names.get(match.group(), match.group()), str(size.value)))
