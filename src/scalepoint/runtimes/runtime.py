"""A runtime as a declaration: its package, its child program, the formats that it reads.

    Runtime("mine", "my_package", Path(__file__).with_name("child.py"), formats=("onnx",))

The child program is described in `child_loop.py`, which runs it. Nothing here imports a runtime.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from scalepoint.errors import UsageError, short_repr

ExecutedNodes = Sequence[Mapping[str, Any]]  # the nodes of a compiled graph, as the child tells them


def applies_always(executed: ExecutedNodes) -> bool:
    """For every file."""
    return True


@dataclass(frozen=True)
class Variant:
    """Another way to run the same file, whose agreement with the simulation tells something."""

    name: Literal["unoptimized", "exact"]  # the field of a Verification
    options: Mapping[str, Any]  # of the child
    applies: Callable[[ExecutedNodes], bool] = applies_always
    why: str = ""  # what the runtime does unless it is run so, and the setting that it hangs on


@dataclass(frozen=True)
class Runtime:
    """Where files run: `verify`, `benchmark` and `evaluate` start its child program."""

    name: str
    package: str  # what has to be installed
    child: Path
    formats: tuple[str, ...]
    summary: str = ""
    variants: tuple[Variant, ...] = field(default=(), hash=False)
    profiles: bool = False  # option "profile" of the child, and `profiled()`: the time of every node
    shows_codes: bool = False  # option "expose" of the child: the codes at every quantizer are outputs too
    found: Callable[[], bool] | None = None  # whether it is here, of a runtime that is no Python package
    install: str = ""  # how it gets here, where pip does not bring it
    stand_in: Callable[[], str] | None = None  # why files are only evaluated here, "" where they really run

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise UsageError(f"a runtime has a name, not {short_repr(self.name)}")
        if not (isinstance(self.package, str) and self.package.isidentifier()):
            raise UsageError(f"runtime {self.name!r}: package= is what is imported, not {short_repr(self.package)}")
        if not Path(self.child).is_file():
            raise UsageError(f"runtime {self.name!r}: its child program {short_repr(str(self.child))} is not there")
        if isinstance(self.formats, str) or not self.formats or not all(isinstance(key, str) for key in self.formats):
            raise UsageError(
                f"runtime {self.name!r}: formats= are keys, such as ('onnx',), not {short_repr(self.formats)}"
            )
        if wrong := [each for each in self.variants if not isinstance(each, Variant) or each.name not in _FIELDS]:
            raise UsageError(
                f"runtime {self.name!r}: a variant is one of {', '.join(_FIELDS)}, not {short_repr(wrong[0])}"
            )

    @property
    def is_here(self) -> bool:
        """Whether its package is installed; nothing is imported."""
        if self.found is not None:
            return self.found()
        try:
            return find_spec(self.package) is not None
        except (ImportError, ValueError):
            return False

    @property
    def why_not_run(self) -> str:
        """Why its child only evaluates files on this machine; "" where it runs them."""
        return "" if self.stand_in is None else self.stand_in()


_FIELDS = ("unoptimized", "exact")
