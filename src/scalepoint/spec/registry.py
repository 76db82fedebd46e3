"""A base class that registers its subclasses by key, so that a config file can refer to them."""

import inspect
import warnings
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch

from scalepoint.errors import SpecError, UnknownKeyError, did_you_mean
from scalepoint.numerics import QuantizationScheme

ClassType = TypeVar("ClassType", bound=type)
EnumType = TypeVar("EnumType", bound=Enum)


class ClassRegistry:
    """Mixin. A base class sets `_registry = {}`. Keys have the order of registration."""

    _registry: ClassVar[dict[str, Any]]

    @classmethod
    def register(cls, key: str) -> Callable[[ClassType], ClassType]:
        """Return a class decorator that registers a class. An existing key is replaced, with a warning."""

        def add(subclass: ClassType) -> ClassType:
            if not (isinstance(subclass, type) and issubclass(subclass, cls)):
                raise SpecError(f"{subclass!r} cannot be registered as {key!r}: derive it from {cls.__name__}")
            if key in cls._registry:
                old_name = cls._registry[key].__name__
                warnings.warn(f"{cls.__name__} {key!r} was {old_name}, is now {subclass.__name__}", stacklevel=2)
            cls._registry[key] = subclass
            return subclass

        if not (isinstance(key, str) and key):
            raise SpecError(f"a registry key must be a non-empty string, got {key!r}")
        return add

    @classmethod
    def get_class(cls, key: str) -> Any:
        """Return the class registered under `key`."""
        if not isinstance(key, str) or key not in cls._registry:
            raise UnknownKeyError(
                f"no {cls.__name__} is registered as {key!r}: {did_you_mean(str(key), cls._registry)}"
            )
        return cls._registry[key]

    @classmethod
    def list_registry_keys(cls) -> list[str]:
        return list(cls._registry)

    @classmethod
    def list_registry_values(cls) -> list[Any]:
        return list(cls._registry.values())

    @classmethod
    def key_of(cls, subclass: type) -> str:
        """Return the key of a registered class."""
        for key, registered in cls._registry.items():
            if registered is subclass:
                return key
        raise UnknownKeyError(
            f"{subclass.__name__} is not registered: decorate it with @{cls.__name__}.register('a_key'). "
            f"Registered keys: {', '.join(cls._registry)}"
        )


def parse_enum(kind: type[EnumType], value: object) -> EnumType:
    """Return the member of an enum with this value. The error lists the allowed values."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(str(member.value)) for member in kind)
        raise SpecError(f"{value!r} is not a {kind.__name__}: use {allowed}") from None


_TORCH_SCHEMES = {
    torch.per_tensor_affine: QuantizationScheme.ASYMMETRIC,
    torch.per_channel_affine: QuantizationScheme.ASYMMETRIC,
    torch.per_tensor_symmetric: QuantizationScheme.SYMMETRIC,
    torch.per_channel_symmetric: QuantizationScheme.SYMMETRIC,
}


def to_scheme(value: object) -> QuantizationScheme:
    """Convert a scheme, its name, or a torch.qscheme (from torchao)."""
    if isinstance(value, torch.qscheme) and value in _TORCH_SCHEMES:
        return _TORCH_SCHEMES[value]
    return parse_enum(QuantizationScheme, value)


@cache
def constructor_parameters(component: type) -> frozenset[str]:
    """Return the parameters of a constructor, including those of base classes that `**extra` is passed to."""
    names: set[str] = set()
    for base in component.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            names |= set(parameters)
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return frozenset(names)
