"""The option `dynamic_axes`: named axes of inputs whose size may change. The syntax is that of torch.onnx.export.

    {"x": {2: "height", 3: "width"}}     input -> axis -> name; axes with the same name have the same size
    {"x": [2, 3]}                        default names: x_2, x_3
    "x:2=height,3=width"                 the same on a command line

The batch (axis 0) and the second axis of token inputs are free by default if the model allows it. An axis that is named
must be free, or capture fails.
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
AxisChooser = Callable[[str, Any], Iterable[int]]  # name and value of an input -> its free axes
BATCH, SEQUENCE = "batch", "sequence"
SYNTAX = "{'input': {2: 'height', 3: 'width'}} or {'input': [2, 3]}"
_TEXT = re.compile(r"(\w+):(-?\d+(?:=\w+)?(?:,-?\d+(?:=\w+)?)*)")


def parse_axes(option: object) -> Axes:
    """Parse the option `dynamic_axes`. Whether the inputs have such axes is checked by `check_axes`."""
    if option is None:
        return {}
    if isinstance(option, str):
        option = option.split()
    if isinstance(option, list | tuple):
        return _parse_texts(option)
    if not isinstance(option, Mapping):
        raise UsageError(f"dynamic_axes must be {SYNTAX}, got {short_repr(option)}")
    return {_check_name(name, "an input"): _parse_axes_of_input(name, axes) for name, axes in option.items()}


def _parse_texts(texts: Iterable[object]) -> Axes:
    axes: dict[str, Mapping[int, str]] = {}
    for text in texts:
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"dynamic_axes must be written as x:2=height,3=width or x:2,3, got {short_repr(text)}")
        parts = [part.partition("=") for part in match[2].split(",")]
        axis_names = {int(axis): name or _default_name(match[1], int(axis)) for axis, _, name in parts}
        if len(axis_names) != len(parts) or match[1] in axes:
            raise UsageError(f"dynamic_axes names an axis or an input twice: {short_repr(text)}")
        axes[match[1]] = axis_names
    return axes


def _parse_axes_of_input(input_name: str, axes: object) -> Mapping[int, str]:
    if isinstance(axes, Mapping):
        return {
            _parse_axis(input_name, axis): _check_name(name, f"axis {axis} of {input_name!r}")
            for axis, name in axes.items()
        }
    if isinstance(axes, list | tuple):
        return {_parse_axis(input_name, axis): _default_name(input_name, axis) for axis in axes}
    raise UsageError(f"dynamic_axes must be {SYNTAX}, got {short_repr(axes)} for {input_name!r}")


def _parse_axis(input_name: str, axis: object) -> int:
    """Convert an axis to int. Keys of JSON objects are strings."""
    is_text = isinstance(axis, str) and axis.removeprefix("-").isdecimal()
    if not is_text and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise UsageError(f"dynamic_axes: an axis of {input_name!r} must be a number, got {short_repr(axis)}")
    return int(axis)  # type: ignore[call-overload, no-any-return]  # an int or a decimal string


def _check_name(name: object, owner: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(
            f"dynamic_axes: the name of {owner} must be an identifier, such as 'height', got {short_repr(name)}"
        )
    return name


def _default_name(name: str, axis: int) -> str:
    return f"{name}_{axis}" if axis >= 0 else f"{name}_last{-axis if axis < -1 else ''}"


def check_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """Check the axes against the inputs and make negative axes positive.

    Raises:
        UsageError: An input or axis does not exist, or one name has two sizes in the example.
    """
    sizes: dict[str, tuple[int, str]] = {}  # axis name -> its size, and the axis where the name was read first
    checked: dict[str, dict[int, str]] = {}
    for name, axis_names in axes.items():
        if name not in inputs:
            raise UsageError(f"dynamic_axes: the model has no input {name!r}: {did_you_mean(name, inputs)}")
        value = inputs[name]
        if not isinstance(value, Tensor):
            raise UsageError(f"dynamic_axes: the input {name!r} is {short_repr(value)} in the example, not a tensor")
        checked[name] = {_to_positive_axis(name, axis, value): axis_name for axis, axis_name in axis_names.items()}
        if len(checked[name]) != len(axis_names):
            raise UsageError(f"dynamic_axes names an axis of {name!r} twice: {dict(axis_names)}")
    for name, value in inputs.items():
        for axis, axis_name in {**_default_axes(value), **checked.get(name, {})}.items():
            size, first_axis = sizes.setdefault(axis_name, (value.shape[axis], f"axis {axis} of {name!r}"))
            if size != value.shape[axis] and axis_name in _all_names(checked):
                raise UsageError(
                    f"dynamic_axes: {axis_name!r} has the size {size} on {first_axis} and {value.shape[axis]} on axis "
                    f"{axis} of {name!r} in the example, but one name stands for one size: use two names, or an "
                    "example in which the sizes are equal"
                )
    return checked


def _to_positive_axis(input_name: str, axis: int, value: Tensor) -> int:
    if not -value.ndim <= axis < value.ndim:
        shape = "x".join(map(str, value.shape)) or "a scalar"
        raise UsageError(f"dynamic_axes: {input_name!r} has no axis {axis}: its shape in the example is {shape}")
    positive_axis = axis % value.ndim
    if positive_axis and value.shape[positive_axis] < 2:
        raise UsageError(
            f"dynamic_axes: axis {positive_axis} of {input_name!r} has the size {value.shape[positive_axis]} in the "
            "example, which torch.export treats as a constant: pass an example with a size of 2 or more"
        )
    return positive_axis


def _all_names(axes: Axes) -> set[str]:
    return {name for axis_names in axes.values() for name in axis_names.values()}


def _default_axes(value: Any) -> dict[int, str]:
    """Return the axes that are free by default, with their names."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return {}
    is_tokens = not value.is_floating_point() and value.ndim == 2
    return {0: BATCH, 1: SEQUENCE} if is_tokens else {0: BATCH}


