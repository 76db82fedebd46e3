"""Nearest upsampling, concatenations, splits and pads between int8 convolutions move codes."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalepoint
from scalepoint.formats import export
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq, quantize
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ALL_INT8 = QuantConfig(speed_first=False)


def relu_conv(inputs, outputs, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two scales, a skip connection, and an odd size that is padded before the concatenation."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner, self.up = relu_conv(3, 8), relu_conv(8, 16), relu_conv(24, 8)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.outer(x)
        x = F.interpolate(self.inner(F.max_pool2d(skip, 2)), scale_factor=2)
        x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
        return self.last(self.up(torch.cat([x, skip], 1)))


class C2f(nn.Module):
    """The block of YOLOv8: half of the channels go through bottlenecks, all results are concatenated."""

    def __init__(self, channels=16):
        super().__init__()
        half = channels // 2
        self.first, self.last = relu_conv(3, channels), relu_conv(4 * half, channels)
        self.bottlenecks = nn.ModuleList(nn.Sequential(relu_conv(half, half), relu_conv(half, half)) for _ in range(2))

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for bottleneck in self.bottlenecks:
            parts.append(parts[-1] + bottleneck(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function, channels=8):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.function = function

    def forward(self, x):
        return self.second(self.function(torch.relu(self.first(x))))


def compile_file(path):
    """Return the operators of the graph that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".compiled"))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(path.with_suffix(".compiled")).graph.node)


def export_for_onnxruntime(model, path, size=(14, 15), dynamic_axes=None):
    torch.manual_seed(0)
    data = [torch.randn(2, 3, *size) for _ in range(2)]
    with torch.no_grad():
        model(data[0])  # gives batch norms statistics
    target = onnxruntime_target("vnni")
    plan = scalepoint.transform(model.eval(), data[0], target=target, dynamic_axes=dynamic_axes)
    quantized = insert_qdq(plan.model, plan.matches, ALL_INT8)
    calibrate(quantized, data, freeze_weights=True)
    export(quantized, path, data[0])
    return quantized, data[0]


@pytest.mark.parametrize("model", [UNet, C2f], ids=["unet", "c2f"])
def test_a_network_of_convolutions_has_no_conversion_between_its_input_and_output(model, tmp_path):
    path = tmp_path / "m.onnx"
    quantized, x = export_for_onnxruntime(model(), path)
    operations = compile_file(path)
    assert (operations["QuantizeLinear"], operations["DequantizeLinear"], operations["Transpose"]) == (1, 1, 2)
    assert operations["QLinearConcat"] == 1
    assert not operations["Resize"]
    if model is C2f:
        assert (operations["QLinearAdd"], operations["Split"]) == (2, 1)
    verification = verify(path, quantized, x)
    assert verification.sqnr == np.inf
    assert verification.fallbacks == ()


MOVES = {
    "twice": (lambda x: F.interpolate(x, scale_factor=2), 8),
    "rows three times, columns twice": (lambda x: F.interpolate(x, scale_factor=(3, 2)), 8),
    "to a size": (lambda x: F.interpolate(x, size=(36, 24)), 8),
    "after a pool": (lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2), 8),
    "read twice": (lambda x: torch.cat([F.interpolate(x, scale_factor=2)] * 2, 1), 16),
}


@pytest.mark.parametrize("name", MOVES)
def test_nearest_upsampling_is_exact_for_any_batch(name, tmp_path):
    function, channels = MOVES[name]
    path = tmp_path / "m.onnx"
    quantized, x = export_for_onnxruntime(Between(function, channels), path, size=(12, 12))
    operations = compile_file(path)
    assert (operations["QuantizeLinear"], operations["DequantizeLinear"]) == (1, 1)
    assert (operations["Resize"], operations["Transpose"]) == (0, 2)
    assert verify(path, quantized, x).sqnr == np.inf
    batch = torch.randn(5, 3, 12, 12)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        assert np.array_equal(session.run(None, {"x": batch.numpy()})[0], quantized(batch).numpy())


RESIZED = {
    "to another ratio": lambda x: F.interpolate(x, size=(18, 20)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "smaller": lambda x: F.interpolate(x, scale_factor=0.5),
}


@pytest.mark.parametrize("name", RESIZED)
def test_other_resizes_stay_and_are_exact(name, tmp_path):
    path = tmp_path / "m.onnx"
    quantized, x = export_for_onnxruntime(Between(RESIZED[name]), path, size=(12, 12))
    assert compile_file(path)["Resize"] == 1
    assert verify(path, quantized, x).sqnr > 60


def test_a_free_height_keeps_the_resize(tmp_path):
    path = tmp_path / "m.onnx"
    function = MOVES["twice"][0]
    quantized, x = export_for_onnxruntime(Between(function), path, size=(12, 12), dynamic_axes={"x": {2: "height"}})
    assert compile_file(path)["Resize"] == 1
    assert verify(path, quantized, x).sqnr == np.inf


def test_a_float_reader_keeps_the_resize(tmp_path):
    class Two(Between):
        def forward(self, x):
            x = self.function(torch.relu(self.first(x)))
            return self.second(x), x.exp()

    path = tmp_path / "m.onnx"
    quantized, x = export_for_onnxruntime(Two(MOVES["twice"][0]), path, size=(12, 12))
    assert compile_file(path)["Resize"] == 1
    assert verify(path, quantized, x).holds


@pytest.mark.parametrize("target", ["openvino", "litert", "executorch"])
def test_upsampling_and_concatenation_keep_their_meaning_on_other_targets(target, tmp_path):
    pytest.importorskip({"litert": "ai_edge_litert"}.get(target, target))
    torch.manual_seed(0)
    model, data = UNet().eval(), [torch.randn(2, 3, 16, 16) for _ in range(2)]
    quantized = quantize(model, data[0], ALL_INT8, forward_loop=data, target=target, freeze_weights=True)
    path = tmp_path / {"litert": "m.tflite", "executorch": "m.pte"}.get(target, "m.onnx")
    export(quantized, path, data[0])
    verification = verify(path, quantized, data[0], runtime=target)
    assert verification.holds
    assert verification.low_precision == 4
