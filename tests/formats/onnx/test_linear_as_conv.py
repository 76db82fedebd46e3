"""Linear layers as convolutions of one tap: the same values, in the kernels that OpenVINO has without VNNI."""

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
    """An MLP, a gated one without biases, channels last, a value that is also given back, and vectors."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.gate, self.value = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.out, self.seen = nn.Linear(24, 16, bias=False), nn.Linear(16, 16)
        self.after, self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.out(F.silu(self.gate(x)) * self.value(x))
        seen = torch.relu(self.seen(x))
        x = self.after(seen)
        return self.head(F.gelu(self.hidden(x.flatten(1, -2).mean(1)))), seen


@pytest.fixture(
    scope="module",
    params=[(4, 8, 16), pytest.param((2, 5, 16), marks=pytest.mark.slow), (2, 3, 5, 16)],
    ids=["sequence", "odd", "picture"],
)
def made(request, tmp_path_factory):
    torch.manual_seed(0)
    folder, x = tmp_path_factory.mktemp("convolved"), torch.randn(request.param)
    model, target = Mixed().eval(), openvino_target("avx2")
    plain = replace(target, name="plain", rewrites=target.rewrites[:1])
    paths = {}
    for name, each in {"own": target, "plain": plain}.items():
        quantized = quantize(model, x, forward_loop=[x], target=each, freeze_weights=True)
        paths[name] = export(quantized, folder / f"{name}.onnx", x)
    return paths, quantized, x


def computed(path, x):
    """What OpenVINO gives with floats left float, by output."""
    options = {"threads": 1, "accurate": True}
    with exchange_files({"x": x.numpy()}) as files:
        return files.outputs(
            run_task(OPENVINO, {"task": "run", "path": str(path), "options": options, **files.files}, seconds=60)
        )


def nodes(path):
    return list(onnx.load(path).graph.node)


def test_every_product_of_codes_is_a_convolution_and_the_file_is_valid(made):
    paths, _, _ = made
    onnx.checker.check_model(str(paths["own"]), full_check=True)
    found = Counter(node.op_type for node in nodes(paths["own"]))
    assert (found["Conv"], found["MatMul"]) == (9, 0)
    assert Counter(node.op_type for node in nodes(paths["plain"]))["MatMul"] == 9


def test_nothing_turns_back_and_forth_between_elementwise_operations(made):
    paths, _, _ = made
    makers = {name: node for node in nodes(paths["own"]) for name in node.output}
    turned = [
        node
        for node in nodes(paths["own"])
        if node.op_type == "QuantizeLinear" and CHANNELS_FIRST_SUFFIX in node.output[0]
    ]
    assert [node.name.partition("_")[0] for node in turned] == ["up", "gate", "hidden"]
    for node in nodes(paths["own"]):
        if node.op_type == "Transpose" and node.name.startswith(("down", "out", "head")):
            assert makers[node.input[0]].op_type == "Conv"  # they are only turned back
    read = [name for node in nodes(paths["own"]) if node.op_type == "Transpose" for name in node.input]
    assert max(Counter(read).values()) == 1  # gate and value read one


def test_a_value_that_the_model_gives_back_is_as_the_model_has_it(made):
    paths, quantized, x = made
    shapes = [tuple(each.shape) for each in quantized(x)]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(paths["own"], options)
    assert [each.shape for each in session.run(None, {"x": x.numpy()})] == shapes


def test_values_are_those_of_the_products(made):
    paths, _, x = made
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    own, plain = (onnxruntime.InferenceSession(path, options).run(None, {"x": x.numpy()}) for path in paths.values())
    for one, two in zip(own, plain, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_openvino_computes_the_same_up_to_a_rounding(made):
    paths, _, x = made
    own, plain = (computed(path, x) for path in paths.values())
    for one, two in zip(own.values(), plain.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


def test_openvino_runs_all_of_them_in_integers_as_simulated(made):
    paths, quantized, x = made
    found = verify(paths["own"], quantized, x, runtime="openvino")
    assert (found.low_precision, found.fallbacks) == (9, ())
    assert found.exact_sqnr > 60


def test_layers_are_compared_however_they_are_turned(made):
    paths, quantized, x = made
    found = verify_layers(paths["own"], quantized, x)
    quantizers = [node.name for node in nodes(paths["own"]) if node.op_type == "QuantizeLinear"]
    assert found.holds
    assert {each.where for each in found.layers} >= set(quantizers)


def test_with_vnni_linear_layers_are_products(tmp_path):
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
    found = verify(path, quantized, x[:3], runtime="openvino")
    assert (found.low_precision, found.fallbacks) == (2, ())
    assert found.exact_sqnr > 60


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight
        self.middle = nn.Linear(16, 16)

    def forward(self, tokens):
        return self.head(self.middle(self.table(tokens)))


def test_weights_alone_and_a_tied_head_stay_products(tmp_path):
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
def test_a_turned_tensor_is_read_back(shape):
    value = np.arange(np.prod(shape)).reshape(shape)
    turned = to_file_layout(f"a{CHANNELS_FIRST_SUFFIX}", value)
    assert turned.shape[1] == shape[-1]
    assert np.array_equal(to_model_layout(f"a{CHANNELS_FIRST_SUFFIX}", turned, value.ndim), value)
    assert to_file_layout("a", value) is value
    assert to_model_layout("a", value, value.ndim) is value
