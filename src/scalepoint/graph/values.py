"""Convert arguments and operators of a graph to plain data and back, without importing anything that a file names.

An operator is named by its registered schema ("aten::conv2d.default"). Only aten operators that use no files are
allowed. Other functions come from a short list. Anything else raises an error with the reason.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import OpOverload
from scalepoint.errors import StoreError, short_repr
from scalepoint.graph.operations import Reference, Slot
from scalepoint.graph.products import affine

OPERATOR_NAMESPACES = ("aten",)
ASSERTIONS = (  # operators that return nothing and only check values
    "aten::_assert_tensor_metadata", "aten::_assert_async", "aten::_assert_scalar", "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
)  # fmt: skip
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "getitem", "eq", "ne", "lt", "le", "gt", "ge",
    "and_", "or_", "not_",
)  # fmt: skip
_SYMBOLIC = ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite")
FUNCTIONS_BY_NAME: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC},
    "scalepoint.affine": affine,
}
_NAMES = {function: name for name, function in FUNCTIONS_BY_NAME.items()}
_CONSTANT_TYPES: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


class NotEncodableError(Exception):
    """Something in a graph cannot be represented as data.

    The message is the reason, as a clause about the model: "it calls the operator ...".
    """


def function_name(function: Callable[..., Any]) -> str:
    """Return the name by which `get_function` finds a function."""
    if isinstance(function, OpOverload):
        name = f"{function._schema.name}.{function._overloadname}"
        reason = _explain_refusal(function)
        if reason:
            raise NotEncodableError(f"it calls the operator {name}: {reason}")
        return name
    if function not in _NAMES:
        name = getattr(function, "__name__", str(function))
        raise NotEncodableError(f"it calls the function {name}, which is not an operator of torch")
    return _NAMES[function]


def get_function(name: str) -> Callable[..., Any]:
    """Return the function of a name that `function_name` gave.

    Raises:
        StoreError: The name is not one that may be in a saved graph.
    """
    if name in FUNCTIONS_BY_NAME:
        return FUNCTIONS_BY_NAME[name]
    space, _, rest = name.partition("::")
    base, _, overload = rest.rpartition(".")
    if space not in OPERATOR_NAMESPACES or not base.isidentifier() or not overload.isidentifier():
        raise StoreError(
            f"the saved graph calls {short_repr(name)}, which is not an operator of {', '.join(OPERATOR_NAMESPACES)}"
        )
    try:
        function = getattr(getattr(getattr(torch.ops, space), base), overload)
    except (AttributeError, RuntimeError):
        function = None
    if not isinstance(function, OpOverload):
        raise StoreError(
            f"the saved graph calls the operator {short_repr(name)}, which torch {torch.__version__} does not have"
        )
    reason = _explain_refusal(function)
    if reason:
        raise StoreError(f"the saved graph calls the operator {short_repr(name)}: {reason}")
    return function


def _explain_refusal(function: Any) -> str:
    """Return the reason why an operator may not be in a saved graph; "" if it may."""
    schema = function._schema
    if schema.name.partition("::")[0] not in OPERATOR_NAMESPACES:
        return f"only operators of {', '.join(OPERATOR_NAMESPACES)} can be saved"
    if any("file" in argument.name for argument in schema.arguments):
        return "it reads or writes files"
    # By the text of the type, because "Tensor", "Tensor?" and "Tensor[]" are all results of a model.
    return_types = [str(value.type) for value in schema.returns]
    returns_value = any(kind in return_type for return_type in return_types for kind in ("Tensor", "int", "bool"))
    if schema.name not in ASSERTIONS and not returns_value:
        return "it does not return a tensor"
    return ""


def encode(value: Any, paths: Mapping[int, str]) -> Any:
    """Convert an argument to JSON data. `paths` has the path of every module by its id."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, Reference):
        return {"reference": [paths[id(value.owner)], value.name]}
    if isinstance(value, tuple) and type(value).__name__ in ("tuple", "Size"):
        return {"tuple": [encode(item, paths) for item in value]}
    if isinstance(value, list):
        return [encode(item, paths) for item in value]
    if isinstance(value, slice):
        return {"slice": [encode(item, paths) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, constant_type in _CONSTANT_TYPES.items():
        if isinstance(value, constant_type):
            return {kind: str(value).removeprefix("torch.")}
    raise NotEncodableError(f"it has an argument of type {type(value).__name__}")


def decode(value: Any, nodes: Mapping[str, fx.Node], modules: Mapping[str, nn.Module]) -> Any:
    """Convert JSON data of `encode` back to the argument. Data that `encode` cannot return raise StoreError."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, list):
        return [decode(item, nodes, modules) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise StoreError(f"the saved graph has the invalid argument {short_repr(value)}")
    ((kind, content),) = value.items()
    try:
        return _DECODERS[kind](content, nodes, modules)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise StoreError(
            f"the saved graph has the invalid argument {short_repr(value)} ({type(error).__name__})"
        ) from error


def _decode_reference(content: Any, modules: Mapping[str, nn.Module]) -> Reference:
    path, name = content
    owner = modules[path]
    is_computed = name == "value"  # the property of a ComputedTensor, which is neither a parameter nor a buffer
    if not is_computed and name not in owner._parameters and name not in owner._buffers:
        raise ValueError(name)
    return Reference(owner, name)


def _torch_constant_decoder(kind: str) -> Callable[[Any, Any, Any], Any]:
    """Return a decoder for constants of the torch module, such as torch.float32, that checks their type."""

    def decode_constant(content: Any, _: Any, __: Any) -> Any:
        value = getattr(torch, content)
        if not isinstance(value, _CONSTANT_TYPES[kind]):
            raise TypeError(content)
        return value

    return decode_constant


_DECODERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "float": lambda content, _, __: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content],
    "node": lambda content, nodes, _: nodes[content],
    "slot": lambda content, _, __: Slot(int(content)),
    "reference": lambda content, _, modules: _decode_reference(content, modules),
    "tuple": lambda content, nodes, modules: tuple(decode(item, nodes, modules) for item in content),
    "slice": lambda content, nodes, modules: slice(*(decode(item, nodes, modules) for item in content)),
    "device": lambda content, _, __: torch.device(content),
    **{kind: _torch_constant_decoder(kind) for kind in _CONSTANT_TYPES},
}
