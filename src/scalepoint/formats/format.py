"""A file format as a declaration: how it is written, which files it is, what it says of itself.

    FileFormat("mine", ".mine", write=write, files=files, about=read_info)

`write(model, path, request)` puts a quantized model there, whole or not at all, and the float model of the same
capture at request.float_path where that is given; `files(path)` names all that it wrote, the file itself last;
`about(path)` reads it back without running anything. `check(model, request)`, where a format has it, refuses a
graph that has an operation without a form, before anything is calibrated. `compare(path, model)`, where a format has
it, reads all codes, scales and tables back and says in words where they are others than the model's, bit by bit.
`show_choices(path, copy)`, where a format has it, writes a copy of a file whose further outputs are the scores and
the indices of every top-k.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from scalepoint.errors import ExportError, UsageError, short_repr
from scalepoint.targets import Target


@dataclass(frozen=True)
class ExportRequest:
    """How a model is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    target: Target | None = None
    float_path: Path | None = None
    float_dtype: torch.dtype = torch.float32  # of what is not quantized
    dynamic: bool = True  # whether the batch is free
    names: tuple[str, ...] = ()  # of the tensors among the inputs, for `write_baseline`
    metadata: Mapping[str, str] = field(default_factory=dict)  # what the quantized file says of itself


@dataclass(frozen=True)
class FileInput:
    """An input as a file declares it. None in `shape` is a free axis."""

    name: str
    dtype: str  # as numpy names it
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class FileInfo:
    """What a file says of itself."""

    size: int  # bytes, with the data beside it
    inputs: tuple[FileInput, ...]
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options
    quantizers: Mapping[str, str] = field(default_factory=dict)  # of activations: name -> the tensor of its codes
    metadata: Mapping[str, str] = field(default_factory=dict)  # all that it says, by key


@dataclass(frozen=True)
class ChoiceOutputs:
    """The outputs of a copy of a file that shows by which scores it chooses indices."""

    outputs: tuple[str, ...]  # all of them, in order: first those of the file
    choices: tuple[tuple[str, str, str], ...]  # the name of a node, the output with its scores, that with its indices


@dataclass(frozen=True)
class FileFormat:
    """One file format: how to write it, read what it says of itself, and compare it with the model."""

    name: str
    suffix: str
    write: Callable[[fx.GraphModule, Path, ExportRequest], None]
    files: Callable[[Path], Sequence[Path]]
    about: Callable[[Path], FileInfo]
    summary: str = ""
    write_baseline: Callable[[nn.Module, Path, ExportRequest], None] | None = (
        None  # the float model by the exporter that people use
    )
    write_with_layer_outputs: Callable[[fx.GraphModule, Path, ExportRequest], None] | None = (
        None  # with the codes of activations as outputs
    )
    check: Callable[[fx.GraphModule, ExportRequest], None] | None = None  # raises for a model that cannot be written
    compare: Callable[[Path, fx.GraphModule], Sequence[str]] | None = None  # what a file holds that the model does not
    show_choices: Callable[[Path, Path], ChoiceOutputs | None] | None = None  # writes a copy that shows them
    package: str = ""  # that has to be installed to write such files, where scalepoint does not bring it
    install: str = ""  # how it is installed

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise UsageError(f"a format has a name, not {short_repr(self.name)}")
        if not (isinstance(self.suffix, str) and self.suffix.startswith(".") and len(self.suffix) > 1):
            raise UsageError(f"format {self.name!r}: suffix= begins with a dot, such as '.onnx', not {self.suffix!r}")
        signatures = {"write": ("model", "path", "request"), "files": ("path",), "about": ("path",)}
        for extra in ("write_baseline", "write_with_layer_outputs"):
            if getattr(self, extra) is not None:
                signatures[extra] = ("model", "path", "request")
        if self.check is not None:
            signatures["check"] = ("model", "request")
        if self.compare is not None:
            signatures["compare"] = ("path", "model")
        if self.show_choices is not None:
            signatures["show_choices"] = ("path", "copy")
        for argument, parameters in signatures.items():
            _check_call(f"format {self.name!r}: {argument}=", getattr(self, argument), parameters)

    def check_installed(self) -> None:
        """Raise ExportError if the package that writes such files is not installed; nothing is imported."""
        if self.package and find_spec(self.package) is None:
            raise ExportError(
                f"{self.suffix} files are written by {self.package}, which is not installed: "
                f"{self.install or f'pip install {self.package}'}"
            )


def _check_call(where: str, function: Any, parameters: Sequence[str]) -> None:
    """It must take so many arguments: told now, not in the middle of an export."""
    expected = f"a function of ({', '.join(parameters)})"
    if not callable(function):
        raise UsageError(f"{where} is {expected}, not {short_repr(function)}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise UsageError(f"{where} is {expected}: {getattr(function, '__name__', function)}: {error}") from error
    except ValueError:  # a builtin without a signature
        return
