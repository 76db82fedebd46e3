"""Capture: kinds are the same for all ways to write an operation, names are kept, the user's model is not changed."""

import copy
import logging
import sys
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree

from scalepoint.errors import CaptureError, ScalepointError, ScalepointWarning, UsageError
from scalepoint.graph import capture, check_graph
from scalepoint.graph.nodes import get_info, get_kind
from scalepoint.graph.origin import get_origin, set_origin
from tests.errors import raises
from tests.models import Decoder, ResNet, SilentSkip, UNet, resnet50, vit_b16, with_norm_statistics


def small_resnet():
    return ResNet((1, 1, 1, 1), 4, 10)


class Function(nn.Module):
    """A model whose forward is a function of x and one parameter and bias."""

    def __init__(self, function, weight=None, bias=None):
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x):
        parameters = [value for value in (self.weight, self.bias) if value is not None]
        return self.function(x, *parameters)


class Layer(nn.Module):
    """One module under the name `layer`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def kinds(graph_module):
    return [get_info(node).kind for node in graph_module.graph.nodes if get_info(node).kind is not None]


def lifted(graph_module):
    return [get_kind(node) for node in graph_module.graph.nodes if node.op == "call_module"]


def close(actual, expected):
    actual_leaves, expected_leaves = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves)
    for actual_leaf, expected_leaf in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(expected_leaf, Tensor):
            torch.testing.assert_close(actual_leaf, expected_leaf)
        else:
            assert actual_leaf == expected_leaf


def captured(model, *args, **kwargs):
    """Capture a model in eval mode, and check that the graph is valid and gives the model's outputs."""
    graph_module = capture(model.eval(), args, kwargs or None)
    check_graph(graph_module)
    inputs = copy.deepcopy((args, kwargs))
    close(graph_module(*args, **kwargs), model(*inputs[0], **inputs[1]))
    return graph_module


SLOW = pytest.mark.slow
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))
W = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
B = torch.randn(3, generator=torch.Generator().manual_seed(4))


