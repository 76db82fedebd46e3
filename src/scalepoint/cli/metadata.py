"""Collects the metadata that is stored in the exported file: labels, preprocessing, and what the user adds."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any, TypeVar

from scalepoint.cli.load_objects import ObjectLoader
from scalepoint.errors import DocumentError, UsageError
from scalepoint.options import DeployConfig, options_for

PREPROCESSOR_CONFIG = "preprocessor_config.json"
ConfigT = TypeVar("ConfigT", bound=DeployConfig)


def with_metadata(settings: ConfigT, loader: ObjectLoader) -> ConfigT:
    """Return the settings with the complete metadata: the preprocessing of images, then `metadata`, which wins.

    A `metadata` that is a text is the name of a YAML or JSON file.
    """
    metadata = settings.metadata
    if isinstance(metadata, str):
        metadata = _read_mapping(loader.resolve(metadata))
    merged = {**_read_preprocessing(settings, loader), **(metadata or {})}
    return settings.updated({"metadata": merged or None})


def _read_preprocessing(settings: DeployConfig, loader: ObjectLoader) -> dict[str, Any]:
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
