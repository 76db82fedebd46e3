"""Layers of constants, computed weights and biases, and other forms of a product, from capture to the runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.formats import export
from scalepoint.quantize import calibrate, coverage, freeze, insert_qdq
from scalepoint.transformation import transform

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    """A function of the input and of parameters of these shapes, and a linear layer."""

    def __init__(self, function, *shapes, out=16):
        super().__init__()
        self.function = function
        self.parameter_list = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.last = nn.Linear(out, 16)

    def forward(self, x):
        return self.last(self.function(x, *self.parameter_list))


class OfABuffer(nn.Module):
    def __init__(self, layer, table):
        super().__init__()
        self.first, self.layer = nn.Conv2d(8, 8, 3, padding=1), layer
        self.register_buffer("table", table)

    def forward(self, x):
        return self.first(x) + self.layer(self.table)


def standardized(x, w, b):
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, w, b).mean((2, 3))


def packed(x, w, b):
    """Cross attention as nn.MultiheadAttention computes it, with slices of a packed matrix."""
    (first, second), (one, other) = w.split([16, 32]), b.split([16, 32])
    q, (k, v) = F.linear(x, first, one), F.linear(x + 1, second, other).chunk(2, -1)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def masked(x, bias):
    heads = x.view(-1, 5, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, bias).transpose(1, 2).reshape(-1, 5, 16)


def masked_view(x, bias):
    heads = x.view(-1, 5, 2, 8).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads, bias)
    return attended.permute(0, 2, 1, 3).contiguous().view(-1, 5, 16)


TOKENS, IMAGE = (2, 5, 16), (2, 8, 6, 6)
CASES = [  # model, shape of the input, number of quantized layers
    pytest.param(lambda: OfABuffer(nn.Linear(4, 6), torch.randn(6, 4)), IMAGE, 1, id="linear-of-a-buffer"),
    pytest.param(lambda: OfABuffer(nn.Conv2d(4, 8, 1), torch.randn(1, 4, 6, 6)), IMAGE, 1, id="conv-of-a-buffer"),
    pytest.param(
        lambda: Net(lambda x, w, q: F.linear(x, w, torch.cat((q, torch.zeros(8)))), (16, 16), (8,)),
        TOKENS,
        2,
        id="computed-bias",
    ),
    pytest.param(lambda: Net(standardized, (16, 8, 3, 3), (16,)), IMAGE, 2, id="standardized-weight"),
    pytest.param(lambda: Net(packed, (48, 16), (48,)), TOKENS, 3, id="parts-of-a-packed-weight"),
    pytest.param(
        lambda: Net(lambda x, b, w: torch.addmm(b, x.view(-1, 16), w).view(x.shape), (16,), (16, 16)),
        TOKENS,
        2,
        id="addmm-on-tokens",
    ),
    pytest.param(
        lambda: Net(lambda x, b, w: torch.addmm(b, x.view(-1, 16), w, alpha=0.5), (16,), (16, 16)),
        TOKENS,
        2,
        id="addmm-with-a-factor",
    ),
    pytest.param(lambda: Net(lambda x, w: F.linear(x, w, x.mean((0, 1))), (16, 16)), TOKENS, 2, id="bias-of-the-data"),
    pytest.param(lambda: Net(masked, (1, 2, 5, 5)), TOKENS, 1, id="reshape-after-masked-attention"),
    pytest.param(lambda: Net(masked_view, (1, 2, 5, 5)), TOKENS, 1, id="view-after-masked-attention"),
]


@pytest.mark.parametrize(("make", "shape", "layers"), CASES)
def test_the_file_computes_what_the_simulation_does(make, shape, layers, tmp_path):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    result = transform(model, x, target="onnxruntime", check=True)
    quantized = insert_qdq(result.model, result.matches)
    calibrate(quantized, [x])
    freeze(quantized)
    assert len(coverage(quantized).in_state("quantized")) >= layers
    with torch.no_grad():
        expected, plain = quantized(x), model(x)
    assert (expected - plain).norm() / plain.norm() < 0.1
    export(quantized, tmp_path / "model.onnx", x, float_path=tmp_path / "float.onnx")
    for name, expected_output, bound in (("model", expected, 2e-3), ("float", plain, 1e-5)):
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.linalg.norm(output - expected_output.numpy()) <= bound * np.linalg.norm(expected_output.numpy())


def test_a_layer_of_constants_is_computed_when_the_file_is_loaded(tmp_path):
    torch.manual_seed(0)
    model, x = OfABuffer(nn.Linear(4, 6), torch.randn(6, 4)).eval(), torch.randn(IMAGE)
    result = transform(model, x, target="onnxruntime")
    quantized = insert_qdq(result.model, result.matches)
    calibrate(quantized, [x])
    freeze(quantized)
    export(quantized, tmp_path / "model.onnx", x)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    operations = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert not operations & {"MatMul", "Gemm", "FusedMatMul"}
