"""Verification of files in ONNX Runtime and OpenVINO, in child processes."""

import importlib.util

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from scalepoint.errors import ScalepointWarning, StoreError, UsageError, VerificationError
from scalepoint.formats import export, find_format
from scalepoint.quantize import quantize
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import Status, benchmark, verify
from tests.errors import raises
from tests.formats.onnx.test_export import Net, with_random_statistics

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch.manual_seed(0)
    model, x = with_random_statistics(Net()), torch.randn(8, 3, 32, 32)
    quantized = quantize(model, x[:2], forward_loop=[x], target="onnxruntime")
    folder = tmp_path_factory.mktemp("verified")
    export(quantized, folder / "model.onnx", x[:1], float_path=folder / "float.onnx")
    return quantized, x, folder


class TestOnnxRuntime:
    @pytest.fixture(scope="class")
    def verification(self, case):
        quantized, x, folder = case
        return verify(folder / "model.onnx", quantized, x, float_path=folder / "float.onnx")

    def test_outputs_agree_with_the_simulation(self, verification):
        assert verification.status == Status.OK
        assert verification.holds
        assert verification.sqnr > 35
        assert verification.optimized[0].top1 == 1.0
        assert verification.unoptimized[0].sqnr > 35

    def test_operations_that_run_in_int8_are_counted(self, verification):
        assert verification.low_precision == 5
        assert verification.fallbacks == ()
        assert verification.executed["QLinearConv"] == 4

    def test_size_and_speed_are_measured(self, verification):
        assert verification.size > 0
        assert verification.float_size > 0
        assert verification.latency.ratio > 0
        assert verification.latency.repeats >= 5
        assert "agreement" in str(verification)

    def test_a_float_file_has_no_operations_in_int8(self, case):
        quantized, x, folder = case
        result = verify(folder / "float.onnx", quantized, x, layers=False)
        assert result.low_precision == 0
        assert len(result.fallbacks) == 5


@pytest.fixture
def one_sign(tmp_path):
    """Function that writes a file for a kind of CPU. The weights have one sign and full range, so products saturate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.abs_().clamp_(min=0.11)
    x = torch.rand(16, 64)

    def write_file(cpu):
        quantized = quantize(model, x, forward_loop=[x], target=onnxruntime_target(cpu))
        export(quantized, tmp_path / f"{cpu}.onnx", x)
        return tmp_path / f"{cpu}.onnx", quantized, x

    return write_file


def test_a_file_for_vnni_agrees_on_a_cpu_with_vnni_and_on_others_saturation_is_the_cause(one_sign):
    naive = one_sign("vnni")
    if instruction_set() == "vnni":
        result = verify(*naive)
        assert result.sqnr > 35
        assert (result.warning, result.made_for["cpu"]) == ("", "vnni")
        return
    with pytest.warns(ScalepointWarning, match="VNNI.*saturate"):
        result = verify(*naive)
    assert not result.holds
    assert "made for a CPU with VNNI" in result.warning
    assert result.unoptimized[0].sqnr > result.sqnr + 10
    assert "saturate" in result.departure.cause
    with pytest.raises(VerificationError, match="saturate"):
        result.check()


def test_a_file_for_avx2_runs_on_any_cpu(one_sign):
    path, *rest = one_sign("avx2")
    result = verify(path, *rest)
    assert result.sqnr > 35
    assert result.warning == ""
    assert result.made_for == {"target": "onnxruntime", "cpu": "avx2"}
    assert "target onnxruntime, cpu avx2" in str(result)
    assert find_format("onnx").about(path).made_for == result.made_for


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_runs_every_layer_in_int8(tmp_path):
    torch.manual_seed(0)
    model, x = with_random_statistics(Net()), torch.randn(4, 3, 32, 32)
    quantized = quantize(model, x, forward_loop=[x], target="openvino")
    export(quantized, tmp_path / "m.onnx", x)
    result = verify(tmp_path / "m.onnx", quantized, x, runtime="openvino")
    assert result.status == Status.OK, result.message
    assert result.sqnr > 30
    assert result.fallbacks == ()
    assert result.low_precision >= 5


class TestErrors:
    def test_a_file_that_is_not_a_model_fails(self, case, tmp_path):
        quantized, x, _ = case
        (tmp_path / "bad.onnx").write_bytes(b"not a model")
        result = verify(tmp_path / "bad.onnx", quantized, x)
        assert result.status == Status.FAILED
        assert result.message
        with pytest.raises(VerificationError):
            result.check()

    def test_a_missing_file_is_an_error(self, case, tmp_path):
        quantized, x, _ = case
        with pytest.raises(StoreError, match="does not exist"):
            verify(tmp_path / "none.onnx", quantized, x)

    @pytest.fixture
    def crashing(self, tmp_path):
        """File that makes ONNX Runtime divide by zero: the checker accepts blocksize 2^32."""
        node = helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2**32)
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.save(model, tmp_path / "crash.onnx")
        return tmp_path / "crash.onnx"

    def test_a_crash_of_the_runtime_is_a_status_with_the_signal(self, crashing):
        result = verify(crashing, nn.Identity(), torch.randn(1, 3, 32, 32))
        assert result.status == Status.CRASHED
        assert result.message == "onnxruntime died of SIGFPE"
        assert not result.holds

    def test_a_crash_reports_whether_the_float_file_crashes_too(self, case, crashing):
        *_, folder = case
        x = torch.randn(1, 3, 32, 32)
        alone = verify(crashing, nn.Identity(), x, float_path=folder / "float.onnx")
        assert alone.message == "onnxruntime died of SIGFPE; the float file runs"
        both = verify(crashing, nn.Identity(), x, float_path=crashing)
        assert both.message.endswith(
            "the float file crashes too (onnxruntime died of SIGFPE), so it is not the quantization"
        )
        with raises(VerificationError, "SIGFPE", "float file runs"):
            benchmark(folder / "float.onnx", crashing, {"x": x.numpy()})

    def test_a_run_over_the_time_limit_ends_with_a_timeout(self, case):
        quantized, x, folder = case
        result = verify(folder / "model.onnx", quantized, x, seconds=0.05)
        assert result.status == Status.TIMEOUT

    def test_an_unknown_runtime_is_an_error(self, case):
        quantized, x, folder = case
        with pytest.raises(UsageError, match="onnxruntime"):
            verify(folder / "model.onnx", quantized, x, runtime="tflite")


def test_benchmark_needs_no_inputs(case):
    *_, folder = case
    result = benchmark(folder / "float.onnx", folder / "model.onnx", repeats=5, seconds=1)
    assert result.seconds[0] > 0
    assert np.isclose(result.ratio, result.seconds[0] / result.seconds[1])
