"""What a file will say of itself, from what a command was told; and what a file says of itself, shown."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any

from rich.text import Text

from scalepoint.cli.exit_codes import Code, usage_error
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.cli.output import Listing, show, show_json
from scalepoint.errors import DocumentError
from scalepoint.support.formatting import size_of

SUFFIXES = (".onnx", ".pte", ".mlpackage", ".tflite")  # files that people have lying about; others go by their format
IMAGE_OPTIONS = ("size", "mean", "std")
PREPROCESSOR_CONFIG = "preprocessor_config.json"
MAX_VALUE_LENGTH = 300  # characters of a value on a screen


def with_metadata(settings: Any, finder: ObjectLoader) -> Any:
    """The settings with all that the file will say: how pictures were made, and over it what is given, read if it is
    the name of a file."""
    given = settings.metadata
    if isinstance(given, str):
        given = _read_mapping(finder.path(given))
    found = {**_read_preprocessing(settings, finder), **(given or {})}
    return settings.updated({"metadata": found or None})


def _read_preprocessing(settings: Any, finder: ObjectLoader) -> dict[str, Any]:
    stated = {name: getattr(settings, name) for name in IMAGE_OPTIONS if getattr(settings, name) is not None}
    if stated:
        return {"preprocessing": stated}
    library, _, name = (settings.model or "").partition(":")
    path = finder.path(name) / PREPROCESSOR_CONFIG if library == "hf" else None
    return {"preprocessing": _read_mapping(path)} if path is not None and path.is_file() else {}


def _read_mapping(path: Path) -> dict[str, Any]:
    """A mapping from YAML or JSON."""
    from scalepoint.support.untrusted import read_json, read_yaml

    try:
        found = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except DocumentError as error:
        raise usage_error(f"metadata: {error.args[0]}") from error
    except OSError as error:
        raise usage_error(f"metadata {str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise usage_error(
            f"metadata {str(path)!r}: a mapping of keys to values is expected, not {type(found).__name__}"
        )
    return found


def is_model_file(name: str | None) -> bool:
    """Whether what stands for a model is a file that some runtime reads."""
    return bool(name) and Path(str(name)).suffix in SUFFIXES


def show_file_info(path: Path, *, json: bool) -> int:
    """Inputs, size and metadata of a file; nothing of it is run."""
    from scalepoint.formats import find_format, list_formats, read_value

    if not path.exists():
        raise usage_error(f"{str(path)!r}: there is no such file")
    form = next(each for each in map(find_format, list_formats()) if each.suffix == path.suffix)
    said = form.about(path)
    if json:
        metadata = {key: read_value(value) for key, value in said.metadata.items()}
        inputs = [{"name": each.name, "dtype": each.dtype, "shape": each.shape} for each in said.inputs]
        show_json("inspect", {"exit_code": 0, "path": path, "size": said.size, "inputs": inputs, "metadata": metadata})
        return Code.DONE
    rows = [(f"input {each.name}", f"{each.dtype} {_format_shape(each.shape)}") for each in said.inputs]
    rows += [(key, _shorten(value)) for key, value in said.metadata.items()]
    show(Listing(("what", "value"), [("size", size_of(said.size)), *rows]), _metadata_listing(said.metadata))
    return Code.DONE


def _metadata_listing(metadata: Any) -> Text | str:
    return "--json shows every value whole" if metadata else "the file says nothing of itself: others wrote it"


def _format_shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("*" if each is None else str(each) for each in shape)


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]} ... ({len(value)} characters)"
