"""Axes of inputs that may change, by name: `dynamic_axes`, as torch.onnx.export has it.

    {"x": {2: "height", 3: "width"}}     input -> axis -> name: axes of one name have one size
    {"x": [2, 3]}                        the names are made: x_2, x_3
    "x:2=height,3=width"                 the same on a command line

The batch (axis 0) and the second axis of token inputs are free by themselves; to name them is to ask for it.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from scalepoint.compat.torch_names import pytree
from scalepoint.errors import UsageError, did_you_mean, short_repr

Axes = Mapping[str, Mapping[int, str]]  # input -> axis -> name
AxisChooser = Callable[[str, Any], Iterable[int]]  # the axes that may change of an input, by its name and value
BATCH, SEQUENCE = "batch", "sequence"
SHAPE = "{'input': {2: 'height', 3: 'width'}} or {'input': [2, 3]}"
_TEXT = re.compile(r"(\w+):(-?\d+(?:=\w+)?(?:,-?\d+(?:=\w+)?)*)")


def parse_axes(given: object) -> Axes:
    """What was given for `dynamic_axes`, by input, axis and name; whether there are such axes is not looked at."""
    if given is None:
        return {}
    if isinstance(given, str):
        given = given.split()
    if isinstance(given, list | tuple):
        return _parse_texts(given)
    if not isinstance(given, Mapping):
        raise UsageError(f"dynamic_axes is {SHAPE}, not {short_repr(given)}")
    return {_check_name(name, "an input"): _parse_axes_of_input(name, own) for name, own in given.items()}


def _parse_texts(texts: Iterable[object]) -> Axes:
    axes: dict[str, Mapping[int, str]] = {}
    for text in texts:
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"dynamic_axes is written as x:2=height,3=width or x:2,3, not {short_repr(text)}")
        parts = [part.partition("=") for part in match[2].split(",")]
        named_axes = {int(axis): name or _default_name(match[1], int(axis)) for axis, _, name in parts}
        if len(named_axes) != len(parts) or axes.keys() & {match[1]}:
            raise UsageError(f"dynamic_axes names an axis or an input twice: {short_repr(text)}")
        axes[match[1]] = named_axes
    return axes


def _parse_axes_of_input(name: str, own: object) -> Mapping[int, str]:
    if isinstance(own, Mapping):
        return {_parse_axis(name, axis): _check_name(each, f"axis {axis} of {name!r}") for axis, each in own.items()}
    if isinstance(own, list | tuple):
        return {_parse_axis(name, axis): _default_name(name, axis) for axis in own}
    raise UsageError(f"dynamic_axes is {SHAPE}; {name!r} has {short_repr(own)}")


def _parse_axis(name: str, axis: object) -> int:
    """A number, also as JSON has it for a key."""
    is_text = isinstance(axis, str) and axis.removeprefix("-").isdecimal()
    if not is_text and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise UsageError(f"dynamic_axes: an axis of {name!r} is a number, not {short_repr(axis)}")
    return int(axis)  # type: ignore[call-overload, no-any-return]  # one of the two


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"dynamic_axes: the name of {what} is a word, such as 'height', not {short_repr(name)}")
    return name


def _default_name(name: str, axis: int) -> str:
    return f"{name}_{axis}" if axis >= 0 else f"{name}_last{-axis if axis < -1 else ''}"


def check_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """The same for these inputs, axes counted from the first; a UsageError for an axis that none of them has, or a name
    that stands for two sizes."""
    sizes: dict[str, tuple[int, str]] = {}  # by name, and where it was met first
    checked: dict[str, dict[int, str]] = {}
    for name, own in axes.items():
        if name not in inputs:
            raise UsageError(f"dynamic_axes: the model has no input {name!r}: {did_you_mean(name, inputs)}")
        value = inputs[name]
        if not isinstance(value, Tensor):
            raise UsageError(
                f"dynamic_axes: the input {name!r} is {short_repr(value)} in the example, no tensor with axes"
            )
        checked[name] = {_check_axis_exists(name, axis, value): each for axis, each in own.items()}
        if len(checked[name]) != len(own):
            raise UsageError(f"dynamic_axes names an axis of {name!r} twice: {dict(own)}")
    for name, value in inputs.items():
        for axis, each in {**_default_axes(value), **checked.get(name, {})}.items():
            size, where = sizes.setdefault(each, (value.shape[axis], f"axis {axis} of {name!r}"))
            if size != value.shape[axis] and each in _all_names(checked):
                raise UsageError(
                    f"dynamic_axes: {each!r} is {size} on {where} and {value.shape[axis]} on axis {axis} of {name!r} "
                    "in the example: one name is one size. Give them two names, or an example where they are the same"
                )
    return checked


def _check_axis_exists(name: str, axis: int, value: Tensor) -> int:
    if not -value.ndim <= axis < value.ndim:
        shape = "x".join(map(str, value.shape)) or "a single number"
        raise UsageError(f"dynamic_axes: {name!r} has no axis {axis}: it is {shape} in the example")
    place = axis % value.ndim
    if place and value.shape[place] < 2:
        raise UsageError(
            f"dynamic_axes: axis {place} of {name!r} has the size {value.shape[place]} in the example, which "
            "torch.export takes for a constant: give an example with 2 or more there"
        )
    return place


def _all_names(axes: Axes) -> set[str]:
    return {each for own in axes.values() for each in own.values()}


def _default_axes(value: Any) -> dict[int, str]:
    """The axes that are free without being asked for, with their names."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return {}
    is_tokens = not value.is_floating_point() and value.ndim == 2
    return {0: BATCH, 1: SEQUENCE} if is_tokens else {0: BATCH}


