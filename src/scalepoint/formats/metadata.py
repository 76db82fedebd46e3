"""What a file says of itself, as text by key, in whatever place its format has for that.

    scalepoint.version, .torch       what it was made with
    scalepoint.target, .target.*     what it was made for, and the target's options
    scalepoint.config                what was asked of quantization, as JSON
    scalepoint.calibration           how much was seen, as JSON: {"batches": 16, "samples": 128}
    scalepoint.tuning.threads        torch threads that tune ran with: another number may give other bytes
    labels, preprocessing, ...       what its maker gives: text as it is, all else as JSON

There is no time and no path in it: the same model is the same bytes.
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
from scalepoint.support.formatting import one_line
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target
from scalepoint.targets.target import LABEL
from scalepoint.version import __version__

KEY_PREFIX = "scalepoint."
STORABLE_TYPES = (str, Number, Enum, PathLike, date, time, torch.dtype, type(None))
MAX_METADATA_CHARACTERS = 1_000_000  # characters of all that is given
MAX_DESCRIPTION_BYTES = 64_000_000  # bytes: quantizers and layers of large models are in it too


def build_metadata(
    model: fx.GraphModule, target: Target | None, user_metadata: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """All that the file of a model will say; keys in the order in which they are shown."""
    metadata = {f"{KEY_PREFIX}version": __version__, f"{KEY_PREFIX}torch": str(torch.__version__)}
    metadata |= {} if target is None else target.labels
    if has_record(model):
        record = record_of(model)
        metadata[f"{KEY_PREFIX}config"] = _to_json(record.config.to_dict())
        if record.calibrated is not None:
            metadata[f"{KEY_PREFIX}calibration"] = _to_json(
                dict(zip(("batches", "samples"), record.calibrated, strict=True))
            )
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
            f"metadata= maps keys to values, such as {{'labels': ['cat', 'dog']}}, not {short_repr(user_metadata)}"
        )
    texts: dict[str, str] = {}
    for key in sorted(user_metadata, key=str):
        if not isinstance(key, str) or not key or one_line(key) != key:
            raise UsageError(f"metadata: a key is a text that can be printed, not {short_repr(key)}")
        if key.startswith(KEY_PREFIX):
            raise UsageError(f"metadata: {key!r}: keys that begin with {KEY_PREFIX!r} are ours; choose another")
        texts[key] = _to_text(key, user_metadata[key])
    if sum(len(key) + len(value) for key, value in texts.items()) > MAX_METADATA_CHARACTERS:
        raise UsageError(f"metadata: more than {MAX_METADATA_CHARACTERS} characters: keep it beside the file instead")
    return texts


def _to_text(key: str, value: Any) -> str:
    try:
        text = value if isinstance(value, str) else _to_json(_check_storable(key, value))
        text.encode()
    except RecursionError as error:
        raise UsageError(f"metadata: {key!r} holds itself, or is nested too deep for JSON") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"metadata: {key!r} holds half a character: {error.object[error.start]!r}") from error
    return text


def _check_storable(key: str, value: Any) -> Any:
    """The value, if it has a form that says what it is: of other objects only a type and an address would be kept."""
    if isinstance(value, Mapping):
        for item in value.values():
            _check_storable(key, item)
    elif isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        for item in value:
            _check_storable(key, item)
    elif not (isinstance(value, STORABLE_TYPES) or is_dataclass(value) or hasattr(value, "tolist")) or isinstance(
        value, type
    ):
        raise UsageError(
            f"metadata: {key!r} holds {short_repr(value)}, which a file cannot hold: give text, numbers, lists or "
            "mappings"
        )
    return value


def read_target_options(metadata: Mapping[str, str]) -> dict[str, str]:
    """The target of a file that scalepoint wrote, and its options: {"target": "onnxruntime", "cpu": "avx2"}."""
    options = {key.removeprefix(f"{LABEL}."): value for key, value in metadata.items() if key.startswith(f"{LABEL}.")}
    return {"target": metadata[LABEL], **options} if LABEL in metadata else {}


class DescriptionInput(BaseModel):
    """One input, as a file states it."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class FileDescription(BaseModel):
    """What a .pte or .tflite file states about itself, as JSON; other keys are for its runtime."""

    made_for: dict[str, str] = {}
    quantizers: dict[str, str] = {}
    inputs: tuple[DescriptionInput, ...] = ()


def read_description(text: str) -> FileDescription:
    """Parse the description in a file, which anybody may have written."""
    try:
        return FileDescription.model_validate(parse_json(text, MAX_DESCRIPTION_BYTES))
    except DocumentError as error:
        raise StoreError(f"its description cannot be read: {error.args[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise StoreError(f"its description cannot be read: {one_line(where)}: {first['msg']}") from error


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
