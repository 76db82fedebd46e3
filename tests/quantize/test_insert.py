"""insert_qdq: placement of quantizers, folded weights, coverage of float operations, and an unchanged float model."""

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from scalepoint.errors import CoverageError, PatternError, ScalepointError
from scalepoint.patterns import Fused
from scalepoint.quantize import (
    Override,
    QuantConfig,
    QuantStub,
    TensorQuantConfig,
    WeightFakeQuantize,
    calibrate,
    coverage,
    insert_qdq,
    quantize,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationSpec
from scalepoint.tensorrt import TENSORRT_PATTERNS
from scalepoint.transformation import transform
from tests.models import Decoder, ResNet, SilentSkip, UNet, VisionTransformer, resnet50, vit_b16, with_norm_statistics

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph

INT8 = TensorQuantConfig()
CHANNELS = TensorQuantConfig(per_channel=True)
CONFIG = QuantConfig(activation=INT8, weight=CHANNELS)
FP8 = QuantizationSpec(dtype="float8_e4m3fn")


def inserted(model, *inputs, config=CONFIG, **options):
    result = transform(model.eval(), inputs)
    return insert_qdq(result.model, result.matches, config, **options)


TRANSFORMED_MODELS = {}


def transformed_model(make, shape):
    """Return a model and its transformation, cached for all tests with the same factory."""
    if make not in TRANSFORMED_MODELS:
        model = make().eval()
        TRANSFORMED_MODELS[make] = model, transform(model, torch.randn(3, *shape))
    return TRANSFORMED_MODELS[make]


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    model = with_norm_statistics(UNet())
    return model, transform(model, torch.randn(2, 3, 16, 16))


def from_unet(unet, config=CONFIG):
    return insert_qdq(unet[1].model, unet[1].matches, config)


def stubs_of(model):
    return [module for module in model.modules() if isinstance(module, QuantStub)]


def weights_of(model):
    return [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]


def stub_of(model, reader):
    (stub,) = [stub for stub in stubs_of(model) if reader in stub.consumers]
    return stub


def readers(model):
    """Return the names of the nodes that read each stub."""
    consumers = {}
    for node in model.graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), QuantStub):
            consumers[node.target] = [user.name for user in node.users]
    return consumers


def row(model, name):
    (operation,) = [operation for operation in coverage(model).operations if operation.name == name]
    return operation


def close(actual, expected, tolerance=1e-4):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def state_of(model):
    """Return everything of a model that a caller can observe."""
    return {
        **{f"value {name}": value.clone() for name, value in model.state_dict().items()},
        **{f"mode {name}": torch.tensor(module.training) for name, module in model.named_modules()},
        **{f"grad {name}": torch.tensor(value.requires_grad) for name, value in model.named_parameters()},
        **{
            f"hooks {name}": torch.tensor(len(module._forward_hooks) + len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
    }


def same_state(one, other):
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class TestCounts:
    def test_resnet50_has_55_stubs_and_54_weight_quantizers(self):
        result = transform(resnet50().eval(), patterns=TENSORRT_PATTERNS)
        model = insert_qdq(result.model, result.matches, CONFIG)
        assert len(stubs_of(model)) == 55
        assert len(weights_of(model)) == 54

    @pytest.mark.slow
    def test_resnet50_has_55_stubs_with_the_tensorrt_target_too(self):
        result = transform(resnet50(16, 100).eval(), torch.randn(1, 3, 64, 64), target="tensorrt")
        model = insert_qdq(result.model, result.matches)
        assert (len(stubs_of(model)), len(weights_of(model))) == (55, 54)
        assert coverage(model).unrequested_float == ()
        coverage(model).check()

    def test_vit_b16_has_86_stubs(self):
        result = transform(vit_b16().eval(), patterns=TENSORRT_PATTERNS)
        model = insert_qdq(
            result.model,
            result.matches,
            QuantConfig(activation=INT8, weight=CHANNELS, skip_weight_quant_for=(nn.LayerNorm,)),
        )
        assert len(stubs_of(model)) == 86
        assert len(weights_of(model)) == 12 * 4 + 2

    def test_the_tensors_of_resnet50_are_those_of_the_contract(self):
        """Input, pooled stem, 32 inner tensors, 16 block outputs, 4 downsample outputs, pooled vector."""
        model = inserted(with_norm_statistics(resnet50(8, 10)), torch.randn(1, 3, 64, 64))
        consumers = [sorted(stub.consumers) for stub in stubs_of(model)]
        assert len(consumers) == 55
        assert [readers for readers in consumers if "conv1" in readers] == [["conv1"]]
        inner = [readers for readers in consumers if len(readers) == 1 and readers[0].endswith((".conv2", ".conv3"))]
        assert len([readers for readers in inner if ".conv2" in readers[0]]) == 16
        assert ["layer1.0.conv1", "layer1.0.downsample.0"] in consumers
        assert ["layer1.1.conv1", "layer1.1.conv3"] in consumers
        assert len([readers for readers in consumers if len(readers) == 1 and readers[0].endswith(".0.conv3")]) == 8

    @pytest.mark.parametrize(
        ("make", "inputs", "stubs", "weights"),
        [
            pytest.param(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),), 1, 1, id="linear"),
            pytest.param(lambda: with_norm_statistics(UNet()), (torch.randn(1, 3, 16, 16),), 13, 13, id="unet"),
            pytest.param(Decoder, (torch.randint(0, 50, (1, 6)),), 2 * 7 + 1, 15, id="decoder"),
        ],
    )
    def test_small_networks(self, make, inputs, stubs, weights):
        model = inserted(make(), *inputs)
        assert (len(stubs_of(model)), len(weights_of(model))) == (stubs, weights)