def make_axis_chooser(axes: Axes, *, dynamic: bool) -> AxisChooser:
    """Return a function that gives the free axes of an input: the named ones, and the defaults if `dynamic`."""
    return lambda name, value: {*(_default_axes(value) if dynamic else ()), *axes.get(name, ())}


def get_named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs by their names in graph and file: x, or x_0 and x_key for nested ones."""
    leaves, _ = pytree.tree_flatten_with_path(get_inputs_by_parameter(model, args, kwargs))
    return {input_name(path): value for path, value in leaves}


def get_inputs_by_parameter(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs by parameter of forward, as `dynamic_shapes` of torch.export expects: **kwargs one by one."""
    signature = inspect.signature(model.forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name in _variadic_parameters(signature):
        arguments |= arguments.pop(name, {})
    return arguments


def _variadic_parameters(signature: inspect.Signature) -> list[str]:
    return [name for name, parameter in signature.parameters.items() if parameter.kind == parameter.VAR_KEYWORD]


def input_name(path: tuple[Any, ...]) -> str:
    """Return the name that torch.export gives the placeholder of a leaf at this pytree path."""
    keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return "_".join(re.sub(r"[^a-zA-Z0-9]", "_", str(key)) for key in keys).lower()


def resize_inputs(
    model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]], axes: Axes, sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Resize the named axes of the inputs: values are cut off, or repeated from the beginning."""
    signature = inspect.signature(model.forward)
    bound = signature.bind(*inputs[0], **inputs[1])
    variadic = _variadic_parameters(signature)

    def resize(path: tuple[Any, ...], value: Any) -> Any:
        axis_names = axes.get(input_name(path[1:] if path[0].key in variadic else path), {})
        for axis, name in axis_names.items():
            if isinstance(value, Tensor) and name in sizes:
                indices = torch.arange(sizes[name], device=value.device) % value.shape[axis]
                value = value.index_select(axis, indices)
        return value

    bound.arguments.update(pytree.tree_map_with_path(resize, dict(bound.arguments)))
    return bound.args, bound.kwargs


def is_dynamic(size: Any) -> bool:
    """Whether the size of an axis of a captured graph may change."""
    return isinstance(size, torch.SymInt) and not is_concrete_int(size)
