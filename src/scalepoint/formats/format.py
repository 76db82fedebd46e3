"""A file format as a declaration: how it is written, which files it is, what it says of itself.

    FileFormat("mine", ".mine", write=write, files=files, about=about)

`write(model, path, writing)` puts a quantized model there, whole or not at all, and the float model of the same capture
at writing.float_path where that is given; `files(path)` names all that it wrote, the file itself last; `about(path)`
reads it back without running anything. `check(model, writing)`, where a format has it, refuses a graph that has an
operation without a form, before anything is calibrated. `compare(path, model)`, where a format has it, reads all codes,
scales and tables back and says in words where they are others than the model's, bit by bit. `show_choices(path, copy)`,
where a format has it, writes a copy of a file whose further outputs are the scores and the indices of every top-k.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from scalepoint.errors import ExportError, UsageError, shown
from scalepoint.targets import Target


@dataclass(frozen=True)
class Writing:
    """How a model is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    target: Target | None = None
    float_path: Path | None = None
    float_dtype: torch.dtype = torch.float32  # of what is not quantized
    dynamic: bool = True  # whether the batch is free
    names: tuple[str, ...] = ()  # of the tensors among the inputs, for `plain`
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the quantized file says of itself


@dataclass(frozen=True)
class FileInput:
    """An input as a file declares it; None is an axis that is free."""

    name: str
    dtype: str  # as numpy names it
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class About:
    """What a file says of itself."""

    size: int  # bytes, with the data beside it
    inputs: tuple[FileInput, ...]
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options
    quantizers: Mapping[str, str] = field(default_factory=dict)  # of activations: name -> the tensor of its codes
    metadata: Mapping[str, str] = field(default_factory=dict)  # all that it says, by key


@dataclass(frozen=True)
class ShownChoices:
    """The outputs of a copy of a file that shows by which scores it chooses indices."""

    outputs: tuple[str, ...]  # all of them, in order: first those of the file
    choices: tuple[tuple[str, str, str], ...]  # the name of a node, the output with its scores, that with its indices


@dataclass(frozen=True)
class FileFormat:
    """One file format."""

    name: str
    suffix: str
    write: Callable[[fx.GraphModule, Path, Writing], None]
    files: Callable[[Path], Sequence[Path]]
    about: Callable[[Path], About]
    summary: str = ""
    plain: Callable[[nn.Module, Path, Writing], None] | None = None  # the float model by the exporter that people use
    exposed: Callable[[fx.GraphModule, Path, Writing], None] | None = None  # with the codes of activations as outputs
    check: Callable[[fx.GraphModule, Writing], None] | None = None  # raises for a model that cannot be written
    compare: Callable[[Path, fx.GraphModule], Sequence[str]] | None = None  # what a file holds that the model does not
    show_choices: Callable[[Path, Path], ShownChoices | None] | None = None  # writes a copy that shows them
    package: str = ""  # that has to be installed to write such files, where scalepoint does not bring it
    install: str = ""  # how it is installed

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise UsageError(f"a format has a name, not {shown(self.name)}")
        if not (isinstance(self.suffix, str) and self.suffix.startswith(".") and len(self.suffix) > 1):
            raise UsageError(f"format {self.name!r}: suffix= begins with a dot, such as '.onnx', not {self.suffix!r}")
        calls = {"write": ("model", "path", "writing"), "files": ("path",), "about": ("path",)}
        for extra in ("plain", "exposed"):
            if getattr(self, extra) is not None:
                calls[extra] = ("model", "path", "writing")
        if self.check is not None:
            calls["check"] = ("model", "writing")
        if self.compare is not None:
            calls["compare"] = ("path", "model")
        if self.show_choices is not None:
            calls["show_choices"] = ("path", "copy")
        for called, given in calls.items():
            _check_call(f"format {self.name!r}: {called}=", getattr(self, called), given)

    def check_installed(self) -> None:
        """Raise ExportError if the package that writes such files is not installed; nothing is imported."""
        if self.package and find_spec(self.package) is None:
            raise ExportError(
                f"{self.suffix} files are written by {self.package}, which is not installed: "
                f"{self.install or f'pip install {self.package}'}"
            )


def _check_call(where: str, function: Any, given: Sequence[str]) -> None:
    """It must take so many arguments: told now, not in the middle of an export."""
    takes = f"a function of ({', '.join(given)})"
    if not callable(function):
        raise UsageError(f"{where} is {takes}, not {shown(function)}")
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise UsageError(f"{where} is {takes}: {getattr(function, '__name__', function)}: {error}") from error
    except ValueError:  # a builtin without a signature
        return
