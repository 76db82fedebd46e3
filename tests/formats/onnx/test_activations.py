"""Activation functions of quantized tensors: the operators in the file, the kernels that run, and the values."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn
from torch.nn import functional as F

from scalepoint.formats import export
from scalepoint.formats.onnx.activations import exp_activations
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import onnxruntime_target
from scalepoint.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

RULES = ("activations_of_codes", "exp_activations")
ALL_INT8 = QuantConfig(speed_first=False)


class Activated(nn.Module):
    """Two convolutions with an activation between them."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


def export_with(activation, folder, *, rules=True):
    """Write a network with this activation for ONNX Runtime, with or without the rules for activations."""
    torch.manual_seed(0)
    model, data = Activated(activation).eval(), [4 * torch.randn(2, 3, 12, 12) for _ in range(2)]
    target = onnxruntime_target("vnni")
    if not rules:
        target = replace(target, rewrites=tuple(rule for rule in target.rewrites if rule.name not in RULES))
    quantized = quantize(model, data[0], ALL_INT8, forward_loop=data, target=target, freeze_weights=True)
    path = folder / f"{'with' if rules else 'without'}.onnx"
    export(quantized, path, data[0], float_path=folder / "float.onnx")
    return quantized, path, data[0]


def run(path, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".compiled"))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    compiled = onnx.load(path.with_suffix(".compiled"))
    return session.run(None, {"x": x.numpy()})[0], Counter(node.op_type for node in compiled.graph.node)


KERNELS = {
    "silu": (F.silu, ("QuickGelu",)),
    "silu as a product": (lambda x: x * torch.sigmoid(x), ("QuickGelu",)),
    "gelu": (F.gelu, ("Gelu",)),
    "gelu with tanh": (lambda x: F.gelu(x, approximate="tanh"), ("FastGelu",)),
    "mish": (F.mish, ("Min", "Exp", "Add", "Mul", "Add", "Div", "Mul")),
    "elu": (F.elu, ("Min", "Exp", "Sub", "Max")),
    "elu with alpha": (lambda x: F.elu(x, 0.7), ("Min", "Exp", "Sub", "Mul", "Max")),
}


@pytest.mark.parametrize("name", KERNELS)
def test_an_activation_between_int8_convolutions_runs_in_the_fast_kernels(name, tmp_path):
    activation, kernels = KERNELS[name]
    quantized, path, x = export_with(activation, tmp_path)
    y, operations = run(path, x)
    conversions = {"QuantizeLinear": 2, "DequantizeLinear": operations["DequantizeLinear"], "Transpose": 2}
    assert operations == Counter(kernels) + Counter(conversions) + Counter({"QLinearConv": 2})
    assert operations["DequantizeLinear"] == (2 if len(kernels) == 1 else 3)  # one of them at the output
    with torch.no_grad():
        simulated = quantized(x).numpy()
    step = float(quantized.get_submodule("second_fused_quant").scale)
    assert np.abs(y - simulated).max() <= 1.01 * step
    assert np.mean(y != simulated) < 0.01
    verification = verify(path, quantized, x)
    assert verification.holds
    assert (verification.low_precision, verification.fallbacks) == (2, ())


@pytest.mark.parametrize("name", KERNELS)
def test_the_rules_change_no_value_by_more_than_a_rounding(name, tmp_path):
    _, path, x = export_with(KERNELS[name][0], tmp_path)
    _, plain, _ = export_with(KERNELS[name][0], tmp_path, rules=False)
    (y, _), (expected, operations) = run(path, x), run(plain, x)
    assert not set(operations) & {"QuickGelu", "Gelu", "FastGelu"}
    codes_differ = y != expected
    assert np.mean(codes_differ) < 0.01
    assert np.unique(expected).size > 50  # the comparison is not one of clipped values


@pytest.mark.parametrize(
    "name", ["gelu with another factor", "gelu of another tensor", "elu with a large alpha", "swish with a factor"]
)
def test_similar_activations_are_not_rewritten(name, tmp_path):
    similar = {
        "gelu with another factor": lambda x: x * (0.5 * (1 + torch.erf(x / 1.5))),
        "gelu of another tensor": lambda x: x * (0.5 * (1 + torch.erf(x.flip(3) / 2**0.5))),
        "elu with a large alpha": lambda x: F.elu(x, 1.5),
        "swish with a factor": lambda x: x * torch.sigmoid(1.7 * x),
    }
    quantized, path, x = export_with(similar[name], tmp_path)
    operator_counts = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert not set(operator_counts) & {"QuickGelu", "Gelu", "FastGelu", "Exp"}
    assert verify(path, quantized, x).holds


def test_activations_of_float_tensors_keep_their_operators(tmp_path):
    """ONNX Runtime fuses them itself, together with the bias before them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    x = torch.randn(4, 16)
    quantized = quantize(model, x, ALL_INT8, forward_loop=[x], target="onnxruntime", freeze_weights=True)
    path = export(quantized, tmp_path / "m.onnx", x)
    proto = onnx.load(path)
    operator_counts = Counter(node.op_type for node in proto.graph.node)
    assert (operator_counts["Sigmoid"], operator_counts["Erf"]) == (1, 1)
    assert all(node.domain == "" for node in proto.graph.node)


def test_float_files_have_standard_operators_only(tmp_path):
    for name in ("silu", "mish"):
        export_with(KERNELS[name][0], tmp_path)
        operations = {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}
        assert operations == ({"Conv", "Sigmoid", "Mul"} if name == "silu" else {"Conv", "Mish"})


@pytest.mark.parametrize(("operator", "layer"), [("Mish", nn.Mish()), ("Elu", nn.ELU())])
def test_mish_and_elu_are_correct_for_large_and_small_values(operator, layer):
    values = torch.tensor([-1e4, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 44.0, 88.0, 1e4])
    infos = [helper.make_tensor_value_info(name, 1, [10]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    exp_activations(model)
    assert all(node.op_type != operator for node in model.graph)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": values.numpy()})
    np.testing.assert_allclose(y, layer(values), rtol=1e-6, atol=1e-7)
