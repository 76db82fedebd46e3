"""A format is checked when it is declared."""

import pytest
import torch
from torch import nn

from scalepoint import export
from scalepoint.errors import ExportError, UsageError
from scalepoint.formats import FileFormat, find_format, list_formats
from scalepoint.quantize import quantize
from tests.errors import raises


def write(model, path, request):
    """Nothing."""


def one(path):
    """Nothing."""


def test_ours_are_found_by_name():
    assert list_formats()[0] == "onnx"
    assert find_format("onnx").suffix == ".onnx"
    assert find_format(find_format("onnx")) is find_format("onnx")


def test_an_unknown_one_is_told_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'onnx'"):
        find_format("onx")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": ""}, "must be text"),
        ({"suffix": "mine"}, "must start with a dot"),
        ({"write": one}, r"write=.*\(model, path, request\)"),
        ({"files": write}, r"files=.*\(path\)"),
        ({"about": None}, r"about=.*\(path\).*None"),
        ({"write_baseline": one}, r"write_baseline=.*\(model, path, request\)"),
        ({"write_with_layer_outputs": one}, r"write_with_layer_outputs=.*\(model, path, request\)"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(fields, why):
    given = {"name": "mine", "suffix": ".mine", "write": write, "files": one, "about": one} | fields
    with pytest.raises(UsageError, match=why):
        FileFormat(**given)


def test_a_file_has_the_suffix_of_its_format(tmp_path):
    x = torch.randn(2, 16)
    quantized = quantize(nn.Linear(16, 16).eval(), x, forward_loop=[x], target="onnxruntime")
    with raises(ExportError, "m.tflite", "'onnxruntime'", ".onnx"):
        export(quantized, tmp_path / "m.tflite", x)
