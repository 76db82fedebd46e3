"""Conversion of values to JSON values."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from scalepoint.support.jsonable import to_jsonable


class Kind(Enum):
    FIRST = "first"


@dataclass(frozen=True)
class Pair:
    number: int
    numbers: tuple[float, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((number * 2 for number in (1, 2)), [2, 4]),
        (map(str, (1, 2)), ["1", "2"]),
        ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.values(), [1]),
        ({"a": 1}.items(), [["a", 1]]),
        ({"b", "a"}, ["a", "b"]),
        (range(2), [0, 1]),
        (OrderedDict(x=Kind.FIRST), {"x": "first"}),
        (Pair(np.int64(3), (1.5, float("inf"), float("nan"))), {"number": 3, "numbers": [1.5, "Infinity", "NaN"]}),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.float16, "torch.float16"),
        (Path("a") / "b", str(Path("a") / "b")),
        (b"ab", "b'ab'"),
    ],
    ids=range(13),
)
def test_values_become_json_values(value, expected):
    assert to_jsonable(value) == expected
    json.dumps(expected, allow_nan=False)
