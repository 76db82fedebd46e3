"""Agreement between the outputs of a file and of the simulation."""

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


def agreement(expected, output):
    return compare_outputs([torch.tensor(expected)], {"y": np.array(output, np.float32)})[0]


def test_equal_outputs_have_an_infinite_sqnr():
    result = agreement([[1.0, 2.0]], [[1.0, 2.0]])
    assert (result.sqnr, result.max_difference, result.top1) == (inf, 0.0, 1.0)


def test_sqnr_is_signal_over_noise_in_decibels():
    assert agreement([[1.0, 0.0]], [[1.0, 0.1]]).sqnr == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("expected", "output"),
    [
        ([1.0, 2.0], [1.0, nan]),
        ([1.0, nan], [1.0, 2.0]),
        ([1.0, nan], [1.0, nan]),
        ([1.0, 2.0], [1.0, inf]),
        ([1.0, inf], [1.0, -inf]),
    ],
    ids=[
        "NaN in the file",
        "NaN in the simulation",
        "NaN in both",
        "infinity in the file",
        "infinities with other signs",
    ],
)
def test_a_nan_or_an_infinity_in_one_of_the_two_never_agrees(expected, output):
    assert agreement(expected, output).sqnr == -inf


def test_the_infinities_of_a_mask_agree_with_themselves():
    result = agreement([1.0, -inf], [1.1, -inf])
    assert result.sqnr == pytest.approx(20.0, abs=0.01)
    assert result.max_difference == pytest.approx(0.1, abs=1e-6)


def test_the_worst_output_counts_at_any_position():
    ones = torch.ones(2, 3)
    bad = np.full((2, 3), nan, np.float32)
    good = np.ones((2, 3), np.float32)
    for outputs in ({"a": good, "b": bad, "c": good}, {"a": bad, "b": good, "c": good}):
        assert worst_sqnr(compare_outputs([ones] * 3, outputs)) == -inf


def test_an_output_that_the_file_lacks_does_not_agree():
    agreements = compare_outputs([torch.ones(2), torch.ones(2)], {"a": np.ones(2, np.float32)})
    assert [agreement.output for agreement in agreements] == ["a", "output_1"]
    assert worst_sqnr(agreements) == -inf


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(torch.zeros(0, 4), "empty (0x4)", id="empty batch"),
        pytest.param(torch.zeros(2, 3), "constant, 0 everywhere", id="all zero"),
        pytest.param(torch.full((2, 3), 7), "constant, 7 everywhere", id="constant integers"),
    ],
)
def test_equal_values_of_an_empty_or_constant_output_prove_nothing(value, reason):
    result = compare_outputs([value], {"y": value.numpy()})[0]
    assert "exactly" not in str(result)
    assert str(result) == f"y: nothing was compared, it is {reason}"


def test_a_constant_that_the_file_changes_does_not_agree():
    assert agreement([[0.0, 0.0]], [[0.0, 0.1]]).sqnr == -inf


@pytest.mark.parametrize(
    ("shape", "feeds", "has_classes"),
    [
        pytest.param((2, 10), {}, True, id="classes"),
        pytest.param((1, 84, 100), {}, False, id="boxes of a detector"),
        pytest.param((1, 5, 8, 8), {}, False, id="feature map"),
        pytest.param((2, 6, 100), {"ids": np.zeros((2, 6), np.int64)}, True, id="tokens of a language model"),
        pytest.param((2, 6, 100), {"ids": np.zeros((2, 7), np.int64)}, False, id="no input with these axes"),
    ],
)
def test_top1_is_counted_only_if_the_last_axis_has_classes(shape, feeds, has_classes):
    value = torch.randn(shape)
    result = compare_outputs([value], {"y": value.numpy()}, feeds)[0]
    assert result.top1 == (1.0 if has_classes else None)


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


def test_nan_in_a_second_output_fails_the_verification(tmp_path):
    """The file computes 0 / 0, the simulation a number."""
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
    result = verify(tmp_path / "m.onnx", TwoOutputs(), torch.randn(2, 3))
    assert result.status == Status.OK
    assert result.optimized[0].sqnr == inf
    assert not result.holds
    with pytest.raises(VerificationError, match="-inf dB"):
        result.check()


def test_a_verification_without_outputs_does_not_hold():
    assert not Verification("m.onnx", "onnxruntime", Status.OK).holds


@pytest.mark.parametrize(
    ("default", "exact_sqnr", "holds"),
    [(17.0, 26.0, True), (8.0, 26.0, False), (17.0, 19.0, False), (17.0, None, False)],
)
def test_a_file_is_judged_by_its_agreement_without_the_rounding_of_the_runtime(default, exact_sqnr, holds):
    """OpenVINO computes floats in bfloat16 if the CPU supports it."""
    agreed, exact = ((Agreement("y", sqnr, 0.1, None),) if sqnr else () for sqnr in (default, exact_sqnr))
    result = Verification("m.onnx", "openvino", Status.OK, optimized=agreed, exact=exact, rounded="16 bits")
    assert result.holds == holds
    if not holds:
        with pytest.raises(VerificationError, match="16 bits" if exact else "17.0 dB"):
            result.check()


class ConstantOutput(nn.Module):
    """A constant output, and with `both` also one that depends on the input."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.linear, self.both = nn.Linear(4, 4), both

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return (y, y.mul(0).relu()) if self.both else y.mul(0).relu()


def _verify_constant_output(tmp_path, both):
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = quantize(ConstantOutput(both).eval(), x, forward_loop=[x], target="onnxruntime")
    export(model, tmp_path / "m.onnx", x)
    return verify(tmp_path / "m.onnx", model, x)


def test_a_file_whose_only_output_is_constant_is_not_verified_without_an_error(tmp_path):
    result = _verify_constant_output(tmp_path, both=False)
    assert result.status == Status.NOT_VERIFIED
    assert "nothing was compared" in result.message
    assert not result.holds
    result.check()


def test_a_constant_output_is_reported_and_the_other_output_counts(tmp_path):
    result = _verify_constant_output(tmp_path, both=True)
    assert result.status == Status.OK
    assert result.holds
    assert "nothing was compared" in str(result.optimized[1])
    assert "nothing was compared" not in str(result.optimized[0])
