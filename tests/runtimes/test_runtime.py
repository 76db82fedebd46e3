"""The declaration of a runtime is checked."""

from pathlib import Path

import pytest

from scalepoint.errors import UsageError
from scalepoint.runtimes import Runtime, Variant, find_runtime, list_runtimes

HERE = Path(__file__)


def test_built_in_runtimes_are_found_by_name():
    assert list_runtimes()[:2] == ["onnxruntime", "openvino"]
    assert find_runtime("onnxruntime").formats == ("onnx",)
    assert find_runtime(find_runtime("openvino")) is find_runtime("openvino")


def test_an_unknown_runtime_is_an_error_with_the_nearest_name():
    with pytest.raises(UsageError, match="did you mean 'openvino'"):
        find_runtime("openvin")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name= of a runtime"),
        ({"package": "not a module"}, "package="),
        ({"child": Path("/no/such/child.py")}, "child= must be an existing file"),
        ({"formats": "onnx"}, "formats= must be a tuple of names"),
        ({"formats": ()}, "formats= must be a tuple of names"),
        ({"variants": (Variant("fast", {}),)}, "unoptimized, exact"),
    ],
)
def test_an_invalid_declaration_is_refused(fields, message):
    arguments = {"name": "mine", "package": "numpy", "child": HERE, "formats": ("onnx",)} | fields
    with pytest.raises(UsageError, match=message):
        Runtime(**arguments)