class TestPlacement:
    def test_no_stub_is_inside_a_fused_group(self):
        model = inserted(with_norm_statistics(ResNet((1, 1, 1, 1), 8, 4)), torch.randn(1, 3, 64, 64))
        assert len([module for module in model.modules() if isinstance(module, Fused)]) > 10
        for module in model.modules():
            if isinstance(module, Fused):
                assert stubs_of(module) == []

    def test_a_tensor_with_three_readers_has_one_stub(self):
        class Three(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

            def forward(self, x):
                x = x.tanh()
                return self.q(x) + self.k(x) * self.v(x)

        model = inserted(Three(), torch.randn(2, 4))
        (stub,) = stubs_of(model)
        assert sorted(stub.consumers) == ["k", "q", "v"]
        assert [len(users) for users in readers(model).values()] == [3]

    def test_a_reader_without_points_reads_the_float_tensor(self):
        class Bypass(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return self.fc(x), x.exp()

        float_model = Bypass().eval()
        model = inserted(float_model, torch.randn(2, 4))
        calibrate(model, [torch.randn(8, 4)])
        x = torch.randn(2, 4) * 10
        assert torch.equal(model(x)[1], x.exp())

    @pytest.mark.parametrize("order", [0, 1])
    def test_two_readers_with_two_precisions_have_two_stubs(self, order):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                x = x.sigmoid()
                return (self.a(x) + self.b(x) + self.c(x)) if order else (self.b(x) + self.a(x) + self.c(x))

        int4 = TensorQuantConfig(n_bits=4)
        overrides = (Override(name="b", input=int4), Override(name="c", input="float"))
        model = inserted(
            Two(), torch.randn(2, 4), config=QuantConfig(activation=INT8, weight=CHANNELS, overrides=overrides)
        )
        bits = {tuple(stub.consumers): stub.spec.n_bits for stub in stubs_of(model)}
        assert bits == {("a",): 8, ("b",): 4}
        assert sorted(map(len, readers(model).values())) == [1, 1]

    def test_a_pool_and_a_reader_with_another_precision_have_a_stub_each(self):
        """The output point of the pool has int8; the config gives the layer that reads it int4."""

        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.pool, self.fc = nn.AdaptiveAvgPool2d(2), nn.Conv2d(3, 4, 1)

            def forward(self, x):
                return self.fc(self.pool(x.sigmoid()))

        config = QuantConfig(
            activation=INT8, weight=CHANNELS, overrides=(Override(name="fc", input=TensorQuantConfig(n_bits=4)),)
        )
        model = inserted(Pooled(), torch.randn(1, 3, 8, 8), config=config)
        calibrate(model, [torch.randn(2, 3, 8, 8)])
        assert all(readers(model).values())
        assert stub_of(model, "fc").spec.n_bits == 4

    @pytest.mark.parametrize(
        "add",
        [lambda y, x: y + x, lambda y, x: x + y, torch.add, lambda y, x: torch.add(x, y)],
        ids=["y+x", "x+y", "add(y,x)", "add(x,y)"],
    )
    def test_a_residual_has_its_stub_in_either_order(self, add):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Conv2d(3, 4, 3, padding=1)
                self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
                self.short = nn.Conv2d(3, 4, 1)

            def forward(self, x):
                return add(self.bn(self.conv(self.first(x).relu())), self.short(x)).relu()

        float_model, x = with_norm_statistics(Residual()), torch.randn(2, 3, 8, 8)
        model = inserted(float_model, x)
        # x (read by first and short), first's output, short's output
        assert len(stubs_of(model)) == 3
        close(model(x), float_model(x))
        calibrate(model, [x])
        close(model(x), float_model(x), 0.1)
        residual = [stub for stub in stubs_of(model) if stub.consumers == ["conv"]]
        assert len(residual) == 2
        ranges = sorted(float(stub.scale) * 127.5 for stub in residual)
        with torch.no_grad():
            largest = sorted(float(value.abs().max()) for value in (float_model.first(x).relu(), float_model.short(x)))
        assert ranges == pytest.approx(largest, rel=1e-4)

    def test_every_precision_in_one_config(self):
        model = VisionTransformer(hidden=32, heads=2, depth=2, image=32, classes=5).eval()
        config = QuantConfig(
            activation=INT8,
            weight=CHANNELS,
            overrides=(
                Override(name="encoder.layers.*.mlp.0", weight=TensorQuantConfig(n_bits=4, per_channel=True)),
                Override(
                    name="encoder.layers.encoder_layer_1.mlp.*",
                    weight=QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=16)),
                ),
                Override(type="ScaledDotProductAttentionPattern", activation=FP8),
                Override(name="heads.head", weight="float", activation="float"),
            ),
        )
        x = torch.randn(2, 3, 32, 32)
        quantized = inserted(model, x, config=config)
        close(quantized(x), model(x))
        calibrate(quantized, [x])
        assert row(quantized, "encoder.layers.encoder_layer_0.mlp.0").how == "w int4 per_channel, x int8"
        assert row(quantized, "encoder.layers.encoder_layer_1.mlp.3").how == "w int4 per_block, x int8"
        head = row(quantized, "heads.head")
        assert (head.state, head.precision) == ("float", "float")
        assert "config" in head.reason
        attention = [operation for operation in coverage(quantized).operations if operation.kind == "attention"]
        assert [operation.how for operation in attention] == ["x float8_e4m3fn"] * 2
        close(quantized(x), model(x), 0.5)

    def test_an_integer_input_has_no_stub(self):
        model = inserted(Decoder(), torch.randint(0, 50, (1, 6)))
        assert not any("input_ids" in stub.name for stub in stubs_of(model))

    def test_stub_names_are_their_paths(self, unet):
        model = from_unet(unet)
        for stub in stubs_of(model):
            assert model.get_submodule(stub.name) is stub
        for quantizer in weights_of(model):
            assert quantizer.name
            assert quantizer.consumers


