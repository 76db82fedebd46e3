"""Linear layers as 1x1 convolutions: the same values, in the kernels that OpenVINO has without VNNI."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.formats import export
from scalepoint.formats.onnx.channels_first import CHANNELS_FIRST_SUFFIX, to_file_layout, to_model_layout
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.runtimes.openvino import OPENVINO
from scalepoint.runtimes.process import exchange_files, run_task
from scalepoint.targets import openvino_target
from scalepoint.verification import verify, verify_layers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Mixed(nn.Module):
    """An MLP, a gated one without biases, channels last, a value that is also returned, and vectors."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.gate, self.value = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.out, self.reused = nn.Linear(24, 16, bias=False), nn.Linear(16, 16)
        self.after, self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.out(F.silu(self.gate(x)) * self.value(x))
        returned = torch.relu(self.reused(x))
        x = self.after(returned)
        return self.head(F.gelu(self.hidden(x.flatten(1, -2).mean(1)))), returned


@pytest.fixture(
    scope="module",
    params=[(4, 8, 16), pytest.param((2, 5, 16), marks=pytest.mark.slow), (2, 3, 5, 16)],
    ids=["sequence", "odd", "picture"],
)
def case(request, tmp_path_factory):
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("convolved"), torch.randn(request.param)
    model, target = Mixed().eval(), openvino_target("avx2")
    plain = replace(target, name="plain", rewrites=target.rewrites[:1])
    paths = {}
    for name, used_target in {"convs": target, "plain": plain}.items():
        quantized = quantize(model, x, forward_loop=[x], target=used_target, freeze_weights=True)
        paths[name] = export(quantized, folder / f"{name}.onnx", x)
    return paths, quantized, x


def run_openvino(path, x):
    """Run a file in OpenVINO with floats left float. Returns the outputs by name."""
    options = {"threads": 1, "accurate": True}
    with exchange_files({"x": x.numpy()}) as files:
        return files.outputs(
            run_task(OPENVINO, {"task": "run", "path": str(path), "options": options, **files.paths}, seconds=60)
        )


def nodes(path):
    return list(onnx.load(path).graph.node)


def test_every_product_of_codes_is_a_convolution_and_the_file_is_valid(case):
    paths, _, _ = case
    onnx.checker.check_model(str(paths["convs"]), full_check=True)
    counts = Counter(node.op_type for node in nodes(paths["convs"]))
    assert (counts["Conv"], counts["MatMul"]) == (9, 0)
    assert Counter(node.op_type for node in nodes(paths["plain"]))["MatMul"] == 9


def test_there_are_no_transposes_between_elementwise_operations(case):
    paths, _, _ = case
    makers = {name: node for node in nodes(paths["convs"]) for name in node.output}
    turned = [
        node
        for node in nodes(paths["convs"])
        if node.op_type == "QuantizeLinear" and CHANNELS_FIRST_SUFFIX in node.output[0]
    ]
    assert [node.name.partition("_")[0] for node in turned] == ["up", "gate", "hidden"]
    for node in nodes(paths["convs"]):
        if node.op_type == "Transpose" and node.name.startswith(("down", "out", "head")):
            assert makers[node.input[0]].op_type == "Conv"  # it transposes back
    read = [name for node in nodes(paths["convs"]) if node.op_type == "Transpose" for name in node.input]
    assert max(Counter(read).values()) == 1  # gate and value share a Transpose


def test_a_returned_value_has_the_layout_of_the_model(case):
    paths, quantized, x = case
    shapes = [tuple(used_target.shape) for used_target in quantized(x)]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(paths["convs"], options)
    assert [used_target.shape for used_target in session.run(None, {"x": x.numpy()})] == shapes


def test_convolutions_compute_the_same_values_as_the_products(case):
    paths, _, x = case
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [onnxruntime.InferenceSession(path, options) for path in paths.values()]
    with_convs, plain = (session.run(None, {"x": x.numpy()}) for session in sessions)
    for one, two in zip(with_convs, plain, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_openvino_computes_the_same_up_to_a_rounding(case):
    paths, _, x = case
    with_convs, plain = (run_openvino(path, x) for path in paths.values())
    for one, two in zip(with_convs.values(), plain.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


def test_openvino_runs_all_convolutions_in_integers_as_simulated(case):
    paths, quantized, x = case
    verification = verify(paths["convs"], quantized, x, runtime="openvino")
    assert (verification.low_precision, verification.fallbacks) == (9, ())
    assert verification.exact_sqnr > 60


def test_layers_are_compared_in_any_layout(case):
    paths, quantized, x = case
    verification = verify_layers(paths["convs"], quantized, x)
    quantizers = [node.name for node in nodes(paths["convs"]) if node.op_type == "QuantizeLinear"]
    assert verification.holds
    assert {used_target.where for used_target in verification.layers} >= set(quantizers)


def test_linear_layers_stay_products_with_vnni(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    target = openvino_target("vnni")
    path = export(quantize(model, x, forward_loop=[x], target=target, freeze_weights=True), tmp_path / "m.onnx", x)
    assert not any(node.op_type == "Conv" for node in nodes(path))


@pytest.mark.parametrize("bits", [8, 4])
def test_another_batch_and_narrow_weights_run_too(bits, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval(), torch.randn(4, 16)
    config = QuantConfig(
        activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=bits, per_channel=True)
    )
    target = openvino_target("avx2")
    quantized = quantize(model, x, config, forward_loop=[x], target=target, freeze_weights=True)
    path = export(quantized, tmp_path / "m.onnx", x)
    assert Counter(node.op_type for node in nodes(path))["Conv"] == 2
    verification = verify(path, quantized, x[:3], runtime="openvino")
    assert (verification.low_precision, verification.fallbacks) == (2, ())
    assert verification.exact_sqnr > 60


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight
        self.middle = nn.Linear(16, 16)

    def forward(self, tokens):
        return self.head(self.middle(self.table(tokens)))


def test_weight_only_layers_and_a_tied_head_stay_products(tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 6))
    target = openvino_target("avx2")
    tied = quantize(Tied().eval(), tokens, forward_loop=[tokens], target=target, freeze_weights=True)
    path = export(tied, tmp_path / "m.onnx", tokens)
    assert [node.name.partition("_")[0] for node in nodes(path) if node.op_type == "MatMul"] == ["head"]
    config = QuantConfig(activation="float", weight=TensorQuantConfig(per_channel=True))
    alone = quantize(Mixed().eval(), torch.randn(2, 4, 16), config, target=target, freeze_weights=True)
    path = export(alone, tmp_path / "alone.onnx", torch.randn(2, 4, 16))
    assert not any(node.op_type == "Conv" for node in nodes(path))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 5, 3, 4)])
def test_a_channels_first_tensor_is_converted_back(shape):
    value = np.arange(np.prod(shape)).reshape(shape)
    turned = to_file_layout(f"a{CHANNELS_FIRST_SUFFIX}", value)
    assert turned.shape[1] == shape[-1]
    assert np.array_equal(to_model_layout(f"a{CHANNELS_FIRST_SUFFIX}", turned, value.ndim), value)
    assert to_file_layout("a", value) is value
    assert to_model_layout("a", value, value.ndim) is value
