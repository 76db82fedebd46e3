"""What a file will say of itself, from what a command was told; and what a file says of itself, shown."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any

from rich.text import Text

from scalepoint.cli.ending import Code, usage
from scalepoint.cli.naming import Finder
from scalepoint.cli.screen import Listing, show, show_json
from scalepoint.errors import DocumentError
from scalepoint.support.formatting import size_of

SUFFIXES = (".onnx", ".pte", ".mlpackage", ".tflite")  # files that people have lying about; others go by their format
OF_PICTURES = ("size", "mean", "std")
OF_TRANSFORMERS = "preprocessor_config.json"
LONGEST = 300  # characters of a value on a screen


def with_metadata(settings: Any, finder: Finder) -> Any:
    """The settings with all that the file will say: how pictures were made, and over it what is given, read if it is
    the name of a file."""
    given = settings.metadata
    if isinstance(given, str):
        given = _read(finder.path(given))
    found = {**_preprocessing(settings, finder), **(given or {})}
    return settings.updated({"metadata": found or None})


def _preprocessing(settings: Any, finder: Finder) -> dict[str, Any]:
    stated = {name: getattr(settings, name) for name in OF_PICTURES if getattr(settings, name) is not None}
    if stated:
        return {"preprocessing": stated}
    library, _, name = (settings.model or "").partition(":")
    path = finder.path(name) / OF_TRANSFORMERS if library == "hf" else None
    return {"preprocessing": _read(path)} if path is not None and path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    """A mapping from YAML or JSON."""
    from scalepoint.support.untrusted import read_json, read_yaml

    try:
        found = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except DocumentError as error:
        raise usage(f"metadata: {error.args[0]}") from error
    except OSError as error:
        raise usage(f"metadata {str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise usage(f"metadata {str(path)!r}: a mapping of keys to values is expected, not {type(found).__name__}")
    return found


def is_file_of_ours(name: str | None) -> bool:
    """Whether what stands for a model is a file that some runtime reads."""
    return bool(name) and Path(str(name)).suffix in SUFFIXES


def tell_about(path: Path, *, json: bool) -> int:
    """Inputs, size and metadata of a file; nothing of it is run."""
    from scalepoint.formats import find_format, list_formats, read_value

    if not path.exists():
        raise usage(f"{str(path)!r}: there is no such file")
    form = next(each for each in map(find_format, list_formats()) if each.suffix == path.suffix)
    said = form.about(path)
    if json:
        metadata = {key: read_value(value) for key, value in said.metadata.items()}
        inputs = [{"name": each.name, "dtype": each.dtype, "shape": each.shape} for each in said.inputs]
        show_json("inspect", {"exit_code": 0, "path": path, "size": said.size, "inputs": inputs, "metadata": metadata})
        return Code.DONE
    rows = [(f"input {each.name}", f"{each.dtype} {_shape(each.shape)}") for each in said.inputs]
    rows += [(key, _short(value)) for key, value in said.metadata.items()]
    show(Listing(("what", "value"), [("size", size_of(said.size)), *rows]), _end(said.metadata))
    return Code.DONE


def _end(metadata: Any) -> Text | str:
    return "--json shows every value whole" if metadata else "the file says nothing of itself: others wrote it"


def _shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("*" if each is None else str(each) for each in shape)


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]} ... ({len(value)} characters)"
