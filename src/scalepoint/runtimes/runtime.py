"""Declaration of a runtime: its package, its child program, and the formats that it reads.

    Runtime("mine", "my_package", Path(__file__).with_name("child.py"), formats=("onnx",))

`child_loop.py` runs the child program and describes it. Nothing here imports a runtime.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from scalepoint.errors import UsageError, short_repr

ExecutedNodes = Sequence[Mapping[str, Any]]  # nodes of a compiled graph, see File.executed in child_loop.py


def applies_always(executed: ExecutedNodes) -> bool:
    """Apply a variant to every file."""
    return True


@dataclass(frozen=True)
class Variant:
    """Other settings of a runtime, with which `verify` runs a file once more.

    Args:
        name: The field of `Verification` for the agreement with these settings.
        options: Options of the child program.
        applies: Whether a file with these executed nodes is run with the settings.
        why: What the runtime does without these settings, and the setting that changes it.
    """

    name: Literal["unoptimized", "exact"]
    options: Mapping[str, Any]
    applies: Callable[[ExecutedNodes], bool] = applies_always
    why: str = ""


@dataclass(frozen=True)
class Runtime:
    """A program that runs files. `verify`, `benchmark` and `evaluate` start its child program.

    Args:
        name: Name of the runtime.
        package: Python package that must be installed.
        child: Path of the child program, see `child_loop.py`.
        formats: Names of the file formats that it reads.
        summary: One line for `scalepoint targets` and the documentation.
        variants: Other settings with which `verify` runs files once more.
        profiles: The child supports the option "profile" and `profiled()`, the time of every node.
        shows_codes: The child supports the option "expose": the codes at every quantizer become outputs.
        shows_products: With "expose", the product of every layer whose weight is stored as codes becomes an output too.
        retries_smaller: The child refuses files that take too long. Then `verify` runs a file for a smaller input.
        detect: Whether the runtime is installed, if it is not a Python package.
        install: Command that installs the runtime, if it is not `pip install PACKAGE`.
        check_platform: Returns why the child evaluates files on this machine instead of running them; "" if it runs
            them.
        no_speed_reason: Why the speed on this machine says nothing about the target; "" if it does.
    """

    name: str
    package: str
    child: Path
    formats: tuple[str, ...]
    summary: str = ""
    variants: tuple[Variant, ...] = field(default=(), hash=False)
    profiles: bool = False
    shows_codes: bool = False
    shows_products: bool = False
    retries_smaller: bool = False
    detect: Callable[[], bool] | None = None
    install: str = ""
    check_platform: Callable[[], str] | None = None
    no_speed_reason: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise UsageError(f"name= of a runtime must be a text that is not empty, got {short_repr(self.name)}")
        if not (isinstance(self.package, str) and self.package.isidentifier()):
            raise UsageError(
                f"runtime {self.name!r}: package= must be the name of a Python package, got {short_repr(self.package)}"
            )
        if not Path(self.child).is_file():
            raise UsageError(
                f"runtime {self.name!r}: child= must be an existing file, got {short_repr(str(self.child))}"
            )
        if isinstance(self.formats, str) or not self.formats or not all(isinstance(key, str) for key in self.formats):
            names = short_repr(self.formats)
            raise UsageError(f"runtime {self.name!r}: formats= must be a tuple of names such as ('onnx',), got {names}")
        for variant in self.variants:
            if not isinstance(variant, Variant) or variant.name not in _VARIANT_NAMES:
                raise UsageError(
                    f"runtime {self.name!r}: a variant must be a Variant with one of the names "
                    f"{', '.join(_VARIANT_NAMES)}, got {short_repr(variant)}"
                )

    @property
    def is_installed(self) -> bool:
        """Whether the runtime is installed. Nothing is imported."""
        if self.detect is not None:
            return self.detect()
        try:
            return find_spec(self.package) is not None
        except (ImportError, ValueError):
            return False

    @property
    def why_not_run(self) -> str:
        """Why the child evaluates files on this machine instead of running them; "" if it runs them."""
        return "" if self.check_platform is None else self.check_platform()

    @property
    def why_no_speed(self) -> str:
        """Why no speed is measured with this runtime on this machine; "" if it is measured."""
        return self.why_not_run or self.no_speed_reason


_VARIANT_NAMES = ("unoptimized", "exact")
