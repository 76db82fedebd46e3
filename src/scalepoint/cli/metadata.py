"""Collects the metadata for an exported file, and shows the inputs and metadata of a file."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any

from scalepoint.cli.exit_codes import Code
from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.cli.output import Listing, show, show_json
from scalepoint.errors import DocumentError, UsageError
from scalepoint.options import options_for
from scalepoint.support.formatting import format_size

PREPROCESSOR_CONFIG = "preprocessor_config.json"
MAX_VALUE_LENGTH = 300  # characters shown without --json


def with_metadata(settings: Any, loader: ObjectLoader) -> Any:
    """Return the settings with the complete metadata: the preprocessing of images, then `metadata`, which wins.

    A `metadata` that is a text is the name of a YAML or JSON file.
    """
    metadata = settings.metadata
    if isinstance(metadata, str):
        metadata = _read_mapping(loader.resolve(metadata))
    merged = {**_read_preprocessing(settings, loader), **(metadata or {})}
    return settings.updated({"metadata": merged or None})


def _read_preprocessing(settings: Any, loader: ObjectLoader) -> dict[str, Any]:
    """Return the preprocessing from the image options, else from the checkpoint of a transformers model."""
    options = {name: getattr(settings, name) for name in options_for("images") if getattr(settings, name) is not None}
    if options:
        return {"preprocessing": options}
    library, _, name = (settings.model or "").partition(":")
    path = loader.resolve(name) / PREPROCESSOR_CONFIG if library == "hf" else None
    return {"preprocessing": _read_mapping(path)} if path is not None and path.is_file() else {}


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML or JSON file."""
    from scalepoint.support.untrusted import read_json, read_yaml

    try:
        content = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except DocumentError as error:
        raise UsageError(f"metadata: {error.args[0]}") from error
    except OSError as error:
        raise UsageError(f"metadata {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"metadata {str(path)!r} must be a mapping of keys to values, got a {type(content).__name__}")
    return content


def is_model_file(name: str | None) -> bool:
    """Whether the name of a model is an exported file."""
    return name is not None and _find_file_format(Path(name)) is not None


def _find_file_format(path: Path) -> Any:
    """Return the format with the suffix of the file; None for other names, such as package.module:function."""
    from scalepoint.formats import find_format, list_formats

    suffix = path.suffix.lower()
    formats = map(find_format, list_formats() if suffix[1:].isalnum() else ())
    return next((file_format for file_format in formats if file_format.suffix == suffix), None)


def is_float_onnx(name: str | None) -> bool:
    """Whether a model is an .onnx file that scalepoint did not quantize: its layers are shown."""
    from scalepoint.formats import find_format

    path = Path(str(name))
    return path.suffix.lower() == ".onnx" and path.is_file() and not find_format("onnx").about(path).made_for


def show_file_info(path: Path, *, json: bool) -> int:
    """Show inputs, size and metadata of a file. The file is not run."""
    from scalepoint.formats import read_value

    if not path.exists():
        raise UsageError(f"{str(path)!r}: there is no such file in {Path.cwd()}")
    info = _find_file_format(path).about(path)
    if json:
        metadata = {key: read_value(value) for key, value in info.metadata.items()}
        inputs = [{"name": entry.name, "dtype": entry.dtype, "shape": entry.shape} for entry in info.inputs]
        show_json("inspect", {"exit_code": 0, "path": path, "size": info.size, "inputs": inputs, "metadata": metadata})
        return Code.DONE
    rows = [("size", format_size(info.size))]
    rows += [(f"input {entry.name}", f"{entry.dtype} {_format_shape(entry.shape)}") for entry in info.inputs]
    rows += [(key, _shorten(value)) for key, value in info.metadata.items()]
    has_metadata = bool(info.metadata)
    note = "--json shows all values in full" if has_metadata else "no metadata: the file was not written by scalepoint"
    show(Listing(("what", "value"), rows), note)
    return Code.DONE


def _format_shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("*" if size is None else str(size) for size in shape)


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]} ... ({len(value)} characters)"
