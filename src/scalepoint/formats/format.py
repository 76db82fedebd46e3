"""FileFormat: the declaration of a file format.

    FileFormat("mine", ".mine", write=write, files=files, about=read_info)

Only `write`, `files` and `about` are required. A format without one of the optional functions does not support the
feature behind it: for example, files without `compare` are not compared with the model bit by bit.
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
    """The options with which a model is written."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]  # example inputs: args and kwargs
    target: Target | None = None
    float_path: Path | None = None  # also write the float model to this file
    float_dtype: torch.dtype = torch.float32  # of everything that is not quantized
    dynamic: bool = True  # whether the batch is dynamic
    names: tuple[str, ...] = ()  # of the tensors among the inputs, for `write_baseline`
    free_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by input name, for `write_baseline`
    metadata: Mapping[str, str] = field(default_factory=dict)  # stored in the quantized file


@dataclass(frozen=True)
class FileInput:
    """An input as a file declares it. None in `shape` is a dynamic axis."""

    name: str
    dtype: str  # numpy name
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class FileInfo:
    """What a file states about itself; read without running it."""

    size: int  # bytes, including external data files
    inputs: tuple[FileInput, ...]
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options
    quantizers: Mapping[str, str] = field(default_factory=dict)  # of activations: name -> the tensor of its codes
    metadata: Mapping[str, str] = field(default_factory=dict)  # all metadata, by key

    @property
    def free_axes(self) -> dict[str, tuple[int, ...]]:
        """The free axes of the inputs that have any, by name."""
        axes = {info.name: tuple(axis for axis, size in enumerate(info.shape) if size is None) for info in self.inputs}
        return {name: free for name, free in axes.items() if free}


@dataclass(frozen=True)
class ChoiceOutputs:
    """The outputs of a copy of a file that also returns the scores and indices of every top-k, argmax and argmin."""

    outputs: tuple[str, ...]  # all outputs in order, those of the original file first
    choices: tuple[tuple[str, str, str], ...]  # for each node: its name, the output with scores, the one with indices


@dataclass(frozen=True)
class FileFormat:
    """A file format: how its files are written, read back, and compared with the model.

    Args:
        name: The name, by which targets refer to the format.
        suffix: The suffix of its files, with the dot.
        write: (model, path, request): write the quantized model, and the float model to request.float_path if set. A
            failed write leaves an old file unchanged.
        files: (path): all files that `write` wrote, the file itself last.
        about: (path): read the file's description, without running it.
        summary: One line for lists of formats.
        write_baseline: (model, path, request): write the float model with the exporter that people usually use.
        write_with_layer_outputs: (model, path, request): write the quantized model with the codes of activations as
            additional outputs.
        check: (model, request): raise for a model that cannot be written. Runs before calibration.
        compare: (path, model): compare all codes, scales and tables with the model bit by bit, and return a sentence
            for each difference.
        show_choices: (path, copy): write a copy whose additional outputs are the scores and indices of every top-k;
            None if there is none.
        package: The package that is needed to write such files, if scalepoint does not depend on it.
        install: The command that installs it.
    """

    name: str
    suffix: str
    write: Callable[[fx.GraphModule, Path, ExportRequest], None]
    files: Callable[[Path], Sequence[Path]]
    about: Callable[[Path], FileInfo]
    summary: str = ""
    write_baseline: Callable[[nn.Module, Path, ExportRequest], None] | None = None
    write_with_layer_outputs: Callable[[fx.GraphModule, Path, ExportRequest], None] | None = None
    check: Callable[[fx.GraphModule, ExportRequest], None] | None = None
    compare: Callable[[Path, fx.GraphModule], Sequence[str]] | None = None
    show_choices: Callable[[Path, Path], ChoiceOutputs | None] | None = None
    package: str = ""
    install: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise UsageError(f"the name of a format must be text, got {short_repr(self.name)}")
        if not (isinstance(self.suffix, str) and self.suffix.startswith(".") and len(self.suffix) > 1):
            raise UsageError(
                f"format {self.name!r}: suffix= must start with a dot, such as '.onnx', got {self.suffix!r}"
            )
        required = {"write": ("model", "path", "request"), "files": ("path",), "about": ("path",)}
        optional = {
            "write_baseline": ("model", "path", "request"),
            "write_with_layer_outputs": ("model", "path", "request"),
            "check": ("model", "request"),
            "compare": ("path", "model"),
            "show_choices": ("path", "copy"),
        }
        for name, parameters in {**required, **optional}.items():
            function = getattr(self, name)
            if name in required or function is not None:
                _check_function(f"format {self.name!r}: {name}=", function, parameters)

    def check_installed(self) -> None:
        """Raise ExportError if the package that writes such files is not installed. Imports nothing."""
        if self.package and find_spec(self.package) is None:
            raise ExportError(
                f"{self.suffix} files are written with {self.package}, which is not installed: "
                f"{self.install or f'pip install {self.package}'}"
            )


def _check_function(where: str, function: Any, parameters: Sequence[str]) -> None:
    """Raise UsageError for a wrong number of parameters now, instead of in the middle of an export."""
    expected = f"a function of ({', '.join(parameters)})"
    if not callable(function):
        raise UsageError(f"{where} must be {expected}, got {short_repr(function)}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise UsageError(f"{where} must be {expected}: {getattr(function, '__name__', function)}: {error}") from error
    except ValueError:  # a builtin without a signature
        return
