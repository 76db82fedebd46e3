"""Real networks in OpenVINO: every convolution and linear layer runs in an int8 primitive, as simulated."""

import importlib.util

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from scalepoint import export, verify
from scalepoint.patterns import Point
from scalepoint.quantize import coverage, quantize
from scalepoint.quantize.record import record_of
from scalepoint.support.cpu import instruction_set
from scalepoint.targets import find_target, openvino_target
from tests.architectures import ARCHITECTURES
from tests.onnx_reader.graphs import model_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries that the models come from
    pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
]
QUICK = ("bert",)
SLOW = ("vit_small", "resnet18", "mobilenet_v2", "mobilenet_v3_small", "distilbert")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_all_products_run_in_int8(name, tmp_path):
    model, inputs = ARCHITECTURES[name].build()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
    quantized = quantize(model, args or None, forward_loop=[inputs], target="openvino", kwargs=kwargs)
    export(quantized, tmp_path / "m.onnx", args, kwargs=kwargs)
    verification = verify(tmp_path / "m.onnx", quantized, args, kwargs=kwargs, runtime="openvino")
    rows = [row for row in coverage(quantized).operations if row.kind in ("conv", "linear")]
    assert {row.state for row in rows} == {"quantized"}
    assert verification.holds
    assert verification.sqnr >= 30
    assert verification.fallbacks == ()
    assert verification.low_precision == len(rows)
    primitives = {op for op in verification.executed if op.split()[0] in ("Convolution", "FullyConnected")}
    assert primitives
    assert all(op.endswith("_I8") for op in primitives)


def test_openvino_patterns_have_no_output_points():
    """OpenVINO would also round the float tensor of a Concat: for the class token of a ViT, to 15 dB."""
    with_output = [pattern.name for pattern in find_target("openvino").patterns if Point.OUTPUT in pattern.qdq_points]
    assert with_output == ["ConcatPattern"]


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(torch.stack([x[:, 0], x[:, 2]], 1))


def test_a_linear_layer_after_a_concat_of_tokens_runs_in_int8(tmp_path):
    x = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    target = openvino_target("vnni")  # without VNNI the layer is written as a convolution
    quantized = quantize(Joined().eval(), x, forward_loop=[x], target=target)
    verification = verify(export(quantized, tmp_path / "m.onnx", x), quantized, x, runtime="openvino", layers=False)
    assert verification.holds, verification
    assert (verification.low_precision, verification.fallbacks) == (1, ())


class Branches(nn.Module):
    """One branch has values ten times as large as the other."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(32, 8, 1)
        with torch.no_grad():
            self.two.weight *= 10

    def forward(self, x):
        return self.last(torch.cat([torch.relu(self.one(x)), torch.relu(self.two(x))], 1))


def test_the_inputs_of_a_concat_share_one_scale(tmp_path):
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    quantized = quantize(Branches().eval(), x, forward_loop=[x], target=openvino_target("vnni"))
    stubs = [str(node.target) for node in quantized.graph.nodes if str(node.target).endswith("_quant")]
    assert len(stubs) == 4  # of x, of both branches, and of the Concat
    assert len(set(stubs)) == 2
    verification = verify(export(quantized, tmp_path / "m.onnx", x), quantized, x, runtime="openvino", layers=False)
    assert verification.holds
    assert verification.fallbacks == ()


class Last(nn.Module):
    """Channels last, one of them large, and a residual that reads them too."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        with torch.no_grad():
            self.norm.weight[3] = 40.0
            self.linear.weight[:, 3] /= 40.0

    def forward(self, x):
        x = self.norm(x)
        return x + self.linear(x)


@pytest.mark.parametrize(("shape", "count"), [((4, 30, 16), 1), ((4, 5, 6, 16), 0)], ids=["tokens", "picture"])
def test_scaled_channels_run_as_simulated(shape, count, tmp_path):
    """With four axes OpenVINO would compute other values for scaled channels."""
    if count and instruction_set() != "vnni":
        pytest.skip("a file for CPUs with VNNI saturates on this one")
    torch.manual_seed(0)
    data = [torch.randn(shape) for _ in range(2)]
    quantized = quantize(Last().eval(), data[0], forward_loop=data, target=openvino_target("vnni"))
    assert len(record_of(quantized).migrated.done if record_of(quantized).migrated else ()) == count
    path = export(quantized, tmp_path / "m.onnx", data[0])
    assert verify(path, quantized, data[0], runtime="openvino", layers=False).exact_sqnr > 60


class Gated(nn.Module):
    """A layer whose result a quantizer and a float operator read."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.gate = layer, nn.Conv2d(16, 16, 1)

    def forward(self, x):
        y = self.layer(x)
        return y * torch.sigmoid(self.gate(y))


class LinearOverChannels(nn.Linear):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


LAYERS = {
    "conv": lambda: nn.Conv2d(8, 16, 3, bias=False),
    "grouped": lambda: nn.Conv2d(8, 16, 1, groups=4, bias=False),
    "with_bias": lambda: nn.Conv2d(8, 16, 1),
    "linear": lambda: LinearOverChannels(8, 16, bias=False),
}


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_a_quantizer_and_a_float_operator_read_runs_as_simulated(name, cpu, tmp_path):
    if cpu == "vnni" and instruction_set() != "vnni":
        pytest.skip("a file for CPUs with VNNI saturates on this one")
    torch.manual_seed(0)
    data = [torch.randn(2, 8, 6, 6) for _ in range(2)]
    quantized = quantize(Gated(LAYERS[name]()).eval(), data[0], forward_loop=data, target=openvino_target(cpu))
    path = export(quantized, tmp_path / "m.onnx", data[0])
    verification = verify(path, quantized, data[0], runtime="openvino", layers=False)
    assert verification.exact_sqnr > 60, verification


def test_without_a_bias_openvino_multiplies_with_the_scales_twice(tmp_path):
    """If this fails, OpenVINO does not need the rewrite bias_for_several_readers any more."""
    import openvino

    graph = """agraph (float[N, 16, 4, 4] x) => (float[N, 16, 4, 4] codes, float[N, 16, 4, 4] activation) {
        xq = QuantizeLinear(x, scale, zero)  xd = DequantizeLinear(xq, scale, zero)
        wd = DequantizeLinear(weight, weight_scale)  y = Conv(xd, wd)
        yq = QuantizeLinear(y, scale, zero)  codes = DequantizeLinear(yq, scale, zero)
        activation = Sigmoid(y)
    }"""
    generator = np.random.default_rng(0)
    constants = {
        "scale": np.float32(0.05),
        "zero": np.uint8(128),
        "weight": generator.integers(-127, 128, (16, 16, 1, 1), np.int8),
        "weight_scale": np.float32(0.002),
    }
    onnx.save(model_of(graph, 17, **constants), tmp_path / "m.onnx")
    x = generator.normal(size=(1, 16, 4, 4)).astype(np.float32)
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    codes, activation = openvino.Core().compile_model(tmp_path / "m.onnx", "CPU", options)(x).values()
    y = np.log(activation / (1 - activation))
    assert np.abs(y).max() > 0.5
    assert not codes.any()
