"""Time per layer, measured by the profiler of the runtime, and its description."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalepoint import export
from scalepoint.errors import VerificationError
from scalepoint.quantize import quantize
from scalepoint.runtimes import find_runtime
from scalepoint.verification import LayerTime, profile, verify
from scalepoint.verification.layer_times import describe_slower_layers, find_slower_layers, sum_seconds
from scalepoint.verification.profiling import group_by_layer, map_layer_names, read_scope

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("profiled")
    body = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
    x = torch.randn(1, 3, 32, 32)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, folder / "m.onnx", x, float_path=folder / "float.onnx")
    return folder, quantized, x


def test_every_layer_has_its_time_and_kernel_in_both_files(profiled):
    folder, quantized, _ = profiled
    rows = {
        row.name: row for row in profile(folder / "float.onnx", folder / "m.onnx", names=map_layer_names(quantized))
    }
    for name in ("0", "2"):
        assert rows[name].kernels[0] == "QLinearConv"
        assert rows[name].float_kernels[0] == "Conv"  # in a blocked layout, under the name of a tensor
        assert rows[name].seconds > 0
        assert rows[name].float_seconds > 0
    assert "QGemm" in rows["6"].kernels
    assert rows["input_quant"].is_conversion
    assert rows["input_quant"].float_seconds is None


def test_a_kernel_that_the_runtime_fused_is_assigned_to_its_layer(tmp_path):
    """ONNX Runtime fuses a bias and a GELU into a node with a name of its own."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval(), torch.randn(4, 16, 64)
    quantized = quantize(model, x, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    export(quantized, tmp_path / "m.onnx", x, float_path=tmp_path / "float.onnx")
    rows = profile(tmp_path / "float.onnx", tmp_path / "m.onnx", names=map_layer_names(quantized))
    (fused,) = [row for row in rows if "BiasGelu" in row.kernels]
    assert fused.name == "0"  # a GELU belongs to the layer before it
    assert "Erf" in fused.float_kernels


def test_the_slowest_come_first(profiled):
    folder, _, _ = profiled
    times = [row.seconds or 0.0 for row in profile(folder / "float.onnx", folder / "m.onnx")]
    assert times == sorted(times, reverse=True)


def test_verify_profiles_what_it_times(profiled):
    folder, quantized, x = profiled
    result = verify(folder / "m.onnx", quantized, x, float_path=folder / "float.onnx")
    assert {"0", "2", "6"} <= {row.name for row in result.times}
    assert verify(folder / "m.onnx", quantized, x).times == ()


def test_openvino_reports_its_primitives(profiled):
    folder, _, _ = profiled
    rows = profile(folder / "float.onnx", folder / "m.onnx", runtime="openvino")
    assert any("Convolution" in kernel for row in rows for kernel in row.kernels)
    assert all((row.seconds or 0) >= 0 for row in rows)


RUNS = 12
OPENVINO = """
import json, runpy, sys
import numpy as np

child, path, runs = sys.argv[1:]
file = runpy.run_path(child)["File"](path, {"threads": 1, "profile": True})
feeds = {file.inputs[0]: np.zeros((1, 3, 32, 32), np.float32)}
for _ in range(int(runs)):
    file.run(feeds)
averages = {node.node_name: node.real_time.total_seconds() for node in file.request.profiling_info}
print(json.dumps({name: [averages[name], times] for (name, _), times in file.run_times.items()}))
"""


def test_times_in_openvino_are_those_of_single_runs(profiled):
    """OpenVINO reports averages since the file was compiled; the child computes the time of each run from them."""
    child = find_runtime("openvino").child
    command = [sys.executable, "-c", OPENVINO, str(child), str(profiled[0] / "float.onnx"), str(RUNS)]
    times_by_node = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert times_by_node
    for average, times in times_by_node.values():
        assert len(times) == RUNS
        assert sum(times) == pytest.approx(RUNS * average, abs=1e-9)


def test_a_runtime_without_a_profiler_is_refused(profiled):
    folder, _, _ = profiled
    no_profiler = replace(find_runtime("onnxruntime"), profiles=False)
    with pytest.raises(VerificationError, match="time of its nodes"):
        profile(folder / "float.onnx", folder / "m.onnx", runtime=no_profiler)


def test_a_file_that_does_not_run_is_an_error(profiled, tmp_path):
    folder, _, _ = profiled
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(VerificationError, match="could not profile"):
        profile(folder / "float.onnx", tmp_path / "broken.onnx", {"input": profiled[2].numpy()})


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("layer1.conv/Conv", "layer1.conv"),
        ("layer1.conv/MatMul/MatMulAddFusion", "layer1.conv"),
        ("attention/MatMul/MatMulScaleFusion/", "attention"),
        ("/layer1/conv/Conv", "layer1/conv"),
        ("SkipLayerNormalization", "SkipLayerNormalization"),
        ("", "Gather"),
        ("node_12", "node_12"),
        ("Transpose_token_7", "Transpose"),
        ("layer1.conv/Conv_token_3", "layer1.conv"),
    ],
)
def test_a_node_belongs_to_the_layer_that_its_name_begins_with(name, scope):
    assert read_scope(name, "Gather") == scope


def test_nodes_of_a_layer_are_added_up_and_named_by_the_slowest():
    nodes = [{"name": "a/Add", "op": "Add", "seconds": 1.0}, {"name": "a/MatMul", "op": "MatMul", "seconds": 3.0}]
    (row,) = group_by_layer(nodes, [{"name": "a/MatMul", "op": "QGemm", "seconds": 2.0}], {"a": "layer.a"})
    assert row == LayerTime("layer.a", 2.0, 4.0, ("QGemm",), ("MatMul", "Add"))


ROWS = (
    LayerTime("slow", 3.0, 1.0, ("QLinearConv",), ("Conv",)),
    LayerTime("fast", 1.0, 4.0, ("QLinearConv",), ("Conv",)),
    LayerTime("x_quant", 1.0, None, ("QuantizeLinear",)),
    LayerTime("noise", 1.01, 1.0, ("Softmax",), ("Softmax",)),
)


def test_slower_layers_are_named_with_their_kernels_and_noise_is_not():
    assert [row.name for row in find_slower_layers(ROWS)] == ["slow"]
    text = describe_slower_layers(ROWS)
    assert text.startswith("slow (QLinearConv 3.0 s, Conv 1.0 s in float)")
    assert "conversions between float and integers, 16.6% of its time" in text
    assert "noise" not in text
    assert sum_seconds(ROWS) == (6.0, 6.01)


def test_files_without_slower_layers_have_no_description():
    assert describe_slower_layers(ROWS[1:2]) == ""
    assert describe_slower_layers(()) == ""
