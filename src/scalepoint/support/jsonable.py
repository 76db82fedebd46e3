"""Converts dataclasses and other values to JSON values."""

import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any


def to_jsonable(value: Any) -> Any:  # a table of cases
    """Convert a value to dicts, lists, strings and numbers. Infinity and NaN become strings that float() accepts."""
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence | Iterator | KeysView | ItemsView | ValuesView) and not isinstance(value, bytes):
        return [to_jsonable(item) for item in value]
    if isinstance(value, Set):
        return [to_jsonable(item) for item in sorted(value, key=str)]
    is_array = hasattr(value, "tolist") and not isinstance(value, type)  # or a tensor: torch is not imported here
    return to_jsonable(value.tolist()) if is_array else str(value)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"
