"""Metadata of exported files: text by key, stored where the file format allows it.

    scalepoint.version, .torch       versions that wrote the file
    scalepoint.target, .target.*     the target and its options
    scalepoint.config                the QuantConfig, as JSON
    scalepoint.calibration           the amount of calibration data, as JSON: {"batches": 16, "samples": 128}
    scalepoint.tuning.threads        torch threads of `tune`: another number of threads may give other bytes
    labels, preprocessing, ...       entries of the user: text unchanged, other values as JSON

Metadata contain no time and no path, so the same model gives the same bytes.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import is_dataclass
from datetime import date, time
from enum import Enum
from numbers import Number
from os import PathLike
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import fx

from scalepoint.errors import DocumentError, StoreError, UsageError, short_repr
from scalepoint.quantize.record import has_record, record_of
from scalepoint.support.documents import parse_json
from scalepoint.support.formatting import to_one_line
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target
from scalepoint.targets.target import METADATA_KEY
from scalepoint.version import __version__

KEY_PREFIX = "scalepoint."
STORABLE_TYPES = (str, Number, Enum, PathLike, date, time, torch.dtype, type(None))
MAX_METADATA_CHARACTERS = 1_000_000  # of all entries of the user together
MAX_DESCRIPTION_BYTES = 64_000_000  # a description also lists the quantizers and layers of large models


def build_metadata(
    model: fx.GraphModule, target: Target | None, user_metadata: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return all metadata of a model's file, in the order in which they are shown."""
    metadata = {f"{KEY_PREFIX}version": __version__, f"{KEY_PREFIX}torch": str(torch.__version__)}
    metadata |= {} if target is None else target.file_metadata
    if has_record(model):
        record = record_of(model)
        metadata[f"{KEY_PREFIX}config"] = _to_json(record.config.to_dict())
        if record.calibrated is not None:
            batches, samples = record.calibrated
            metadata[f"{KEY_PREFIX}calibration"] = _to_json({"batches": batches, "samples": samples})
        if record.tuned_threads is not None:
            metadata[f"{KEY_PREFIX}tuning.threads"] = str(record.tuned_threads)
    return metadata | check_metadata(user_metadata)


def check_metadata(user_metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Check metadata of the user and turn it into text.

    Args:
        user_metadata: Keys and values; values that are not text are written as JSON.

    Returns:
        Text by key, sorted by key.

    Raises:
        UsageError: A key or a value cannot be stored.
    """
    if user_metadata is None:
        return {}
    if not isinstance(user_metadata, Mapping):
        raise UsageError(
            f"metadata= must be a mapping, such as {{'labels': ['cat', 'dog']}}, got {short_repr(user_metadata)}"
        )
    texts: dict[str, str] = {}
    for key in sorted(user_metadata, key=str):
        if not isinstance(key, str) or not key or to_one_line(key) != key:
            raise UsageError(f"metadata: a key must be printable text, got {short_repr(key)}")
        if key.startswith(KEY_PREFIX):
            raise UsageError(f"metadata: {key!r}: keys that begin with {KEY_PREFIX!r} are reserved: choose another key")
        texts[key] = _to_text(key, user_metadata[key])
    if sum(len(key) + len(value) for key, value in texts.items()) > MAX_METADATA_CHARACTERS:
        raise UsageError(f"metadata: more than {MAX_METADATA_CHARACTERS} characters: store it in a separate file")
    return texts


def _to_text(key: str, value: Any) -> str:
    try:
        text = value if isinstance(value, str) else _to_json(_check_storable(key, value))
        text.encode()
    except RecursionError as error:
        raise UsageError(f"metadata: {key!r} contains itself, or is nested too deeply for JSON") from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"metadata: {key!r} contains an incomplete character (a lone surrogate): {error.object[error.start]!r}"
        ) from error
    return text


def _check_storable(key: str, value: Any) -> Any:
    """Return the value, or raise UsageError for an object whose text form would be only its type and address."""
    if isinstance(value, Mapping):
        for item in value.values():
            _check_storable(key, item)
    elif isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        for item in value:
            _check_storable(key, item)
    else:
        is_storable = isinstance(value, STORABLE_TYPES) or is_dataclass(value) or hasattr(value, "tolist")
        if not is_storable or isinstance(value, type):
            raise UsageError(
                f"metadata: {key!r} contains {short_repr(value)}, which cannot be stored: give text, numbers, lists or "
                "mappings"
            )
    return value


def read_target_options(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the target of a file and its options: {"target": "onnxruntime", "cpu": "avx2"}; {} if it has none."""
    options = {
        key.removeprefix(f"{METADATA_KEY}."): value
        for key, value in metadata.items()
        if key.startswith(f"{METADATA_KEY}.")
    }
    return {"target": metadata[METADATA_KEY], **options} if METADATA_KEY in metadata else {}


class DescriptionInput(BaseModel):
    """An input in the description of a file."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class FileDescription(BaseModel):
    """The description in a .pte or .tflite file, stored as JSON. Other keys are for the runtime."""

    made_for: dict[str, str] = {}
    quantizers: dict[str, str] = {}
    inputs: tuple[DescriptionInput, ...] = ()


def read_description(text: str) -> FileDescription:
    """Parse the description in a file. The file is untrusted."""
    try:
        return FileDescription.model_validate(parse_json(text, MAX_DESCRIPTION_BYTES))
    except DocumentError as error:
        raise StoreError(f"its description cannot be read: {error.args[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise StoreError(f"its description cannot be read: {to_one_line(where)}: {first['msg']}") from error


def read_value(text: str) -> Any:
    """Read a value of the metadata: JSON lists and mappings become Python values, other text stays text.

    Args:
        text: The stored text.
    """
    if not text.startswith(("{", "[")):
        return text
    try:
        return parse_json(text, MAX_DESCRIPTION_BYTES)
    except DocumentError:  # text that only begins like JSON
        return text


def _to_json(value: Any) -> str:
    return json.dumps(to_jsonable(value), ensure_ascii=False)
