"""Values found by name: our own, and those that other packages bring through an entry point.

What a package brings is checked when it is found, before anything calls it, and an error names the package.
"""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from scalepoint.errors import ScalepointError, nearest, shown


class Named(Protocol):
    """What an extension is: a value that knows its name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def brought(group: str) -> list[str]:
    """The names that other packages bring to an entry point; nothing of them is imported."""
    return sorted({point.name for point in entry_points(group=group)})


class Extensions(Generic[T]):
    """All values of one kind: targets, formats or runtimes. Ours cannot be replaced by a package."""

    def __init__(self, kind: type[T], group: str, own: Iterable[T], error: type[ScalepointError]) -> None:
        self.kind, self.group, self.error = kind, group, error
        self.word = group.rpartition(".")[2].removesuffix("s")
        self.own = {each.name: each for each in own}

    def names(self) -> list[str]:
        """All names, ours first; nothing of another package is imported."""
        return [*self.own, *(name for name in brought(self.group) if name not in self.own)]

    def find(self, given: str | T) -> T:
        """A value from itself or from its name."""
        if isinstance(given, self.kind):
            return given
        if not isinstance(given, str):
            several = ": one at a time" if isinstance(given, list | tuple | set) else ""
            raise self.error(f"a {self.word} is a name or a {self.kind.__name__}, not {shown(given)}{several}")
        if given in self.own:
            return self.own[given]
        for point in entry_points(group=self.group):
            if point.name == given:
                return self._loaded(point)
        raise self.error(f"no {self.word} {shown(given)}: {nearest(str(given), self.names())}")

    def _loaded(self, point: EntryPoint) -> T:
        package = "an unknown package" if point.dist is None else f"the package {point.dist.name!r}"
        where = f"{self.word} {point.name!r} of {package} ({point.value})"
        try:
            found = point.load()
        except Exception as error:  # foreign code raises what it likes
            raise self.error(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(found, self.kind):
            raise self.error(f"{where} is not a {self.group}.{self.kind.__name__}: {shown(found)}")
        if found.name != point.name:
            raise self.error(f"{where} calls itself {found.name!r}: both names must be the same")
        return found
