"""A runtime is checked when it is declared."""

from pathlib import Path

import pytest

from scalepoint.errors import UsageError
from scalepoint.runtimes import Runtime, Variant, find_runtime, list_runtimes

HERE = Path(__file__)


def test_ours_are_found_by_name():
    assert list_runtimes()[:2] == ["onnxruntime", "openvino"]
    assert find_runtime("onnxruntime").formats == ("onnx",)
    assert find_runtime(find_runtime("openvino")) is find_runtime("openvino")


def test_an_unknown_one_is_told_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'openvino'"):
        find_runtime("openvin")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": ""}, "has a name"),
        ({"package": "not a module"}, "package="),
        ({"child": Path("/no/such/child.py")}, "child program"),
        ({"formats": "onnx"}, "formats= are keys"),
        ({"formats": ()}, "formats= are keys"),
        ({"variants": (Variant("fast", {}),)}, "unoptimized, exact"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(fields, why):
    given = {"name": "mine", "package": "numpy", "child": HERE, "formats": ("onnx",)} | fields
    with pytest.raises(UsageError, match=why):
        Runtime(**given)