ACTIVATIONS = {
    "relu": [F.relu, torch.relu, Tensor.relu, lambda x: (x * 1).relu_(), nn.ReLU(), nn.ReLU(inplace=True)],
    "relu6": [F.relu6, nn.ReLU6(), lambda x: x.clamp(0, 6), lambda x: torch.clamp(x, min=0, max=6)],
    "gelu": [F.gelu, nn.GELU(), nn.GELU(approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")],
    "silu": [F.silu, nn.SiLU(), lambda x: F.silu(x * 1, inplace=True)],
    "leaky_relu": [F.leaky_relu, nn.LeakyReLU(0.2), lambda x: F.leaky_relu_(x * 1)],
    "elu": [F.elu, nn.ELU(), lambda x: F.elu(x * 1, inplace=True)],
    "hardswish": [F.hardswish, nn.Hardswish()],
    "hardsigmoid": [F.hardsigmoid, nn.Hardsigmoid()],
    "sigmoid": [torch.sigmoid, Tensor.sigmoid, nn.Sigmoid(), lambda x: (x * 1).sigmoid_()],
    "tanh": [torch.tanh, Tensor.tanh, nn.Tanh()],
    "mish": [F.mish, nn.Mish()],
    "softplus": [F.softplus, nn.Softplus()],
    "softmax": [lambda x: F.softmax(x, -1), lambda x: torch.softmax(x, -1), lambda x: x.softmax(-1), nn.Softmax(-1)],
}


class TestKinds:
    @pytest.mark.parametrize(
        ("kind", "spelling"),
        [
            pytest.param(kind, spelling, id=f"{kind}-{index}")
            for kind, spellings in ACTIVATIONS.items()
            for index, spelling in enumerate(spellings)
        ],
    )
    def test_an_activation(self, kind, spelling):
        model = Layer(spelling) if isinstance(spelling, nn.Module) else Function(spelling)
        kinds = lifted(captured(model, X))
        assert kinds.count(kind) == 1
        assert set(kinds) <= {kind, "mul"}

    @pytest.mark.parametrize(
        "model",
        [
            pytest.param(Layer(nn.Linear(4, 3)), id="module"),
            pytest.param(Function(F.linear, W), id="bare-parameter"),
            pytest.param(Function(F.linear, W, B), id="bare-parameter-and-bias"),
            pytest.param(Function(lambda x, w: x @ w.T, W), id="matmul-transposed"),
            pytest.param(Function(lambda x, w: torch.matmul(x, w.t()), W), id="matmul-t"),
            pytest.param(Function(lambda x, w: x.mm(w.transpose(0, 1)), W), id="mm-transpose"),
            pytest.param(Function(lambda x, w: x @ w.mT, W), id="matmul-mT"),
            pytest.param(Function(lambda x, w, b: x @ w.T + b, W, B), id="matmul-plus-bias"),
            pytest.param(Function(lambda x, w, b: b + x @ w.T, W, B), id="bias-plus-matmul"),
            pytest.param(Function(lambda x, w, b: torch.addmm(b, x, w.t()), W, B), id="addmm"),
            pytest.param(Function(lambda x, w, b: torch.addmm(b, x, w), W.T.contiguous(), B), id="conv1d-of-gpt2"),
            pytest.param(Function(lambda x, w: x @ w, W.T.contiguous()), id="matmul-in-out"),
        ],
    )
    def test_a_linear_layer(self, model):
        graph_module = captured(model, X)
        assert [kind for kind in kinds(graph_module) if kind in ("linear", "matmul", "add", "addmm")] == ["linear"]

    def test_a_linear_layer_on_tokens_keeps_its_kind_and_bias(self):
        tokens = torch.randn(2, 5, 4)
        graph_module = captured(Function(lambda x, w, b: x @ w.T + b, W, B), tokens)
        assert lifted(graph_module) == ["linear"]

    def test_conv1d_of_gpt2_on_tokens(self):
        def conv1d(x, w, b):
            size = (*x.size()[:-1], w.shape[1])
            return torch.addmm(b, x.view(-1, x.size(-1)), w).view(size)

        graph_module = captured(Function(conv1d, W.T.contiguous(), B), torch.randn(2, 5, 4))
        assert lifted(graph_module) == ["linear"]

    def test_conv1d_of_gpt2_is_one_linear_layer_on_the_tokens(self):
        def conv1d(x, w, b):
            size = (*x.size()[:-1], w.shape[1])
            return torch.addmm(b, x.view(-1, x.size(-1)), w).view(size)

        model = Function(conv1d, W.T.contiguous(), B)
        graph_module = captured(model, torch.randn(2, 5, 4))
        assert "reshape" not in kinds(graph_module)
        operation = graph_module.get_submodule("linear")
        assert operation.weight is graph_module.weight
        assert operation.bias is graph_module.bias
        assert operation.has_transposed_weight
        x = torch.randn(3, 5, 4)
        close(graph_module(x), model(x))

    @pytest.mark.parametrize(
        "back",
        [lambda y: y.view(5, 2, 3), lambda y: y.view(2, 15), lambda y: y.view(2, 5, 3, 1)],
        ids=["turned", "joined", "split"],
    )
    def test_tokens_that_are_not_restored_stay_flat(self, back):
        model = Function(lambda x, w: back(F.linear(x.view(-1, 4), w)), W)
        graph_module = capture(model, torch.randn(2, 5, 4), dynamic=False)
        assert kinds(graph_module) == ["reshape", "linear", "reshape"]

    def test_an_operator_whose_name_only_looks_like_an_in_place_write(self):
        def forward(x):
            y = F.dropout(x, 0.5, training=False) > 0
            return x * ((y & (x < 3)) | (x > 5))

        assert "dropout" in lifted(captured(Function(forward), X))

    def test_addmm_with_factors_keeps_its_meaning(self):
        captured(Function(lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0), W, B), X)

    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(lambda x, y: x + y, id="plus"),
            pytest.param(torch.add, id="torch.add"),
            pytest.param(lambda x, y: x.add(y), id="method"),
            pytest.param(lambda x, y: (x * 1).add_(y), id="in-place-method"),
        ],
    )
    def test_an_addition(self, function):
        model = Function(lambda x: function(torch.relu(x), torch.tanh(x)))
        assert [kind for kind in lifted(captured(model, X)) if kind != "mul"] == ["relu", "tanh", "add"]

    def test_an_augmented_addition(self):
        def add(x):
            y = torch.relu(x)
            y += torch.tanh(x)
            return y

        assert lifted(captured(Function(add), X)) == ["relu", "tanh", "add"]

    def test_a_scaled_addition_keeps_its_factor(self):
        captured(Function(lambda x: torch.add(torch.relu(x), torch.tanh(x), alpha=3)), X)

    @pytest.mark.parametrize(
        ("kind", "function"),
        [
            pytest.param("mul", lambda x: torch.relu(x) * torch.tanh(x), id="mul"),
            pytest.param("mul", lambda x: torch.mul(torch.relu(x), torch.tanh(x)), id="torch.mul"),
            pytest.param("mul", lambda x: torch.relu(x).mul_(torch.tanh(x)), id="mul_"),
            pytest.param("cat", lambda x: torch.cat([torch.relu(x), torch.tanh(x)], 1), id="cat"),
            pytest.param("cat", lambda x: torch.concat([torch.relu(x), torch.tanh(x)], dim=-1), id="concat"),
            pytest.param("cat", lambda x: torch.concatenate([torch.relu(x), torch.tanh(x)]), id="concatenate"),
            pytest.param("matmul", lambda x: torch.relu(x) @ torch.tanh(x).transpose(-1, -2), id="at"),
            pytest.param("matmul", lambda x: torch.matmul(torch.relu(x), torch.tanh(x).mT), id="matmul"),
            pytest.param("matmul", lambda x: torch.bmm(torch.relu(x), torch.tanh(x).mT), id="bmm"),
        ],
    )
    def test_operations_on_two_tensors(self, kind, function):
        assert lifted(captured(Function(function), torch.randn(2, 3, 4))) == ["relu", "tanh", kind]

    @pytest.mark.parametrize("dimensions", [1, 2, 3])
    @pytest.mark.parametrize("form", ["module", "function"])
    @pytest.mark.parametrize("kind", ["max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"])
    def test_a_pool(self, kind, form, dimensions):
        x = torch.randn(2, 3, *[6] * dimensions)
        if form == "module":
            name = "".join(part.capitalize() for part in kind.split("_")) + f"{dimensions}d"
            model = Layer(getattr(nn, name)(2))
        else:
            function = getattr(F, f"{kind}{dimensions}d")
            model = Function(lambda x: function(x, 2))
        assert lifted(captured(model, x)) == [kind]

    @pytest.mark.parametrize("dimensions", [1, 2, 3])
    @pytest.mark.parametrize("form", ["module", "function"])
    @pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
    def test_a_convolution(self, kind, form, dimensions):
        x = torch.randn(2, 3, *[6] * dimensions)
        if form == "module":
            name = {"conv": "Conv", "conv_transpose": "ConvTranspose"}[kind]
            model = Layer(getattr(nn, f"{name}{dimensions}d")(3, 4, 3, stride=2, padding=1))
        else:
            function = getattr(F, f"{kind}{dimensions}d")
            shape = (4, 3) if kind == "conv" else (3, 4)
            model = Function(
                lambda x, w, b: function(x, w, b, stride=2), torch.randn(*shape, *[3] * dimensions), torch.randn(4)
            )
        assert lifted(captured(model, x)) == [kind]

    @pytest.mark.parametrize("padding", ["same", "valid"])
    @pytest.mark.parametrize("mode", ["zeros", "reflect"])
    def test_a_convolution_with_a_padding_mode(self, padding, mode):
        model = Layer(nn.Conv2d(4, 4, 3, padding=padding, padding_mode=mode))
        assert [kind for kind in kinds(captured(model, IMAGE)) if kind == "conv"] == ["conv"]

    @pytest.mark.parametrize(
        ("kind", "model"),
        [
            pytest.param("batch_norm", Layer(with_norm_statistics(nn.BatchNorm2d(4))), id="batch"),
            pytest.param("batch_norm", Layer(nn.BatchNorm2d(4, affine=False)), id="batch-without-affine"),
            pytest.param("layer_norm", Layer(nn.LayerNorm(6)), id="layer"),
            pytest.param(
                "layer_norm", Layer(nn.LayerNorm([6, 6], elementwise_affine=False)), id="layer-without-affine"
            ),
            pytest.param("layer_norm", Function(lambda x: F.layer_norm(x, (6,))), id="layer-function"),
            pytest.param("group_norm", Layer(nn.GroupNorm(2, 4)), id="group"),
            pytest.param("group_norm", Function(lambda x: F.group_norm(x, 2)), id="group-function"),
            pytest.param("instance_norm", Layer(nn.InstanceNorm2d(4, affine=True)), id="instance"),
            pytest.param("instance_norm", Function(F.instance_norm), id="instance-function"),
            pytest.param("rms_norm", Layer(nn.RMSNorm(6)), id="rms"),
            pytest.param("rms_norm", Function(lambda x, w: F.rms_norm(x, (6,), w), torch.rand(6)), id="rms-function"),
        ],
    )
    def test_a_norm(self, kind, model):
        assert lifted(captured(model, IMAGE)) == [kind]

    @pytest.mark.parametrize(
        "model",
        [
            pytest.param(Layer(nn.Embedding(10, 4)), id="module"),
            pytest.param(Layer(nn.Embedding(10, 4, padding_idx=0)), id="module-with-padding"),
            pytest.param(Function(F.embedding, torch.randn(10, 4)), id="function"),
        ],
    )
    def test_an_embedding(self, model):
        assert lifted(captured(model, torch.randint(0, 10, (2, 5)))) == ["embedding"]

    @pytest.mark.parametrize(
        ("layer", "settings"),
        [
            pytest.param(
                layer,
                settings,
                id=f"{layer.__name__.lower()}-{settings}",
                marks=SLOW if settings and layer is not nn.LSTM else (),
            )
            for layer in (nn.LSTM, nn.GRU, nn.RNN)
            for settings in ({}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False})
        ],
    )
    def test_a_recurrent_layer(self, layer, settings):
        model = Layer(layer(4, 3, batch_first=True, **settings))
        graph_module = captured(model, torch.randn(2, 5, 4))
        assert lifted(graph_module) == [layer.__name__.lower()]

    def test_attention_is_a_projection_a_core_and_an_output_projection(self):
        model = vit_b16(24, 32).encoder.layers[0]
        lifted_kinds = lifted(captured(model, torch.randn(2, 5, 24)))
        assert [kind for kind in lifted_kinds if kind in ("linear", "attention")][:3] == [
            "linear",
            "attention",
            "linear",
        ]


