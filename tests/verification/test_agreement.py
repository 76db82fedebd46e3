"""How near the outputs of a file are to the simulation's."""

from math import inf, nan
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from scalepoint.errors import VerificationError
from scalepoint.formats import export
from scalepoint.quantize import quantize
from scalepoint.verification import Status, Verification, verify
from scalepoint.verification.agreement import Agreement, compare_outputs, worst_sqnr


def agreement(expected, found):
    return compare_outputs([torch.tensor(expected)], {"y": np.array(found, np.float32)})[0]


def test_equal_outputs_agree_without_end():
    found = agreement([[1.0, 2.0]], [[1.0, 2.0]])
    assert (found.sqnr, found.max_difference, found.top1) == (inf, 0.0, 1.0)


def test_it_is_signal_over_noise_in_decibels():
    assert agreement([[1.0, 0.0]], [[1.0, 0.1]]).sqnr == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ([1.0, 2.0], [1.0, nan]),
        ([1.0, nan], [1.0, 2.0]),
        ([1.0, nan], [1.0, nan]),
        ([1.0, 2.0], [1.0, inf]),
        ([1.0, inf], [1.0, -inf]),
    ],
    ids=["NaN of the file", "NaN of the simulation", "NaN of both", "infinity of the file", "other infinities"],
)
def test_what_is_not_finite_never_agrees(expected, found):
    assert agreement(expected, found).sqnr == -inf


def test_the_infinities_of_a_mask_agree_with_themselves():
    found = agreement([1.0, -inf], [1.1, -inf])
    assert found.sqnr == pytest.approx(20.0, abs=0.01)
    assert found.max_difference == pytest.approx(0.1, abs=1e-6)


def test_the_worst_output_counts_wherever_it_stands():
    ones = torch.ones(2, 3)
    bad = np.full((2, 3), nan, np.float32)
    good = np.ones((2, 3), np.float32)
    for found in ({"a": good, "b": bad, "c": good}, {"a": bad, "b": good, "c": good}):
        assert worst_sqnr(compare_outputs([ones] * 3, found)) == -inf


def test_an_output_that_the_file_has_not_does_not_agree():
    found = compare_outputs([torch.ones(2), torch.ones(2)], {"a": np.ones(2, np.float32)})
    assert [each.output for each in found] == ["a", "output_1"]
    assert worst_sqnr(found) == -inf


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(torch.zeros(0, 4), "empty (0x4)", id="a batch of none"),
        pytest.param(torch.zeros(2, 3), "constant, 0 everywhere", id="all zero"),
        pytest.param(torch.full((2, 3), 7), "constant, 7 everywhere", id="constant integers"),
    ],
)
def test_equal_values_of_an_empty_or_constant_output_prove_nothing(value, words):
    found = compare_outputs([value], {"y": value.numpy()})[0]
    assert "exactly" not in str(found)
    assert str(found) == f"y: nothing was compared, it is {words}"


def test_a_constant_that_the_file_changes_does_not_agree():
    assert agreement([[0.0, 0.0]], [[0.0, 0.1]]).sqnr == -inf


@pytest.mark.parametrize(
    ("shape", "feeds", "has_classes"),
    [
        pytest.param((2, 10), {}, True, id="classes"),
        pytest.param((1, 84, 100), {}, False, id="boxes of a detector"),
        pytest.param((1, 5, 8, 8), {}, False, id="a map"),
        pytest.param((2, 6, 100), {"ids": np.zeros((2, 6), np.int64)}, True, id="tokens of a language model"),
        pytest.param((2, 6, 100), {"ids": np.zeros((2, 7), np.int64)}, False, id="axes of no input"),
    ],
)
def test_top1_is_counted_only_where_the_last_axis_has_classes(shape, feeds, has_classes):
    value = torch.randn(shape)
    found = compare_outputs([value], {"y": value.numpy()}, feeds)[0]
    assert found.top1 == (1.0 if has_classes else None)
    assert ("top-1" in str(found)) == has_classes


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


def test_nan_in_a_second_output_fails_the_verification(tmp_path):
    """0 / 0 in the file, where the simulation has a number."""
    nodes = [
        helper.make_node("Add", ["x", "one"], ["first"]),
        helper.make_node("Sub", ["x", "x"], ["zero"]),
        helper.make_node("Div", ["zero", "zero"], ["second"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, [2, 3])],
        [value("first", TensorProto.FLOAT, [2, 3]), value("second", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "m.onnx")
    found = verify(tmp_path / "m.onnx", Two(), torch.randn(2, 3))
    assert found.status == Status.OK
    assert found.optimized[0].sqnr == inf
    assert not found.holds
    with pytest.raises(VerificationError, match="-inf dB"):
        found.check()


def test_a_verification_without_outputs_does_not_hold():
    assert not Verification("m.onnx", "onnxruntime", Status.OK).holds


@pytest.mark.parametrize(
    ("default", "left_float", "holds"),
    [(17.0, 26.0, True), (8.0, 26.0, False), (17.0, 19.0, False), (17.0, None, False)],
)
def test_floats_that_the_runtime_rounds_by_itself_cost_agreement_but_not_the_file(default, left_float, holds):
    """OpenVINO computes floats in bfloat16 where the CPU has it: the file is judged by its agreement without that."""
    agreed, exact = ((Agreement("y", each, 0.1, None),) if each else () for each in (default, left_float))
    found = Verification("m.onnx", "openvino", Status.OK, optimized=agreed, exact=exact, rounded="16 bits")
    assert found.holds == holds
    if not holds:
        with pytest.raises(VerificationError, match="16 bits" if exact else "17.0 dB"):
            found.check()


class Still(nn.Module):
    """A constant output, beside one that depends on the input where `both`."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.linear, self.both = nn.Linear(4, 4), both

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return (y, y.mul(0).relu()) if self.both else y.mul(0).relu()


def _verified_still(tmp_path, both):
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = quantize(Still(both).eval(), x, forward_loop=[x], target="onnxruntime")
    export(model, tmp_path / "m.onnx", x)
    return verify(tmp_path / "m.onnx", model, x)


def test_a_file_whose_only_output_is_constant_is_not_verified_and_no_error(tmp_path):
    found = _verified_still(tmp_path, both=False)
    assert found.status == Status.NOT_VERIFIED
    assert "nothing was compared" in found.message
    assert not found.holds
    found.check()


def test_a_constant_output_beside_another_is_named_and_the_other_one_counts(tmp_path):
    found = _verified_still(tmp_path, both=True)
    assert found.status == Status.OK
    assert found.holds
    assert "nothing was compared" in str(found.optimized[1])
    assert "nothing was compared" not in str(found.optimized[0])