class TestSharing:
    def test_tied_weights_have_one_quantizer(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
                self.b.weight = self.a.weight

            def forward(self, x):
                return self.b(self.a(x).relu())

        float_model, x = Tied().eval(), torch.randn(2, 4)
        model = inserted(float_model, x)
        close(model(x), float_model(x))
        assert model.get_parameter("a.weight") is model.get_parameter("b.weight")
        assert len(weights_of(model)) == 1

    def test_one_parameter_in_two_functions_has_one_quantizer(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 4))

            def forward(self, x):
                return F.linear(F.linear(x, self.weight).relu(), self.weight)

        float_model, x = Tied().eval(), torch.randn(2, 4)
        model = inserted(float_model, x)
        close(model(x), float_model(x))
        assert len(weights_of(model)) == 1

    def test_a_module_called_twice_has_one_weight_scale_and_two_activation_scales(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return self.fc(10 * self.fc(x).relu())

        float_model, x = Twice().eval(), torch.randn(16, 4)
        model = inserted(float_model, x)
        assert (len(stubs_of(model)), len(weights_of(model))) == (2, 1)
        close(model(x), float_model(x))
        calibrate(model, [x])
        middle = float((10 * float_model.fc(x).relu()).abs().max().detach())
        scales = sorted(float(stub.scale) * 127.5 for stub in stubs_of(model))
        assert scales == pytest.approx(sorted([float(x.abs().max()), middle]), rel=1e-4)
        # both calls are quantized: the result equals that of two quantized products
        (quantizer,) = weights_of(model)
        w, b = quantizer(float_model.fc.weight), float_model.fc.bias
        first, second = (stub_of_scale(model, scale) for scale in (float(x.abs().max()), middle))
        close(model(x), F.linear(second(10 * F.linear(first(x), w, b).relu()), w, b))

    def test_an_embedding_tied_to_the_head_stays_tied(self):
        model = inserted(Decoder(), torch.randint(0, 50, (1, 6)))
        assert model.get_parameter("embed_tokens.weight") is model.get_parameter("lm_head.weight")


def stub_of_scale(model, top):
    (stub,) = [stub for stub in stubs_of(model) if abs(float(stub.scale) * 127.5 - top) < 1e-3 * top]
    return stub


class Functional(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class InputFirst(nn.Module):
    """x @ w, with the weight as (in, out)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6) * torch.logspace(-2, 2, 6))

    def forward(self, x):
        return x @ self.weight


def conv_bn(conv, norm):
    return with_norm_statistics(nn.Sequential(conv, norm, nn.ReLU()))


WEIGHTED = [
    pytest.param(lambda: nn.Sequential(nn.Conv2d(4, 6, 3)), (4, 8, 8), 0, id="conv"),
    pytest.param(lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), (4, 8, 8), 0, id="conv-relu"),
    pytest.param(lambda: conv_bn(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), (4, 8, 8), 0, id="conv-bn"),
    pytest.param(
        lambda: conv_bn(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), (4, 8, 8), 0, id="conv-bn-no-bias"
    ),
    pytest.param(lambda: conv_bn(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), (4, 8, 8), 0, id="grouped-bn"),
    pytest.param(lambda: conv_bn(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), (4, 8, 8), 0, id="depthwise-bn"),
    pytest.param(lambda: conv_bn(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (4, 8), 0, id="conv1d-bn"),
    pytest.param(lambda: conv_bn(nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6)), (4, 4, 4, 4), 0, id="conv3d-bn"),
    pytest.param(
        lambda: conv_bn(nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), nn.BatchNorm2d(6)),
        (4, 8, 8),
        0,
        id="reflect-bn",
    ),
    pytest.param(
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), (4, 8, 8), 0, id="bn-without-affine"
    ),
    pytest.param(lambda: conv_bn(nn.ConvTranspose2d(4, 6, 3, 2), nn.BatchNorm2d(6)), (4, 5, 5), 1, id="transposed-bn"),
    pytest.param(
        lambda: conv_bn(nn.ConvTranspose2d(4, 6, 3, 2, groups=2, output_padding=1), nn.BatchNorm2d(6)),
        (4, 5, 5),
        1,
        id="transposed-grouped-bn",
    ),
    pytest.param(lambda: conv_bn(nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6)), (4, 5), 1, id="transposed-1d-bn"),
    pytest.param(lambda: nn.Sequential(nn.Linear(4, 6)), (4,), 0, id="linear"),
    pytest.param(Functional, (4,), 0, id="F.linear"),
    pytest.param(lambda: Functional(bias=False), (4,), 0, id="F.linear-no-bias"),
    pytest.param(InputFirst, (4,), 1, id="x@w"),
]


def reference_weight(model):
    """Compute w * gamma / std: output channels are axis 0, or axis 1 in each group of a transposed convolution."""
    layers = [module for module in model.modules() if not isinstance(module, nn.Sequential)]
    layer = layers[0]
    w = layer.weight.detach().double().numpy()
    norms = [module for module in layers if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return w
    (norm,) = norms
    gamma = np.ones(norm.num_features) if norm.weight is None else norm.weight.detach().double().numpy()
    factor = gamma / np.sqrt(norm.running_var.double().numpy() + norm.eps)
    w = w.copy()
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        rows, columns = w.shape[0] // layer.groups, w.shape[1]
        for group in range(layer.groups):
            for column in range(columns):
                w[group * rows : (group + 1) * rows, column] *= factor[group * columns + column]
    else:
        for channel in range(w.shape[0]):
            w[channel] *= factor[channel]
    return w


def fake_quantized(w, axis):
    """Quantize to symmetric int8 along an axis: scale = max|w| / 127.5."""
    moved = np.moveaxis(w, axis, 0).astype(np.float32)
    scale = np.maximum(np.abs(moved).reshape(moved.shape[0], -1).max(1), 1e-8) / np.float32(127.5)
    shaped = scale.reshape(-1, *[1] * (w.ndim - 1)).astype(np.float32)
    codes = np.clip(np.round(moved / shaped), -128, 127)
    return np.moveaxis(codes * shaped, 0, axis), scale


class TestWeights:
    @pytest.mark.parametrize(("make", "shape", "axis"), WEIGHTED)
    def test_before_calibration_the_output_is_that_of_the_float_model(self, make, shape, axis):
        (float_model, result), x = transformed_model(make, shape), torch.randn(3, *shape)
        model = insert_qdq(result.model, result.matches, CONFIG)
        assert len(weights_of(model)) == 1
        with torch.no_grad():
            close(model(x), float_model(x), 1e-5)
            close(model(x[:1]), float_model(x[:1]), 1e-5)

    @pytest.mark.parametrize(("make", "shape", "axis"), WEIGHTED)
    def test_the_quantized_weight_contains_the_batch_norm(self, make, shape, axis):
        (float_model, result), x = transformed_model(make, shape), torch.randn(3, *shape)
        model = insert_qdq(result.model, result.matches, QuantConfig(activation="float", weight=CHANNELS))
        calibrate(model, [x])
        (quantizer,) = weights_of(model)
        weights = []
        quantizer.register_forward_hook(lambda module, args, result: weights.append((args[0], result)))
        y = model(x)
        expected, scale = fake_quantized(reference_weight(float_model), axis)
        float_weight, quantized_weight = (value.detach().numpy() for value in weights[-1])
        if isinstance(float_model, InputFirst):
            float_weight, quantized_weight = float_weight.T, quantized_weight.T
        np.testing.assert_allclose(float_weight, reference_weight(float_model), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(quantizer.scale.numpy(), scale, rtol=1e-5)
        step = float(scale.max())
        differs = np.abs(quantized_weight - expected) > 1e-4 * step
        assert differs.mean() < 0.02  # a value halfway between two codes may round either way
        assert np.abs(quantized_weight - expected).max() < 1.01 * step
        # the model multiplies by it: the same as the float model with that weight
        twin = copy.deepcopy(float_model)
        layer = next(module for module in twin.modules() if getattr(module, "weight", None) is not None)
        ratio = torch.from_numpy(
            np.divide(quantized_weight, float_weight, out=np.ones_like(quantized_weight), where=float_weight != 0)
        )
        with torch.no_grad():
            layer.weight.mul_(ratio)
            close(y, twin(x), 1e-4)

    def test_a_batch_norm_with_a_zero_gamma_stays_defined(self):
        float_model, x = conv_bn(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), torch.randn(3, 4, 8, 8)
        with torch.no_grad():
            float_model[1].weight[2] = 0
        model = inserted(float_model, x)
        calibrate(model, [x])
        for training in (False, True):
            model.train(training)
            assert torch.isfinite(model(x)).all()

    def test_a_batch_norm_with_two_readers_is_not_folded(self):
        class Shared(nn.Module):
            """One batch norm after two convolutions."""

            def __init__(self):
                super().__init__()
                self.a, self.b, self.bn = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

            def forward(self, x):
                return self.bn(self.a(x)) + self.bn(self.b(x)).relu()

        float_model, x = with_norm_statistics(Shared()), torch.randn(2, 3, 5, 5)
        model = inserted(float_model, x)
        close(model(x), float_model(x))
        calibrate(model, [x])
        close(model(x), float_model(x), 0.1)

    def test_changing_a_weight_after_calibration_changes_the_result(self):
        """A cached folded weight must be updated after a change."""
        float_model, x = conv_bn(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), torch.randn(3, 4, 8, 8)
        model = inserted(float_model, x)
        calibrate(model, [x])
        with torch.no_grad():
            before = model(x)
            model.get_parameter("0.weight").mul_(0.5)
            changed = model(x)
            model.get_buffer("1.running_mean").add_(1.0)
            again = model(x)
        assert not torch.equal(before, changed)
        assert not torch.equal(changed, again)

    def test_state_dict_keeps_the_names_of_the_float_model(self, unet):
        float_model, model = unet[0], from_unet(unet)
        float_keys = set(float_model.state_dict())
        assert float_keys <= set(model.state_dict())
        assert {name for name, _ in model.named_parameters()} == {name for name, _ in float_model.named_parameters()}

    def test_a_state_loads_into_a_fresh_insertion_bit_equal(self, unet):
        x = torch.randn(2, 3, 16, 16)
        model, fresh = from_unet(unet), from_unet(unet)
        calibrate(model, [x])
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model(x), fresh(x))

    def test_a_deep_copy_is_independent(self, unet):
        x = torch.randn(2, 3, 16, 16)
        model = from_unet(unet)
        calibrate(model, [x])
        twin = copy.deepcopy(model)
        with torch.no_grad():
            expected = model(x)
            assert torch.equal(twin(x), expected)
            for value in twin.parameters():
                value.zero_()
            assert torch.equal(model(x), expected)
            assert not torch.equal(twin(x), expected)


class TestTheCallersModels:
    @pytest.fixture
    def float_model(self):
        return with_norm_statistics(UNet()).train()

    def test_neither_the_model_nor_the_transformed_one_changes(self, float_model):
        x = torch.randn(2, 3, 16, 16)
        before = state_of(float_model)
        result = transform(float_model, x)
        middle, graph = state_of(result.model), str(result.model.graph)
        model = insert_qdq(result.model, result.matches, CONFIG)
        calibrate(model, [x])
        model(x)
        same_state(before, state_of(float_model))
        same_state(middle, state_of(result.model))
        assert str(result.model.graph) == graph
        assert model is not result.model

    def test_a_call_that_fails_changes_nothing(self, unet):
        result = unet[1]
        middle, graph = state_of(result.model), str(result.model.graph)
        for config in (
            QuantConfig(overrides=(Override(name="nowhere", weight="float"),)),
            QuantConfig(weight=TensorQuantConfig(n_bits=2)),
        ):
            with pytest.raises(ScalepointError):
                insert_qdq(result.model, result.matches, config, target="tensorrt", copy=False)
        same_state(middle, state_of(result.model))
        assert str(result.model.graph) == graph

    def test_without_a_copy_the_given_model_is_the_result(self, float_model):
        result = transform(float_model, torch.randn(2, 3, 16, 16))
        assert insert_qdq(result.model, result.matches, CONFIG, copy=False) is result.model

    def test_one_transform_serves_two_configs(self, unet):
        (float_model, result), x = unet, torch.randn(2, 3, 16, 16)
        fine = insert_qdq(result.model, result.matches, CONFIG)
        coarse = insert_qdq(
            result.model,
            result.matches,
            QuantConfig(activation=TensorQuantConfig(n_bits=2), weight=TensorQuantConfig(n_bits=2)),
        )
        calibrate(fine, [x])
        calibrate(coarse, [x])
        again = insert_qdq(result.model, result.matches, CONFIG)
        calibrate(again, [x])
        with torch.no_grad():
            expected = float_model(x)
            errors = [float((model(x) - expected).norm() / expected.norm()) for model in (fine, coarse)]
            assert torch.equal(fine(x), again(x))
        assert 4 * errors[0] < errors[1]
        assert {quantizer.spec.n_bits for quantizer in weights_of(fine)} == {8}

    def test_matches_of_another_transform_are_refused(self, unet):
        one = unet[1]
        other = transform(nn.Sequential(nn.Linear(3, 3)).eval(), torch.randn(1, 3))
        with pytest.raises(PatternError):
            insert_qdq(other.model, one.matches, CONFIG)

    def test_modes_are_kept(self, unet):
        result = unet[1]
        result.model.train()
        result.model.get_submodule("up1").eval()
        try:
            model = from_unet(unet)
        finally:
            result.model.eval()
        assert model.training
        assert not model.get_submodule("up1").training
        assert model.get_submodule("up2").training


class TestFaults:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        ("make", "name", "shape"),
        [
            (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), "0.weight", (3, 4, 4)),
            (Functional, "weight", (4,)),
            (lambda: conv_bn(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "1.weight", (3, 4, 4)),
        ],
        ids=["conv", "F.linear", "gamma"],
    )
    def test_nan_in_a_weight_is_an_error_that_names_it(self, make, name, shape, value):
        model = make().eval()
        result = transform(model, torch.randn(2, *shape))
        with torch.no_grad():
            result.model.get_parameter(name).view(-1)[1] = value
        with pytest.raises(ScalepointError, match=rf"{name.rpartition('.')[0]}.*weight"):
            insert_qdq(result.model, result.matches, CONFIG)

    def test_a_float_layer_may_contain_nan(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        with torch.no_grad():
            model[1].weight[0, 0] = math.inf
        inserted(
            model,
            torch.randn(2, 4),
            config=QuantConfig(overrides=(Override(name="1", weight="float", activation="float"),)),
        )

    @pytest.mark.parametrize(
        "make",
        [lambda: nn.Sequential(nn.ReLU(), nn.Softmax(-1)), lambda: nn.Sequential(nn.LayerNorm(4))],
        ids=["none", "norm"],
    )
    def test_a_model_without_anything_to_quantize_is_an_error(self, make):
        """A result without quantizers must be an error."""
        x = torch.randn(2, 4)
        with pytest.raises(ScalepointError, match=r"nothing|no quantizers|no operation"):
            quantize(make().eval(), x, CONFIG, forward_loop=[x])

    def test_insert_qdq_raises_if_nothing_is_quantized(self):
        result = transform(nn.Sequential(nn.ReLU(), nn.Softmax(-1)).eval(), torch.randn(2, 4))
        with pytest.raises(ScalepointError):
            insert_qdq(result.model, result.matches, CONFIG)


@pytest.fixture(scope="module")
def silent():
    torch.manual_seed(0)
    return transform(SilentSkip().eval(), torch.randn(1, 5, 8))


class TestCoverage:
    def test_every_operation_of_the_silent_skip_model_has_a_row(self, silent):
        model = insert_qdq(silent.model, silent.matches, CONFIG)
        rows = {operation.name: operation for operation in coverage(model).operations}
        states = {name: operation.state for name, operation in rows.items()}
        assert {"attention.in_proj", "attention.out_proj", "head"} <= set(states)
        (recurrent,) = [operation for name, operation in rows.items() if name.startswith("lstm")]
        functional = [
            operation for operation in rows.values() if operation.kind == "linear" and operation.parameters == 64
        ]
        assert len(functional) == 1  # F.linear on a parameter
        assert functional[0].state == "quantized"
        assert states["attention.in_proj"] == states["attention.out_proj"] == states["head"] == "quantized"
        assert recurrent.state != "quantized"
        assert recurrent.reason
        assert any(operation.kind == "attention" for operation in rows.values())
        assert len(rows) == len(coverage(model).operations)

    def test_strict_raises_and_names_what_stays_float(self, silent):
        with pytest.raises(CoverageError, match="lstm"):
            insert_qdq(silent.model, silent.matches, CONFIG, strict=True)

    @pytest.mark.parametrize("name", ["lstm", "lstm*"])
    def test_strict_passes_after_following_its_message(self, silent, name):
        """The message says: ask for it with Override(name=..., weight='float', activation='float')."""
        config = QuantConfig(
            activation=INT8, weight=CHANNELS, overrides=(Override(name=name, weight="float", activation="float"),)
        )
        insert_qdq(silent.model, silent.matches, config, strict=True)

    def test_strict_passes_if_the_config_asks_for_float(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        config = QuantConfig(overrides=(Override(name="2", weight="float", activation="float"),))
        inserted(model, torch.randn(2, 4), config=config, strict=True)

    def test_strict_names_layers_left_float_by_a_cost_rule(self):
        result = transform(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4), target="tensorrt")
        with pytest.raises(CoverageError, match="R16"):
            insert_qdq(result.model, result.matches, strict=True)

    def test_strict_passes_if_the_config_keeps_a_weight_float(self, silent):
        """With only its input quantized, a layer still multiplies by a float weight, which the config asks for."""
        config = QuantConfig(activation=INT8, weight=CHANNELS, skip_weight_quant_for=(nn.Linear,))
        model = inserted(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), config=config, strict=True)
        assert "weight float" in row(model, "0").reason

    def test_skipping_the_weights_of_packed_attention_is_not_ignored(self, silent):
        """The user names nn.MultiheadAttention; its projections are inside."""
        config = QuantConfig(activation=INT8, weight=CHANNELS, skip_weight_quant_for=(nn.MultiheadAttention,))
        model = insert_qdq(silent.model, silent.matches, config)
        assert not [
            quantizer for quantizer in weights_of(model) if any("attention" in name for name in quantizer.consumers)
        ]

    @pytest.mark.parametrize("make", [SilentSkip, Decoder], ids=["silent-skip", "decoder"])
    def test_shares_add_up_to_one(self, make):
        x = torch.randn(1, 5, 8) if make is SilentSkip else torch.randint(0, 50, (1, 6))
        report = coverage(inserted(make(), x))
        assert sum(report.share_of_macs().values()) == pytest.approx(1)
        assert sum(report.share_of_parameters().values()) == pytest.approx(1)
        assert 0 < report.share_of_macs()["w int8 per_channel, x int8"] < 1

    def test_every_parameter_is_counted_once(self):
        model = SilentSkip()
        report = coverage(inserted(model, torch.randn(1, 5, 8)))
        assert sum(operation.parameters for operation in report.operations) == sum(
            value.numel() for value in model.parameters()
        )

    def test_each_operation_has_one_state_and_a_reason_if_float(self, silent):
        report = coverage(insert_qdq(silent.model, silent.matches, CONFIG))
        assert sum(len(report.in_state(state)) for state in ("quantized", "float", "refused")) == len(report.operations)
        for operation in report.operations:
            assert bool(operation.how) == (operation.state == "quantized")
            assert operation.reason or operation.state == "quantized"

    def test_without_example_inputs_macs_are_unknown_not_zero(self):
        result = transform(nn.Sequential(nn.Linear(4, 4)).eval(), patterns=TENSORRT_PATTERNS)
        report = coverage(insert_qdq(result.model, result.matches, CONFIG))
        assert report.share_of_macs() is None
        assert report.operations[0].macs is None
        str(report)

    def test_a_model_without_record_has_no_coverage(self):
        with pytest.raises(RuntimeError, match="insert_qdq"):
            coverage(nn.Linear(3, 3))

    def test_a_disabled_quantizer_is_listed(self):
        spec = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=4))
        model = inserted(
            nn.Sequential(nn.Linear(6, 4)), torch.randn(2, 6), config=QuantConfig(activation="float", weight=spec)
        )
        with pytest.warns(UserWarning, match="block"):
            calibrate(model, [torch.randn(2, 6)], freeze_weights=True)
        assert row(model, "0").state == "refused"
        assert "block" in row(model, "0").reason

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_the_table_prints_on_a_terminal_of_any_width(self, silent, width):
        model = insert_qdq(silent.model, silent.matches, CONFIG)
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(coverage(model).table())
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= width
        if width == 200:
            for name in ("attention.in_proj", "attention.out_proj", "lstm", "head"):
                assert any(name in line for line in lines)

    def test_a_narrow_table_contains_all_names(self, silent):
        model = insert_qdq(silent.model, silent.matches, CONFIG)
        console = Console(width=40, record=True, file=io.StringIO())
        console.print(coverage(model).table())
        first = "".join(
            line.split("│")[1].strip() for line in console.export_text().splitlines() if line.count("│") > 2
        )
        for name in ("attention.in_proj", "attention.out_proj", "lstm", "head"):
            assert name in first

    def test_rows_are_plain_values(self, silent):
        json.dumps(coverage(insert_qdq(silent.model, silent.matches, CONFIG)).to_list())


class Attention(nn.Module):
    def __init__(self, written_out=False):
        super().__init__()
        self.written_out = written_out

    def forward(self, q, k, v):
        if self.written_out:
            return torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:the first axis of .* is fixed")  # a sample without a batch axis
class TestMacs:
    """MACs computed by hand: number of outputs times the length of each sum."""

    @pytest.mark.parametrize(
        ("make", "shape", "macs"),
        [
            # 2 images, 6 x 6 outputs of 5 channels, sums of 3 x 3 x 4
            (lambda: nn.Conv2d(4, 5, 3), (2, 4, 8, 8), 2 * 5 * 6 * 6 * 4 * 9),
            (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 8, 8), 2 * 6 * 4 * 4 * 2 * 9),
            (lambda: nn.Conv2d(4, 4, 3, padding="same", dilation=2, groups=4), (2, 4, 8, 8), 2 * 4 * 8 * 8 * 9),
            (lambda: nn.Conv1d(3, 2, 5), (2, 3, 9), 2 * 2 * 5 * 3 * 5),
            # every input value is multiplied by each of the 5 x 2 x 2 weights of its channel
            (lambda: nn.ConvTranspose2d(3, 5, 2, 2), (2, 3, 4, 4), 2 * 3 * 4 * 4 * 5 * 2 * 2),
            (lambda: nn.Linear(3, 7), (4, 3), 4 * 3 * 7),
            (lambda: nn.Linear(3, 7), (4, 2, 5, 3), 4 * 2 * 5 * 3 * 7),
            (lambda: nn.Linear(3, 7), (3,), 3 * 7),
        ],
        ids=["conv", "grouped", "same", "conv1d", "transposed", "linear", "linear-4d", "linear-1d"],
    )
    def test_macs_of_layers(self, make, shape, macs):
        assert row(inserted(nn.Sequential(make()), torch.randn(shape)), "0").macs == macs

    def test_macs_of_an_example_with_batch_size_one(self):
        model = inserted(nn.Sequential(nn.Conv2d(4, 5, 3)), torch.randn(1, 4, 8, 8))
        assert row(model, "0").macs == 5 * 6 * 6 * 4 * 9

    def test_macs_of_a_convolution_without_a_batch_axis(self):
        model = inserted(nn.Sequential(nn.Conv2d(4, 5, 3)), torch.randn(4, 8, 8))
        assert row(model, "0").macs == 5 * 6 * 6 * 4 * 9

    def test_macs_of_a_stem_exclude_the_pool(self):
        stem = with_norm_statistics(
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        )
        assert row(inserted(stem, torch.randn(2, 3, 8, 8)), "0").macs == 2 * 4 * 8 * 8 * 3 * 9

    def test_macs_of_input_first_weights(self):
        (operation,) = coverage(inserted(InputFirst(), torch.randn(5, 4))).operations
        assert operation.macs == 5 * 4 * 6

    @pytest.mark.parametrize("written_out", [False, True], ids=["sdpa", "written-out"])
    @pytest.mark.parametrize(
        ("length", "source", "size", "value_size"),
        [
            (5, 5, 4, 4),
            (5, 7, 4, 4),
            (5, 7, 4, 6),
        ],
        ids=["self", "cross", "wide-values"],
    )
    def test_macs_of_attention(self, written_out, length, source, size, value_size):
        q, k, v = (
            torch.randn(2, 3, length, size),
            torch.randn(2, 3, source, size),
            torch.randn(2, 3, source, value_size),
        )
        report = coverage(inserted(Attention(written_out), q, k, v))
        expected = 2 * 3 * length * source * (size + value_size)
        assert sum(operation.macs for operation in report.operations) == expected

    def test_macs_of_an_lstm(self):
        model = SilentSkip()
        (operation,) = [row for row in coverage(inserted(model, torch.randn(2, 5, 8))).operations if "lstm" in row.name]
        assert operation.macs == 2 * 5 * 4 * 8 * (8 + 8)

    def test_shares_equal_those_computed_by_hand(self):
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
        config = QuantConfig(
            activation=INT8, weight=INT8, overrides=(Override(name="2", weight="float", activation="float"),)
        )
        report = coverage(inserted(model, torch.randn(3, 4), config=config))
        assert report.share_of_macs() == pytest.approx({"w int8, x int8": 24 / 36, "float": 12 / 36})
        assert report.share_of_parameters() == pytest.approx({"w int8, x int8": 24 / 36, "float": 12 / 36})


class TestOddModels:
    def test_several_outputs_keep_their_structure(self):
        class Many(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x, *, scale=None):
                y = self.fc(x)
                return {"y": y, "pair": (y.relu(), None), "x": x}

        float_model, x = Many().eval(), torch.randn(2, 4)
        model = inserted(float_model, x)
        outputs, expected = model(x), float_model(x)
        assert set(outputs) == set(expected)
        close(outputs["pair"][0], expected["pair"][0])

    def test_per_channel_accepts_a_negative_axis(self):
        spec = QuantizationSpec(granularity=PerChannelGranularity(axis=-2))
        model = inserted(
            nn.Sequential(nn.Linear(4, 6)), torch.randn(2, 4), config=QuantConfig(activation="float", weight=spec)
        )
        calibrate(model, [torch.randn(2, 4)])
        model(torch.randn(2, 4))
        (quantizer,) = weights_of(model)
        assert quantizer.scale.shape == (6,)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_models_of_other_dtypes_are_quantized(self, dtype):
        float_model, x = (
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().to(dtype),
            torch.randn(8, 16).to(dtype),
        )
        model = inserted(float_model, x)
        calibrate(model, [x])
        assert model(x).dtype == dtype
        close(model(x).float(), float_model(x).float(), 0.05)

    def test_the_result_does_not_depend_on_the_run(self):
        x = torch.randn(1, 3, 16, 16)
        one, other = inserted(with_norm_statistics(UNet()), x), inserted(with_norm_statistics(UNet()), x)
        assert list(one.state_dict()) == list(other.state_dict())
        assert [stub.name for stub in stubs_of(one)] == [stub.name for stub in stubs_of(other)]


class TestIntegerSums:
    """Targets whose kernels multiply integers are simulated with exact sums."""

    @pytest.mark.parametrize("kind", ["conv", "grouped", "linear"])
    def test_integer_sums_equal_those_of_int64(self, kind):
        torch.manual_seed(0)
        layers = {
            "conv": nn.Conv2d(32, 16, 3, padding=1),
            "grouped": nn.Conv2d(32, 16, 3, groups=4),
            "linear": nn.Linear(300, 16),
        }
        layer = layers[kind]
        x = torch.randn(2, 300) if kind == "linear" else torch.randn(2, 32, 9, 9)
        model = nn.Sequential(layer).eval()
        quantized = quantize(model, x, {"correct_bias": False}, forward_loop=[x], target="onnxruntime")
        weighted = next(module for module in quantized.modules() if isinstance(module, QuantizedLayer))
        stub = weighted.input_stub
        codes = quantized.get_submodule("input_quant")(x) / stub.scale
        weight = weighted.weight_quant.codes(layer.weight).double()
        bias = (layer.bias / weighted.compute_bias_scale()).round().double()
        if kind == "linear":
            sums = F.linear(codes.round().double(), weight, bias)
            scale = weighted.compute_bias_scale()
        else:
            sums = F.conv2d(codes.round().double(), weight, bias, padding=layer.padding, groups=layer.groups)
            scale = weighted.compute_bias_scale().view(-1, 1, 1)
        with torch.no_grad():
            output = weighted(quantized.get_submodule("input_quant")(x))
        assert torch.equal(output, sums.float() * scale)

    def test_a_half_precision_model_runs_without_integer_sums(self):
        x = torch.randn(2, 3, 9, 9)
        model = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
        quantized = quantize(model, x, forward_loop=[x], target="onnxruntime")
        with torch.no_grad():
            expected = quantized(x)
            output = quantized.half()(x.half())
        assert output.dtype == torch.float16
        assert torch.allclose(output.float(), expected, atol=float(expected.abs().max()) / 50)

    def test_gradients_flow_with_integer_sums(self):
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        quantized = quantize(
            nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), x.detach(), forward_loop=[x.detach()], target="onnxruntime"
        )
        output = quantized(x)
        output.sum().backward()
        assert x.grad is not None
        with torch.no_grad():
            assert torch.allclose(quantized(x), output, atol=float(output.abs().max()) / 100)


def test_a_meta_model_gets_quantizers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    result = transform(model, torch.randn(2, 8, device="meta"), target="reference")
    quantized = insert_qdq(result.model, result.matches)
    weights = [module for module in quantized.modules() if isinstance(module, QuantizedLayer)]
    assert len({id(layer.weight_quant) for layer in weights}) == 2
    assert all(parameter.is_meta for parameter in quantized.parameters())