class TestWholeModels:
    @pytest.mark.parametrize(
        ("model", "example", "larger"),
        [
            pytest.param(
                with_norm_statistics(resnet50(4, 10)),
                torch.randn(1, 3, 32, 32),
                torch.randn(3, 3, 32, 32),
                id="resnet50",
            ),
            pytest.param(
                vit_b16(24, 32, 10).eval(), torch.randn(1, 3, 32, 32), torch.randn(3, 3, 32, 32), id="vit", marks=SLOW
            ),
            pytest.param(Decoder().eval(), torch.randint(0, 50, (1, 6)), torch.randint(0, 50, (3, 9)), id="decoder"),
            pytest.param(with_norm_statistics(UNet()), torch.randn(1, 3, 16, 16), torch.randn(3, 3, 16, 16), id="unet"),
            pytest.param(SilentSkip().eval(), torch.randn(1, 5, 8), torch.randn(3, 5, 8), id="silent-skip"),
        ],
    )
    def test_the_output_is_the_models_at_batch_1_and_at_batch_3(self, model, example, larger):
        graph_module = capture(model, example)
        close(graph_module(example), model(example))
        close(graph_module(larger), model(larger))


class TestNames:
    @pytest.mark.parametrize(
        ("model", "x"),
        [
            pytest.param(resnet50(4, 10), torch.randn(1, 3, 32, 32), id="resnet50", marks=SLOW),
            pytest.param(vit_b16(24, 32), torch.randn(1, 3, 32, 32), id="vit", marks=SLOW),
            pytest.param(Decoder(), torch.randint(0, 50, (1, 6)), id="decoder-with-tied-weights"),
            pytest.param(SilentSkip(), torch.randn(1, 5, 8), id="silent-skip"),
        ],
    )
    def test_parameters_and_buffers_keep_their_names_order_and_values(self, model, x):
        graph_module = capture(model, x)
        state, captured_state = model.state_dict(), graph_module.state_dict()
        assert list(captured_state) == list(state)
        assert all(torch.equal(captured_state[name], state[name]) for name in state)
        assert [name for name, _ in graph_module.named_parameters()] == [name for name, _ in model.named_parameters()]
        graph_module.load_state_dict(state)

    def test_the_users_modules_are_the_ones_called(self):
        graph_module = capture(resnet50(4, 10), torch.randn(1, 3, 32, 32))
        targets = [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
        assert targets[:5] == ["conv1", "bn1", "relu", "maxpool", "layer1.0.conv1"]
        assert {"layer4.2.bn3", "layer2.0.downsample.0", "avgpool", "fc"} <= set(targets)
        assert type(graph_module.get_submodule("layer1.0.conv1")) is nn.Conv2d

    def test_parameters_come_in_the_order_they_were_registered_not_used(self):
        class Backwards(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
                self.c = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return self.a(self.b(x * self.c))

        model = Backwards()
        captured_parameters = captured(model, X).named_parameters()
        assert [name for name, _ in captured_parameters] == [name for name, _ in model.named_parameters()]

    def test_tied_weights_stay_tied(self):
        graph_module = capture(Decoder(), torch.randint(0, 50, (1, 6)))
        assert graph_module.lm_head.weight is graph_module.embed_tokens.weight

    def test_tied_weights_are_copies_of_the_callers(self):
        model = Decoder()
        graph_module = capture(model, torch.randint(0, 50, (1, 6)))
        with torch.no_grad():
            graph_module.lm_head.weight.zero_()
        assert model.embed_tokens.weight.abs().sum() > 0

    def test_buffers_keep_their_persistence(self):
        model = BuffersModel()
        graph_module = captured(model, X)
        assert list(graph_module.state_dict()) == ["kept"]
        assert {"kept", "passing"} <= {name for name, _ in graph_module.named_buffers()}

    def test_parameters_that_the_forward_never_reads_are_kept(self):
        model = Layer(nn.Linear(4, 3))
        model.unread = nn.Linear(2, 2)
        model.bare = nn.Parameter(torch.ones(2))
        assert set(captured(model, X).state_dict()) == set(model.state_dict())

    def test_dtype_is_kept(self):
        graph_module = capture(Layer(nn.Linear(4, 3)).to(torch.bfloat16), X.to(torch.bfloat16))
        assert graph_module(X.to(torch.bfloat16)).dtype == torch.bfloat16
        assert {value.dtype for value in graph_module.parameters()} == {torch.bfloat16}

    def test_requires_grad_is_kept(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        graph_module = capture(model, X)
        assert [value.requires_grad for value in graph_module.parameters()] == [False, False, True, True]

    def test_names_that_collide_with_operations_are_not_overwritten(self):
        model = CollidingNames()
        graph_module = captured(model, X)
        assert list(graph_module.state_dict()) == list(model.state_dict())

    @pytest.mark.parametrize("x", [X, None], ids=["with-inputs", "without"])
    @pytest.mark.parametrize(
        "name", ["a\nb", 'a"b', "a\\b", "class", "None", "a\0b", "\ud800", "\N{LATIN SMALL LIGATURE FI}"], ids=ascii
    )
    def test_a_name_that_cannot_be_in_code_is_reported(self, name, x):
        model = nn.Sequential()
        model.add_module("block", nn.Sequential())
        model.block.add_module(name, nn.Linear(4, 3))
        with pytest.raises(CaptureError, match="rename it") as caught:
            capture(model, x)
        assert repr(f"block.{name}") in str(caught.value)

    @pytest.mark.parametrize("x", [X, None], ids=["with-inputs", "without"])
    @pytest.mark.parametrize("name", ["0", "a b", "a'b", "a-b", "naïve", "\u2028", "relu", "forward_"], ids=ascii)
    def test_other_odd_names_work(self, name, x):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(4, 3))
        close(capture(model, x)(X), model(X))


class BuffersModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.full((4,), 2.0))
        self.register_buffer("passing", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        return x * self.kept + self.passing


class CollidingNames(nn.Module):
    """The user's attributes have the names that lifted operations would have."""

    def __init__(self):
        super().__init__()
        self.relu = nn.Linear(4, 4)
        self.add = nn.Parameter(torch.ones(4))
        self.linear = nn.ReLU()

    def forward(self, x):
        return torch.relu(self.relu(x)) + self.add + self.linear(x)


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor | None = None


pytree.register_dataclass(Result, serialized_type_name="tests.graph.Result")


class ModelOutput(OrderedDict):
    """A dict whose items are also attributes, like ModelOutput of transformers."""

    def __getattr__(self, name):
        return self[name]


class InputsAndOutputs(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.returns = returns

    def forward(self, x, y=None, *, scale=1.0, mask=None):
        out = self.fc(x) * scale
        if y is not None:
            out = out + y
        if mask is not None:
            out = out * mask
        return self.returns(out)


class TestInputsAndOutputs:
    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            pytest.param(X, None, id="a-tensor"),
            pytest.param((X,), None, id="a-tuple"),
            pytest.param([X], None, id="a-list"),
            pytest.param((X, X * 2), None, id="several"),
            pytest.param({"x": X}, None, id="a-dict"),
            pytest.param({"x": X, "mask": X > 0}, None, id="a-dict-with-keyword-only"),
            pytest.param(X, {"y": X * 2}, id="a-tensor-and-keywords"),
            pytest.param((X,), {"mask": X > 0, "y": X}, id="keywords-in-another-order"),
            pytest.param((X, None), {"mask": X > 0}, id="none-between"),
            pytest.param((X,), {"scale": 2.0}, id="a-number"),
        ],
    )
    def test_inputs_are_passed_as_the_model_takes_them(self, args, kwargs):
        model = InputsAndOutputs(lambda out: out)
        graph_module = capture(model, args, kwargs)
        keyword = {**(args if isinstance(args, dict) else {}), **(kwargs or {})}
        positional = () if isinstance(args, dict) else (args,) if isinstance(args, Tensor) else tuple(args)
        close(graph_module(*positional, **keyword), model(*positional, **keyword))

        def larger(value):
            return torch.cat([value, value, value]) if isinstance(value, Tensor) else value

        positional, keyword = pytree.tree_map(larger, (positional, keyword))
        close(graph_module(*positional, **keyword), model(*positional, **keyword))

    @pytest.mark.parametrize(
        "returns",
        [
            pytest.param(lambda out: (out, out.relu()), id="tuple"),
            pytest.param(lambda out: [out, out.relu()], id="list"),
            pytest.param(lambda out: {"logits": out, "hidden": [out.relu(), out.tanh()]}, id="nested-dict"),
            pytest.param(lambda out: (out, None), id="with-none"),
            pytest.param(lambda out: {"logits": out, "loss": None}, id="dict-with-none"),
            pytest.param(lambda out: (out, 3), id="with-a-number"),
            pytest.param(lambda out: (out, out), id="one-tensor-twice"),
            pytest.param(lambda out: Result(out, out.relu()), id="dataclass"),
            pytest.param(Result, id="dataclass-with-none"),
            pytest.param(lambda out: OrderedDict(logits=out), id="ordered-dict"),
        ],
    )
    def test_outputs_have_the_structure_of_the_models_outputs(self, returns):
        model = InputsAndOutputs(returns)
        graph_module = captured(model, X)
        assert type(graph_module(X)) is type(model(X))
        assert pytree.tree_structure(graph_module(X)) == pytree.tree_structure(model(X))

    def test_a_dataclass_that_torch_does_not_know(self):
        @dataclass
        class Unknown:
            logits: Tensor

        model = InputsAndOutputs(Unknown)
        graph_module = capture(model.eval(), X)
        assert type(graph_module(X)) is Unknown
        close(graph_module(X).logits, model(X).logits)

    def test_a_subclass_of_dict_that_torch_does_not_know(self):
        model = InputsAndOutputs(lambda out: ModelOutput(logits=out))
        graph_module = capture(model.eval(), X)
        close(graph_module(X)["logits"], model(X)["logits"])

    def test_an_output_that_is_the_input(self):
        captured(Function(lambda x: (x, x.relu())), X)

    def test_a_structured_input(self):
        model = Function(lambda inputs: inputs["a"] + inputs["b"][0])
        graph_module = capture(model, ({"a": X, "b": [X * 2]},))
        close(graph_module({"a": X, "b": [X * 2]}), X * 3)

    def test_no_parameters_at_all(self):
        assert kinds(captured(Function(lambda x: x.flatten(1)), IMAGE)) == ["flatten"]

    def test_sequence_length_of_token_inputs_is_dynamic(self):
        model = Decoder().eval()
        graph_module = capture(model, {"input_ids": torch.randint(0, 50, (1, 6))})
        for batch, length in ((1, 6), (1, 11), (4, 3)):
            tokens = torch.randint(0, 50, (batch, length))
            close(graph_module(input_ids=tokens), model(input_ids=tokens))

    @pytest.mark.parametrize(
        ("function", "batch"),
        [
            pytest.param(lambda x: x.view(2, 2, 2), 2, id="a-batch-of-two"),
            pytest.param(lambda x: x.view(4), 1, id="a-batch-of-one"),
        ],
    )
    def test_a_model_that_fixes_its_batch_is_captured_with_it_and_a_warning(self, function, batch):
        model = Function(function)
        with pytest.warns(ScalepointWarning, match=f"'x' is fixed at {batch}") as caught:
            graph_module = capture(model, X[:batch])
        assert [warning.filename for warning in caught] == [__file__]
        assert get_origin(graph_module).fixed_batch == {"x": batch}
        close(graph_module(X[:batch]), model(X[:batch]))

    def test_dynamic_false_gives_no_warning_about_a_fixed_batch(self):
        graph_module = capture(Layer(nn.Linear(4, 3)), X, dynamic=False)
        assert get_origin(graph_module).fixed_batch == {"x": 2}

    def test_a_batch_that_only_the_first_attempt_fixes_stays_free(self):
        model = Function(lambda x: x / len(x))  # len() of a tensor is an int in torch.export, except in strict mode
        graph_module = capture(model, X)
        assert get_origin(graph_module).fixed_batch == {}
        x = torch.randn(5, 4)
        close(graph_module(x), model(x))


class Stateful(nn.Module):
    """Layers that behave differently in train mode, as modules and as functions."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 64)
        self.bn = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.bn(self.fc(x)))


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 64)

    def forward(self, x):
        return F.dropout(self.fc(x), 0.5, self.training)


class FunctionalBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class TestTrainAndEval:
    def test_modes_come_out_as_they_went_in(self):
        model = small_resnet().train()
        model.layer1.eval()
        graph_module = capture(model, torch.randn(1, 3, 32, 32))
        expected = {name: module.training for name, module in model.named_modules()}
        modes = {name: module.training for name, module in graph_module.named_modules()}
        assert {name: modes[name] for name in expected} == expected

    def test_new_operations_take_the_mode_of_the_module_they_are_in(self):
        model = nn.Sequential(Function(torch.relu), Function(torch.tanh)).train()
        model[0].eval()
        graph_module = capture(model, X)
        inner = {name: module.training for name, module in graph_module.named_modules() if name.count(".") == 1}
        assert inner == {"0.relu": False, "1.tanh": True}

    def test_batch_norm_learns_again_in_train(self):
        graph_module = capture(Stateful().eval(), X)
        before = graph_module.bn.running_mean.clone()
        graph_module.train()(X)
        assert not torch.equal(graph_module.bn.running_mean, before)
        assert int(graph_module.bn.num_batches_tracked) == 1
        after_training = graph_module.bn.running_mean.clone()
        graph_module.eval()(X)
        assert torch.equal(graph_module.bn.running_mean, after_training)

    @pytest.mark.parametrize("model", [Stateful, FunctionalDropout], ids=["module", "function"])
    @pytest.mark.parametrize("mode", [True, False], ids=["captured-in-train", "captured-in-eval"])
    def test_dropout_is_live_in_train_and_off_in_eval(self, model, mode):
        graph_module = capture(model().train(mode), X)
        outputs = graph_module.train()(X), graph_module(X)
        assert not torch.equal(*outputs)
        assert 0.3 < (outputs[0] == 0).float().mean() < 0.7
        outputs = graph_module.eval()(X), graph_module(X)
        assert torch.equal(*outputs)
        assert (outputs[0] == 0).sum() == 0

    def test_dropout_between_recurrent_layers_is_live_in_train(self):
        graph_module = capture(Layer(nn.LSTM(4, 8, num_layers=2, dropout=0.5, batch_first=True)), torch.randn(2, 5, 4))
        x = torch.randn(2, 5, 4)
        assert not torch.equal(graph_module.train()(x)[0], graph_module(x)[0])
        assert torch.equal(graph_module.eval()(x)[0], graph_module(x)[0])

    def test_batch_norm_written_as_a_function_learns_in_train(self):
        graph_module = capture(FunctionalBatchNorm().train(), X)
        graph_module.train()(X)
        assert graph_module.mean.abs().sum() > 0

    def test_a_forward_in_train_equals_the_models(self):
        model = with_norm_statistics(small_resnet()).train()
        twin = copy.deepcopy(model)
        x = torch.randn(2, 3, 32, 32)
        graph_module = capture(model, x)
        close(graph_module(x), twin(x))
        assert torch.equal(graph_module.bn1.running_var, twin.bn1.running_var)

    def test_gradients_reach_the_copies_and_not_the_callers_model(self):
        model = SilentSkip().train()
        twin = copy.deepcopy(model)
        x = torch.randn(2, 5, 8)
        graph_module = capture(model, x)
        graph_module(x).sum().backward()
        twin(x).sum().backward()
        assert all(value.grad is None for value in model.parameters())
        expected = dict(twin.named_parameters())
        for name, value in graph_module.named_parameters():
            torch.testing.assert_close(value.grad, expected[name].grad)

    def test_training_the_graph_leaves_the_callers_model_as_it_was(self):
        model = small_resnet().train()
        before = copy.deepcopy(model.state_dict())
        graph_module = capture(model, torch.randn(2, 3, 32, 32))
        optimizer = torch.optim.SGD(graph_module.parameters(), lr=0.1)
        graph_module(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not torch.equal(graph_module.fc.weight, model.fc.weight)

    def test_a_deepcopy_of_the_graph_is_independent(self):
        graph_module = capture(SilentSkip().eval(), torch.randn(1, 5, 8))
        x = torch.randn(2, 5, 8)
        twin = copy.deepcopy(graph_module)
        expected = graph_module(x)
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            for value in twin.parameters():
                value.zero_()
        assert torch.equal(graph_module(x), expected)
        assert not torch.equal(twin(x), expected)

    def test_moving_the_graph_moves_what_functions_read(self):
        graph_module = capture(Function(F.linear, W, B), X).to(torch.float64)
        assert graph_module(X.double()).dtype == torch.float64


def snapshot(model):
    """State, identity of tensors, modes, hooks and gradients of a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return {
        "state": {name: (value.clone(), value._version) for name, value in model.state_dict().items()},
        "tensors": [(name, id(value)) for name, value in (*model.named_parameters(), *model.named_buffers())],
        "grads": [(name, value.requires_grad, value.grad) for name, value in model.named_parameters()],
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "inplace": [getattr(module, "inplace", None) for module in model.modules()],
        "hooks": [[list(getattr(module, table).items()) for table in hooks] for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def same(before, after):
    assert {key: value for key, value in before.items() if key != "state"} == {
        key: value for key, value in after.items() if key != "state"
    }
    assert list(before["state"]) == list(after["state"])
    for name, (value, version) in before["state"].items():
        assert torch.equal(value, after["state"][name][0]), name
        assert version == after["state"][name][1], name


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.bn(self.fc(x))
        if x.sum() > 0:  # the line of the error
            return x.relu()
        return x.tanh()


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("the user's own fault")


class TestTheCallersModel:
    @pytest.mark.parametrize("shared", [False, True], ids=["copy", "shared"])
    @pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
    def test_capturing_changes_nothing(self, mode, shared):
        model = small_resnet().train(mode)
        model.layer2.eval()
        model.layer1.requires_grad_(False)
        model.layer1[0].register_forward_hook(lambda module, args, output: output * 1)
        model.fc.register_forward_pre_hook(lambda module, args: None)
        before, rng = snapshot(model), torch.get_rng_state()
        x = torch.randn(1, 3, 32, 32)
        rng = torch.get_rng_state()
        original = x.clone()
        capture(model, x, copy=not shared)
        same(before, snapshot(model))
        assert torch.equal(torch.get_rng_state(), rng)
        assert torch.equal(x, original)

    @pytest.mark.parametrize("shared", [False, True], ids=["copy", "shared"])
    @pytest.mark.parametrize("model", [DataDependent, Raises], ids=["data-dependent", "raises"])
    def test_a_failed_capture_changes_nothing(self, model, shared):
        instance = model().train()
        before, rng = snapshot(instance), torch.get_rng_state()
        with pytest.raises(CaptureError):
            capture(instance, X, copy=not shared)
        same(before, snapshot(instance))
        assert torch.equal(torch.get_rng_state(), rng)

    def test_dropout_during_capture_does_not_move_the_random_state(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
        rng = torch.get_rng_state()
        capture(model, X)
        assert torch.equal(torch.get_rng_state(), rng)

    def test_grad_mode_and_warnings_filters_are_left_alone(self):
        filters = list(warnings.filters)
        capture(Layer(nn.Linear(4, 3)), X)
        assert torch.is_grad_enabled()
        assert warnings.filters == filters

    def test_shared_parameters_are_the_callers_own(self):
        model = SilentSkip()
        graph_module = capture(model, torch.randn(1, 5, 8), copy=False)
        expected, actual = dict(model.named_parameters()), dict(graph_module.named_parameters())
        assert list(actual) == list(expected)
        assert all(actual[name] is expected[name] for name in expected)

    def test_modes_and_hooks_of_a_shared_graph_are_its_own(self):
        model = small_resnet().eval()
        graph_module = capture(model, torch.randn(1, 3, 32, 32), copy=False)
        before = snapshot(model)
        graph_module.train()
        graph_module.layer1[0].conv1.register_forward_hook(lambda module, args, output: None)
        graph_module.layer1[0].conv1.register_full_backward_pre_hook(lambda module, grad: None)
        graph_module.layer1[0].conv1.register_state_dict_pre_hook(lambda *args: None)
        graph_module.layer1[0].conv1.register_load_state_dict_post_hook(lambda *args: None)
        same(before, snapshot(model))
        conv = model.layer1[0].conv1
        assert not conv._backward_pre_hooks
        assert not conv._state_dict_pre_hooks
        assert not conv._load_state_dict_post_hooks

    def test_new_buffers_of_a_shared_graph_are_its_own(self):
        model = BuffersModel()
        graph_module = capture(nn.Sequential(model), X, copy=False)
        graph_module.get_submodule("0").register_buffer("scale", torch.ones(1), persistent=False)
        assert not hasattr(model, "scale")
        assert model._non_persistent_buffers_set == {"passing"}

    def test_copies_share_no_memory_with_the_callers_model(self):
        model = small_resnet()
        graph_module = capture(model, torch.randn(1, 3, 32, 32))
        model_memory = {value.data_ptr() for value in (*model.parameters(), *model.buffers())}
        assert model_memory.isdisjoint(
            value.data_ptr() for value in (*graph_module.parameters(), *graph_module.buffers())
        )

    @pytest.mark.parametrize(
        "mutate", [lambda x: x.add_(1), lambda x: x.relu_(), lambda x: x.zero_()], ids=["add_", "relu_", "zero_"]
    )
    def test_a_model_that_writes_into_its_input_leaves_the_callers_batch_alone(self, mutate):
        model = Function(lambda x: torch.tanh(mutate(x)))
        x = X.clone()
        graph_module = capture(model, x)
        assert torch.equal(x, X)
        assert x._version == 0
        y = X.clone()
        close(graph_module(y), model(X.clone()))

    @pytest.mark.parametrize(
        "write",
        [
            pytest.param(lambda y: [y[:, 0].fill_(5.0), y[:, 1:].mul_(2.0)], id="parts"),
            pytest.param(lambda y: y[0][1:3].add_(1), id="a-view-of-a-view"),
            pytest.param(lambda y: [y.view(-1).mul_(2)], id="flat"),
            pytest.param(lambda y: [y.t()[0].zero_()], id="a-row-of-the-transposed"),
            pytest.param(lambda y: [part.add_(1) for part in y.chunk(2, 1)], id="chunks"),
            pytest.param(lambda y: y[:, 0].copy_(y[:, 1]), id="a-copy"),
            pytest.param(lambda y: y.gt_(0), id="a-comparison-keeps-its-type"),
            pytest.param(lambda y: y.add_(torch.ones(4, dtype=torch.float64)), id="a-wider-operand"),
            pytest.param(lambda y: y[:, :2].div_(y[:, 2:].exp()), id="parts-of-one-tensor"),
            pytest.param(lambda y: y.reshape(-1).add_(1), id="a-reshape"),
            pytest.param(lambda y: y[torch.tensor([0, 1]), torch.tensor([1, 2])].add_(1), id="a-gather-is-a-copy"),
            pytest.param(lambda y: y[:, 0].relu_().add_(1).mul_(3), id="three-writes-on-one-view"),
        ],
    )
    def test_a_write_is_seen_through_every_view(self, write):
        def forward(x):
            y = x * 1
            before, row = y + 0, y[0]
            flat = y.view(-1)
            write(y)
            return y, row, flat, before, y.sum(), row[1:] * 2

        captured(Function(forward), X)

    @pytest.mark.parametrize("late", [True, False])
    def test_the_result_of_a_write_is_the_written_tensor(self, late):
        def forward(x):
            y = x * 1
            part = y[:, 1:]
            z = part.mul_(2)
            y.add_(1)
            return (z if late else z + 0), y, part

        captured(Function(forward), X)

    def test_dropout_stays_where_a_model_writes_through_a_view(self):
        def forward(x):
            y = F.dropout(x, 0.5, training=False)
            y[:, 0] = 1.0
            return y

        assert "dropout" in lifted(captured(Function(forward), X))

    def test_a_counter_that_the_forward_writes_counts(self):
        model = Counter()
        graph_module = capture(model, X)
        assert int(model.calls) == 0
        assert int(graph_module.calls) == 0
        graph_module(X)
        graph_module(X)
        assert int(graph_module.calls) == 2


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(self.act(self.fc(x))))


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return utils.weight_norm(layer)


def with_hook(make):
    model = Layer(nn.Linear(4, 3))
    make(model.layer)
    return model


class TestHardModules:
    def test_the_same_module_called_twice_is_two_nodes_of_one_module(self):
        graph_module = captured(CalledTwice(), X)
        assert lifted(graph_module) == ["linear", "relu", "linear", "relu"]
        targets = [node.target for node in graph_module.graph.nodes if get_kind(node) == "linear"]
        assert len({id(graph_module.get_submodule(target)) for target in targets}) == 1
        assert len(list(graph_module.parameters())) == 2

    @pytest.mark.parametrize(
        "model",
        [
            pytest.param(with_hook(lambda fc: fc.register_forward_hook(lambda m, a, out: out * 2)), id="forward-hook"),
            pytest.param(with_hook(lambda fc: fc.register_forward_pre_hook(lambda m, a: (a[0] * 2,))), id="pre-hook"),
            pytest.param(with_hook(parametrizations.weight_norm), id="weight_norm"),
            pytest.param(with_hook(parametrizations.spectral_norm), id="spectral_norm"),
            pytest.param(with_hook(old_weight_norm), id="old weight_norm"),
            pytest.param(with_hook(utils.spectral_norm), id="old spectral_norm"),
            pytest.param(with_hook(lambda fc: prune.l1_unstructured(fc, "weight", 0.5)), id="pruned"),
        ],
    )
    def test_hooks_and_parametrizations_are_captured_with_equal_output(self, model):
        graph_module = captured(model, X)
        assert set(graph_module.state_dict()) == set(model.state_dict())
        assert "linear" in kinds(graph_module)

    def test_a_pruned_layer_is_copied_with_its_computed_weight_and_not_changed(self):
        model = with_hook(lambda fc: prune.l1_unstructured(fc, "weight", 0.5))
        weight = model.layer.weight
        graph_module = capture(model, X)
        assert model.layer.weight is weight
        assert not set(map(id, graph_module.parameters())) & set(map(id, model.parameters()))

    def test_a_model_that_cannot_be_copied_is_captured_with_copy_false(self):
        model = Layer(nn.Linear(4, 3))
        model.lock = threading.Lock()
        with pytest.raises(CaptureError, match="copy=False"):
            capture(model, X)
        graph_module = capture(model, X, copy=False)
        close(graph_module(X), model(X))

    def test_a_pruned_layer_is_captured_with_copy_false(self):
        model = with_hook(lambda fc: prune.l1_unstructured(fc, "weight", 0.5))
        graph_module = capture(model, X, copy=False)
        close(graph_module(X), model(X))
        assert set(graph_module.state_dict()) == set(model.state_dict())

    @pytest.mark.parametrize("name", ["code", "graph", "meta"])
    def test_a_name_that_graph_modules_use_is_refused_with_advice(self, name):
        model = nn.Sequential(OrderedDict([(name, nn.Linear(4, 3))]))
        with raises(CaptureError, f"Sequential.{name}", "nn.Sequential(model)"):
            capture(model, X)
        captured(nn.Sequential(model), X)

    def test_a_hook_runs_once_and_not_again_in_the_graph(self):
        model = with_hook(lambda fc: fc.register_forward_hook(lambda module, args, output: output + 1))
        close(capture(model, X)(X), model(X))

    def test_a_subclass_of_a_torch_module_keeps_its_own_forward(self):
        class Doubled(nn.Linear):
            def forward(self, x):
                return super().forward(x) * 2

        captured(Layer(Doubled(4, 3)), X)

    def test_an_edited_layer_is_captured_as_it_runs(self):
        model = Layer(nn.Linear(4, 3))
        model.layer.forward = lambda x: F.linear(x * 2, model.layer.weight)
        expected = model(X)
        close(capture(model, X)(X), expected)

    def test_a_constant_created_in_forward_is_not_in_the_state_dict(self):
        graph_module = captured(Function(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])), X)
        assert list(graph_module.state_dict()) == []

    def test_module_lists_and_dicts_keep_their_paths(self):
        class Lists(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return {name: head(x) for name, head in self.heads.items()}

        graph_module = captured(Lists(), X)
        targets = [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
        assert targets == ["blocks.0", "blocks.1", "heads.a", "heads.b"]

    def test_no_grad_blocks_inside_a_forward(self):
        def forward(x, w):
            with torch.no_grad():
                scale = w.abs().max()
            return F.linear(x, w) / scale

        model = Function(forward, W)
        close(capture(model, X)(X), model(X))


class TestErrors:
    def test_data_dependent_control_flow_names_the_file_and_the_line(self):
        with pytest.raises(CaptureError) as caught:
            capture(DataDependent(), X)
        lines = Path(__file__).read_text(encoding="utf-8").splitlines()
        line = next(index for index, text in enumerate(lines, 1) if text.lstrip().startswith("if x.sum() > 0:"))
        assert f"{__file__}:{line}" in str(caught.value)
        assert "x.sum() > 0" in str(caught.value)
        assert "DataDependent" in str(caught.value)

    def test_an_error_in_the_users_forward_is_reported(self):
        with pytest.raises(CaptureError, match="the user's own fault") as caught:
            capture(Raises(), X)
        assert __file__ in str(caught.value)

    @pytest.mark.parametrize(
        ("model", "line"),
        [
            pytest.param(Layer(nn.Linear(4, 3)), "return self.layer(x)", id="a-module"),
            pytest.param(Function(lambda x, w: x @ w.T, W), "x @ w.T", id="a-product"),
        ],
    )
    def test_inputs_on_which_the_model_fails_are_reported_with_the_line(self, model, line):
        with raises(CaptureError, "example inputs", "RuntimeError", "mat1") as caught:
            capture(model, torch.randn(2, 5))
        assert f"{__file__}:" in str(caught.value)
        assert line in str(caught.value)
        assert "leave=" not in str(caught.value)

    def test_explaining_a_failure_has_no_side_effects(self):
        model = nn.Sequential(Counter(), Function(lambda x: x.add_(1)), DataDependent())
        x = X.clone()
        before = snapshot(model)
        with pytest.raises(CaptureError):
            capture(model, x, copy=False)
        same(before, snapshot(model))
        assert torch.equal(x, X)

    def test_logs_and_prints_of_torch_do_not_reach_the_user(self, capfd, caplog):
        def loud(x):
            logging.getLogger("torch.of.tomorrow").error("a logger that is made during the export")
            sys.stdout.write("a line of the export")
            return x + 1

        capture(Function(loud), X)
        assert (*capfd.readouterr(), caplog.text) == ("", "", "")
        logging.getLogger("of.the.user").error("heard again")
        assert "heard again" in caplog.text

    def test_too_many_inputs_are_reported(self):
        with pytest.raises(CaptureError):
            capture(Layer(nn.Linear(4, 3)), (X, X))

    def test_an_unknown_keyword_is_reported(self):
        with pytest.raises(CaptureError, match="unknown"):
            capture(Layer(nn.Linear(4, 3)), X, {"unknown": X})

    def test_a_lazy_module_is_reported(self):
        with pytest.raises(CaptureError, match=r"layer .*lazy"):
            capture(Layer(nn.LazyLinear(3)), X)

    @pytest.mark.parametrize("path", ["model.pt2", "../model.pt", "/tmp/model.py"])  # noqa: S108
    def test_a_path_is_refused_without_trust(self, path):
        for path_argument in (path, Path(path)):
            with pytest.raises(CaptureError, match=r"runs code.*trust=True"):
                capture(path_argument, X)

    @pytest.mark.parametrize("content", [None, b"", b"not a program", "half"], ids=["missing", "empty", "text", "cut"])
    def test_a_trusted_file_that_is_not_a_program_is_reported(self, content, tmp_path):
        path = tmp_path / "model.pt2"
        if content == "half":
            torch.export.save(torch.export.export(nn.Linear(4, 3), (X,)), path)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif content is not None:
            path.write_bytes(content)
        with pytest.raises(CaptureError, match=r"model\.pt2.*[a-z]: ."):
            capture(path, X, trust=True)

    @pytest.mark.parametrize(
        "model", [None, 3, {}, F.relu, nn.Linear], ids=["none", "int", "dict", "function", "class"]
    )
    def test_values_that_are_not_modules_are_refused(self, model):
        with pytest.raises(CaptureError, match=r"Module|not a model"):
            capture(model, X)

    def test_every_error_is_a_scalepoint_error_and_a_value_error(self):
        with pytest.raises(ScalepointError) as caught:
            capture("model.pt2", X)
        assert isinstance(caught.value, ValueError)
        assert "SP-G001" in str(caught.value)


class Unpredictable(nn.Module):
    """A submodule that cannot be captured, between two that can."""

    def __init__(self, wide=4):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = DataDependent()
        self.last = nn.Linear(4, wide)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class TestLeave:
    def test_a_submodule_of_leave_is_called_as_it_is(self):
        model = Unpredictable().eval()
        graph_module = capture(model, X, leave=["middle"])
        assert lifted(graph_module) == ["linear", "left", "linear"]
        assert list(graph_module.state_dict()) == list(model.state_dict())
        for x in (X, -X, torch.randn(5, 4)):
            close(graph_module(x), model(x))

    def test_a_submodule_of_leave_whose_width_equals_the_batch(self):
        model = nn.Sequential(nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3), nn.Flatten()).eval()
        graph_module = capture(model, X, leave=["1"])
        x = torch.randn(5, 4)
        close(graph_module(x), model(x))

    def test_a_submodule_of_leave_that_is_called_twice(self):
        model = CalledTwice().eval()
        graph_module = capture(model, X, leave=["fc"])
        assert lifted(graph_module).count("left") == 2
        close(graph_module(X), model(X))

    @pytest.mark.parametrize("shared", [False, True], ids=["copy", "shared"])
    def test_leave_has_no_side_effects(self, shared):
        model = nn.Sequential(Counter(), Function(lambda x: x.add_(1)), nn.Linear(4, 4)).train()
        x = X.clone()
        before, rng = snapshot(model), torch.get_rng_state()
        graph_module = capture(model, x, leave=["2"], copy=not shared)
        same(before, snapshot(model))
        assert torch.equal(x, X)
        assert torch.equal(torch.get_rng_state(), rng)
        assert int(graph_module.get_submodule("0").calls) == 0

    def test_an_unknown_name_in_leave_is_refused_with_the_nearest_name(self):
        with pytest.raises(UsageError, match="middle"):
            capture(Unpredictable(), X, leave=["midle"])

    def test_the_error_of_a_model_that_cannot_be_captured_mentions_leave(self):
        with pytest.raises(CaptureError, match="leave="):
            capture(Unpredictable(), X)

    def test_a_submodule_of_leave_can_be_trained(self):
        graph_module = capture(Unpredictable().eval(), X, leave=["middle"]).train()
        graph_module(X).sum().backward()
        assert all(value.grad is not None for value in graph_module.parameters())


class TestWithoutInputs:
    @pytest.mark.parametrize(
        ("model", "x"),
        [
            pytest.param(with_norm_statistics(resnet50(4, 10)), torch.randn(2, 3, 32, 32), id="resnet50"),
            pytest.param(vit_b16(24, 32, 10).eval(), torch.randn(2, 3, 32, 32), id="vit", marks=SLOW),
            pytest.param(with_norm_statistics(UNet()), torch.randn(2, 3, 16, 16), id="unet"),
        ],
    )
    def test_the_graph_has_the_same_operations_and_output(self, model, x):
        graph_module = capture(model, None)
        close(graph_module(x), model(x))
        weighted = ("conv", "conv_transpose", "linear", "layer_norm", "batch_norm", "attention")
        expected = [kind for kind in lifted(capture(model, x)) if kind in weighted]
        assert [kind for kind in kinds(graph_module) if kind in weighted] == expected
        assert list(graph_module.state_dict()) == list(model.state_dict())

    def test_capturing_changes_nothing(self):
        model = small_resnet().train()
        before, rng = snapshot(model), torch.get_rng_state()
        capture(model, None)
        same(before, snapshot(model))
        assert torch.equal(torch.get_rng_state(), rng)

    def test_a_functional_linear_is_a_linear(self):
        graph_module = capture(Function(F.linear, W, B), None)
        close(graph_module(X), F.linear(X, W, B))
        assert kinds(graph_module) == ["linear"]
        assert get_origin(graph_module).fixed_batch == {}

    def test_dropout_and_batch_norm_are_live_in_train(self):
        graph_module = capture(Stateful().eval(), None).train()
        assert not torch.equal(graph_module(X), graph_module(X))
        assert int(graph_module.bn.num_batches_tracked) == 2

    def test_data_dependent_control_flow_names_the_line_and_asks_for_inputs(self):
        with pytest.raises(CaptureError, match=r"x\.sum\(\) > 0"):
            capture(DataDependent(), None)


class TestOtherForms:
    @pytest.mark.parametrize("strict", [pytest.param(True, marks=SLOW), False], ids=["strict", "non-strict"])
    def test_an_exported_program(self, strict):
        model = with_norm_statistics(small_resnet())
        x = torch.randn(2, 3, 32, 32)
        program = torch.export.export(model, (x,), strict=strict)
        graph_module = capture(program, x)
        close(graph_module(x), model(x))
        assert set(graph_module.state_dict()) == set(program.state_dict)
        assert lifted(graph_module).count("conv") == 17

    @pytest.mark.parametrize("as_text", [True, False], ids=["str", "Path"])
    def test_a_trusted_file(self, as_text, tmp_path):
        model = Layer(nn.Linear(4, 3)).eval()
        path = tmp_path / "model.pt2"
        torch.export.save(torch.export.export(model, (X,)), path)
        graph_module = capture(str(path) if as_text else path, trust=True)
        close(graph_module(X), model(X))
        assert lifted(graph_module) == ["linear"]

    def test_capturing_an_exported_program_leaves_it_as_it_was(self):
        model = Layer(nn.Linear(4, 3)).eval()
        program = torch.export.export(model, (X,))
        text, state = str(program.graph), {name: value.clone() for name, value in program.state_dict.items()}
        graph_module = capture(program, X)
        with torch.no_grad():
            for value in graph_module.parameters():
                value.zero_()
        assert str(program.graph) == text
        assert all(torch.equal(value, state[name]) for name, value in program.state_dict.items())
        close(program.module()(X), model(X))

    def test_a_graph_module(self):
        model = with_norm_statistics(UNet())
        x = torch.randn(1, 3, 16, 16)
        graph_module = capture(torch.fx.symbolic_trace(model), x)
        close(graph_module(x), model(x))
        assert lifted(graph_module).count("conv") == 11

    def test_a_captured_graph_is_captured_again(self):
        model = with_norm_statistics(UNet())
        x = torch.randn(1, 3, 16, 16)
        once = capture(model, x)
        twice = capture(once, x)
        close(twice(x), model(x))
        assert lifted(twice) == lifted(once)

    def test_the_graph_reads_like_the_model(self):
        graph_module = capture(small_resnet(), torch.randn(1, 3, 32, 32))
        text = str(graph_module)
        assert text.startswith("ResNet(")
        assert "self.layer1" in graph_module.code
        order = [text.index(f"({name})") for name in ("conv1", "bn1", "layer1", "layer4", "fc")]
        assert all(first < second for first, second in pairwise(order))


@pytest.mark.parametrize(
    ("spelling", "inputs"),
    [
        *((spelling, X) for spelling in ("module", "method", "function", "operator")),
        *((form, None) for form in ("module", "method", "function")),  # torch.fx does not record +=
    ],
)
def test_readers_after_an_in_place_write_read_the_new_value(spelling, inputs):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.fc(x)
            if spelling == "module":
                z = self.relu(y)
            elif spelling == "method":
                z = y.relu_()
            elif spelling == "function":
                z = F.relu(y, inplace=True)
            else:
                z = y
                z += 1.0
            return y * 2 + z

    model = Writes().eval()
    x = torch.randn(3, 4)
    assert torch.equal(capture(model, inputs)(x), model(x))


class Remembering(nn.Module):
    """Stores tensors of its last run in attributes that existed before and in new ones."""

    def __init__(self):
        super().__init__()
        self.linear, self.last, self.by_size = nn.Linear(4, 4), None, {}

    def forward(self, x):
        y = self.linear(x)
        self.last, self.new, self.by_size[4] = y, (y, 1), y * 2
        return y + self.by_size[4]


def test_attributes_do_not_keep_tensors_of_the_trace():
    model = Remembering().eval()
    graph_module = capture(model, torch.randn(2, 4))
    twin = copy.deepcopy(graph_module)
    x = torch.randn(3, 4)
    torch.testing.assert_close(twin(x), model(x))
    assert capture(Remembering().eval(), torch.randn(2, 4), copy=False) is not None


def test_a_copy_of_a_graph_keeps_its_origin_and_changes_independently():
    graph_module = capture(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    before = get_origin(graph_module)
    copied = copy.deepcopy(graph_module)
    set_origin(copied, size_steps={"width": 8})
    assert kinds(copied) == kinds(graph_module)
    assert get_origin(copied) == replace(before, size_steps={"width": 8})
    assert get_origin(graph_module) == before
