"""Any value as what JSON has: the one way from our dataclasses to a document."""

import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any


def to_jsonable(value: Any) -> Any:  # noqa: PLR0911  # a table of cases
    """Dicts, lists, strings and numbers; infinity and not-a-number are the strings that float() reads."""
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_jsonable(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(each) for key, each in value.items()}
    if isinstance(value, Sequence | Iterator | KeysView | ItemsView | ValuesView) and not isinstance(value, bytes):
        return [to_jsonable(each) for each in value]
    if isinstance(value, Set):
        return [to_jsonable(each) for each in sorted(value, key=str)]
    is_array = hasattr(value, "tolist") and not isinstance(value, type)  # also a tensor, which is not imported here
    return to_jsonable(value.tolist()) if is_array else str(value)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
