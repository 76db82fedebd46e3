"""Arguments and operators of a graph as plain data, and back. Nothing here runs or imports what a text names.

An operator is named by its registered schema ("aten::conv2d.default"); only aten's are taken, and of those none that
touches a file. Other functions come from a short list. What has no form here is refused with its reason.
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
ASSERTIONS = (  # they give nothing, and only look
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
_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


class NotDescribedError(Exception):
    """Something in a graph that has no form as data."""


def function_name(function: Callable[..., Any]) -> str:
    """The name that `get_function` finds it by."""
    if isinstance(function, OpOverload):
        name = f"{function._schema.name}.{function._overloadname}"
        reason = _explain_refusal(function)
        if reason:
            raise NotDescribedError(f"the operator {name}: {reason}")
        return name
    if function not in _NAMES:
        name = getattr(function, "__name__", str(function))
        raise NotDescribedError(f"the function {name} is not one of torch's operators")
    return _NAMES[function]


def get_function(name: str) -> Callable[..., Any]:
    """What a name stands for; only what `function_name` gives has one."""
    if name in FUNCTIONS_BY_NAME:
        return FUNCTIONS_BY_NAME[name]
    space, _, rest = name.partition("::")
    base, _, overload = rest.rpartition(".")
    if space not in OPERATOR_NAMESPACES or not base.isidentifier() or not overload.isidentifier():
        raise StoreError(
            f"the graph names {short_repr(name)}, which is no operator of {', '.join(OPERATOR_NAMESPACES)}"
        )
    try:
        function = getattr(getattr(getattr(torch.ops, space), base), overload)
    except (AttributeError, RuntimeError):
        function = None
    if not isinstance(function, OpOverload):
        raise StoreError(f"the graph names the operator {short_repr(name)}, which torch {torch.__version__} has not")
    reason = _explain_refusal(function)
    if reason:
        raise StoreError(f"the graph names the operator {short_repr(name)}: {reason}")
    return function


def _explain_refusal(function: Any) -> str:
    """Why an operator may not stand in a saved graph."""
    schema = function._schema
    if schema.name.partition("::")[0] not in OPERATOR_NAMESPACES:
        return f"only those of {', '.join(OPERATOR_NAMESPACES)} can be saved"
    if any("file" in argument.name for argument in schema.arguments):
        return "it reads or writes files"
    gives = [str(value.type) for value in schema.returns]
    if schema.name not in ASSERTIONS and not any(kind in each for each in gives for kind in ("Tensor", "int", "bool")):
        return "it gives no tensor"
    return ""


def encode(value: Any, paths: Mapping[int, str]) -> Any:  # noqa: C901, PLR0911  # a table of cases
    """An argument as JSON has it; `paths` are those of modules by id."""
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
    for kind, type_ in _KINDS.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}
    raise NotDescribedError(f"an argument of type {type(value).__name__}")


def decode(value: Any, nodes: Mapping[str, fx.Node], modules: Mapping[str, nn.Module]) -> Any:
    """What `encode` was given; anything else is an error."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, list):
        return [decode(item, nodes, modules) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise StoreError(f"the graph holds {short_repr(value)}, which is no argument")
    ((kind, held),) = value.items()
    try:
        return _DECODED[kind](held, nodes, modules)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise StoreError(
            f"the graph holds {short_repr(value)}, which is no argument ({type(error).__name__})"
        ) from error


def _reference(held: Any, modules: Mapping[str, nn.Module]) -> Reference:
    path, name = held
    owner = modules[path]
    if name not in owner._parameters and name not in owner._buffers and name != "value":
        raise ValueError(name)
    return Reference(owner, name)


def _torch_constant_decoder(kind: str) -> Callable[[Any, Any, Any], Any]:
    def found(held: Any, _: Any, __: Any) -> Any:
        value = getattr(torch, held)
        if not isinstance(value, _KINDS[kind]):
            raise TypeError(held)
        return value

    return found


_DECODED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "float": lambda held, _, __: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[held],
    "node": lambda held, nodes, _: nodes[held],
    "slot": lambda held, _, __: Slot(int(held)),
    "reference": lambda held, _, modules: _reference(held, modules),
    "tuple": lambda held, nodes, modules: tuple(decode(item, nodes, modules) for item in held),
    "slice": lambda held, nodes, modules: slice(*(decode(item, nodes, modules) for item in held)),
    "device": lambda held, _, __: torch.device(held),
    **{kind: _torch_constant_decoder(kind) for kind in _KINDS},
}
