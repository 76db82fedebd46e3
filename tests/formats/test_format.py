"""Declarations of file formats are checked when they are created."""

import pytest
import torch
from torch import nn

from scalepoint import export
from scalepoint.errors import ExportError, UsageError
from scalepoint.formats import FileFormat, find_format, list_formats
from scalepoint.quantize import quantize
from tests.errors import raises


def write(model, path, request):
    """A function with the required parameters."""


def takes_path(path):
    """A function with the required parameters."""


def test_built_in_formats_are_found_by_name():
    assert list_formats()[0] == "onnx"
    assert find_format("onnx").suffix == ".onnx"
    assert find_format(find_format("onnx")) is find_format("onnx")


def test_the_error_for_an_unknown_format_suggests_the_most_similar_name():
    with pytest.raises(UsageError, match="did you mean 'onnx'"):
        find_format("onx")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": ""}, "must be text"),
        ({"suffix": "mine"}, "must start with a dot"),
        ({"write": takes_path}, r"write=.*\(model, path, request\)"),
        ({"files": write}, r"files=.*\(path\)"),
        ({"about": None}, r"about=.*\(path\).*None"),
        ({"write_baseline": takes_path}, r"write_baseline=.*\(model, path, request\)"),
        ({"write_with_layer_outputs": takes_path}, r"write_with_layer_outputs=.*\(model, path, request\)"),
    ],
)
def test_an_invalid_format_declaration_is_refused(fields, why):
    declaration = {"name": "mine", "suffix": ".mine", "write": write, "files": takes_path, "about": takes_path} | fields
    with pytest.raises(UsageError, match=why):
        FileFormat(**declaration)


def test_a_file_must_have_the_suffix_of_its_format(tmp_path):
    x = torch.randn(2, 16)
    quantized = quantize(nn.Linear(16, 16).eval(), x, forward_loop=[x], target="onnxruntime")
    with raises(ExportError, "m.tflite", "'onnxruntime'", ".onnx"):
        export(quantized, tmp_path / "m.tflite", x)
