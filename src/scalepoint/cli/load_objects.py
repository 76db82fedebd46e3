"""Loads objects by name: package.module:name or file.py:name. Files that would be unpickled are refused.

Installed modules are imported. Code from the folder of the config file or from the current folder runs only with
--trust, because a downloaded folder may contain harmful code.
"""

# ruff: noqa: PLC0415  # torch is imported when a model is
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from scalepoint.cli.library_models import (
    check_library_model,
    check_weights,
    is_library_model,
    load_weights,
    make_library_model,
)
from scalepoint.errors import ScalepointError, UsageError, did_you_mean
from scalepoint.support.cpu import cap_instruction_set
from scalepoint.support.formatting import to_one_line

PICKLE_SUFFIXES = (".pt", ".pth", ".pt2", ".pkl", ".ckpt", ".bin", ".joblib")
_BUILD_HINT = (
    "write a function without arguments that builds the model and loads its weights (safetensors, or "
    "torch.load with weights_only=True), and name it: package.module:function"
)


def is_onnx_file(text: str | None) -> bool:
    """Whether a model is named by an .onnx file."""
    return bool(text) and Path(str(text)).suffix.lower() == ".onnx"


@dataclass(frozen=True)
class ObjectLoader:
    """Settings for loading objects by name. Files and modules are searched in `root` and in the current folder."""

    root: Path = Path()  # folder of the config file
    trust: bool = False  # run code of the two folders
    weights: str | None = None  # file with weights for the model
    random: bool = False  # give a model of a library random weights

    @property
    def folders(self) -> list[Path]:
        """The folders to search, in this order."""
        return list(dict.fromkeys((self.root.resolve(), Path.cwd())))

    def resolve(self, text: str) -> Path:
        """Return the path of an existing file or folder with this name, else the name itself."""
        return next((folder / text for folder in self.folders if (folder / text).exists()), Path(text))


def check_name(text: str, what: str, loader: ObjectLoader) -> None:
    """Refuse a name that is not package.module:name or needs --trust, before anything slow happens.

    `what` is the kind of object for error messages, such as "model".
    """
    if what == "model" and is_library_model(text):
        package = "transformers" if text.startswith("hf:") else text.partition(":")[0]
        _check_trust(text, what, loader, _find_local_package(package, loader))
        check_library_model(text, loader.resolve(text.partition(":")[2]).parent if text.startswith("hf:") else Path())
        return
    if what == "model" and is_onnx_file(text):
        if not loader.resolve(text).is_file():
            raise UsageError(f"model {text!r}: there is no such file in {_list_folders(loader)}")
        return
    module, colon, name = text.partition(":")
    suffix = Path(text.rstrip("/")).suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise UsageError(
            f"{what} {text!r}: a {suffix} file can run code when it is loaded, so it is never opened: {_BUILD_HINT}"
        )
    is_file = module.endswith(".py")
    parts = name.split(".") if is_file else (*module.split("."), *name.split("."))
    if not colon or not name or not all(part.isidentifier() for part in parts):
        raise UsageError(f"{what} {text!r} is not package.module:name: {_BUILD_HINT}")
    if is_file and not loader.resolve(module).is_file():
        raise UsageError(f"{what} {text!r}: there is no file {module} in {_list_folders(loader)}")
    _check_trust(text, what, loader, loader.resolve(module) if is_file else _find_local_code(module, loader))


def _check_trust(text: str, what: str, loader: ObjectLoader, code: Path | None) -> None:
    """Refuse code that is not installed unless --trust is set."""
    if code is not None and not loader.trust:
        raise UsageError(
            f"{what} {text!r} runs code that is not installed: {code}. Read the code, and add --trust if you trust it"
        )


def _find_local_code(module: str, loader: ObjectLoader) -> Path | None:
    """Return the file or folder of a module if it would be imported from one of the loader's folders."""
    name = module.partition(".")[0]
    invalidate_caches()  # Python caches folder contents; a file may be newer
    specs = [spec for folder in loader.folders if (spec := PathFinder.find_spec(name, [str(folder)])) is not None]
    for spec in specs:
        if spec.origin is not None:
            return Path(spec.origin)
    for spec in specs:  # folders without __init__.py: Python prefers an installed module of the same name
        other_folders = [folder for folder in sys.path if Path(folder).resolve() not in loader.folders]
        installed = PathFinder.find_spec(name, other_folders)
        if (installed is None or installed.origin is None) and name not in sys.builtin_module_names:
            return Path(next(iter(spec.submodule_search_locations or [name])))
    return None


