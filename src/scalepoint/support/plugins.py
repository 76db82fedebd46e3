"""Values that are found by name and imported on use: built-in ones, and those of other packages (entry points).

A built-in value may be declared as "module:attribute". Its module is imported when the value is first used, so that
looking up one file format does not load the others. A value from another package is checked when it is loaded, and
an error names the package.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from scalepoint.errors import ScalepointError, did_you_mean, short_repr


class HasName(Protocol):
    """A value with a name, such as a Target, a FileFormat or a Runtime."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=HasName)


def entry_point_names(group: str) -> list[str]:
    """Return the names that other packages register in an entry point group. Nothing of these packages is imported."""
    return sorted({point.name for point in entry_points(group=group)})


class PluginRegistry(Generic[T]):
    """All values of one kind, by name. A package cannot replace a built-in value.

    Args:
        kind: The type of every value.
        group: The entry point group, such as "scalepoint.targets".
        builtin: Name of each built-in value -> the value, or "module:attribute".
        error: Raised for a name that does not exist.
    """

    def __init__(self, kind: type[T], group: str, builtin: Mapping[str, T | str], error: type[ScalepointError]) -> None:
        self.kind, self.group, self.builtin, self.error = kind, group, dict(builtin), error
        self.noun = group.rpartition(".")[2].removesuffix("s")

    def names(self) -> list[str]:
        """Return all names, the built-in ones first. Nothing is imported."""
        return [*self.builtin, *(name for name in entry_point_names(self.group) if name not in self.builtin)]

    def find(self, value: str | T) -> T:
        """Return the value of this name; a value of the right type is returned as it is."""
        if isinstance(value, self.kind):
            return value
        if not isinstance(value, str):
            hint = ": pass one at a time" if isinstance(value, list | tuple | set) else ""
            raise self.error(f"a {self.noun} is a name or a {self.kind.__name__}, not {short_repr(value)}{hint}")
        if value in self.builtin:
            builtin = self.builtin[value]
            if isinstance(builtin, str):
                module, _, attribute = builtin.partition(":")
                self.builtin[value] = builtin = getattr(import_module(module), attribute)
            return builtin
        for point in entry_points(group=self.group):
            if point.name == value:
                return self._load(point)
        raise self.error(f"no {self.noun} {short_repr(value)}: {did_you_mean(value, self.names())}")

    def _load(self, point: EntryPoint) -> T:
        """Load a value of another package and check its type and name."""
        package = "an unknown package" if point.dist is None else f"the package {point.dist.name!r}"
        where = f"{self.noun} {point.name!r} of {package} ({point.value})"
        try:
            value = point.load()
        except Exception as error:  # code of another package may raise anything
            raise self.error(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(value, self.kind):
            raise self.error(f"{where} is not a {self.group}.{self.kind.__name__}: {short_repr(value)}")
        if value.name != point.name:
            raise self.error(f"{where} has the name {value.name!r}: both names must be the same")
        return value


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package: each name is imported from its module on first use.

    Args:
        package: The package, as its `__name__`.
        modules: Attribute -> the module of the package that defines it. No attribute may have the name of a module.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
