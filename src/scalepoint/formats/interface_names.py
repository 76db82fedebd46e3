"""Names of a file's inputs and outputs. They come from the model and are the same for every format.

inputs    arguments of forward; x_0 and x_key where an argument is nested
outputs   keys and fields of the returned value, else output_0, output_1, ...
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument

OUTPUT = "output"


def input_names(program: ExportedProgram) -> list[str]:
    """Return the names of the tensor arguments of forward, in order."""
    return [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT" and isinstance(spec.arg, TensorArgument)
    ]


def output_names(program: ExportedProgram, output_count: int) -> list[str]:
    """Return the names of the tensors and sizes that the model returns, in order.

    A name is made from the keys and fields that lead to the value, or is output_0, output_1, ... without any.
    """
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    paths = _paths(program.call_spec.out_spec)
    numbered = [f"{OUTPUT}_{index}" for index in range(output_count)]
    if len(paths) != len(specs):
        return numbered
    paths = [path for path, spec in zip(paths, specs, strict=True) if not isinstance(spec.arg, ConstantArgument)]
    if len(paths) != output_count:
        return numbered
    names: list[str] = []
    for index, path in enumerate(paths):
        names.append(unused_name(_join_path(path, index), set(names)))
    return names


def _join_path(path: Sequence[str | int], index: int) -> str:
    """Join the path, from its first key or field on: indices before it add nothing to the name."""
    first = next((position for position, key in enumerate(path) if isinstance(key, str)), None)
    return f"{OUTPUT}_{index}" if first is None else "_".join(map(str, path[first:]))


def _paths(spec: Any) -> list[tuple[str | int, ...]]:
    """Return the keys that lead to every leaf of a pytree."""
    if spec is None or spec.is_leaf():
        return [()]
    children = spec.children()
    paths: list[tuple[str | int, ...]] = []
    for key, child in zip(_keys(spec, len(children)), children, strict=True):
        paths += [(key, *path) for path in _paths(child)]
    return paths


def _keys(spec: Any, child_count: int) -> Sequence[str | int]:
    """Return the keys of a dict or the fields of a dataclass or named tuple, else indices."""
    context = spec.context
    parts = context if isinstance(context, list | tuple) else ()  # the context of a dataclass contains its field names
    for candidate in (getattr(context, "_fields", None), context, *parts):
        is_list = isinstance(candidate, list | tuple) and len(candidate) == child_count
        if is_list and all(isinstance(key, str) for key in candidate):
            return list(candidate)
    return range(child_count)


def unused_name(name: str, used: set[str]) -> str:
    """Return the name, or the first of name_1, name_2, ... that is not used."""
    if name not in used:
        return name
    return next(candidate for number in count(1) if (candidate := f"{name}_{number}") not in used)