def make_axis_chooser(axes: Axes, *, dynamic: bool) -> AxisChooser:
    """The batch and the length of token sequences, where `dynamic` asks for them, and what was named."""
    return lambda name, value: {*(_default_axes(value) if dynamic else ()), *axes.get(name, ())}


def get_named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What is among the inputs by the names that graph and file give it: x, of a nested one x_0 or x_key."""
    leaves, _ = pytree.tree_flatten_with_path(get_inputs_by_parameter(model, args, kwargs))
    return {input_name(path): value for path, value in leaves}


def get_inputs_by_parameter(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs by the name of each parameter, as torch.export wants their shapes: *args as one, **kwargs each."""
    signature = inspect.signature(model.forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name in _variadic_parameters(signature):
        arguments |= arguments.pop(name, {})
    return arguments


def _variadic_parameters(signature: inspect.Signature) -> list[str]:
    return [name for name, each in signature.parameters.items() if each.kind == each.VAR_KEYWORD]


def input_name(path: tuple[Any, ...]) -> str:
    """As torch.export names the placeholder of a leaf."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return "_".join(re.sub(r"[^a-zA-Z0-9]", "_", str(key)) for key in keys).lower()


def resize_inputs(
    model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]], axes: Axes, sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with these sizes on the axes of these names: what they hold is cut, or repeated from its beginning."""
    signature = inspect.signature(model.forward)
    bound, rest = signature.bind(*inputs[0], **inputs[1]), _variadic_parameters(signature)

    def cut(path: tuple[Any, ...], value: Any) -> Any:
        own = axes.get(input_name(path[1:] if path[0].key in rest else path), {})
        for axis, name in own.items():
            if isinstance(value, Tensor) and name in sizes:
                places = torch.arange(sizes[name], device=value.device) % value.shape[axis]
                value = value.index_select(axis, places)
        return value

    bound.arguments.update(pytree.tree_map_with_path(cut, dict(bound.arguments)))
    return bound.args, bound.kwargs


def is_dynamic(size: Any) -> bool:
    """Whether the extent of an axis of a captured graph may change."""
    return isinstance(size, torch.SymInt) and not is_concrete_int(size)
