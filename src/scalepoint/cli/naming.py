"""Objects by name: package.module:name, from the current folder on. Files that would be unpickled are refused."""

# ruff: noqa: PLC0415  # torch is imported when a model is
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from scalepoint.cli.ending import usage
from scalepoint.cli.screen import one_line
from scalepoint.errors import ScalepointError, nearest
from scalepoint.processor import cap

PICKLES = (".pt", ".pth", ".pt2", ".pkl", ".ckpt", ".bin", ".joblib")
_BUILD = (
    "write a function without arguments that builds the model and loads its weights (safetensors, or "
    "torch.load with weights_only=True), and name it: package.module:function"
)


def public(name: str) -> Any:
    """A function of the package's front door, loaded now."""
    import scalepoint

    return getattr(scalepoint, name)


def check_name(text: str, what: str) -> None:
    """Refuse what is no package.module:name, before anything slow happens."""
    module, colon, name = text.partition(":")
    suffix = Path(text.rstrip("/")).suffix.lower()
    if suffix in PICKLES:
        raise usage(
            f"{what} {text!r}: a {suffix} file can run code when it is loaded, so it is never opened here: {_BUILD}"
        )
    if module.endswith(".py"):
        better = ".".join(Path(module).with_suffix("").parts)
        raise usage(
            f"{what} {text!r}: name the module, not its file: {better}:{name or 'name'}, from the folder it is in"
        )
    if not colon or not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise usage(f"{what} {text!r} is not package.module:name: {_BUILD}")


def named(text: str, what: str) -> Any:
    """The object that package.module:name says."""
    check_name(text, what)
    module_name, _, path = text.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))  # only now: no other command runs what lies in the current folder
    with users_code(f"importing {module_name!r} for {what}"):
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            here = sorted(
                {each.stem if each.is_file() else each.name for each in Path.cwd().iterdir() if _module(each)}
            )
            raise usage(
                f"{what} {text!r}: there is no module {error.name!r} here ({Path.cwd()}) or installed: "
                f"{nearest(error.name, here[:20])}"
            ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            names = [each for each in dir(found) if not each.startswith("_")][:40]
            raise usage(f"{what} {text!r}: {module_name} has no {name!r}: {nearest(name, names)}")
        found = getattr(found, name)
    return found


def _module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").is_file())


def load_model(text: str) -> tuple[Any, Any]:
    """The model that a name makes, and its example inputs, or None."""
    cap()  # the user's module imports torch, and may multiply
    made = named(text, "model")
    from torch import nn

    if not isinstance(made, nn.Module | tuple):
        if not callable(made):
            raise usage(f"model {text!r} is a {type(made).__name__}, not a model nor a function that makes one")
        with users_code(f"making the model {text!r}"):
            made = made()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise usage(
            f"model {text!r} gave a {type(model).__name__}: it must give an nn.Module or (model, example_inputs)"
        )
    return model.eval(), inputs


def load_evaluate(text: str) -> Callable[[Any], Any]:
    """The user's metric; what goes wrong in it is told as theirs."""
    function = named(text, "evaluate")
    if not callable(function):
        raise usage(f"evaluate {text!r} is a {type(function).__name__}, not a function")

    @wraps(function)
    def evaluate(run: Any) -> Any:
        with users_code(f"evaluate {text!r}"):
            return function(run)

    return evaluate


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """What the user's own code raises, or an exit in it, is theirs to mend: said with its place."""
    try:
        yield
    except ScalepointError:
        raise
    except SystemExit as error:
        raise usage(f"{doing}: the code ended the process with sys.exit({error.code!r}): it should return") from error
    except Exception as error:
        raise usage(f"{doing}: {type(error).__name__}: {one_line(error)}{_place(error)}") from error


def _place(error: Exception) -> str:
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
