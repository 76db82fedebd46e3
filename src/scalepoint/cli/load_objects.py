"""Objects by name: package.module:name, or file.py:name. Files that would be unpickled are refused.

Installed modules are imported. Code from the folder of the config file or from the current directory runs only with
--trust, however it is named: both folders may come from somebody else.
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

from scalepoint.cli.exit_codes import usage_error
from scalepoint.cli.library_models import (
    check_library_model,
    check_weights,
    is_library_model,
    load_weights,
    make_library_model,
)
from scalepoint.errors import ScalepointError, did_you_mean
from scalepoint.support.cpu import cap_instruction_set
from scalepoint.support.formatting import one_line

PICKLE_SUFFIXES = (".pt", ".pth", ".pt2", ".pkl", ".ckpt", ".bin", ".joblib")
_BUILD_HINT = (
    "write a function without arguments that builds the model and loads its weights (safetensors, or "
    "torch.load with weights_only=True), and name it: package.module:function"
)


def load_public(name: str) -> Any:
    """A function of the package's front door, loaded now."""
    import scalepoint

    return getattr(scalepoint, name)


@dataclass(frozen=True)
class ObjectLoader:
    """Where modules and files are looked for: in `root`, the folder of the config, then in the current one. Only with
    `trust` is code of these two folders run. `weights` go into the model that is made; with `random`, a library's
    model has weights of its own."""

    root: Path = Path()
    trust: bool = False
    weights: str | None = None
    random: bool = False

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys((self.root.resolve(), Path.cwd())))

    def path(self, text: str) -> Path:
        """A file or folder that is there, else the name as it was given."""
        return next((folder / text for folder in self.folders if (folder / text).exists()), Path(text))


def check_name(text: str, what: str, finder: ObjectLoader | None = None) -> None:
    """Refuse what is no package.module:name, before anything slow happens."""
    finder = finder or ObjectLoader()
    if what == "model" and is_library_model(text):
        package = "transformers" if text.startswith("hf:") else text.partition(":")[0]
        _check_trust(text, what, finder, _loaded_from_here(package, finder))
        check_library_model(text, finder.path(text.partition(":")[2]).parent if text.startswith("hf:") else Path())
        return
    module, colon, name = text.partition(":")
    suffix = Path(text.rstrip("/")).suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise usage_error(
            f"{what} {text!r}: a {suffix} file can run code when it is loaded, so it is never opened here: "
            f"{_BUILD_HINT}"
        )
    is_file = module.endswith(".py")
    parts = name.split(".") if is_file else (*module.split("."), *name.split("."))
    if not colon or not name or not all(part.isidentifier() for part in parts):
        raise usage_error(f"{what} {text!r} is not package.module:name: {_BUILD_HINT}")
    if is_file and not finder.path(module).is_file():
        raise usage_error(f"{what} {text!r}: there is no file {module} in {_list_folders(finder)}")
    _check_trust(text, what, finder, finder.path(module) if is_file else _local_code(module, finder))


def _check_trust(text: str, what: str, finder: ObjectLoader, code: Path | None) -> None:
    if code is not None and not finder.trust:
        raise usage_error(
            f"{what} {text!r} runs code that is not installed: {code}. Read the code, and add --trust if you trust it"
        )


def _local_code(module: str, finder: ObjectLoader) -> Path | None:
    """The file or folder of a module that would be imported from one of our two folders."""
    name = module.partition(".")[0]
    invalidate_caches()  # a file may be younger than the last look into its folder
    specs = [spec for folder in finder.folders if (spec := PathFinder.find_spec(name, [str(folder)])) is not None]
    for spec in specs:
        if spec.origin is not None:
            return Path(spec.origin)
    for spec in specs:  # a folder without __init__.py: an installed module of the same name comes first
        others = [each for each in sys.path if Path(each).resolve() not in finder.folders]
        installed = PathFinder.find_spec(name, others)
        if (installed is None or installed.origin is None) and name not in sys.builtin_module_names:
            return Path(next(iter(spec.submodule_search_locations or [name])))
    return None