def _find_local_package(package: str, loader: ObjectLoader) -> Path | None:
    """Return the file of a library if Python would load it from one of the loader's folders."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).resolve()
    parent = path.parents[1] if path.stem == "__init__" else path.parent
    return path if parent in loader.folders else None


def _list_folders(loader: ObjectLoader) -> str:
    return " or ".join(map(str, loader.folders))


def load_object(text: str, what: str, loader: ObjectLoader) -> Any:
    """Load the object that package.module:name or file.py:name names."""
    check_name(text, what, loader)
    module_name, _, path = text.partition(":")
    with user_code(f"importing {module_name!r} for {what}"):
        is_file = module_name.endswith(".py")
        value: Any = (
            _run_file(loader.resolve(module_name)) if is_file else _import_module(module_name, text, what, loader)
        )
    for name in path.split("."):
        if not hasattr(value, name):
            names = [attribute for attribute in dir(value) if not attribute.startswith("_")][:40]
            raise UsageError(f"{what} {text!r}: {module_name} has no {name!r}: {did_you_mean(name, names)}")
        value = getattr(value, name)
    return value


def _extend_path(*folders: Path) -> None:
    """Make modules in the folders importable. Called only for trusted folders."""
    for folder in reversed(folders):
        is_on_path = str(folder) in sys.path or (folder == Path.cwd() and "" in sys.path)
        if not is_on_path:
            sys.path.insert(0, str(folder))


def _import_module(module_name: str, text: str, what: str, loader: ObjectLoader) -> Any:
    if loader.trust:
        _extend_path(*loader.folders)
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        paths = [path for folder in loader.folders for path in folder.iterdir() if _is_module(path)]
        modules = sorted({path.stem if path.is_file() else path.name for path in paths})
        raise UsageError(
            f"{what} {text!r}: there is no module {error.name!r} in {_list_folders(loader)} or installed: "
            f"{did_you_mean(error.name, modules[:20])}"
        ) from error


def _run_file(path: Path) -> Any:
    """Run a file once and return its module. It can import modules next to it, as with `python file.py`."""
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # another module has this name
        name = f"{name} of {path.parent}"
    _extend_path(path.parent)
    spec = spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101  # a .py file always has one
    assert spec.loader is not None  # noqa: S101
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").is_file())


def load_model(text: str, loader: ObjectLoader) -> tuple[Any, Any]:
    """Load the model that `text` names, and its example inputs or None."""
    cap_instruction_set()  # before the user's module imports torch
    weights = None if loader.weights is None else loader.resolve(loader.weights)
    if weights is not None:
        check_weights(weights)
    model, inputs = _load_library_model(text, loader) if is_library_model(text) else _build_model(text, loader)
    if weights is not None:
        load_weights(model, weights)
    return model.eval(), inputs


def _load_library_model(text: str, loader: ObjectLoader) -> tuple[Any, Any]:
    root = loader.resolve(text.partition(":")[2]).parent if text.startswith("hf:") else Path()
    return make_library_model(text, root, loader.random or loader.weights is not None)


def _build_model(text: str, loader: ObjectLoader) -> tuple[Any, Any]:
    """Call the user's factory. It returns a model or (model, example_inputs); a model itself may also be named."""
    value = load_object(text, "model", loader)
    from torch import nn

    if not isinstance(value, nn.Module | tuple):
        if not callable(value):
            kind = type(value).__name__
            raise UsageError(f"model {text!r} must be a model or a function that returns one, got a {kind}")
        with user_code(f"building the model {text!r}"):
            value = value()
    model, inputs = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {text!r} must return an nn.Module or (model, example_inputs), got a {type(model).__name__}"
        )
    return model, inputs


def load_evaluate(text: str, loader: ObjectLoader) -> Callable[[Any], Any]:
    """Load the user's metric. Exceptions in it become usage errors."""
    function = load_object(text, "evaluate", loader)
    if not callable(function):
        raise UsageError(f"evaluate {text!r} must be a function, got a {type(function).__name__}")

    @wraps(function)
    def evaluate(run: Any) -> Any:
        with user_code(f"evaluate {text!r}"):
            return function(run)

    return evaluate


@contextmanager
def user_code(activity: str) -> Iterator[None]:
    """Turn exceptions and exits in the user's code into usage errors that name the line."""
    try:
        yield
    except ScalepointError:
        raise
    except SystemExit as error:
        raise UsageError(
            f"{activity}: the code ended the process with sys.exit({error.code!r}): it must return instead"
        ) from error
    except Exception as error:
        raise UsageError(f"{activity}: {type(error).__name__}: {to_one_line(error)}{_find_user_line(error)}") from error


def _find_user_line(error: Exception) -> str:
    """Return the innermost line of the traceback that is not in a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (sys.prefix, sys.base_prefix, "<", str(Path(__file__).parent))
    user_frames = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
