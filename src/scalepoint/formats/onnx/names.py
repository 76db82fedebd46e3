"""Names inputs, outputs and dynamic axes of a file after the model, whatever was quantized.

inputs    arguments of forward; x_0 and x_key for a nested argument
outputs   keys and fields of the value that forward returns, else output_0, output_1, ..
axes      names from dynamic_axes; "batch"; "sequence" for the second axis of token inputs; else NAME_AXIS
"""

import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from torch.export import ExportedProgram

from scalepoint.errors import ExportError
from scalepoint.formats.interface_names import input_names, output_names, unused_name
from scalepoint.graph.dynamic_axes import BATCH, SEQUENCE, Axes
from scalepoint.support.interface_names import InterfaceNames

_WORD = re.compile(r"[A-Za-z_]\w*")


def name_interface(
    model: Any, program: ExportedProgram, axes: Axes | None = None, file_names: InterfaceNames | None = None
) -> None:
    """Rename inputs, outputs and axes of the graph in place.

    Args:
        model: The graph.
        program: The program that it was translated from.
        axes: The names that the user gave to axes.
        file_names: The names in the file that the model was read from; they win.
    """
    graph = model.graph
    inputs = input_names(program)
    if len(inputs) != len(graph.inputs):
        inputs = [value.name for value in graph.inputs]
    outputs = output_names(program, len(graph.outputs))
    axes = axes or {}
    if file_names is not None and len(file_names.inputs) == len(inputs):
        axes = {new: axes.get(old, {}) for old, new in zip(inputs, file_names.inputs, strict=True)}
        inputs = list(file_names.inputs)
    if file_names is not None and len(file_names.outputs) == len(outputs):
        outputs = list(file_names.outputs)
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    _rename_interface(graph, values, [*inputs, *(unused_name(name, set(inputs)) for name in outputs)])
    _name_axes(graph, values, axes)


def _rename_interface(graph: Any, values: Sequence[Any], new_names: Sequence[str]) -> None:
    """Rename inputs and outputs, after all other values that have one of the new names."""
    interface = [*graph.inputs, *graph.outputs]
    for value in values:
        if value.name in new_names and not any(value is other for other in interface):
            value.name = unused_name(value.name, {other.name for other in values} | set(new_names))
    for number, (value, name) in enumerate(zip(interface, new_names, strict=True)):
        if value.name != name:
            value.name = f"interface {number}"  # a temporary name, because two values may swap their names
    for value, name in zip(interface, new_names, strict=True):
        value.name = name


def _name_axes(graph: Any, values: Sequence[Any], axes: Axes) -> None:
    """Rename the symbols of axes: user names first, then after the first axis with the symbol; also in expressions."""
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
    """Map symbols to the user's names for their axes. Two symbols may have the same name."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for axis, name in axes.get(value.name, {}).items():
            size = value.shape[axis]
            if isinstance(size, int):
                raise ExportError(
                    f"dynamic_axes: axis {axis} ({name}) of {value.name!r} is dynamic in the graph, but {size} in the "
                    "file: the ONNX form of an operation has fixed sizes"
                )
            names.setdefault(str(size.value), name)
    return names


def _name_axis(value: Any, axis: int) -> str:
    is_tokens = value.is_graph_input() and len(value.shape) == 2 and not value.dtype.is_floating_point()
    if axis == 0:
        return BATCH
    return SEQUENCE if axis == 1 and is_tokens else f"{value.name}_{axis}"


def _rename_size(size: Any, names: dict[str, str]) -> Any:
    if isinstance(size, int) or size.value is None:
        return size
    return ir.SymbolicDim(_WORD.sub(lambda match: names.get(match.group(), match.group()), str(size.value)))