def _loaded_from_here(package: str, finder: ObjectLoader) -> Path | None:
    """The file of a library that Python itself would load from one of our two folders."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).resolve()
    return path if (path.parents[1] if path.stem == "__init__" else path.parent) in finder.folders else None


def _list_folders(finder: ObjectLoader) -> str:
    return " or ".join(map(str, finder.folders))


def load_object(text: str, what: str, finder: ObjectLoader) -> Any:
    """The object that package.module:name or file.py:name says."""
    check_name(text, what, finder)
    module_name, _, path = text.partition(":")
    with user_code(f"importing {module_name!r} for {what}"):
        is_file = module_name.endswith(".py")
        found: Any = _run_file(finder.path(module_name)) if is_file else _import_module(module_name, text, what, finder)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [each for each in dir(found) if not each.startswith("_")][:40]
            raise usage_error(f"{what} {text!r}: {module_name} has no {name!r}: {did_you_mean(name, names)}")
        found = getattr(found, name)
    return found


def _extend_path(*folders: Path) -> None:
    """Only now: no other command runs what lies in these folders."""
    for folder in reversed(folders):
        is_there = str(folder) in sys.path or (folder == Path.cwd() and "" in sys.path)
        if not is_there:
            sys.path.insert(0, str(folder))


def _import_module(module_name: str, text: str, what: str, finder: ObjectLoader) -> Any:
    if finder.trust:
        _extend_path(*finder.folders)
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        files = [each for folder in finder.folders for each in folder.iterdir() if _is_module(each)]
        here = sorted({each.stem if each.is_file() else each.name for each in files})
        raise usage_error(
            f"{what} {text!r}: there is no module {error.name!r} here ({_list_folders(finder)}) or installed: "
            f"{did_you_mean(error.name, here[:20])}"
        ) from error


def _run_file(path: Path) -> Any:
    """The module of a file, run once; its neighbours can be imported, as when Python runs it."""
    path = path.resolve()
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None:
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


def load_model(text: str, finder: ObjectLoader) -> tuple[Any, Any]:
    """The model that a name makes, and its example inputs, or None."""
    cap_instruction_set()  # the user's module imports torch, and may multiply
    weights = None if finder.weights is None else finder.path(finder.weights)
    if weights is not None:
        check_weights(weights)
    model, inputs = _load_library_model(text, finder) if is_library_model(text) else _build_model(text, finder)
    if weights is not None:
        load_weights(model, weights)
    return model.eval(), inputs


def _load_library_model(text: str, finder: ObjectLoader) -> tuple[Any, Any]:
    root = finder.path(text.partition(":")[2]).parent if text.startswith("hf:") else Path()
    return make_library_model(text, root, finder.random or finder.weights is not None)


def _build_model(text: str, finder: ObjectLoader) -> tuple[Any, Any]:
    made = load_object(text, "model", finder)
    from torch import nn

    if not isinstance(made, nn.Module | tuple):
        if not callable(made):
            raise usage_error(f"model {text!r} is a {type(made).__name__}, not a model nor a function that makes one")
        with user_code(f"making the model {text!r}"):
            made = made()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise usage_error(
            f"model {text!r} gave a {type(model).__name__}: it must give an nn.Module or (model, example_inputs)"
        )
    return model, inputs


def load_evaluate(text: str, finder: ObjectLoader) -> Callable[[Any], Any]:
    """The user's metric; what goes wrong in it is told as theirs."""
    function = load_object(text, "evaluate", finder)
    if not callable(function):
        raise usage_error(f"evaluate {text!r} is a {type(function).__name__}, not a function")

    @wraps(function)
    def evaluate(run: Any) -> Any:
        with user_code(f"evaluate {text!r}"):
            return function(run)

    return evaluate


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """What the user's own code raises, or an exit in it, is theirs to mend: said with its place."""
    try:
        yield
    except ScalepointError:
        raise
    except SystemExit as error:
        raise usage_error(
            f"{doing}: the code ended the process with sys.exit({error.code!r}): it should return"
        ) from error
    except Exception as error:
        raise usage_error(f"{doing}: {type(error).__name__}: {one_line(error)}{_find_user_line(error)}") from error


def _find_user_line(error: Exception) -> str:
    """The innermost line outside of the libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if not each.filename.startswith((sys.prefix, sys.base_prefix, "<", str(Path(__file__).parent)))
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
