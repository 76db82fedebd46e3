"""QAT: training steps against an independent computation; switches, schedule, resume, compile, two ranks."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalepoint.errors import ConfigError, ScalepointError
from scalepoint.quantize import (
    QATSchedule,
    QuantConfig,
    QuantStub,
    TensorQuantConfig,
    WeightFakeQuantize,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    freeze_bn_stats,
    insert_qdq,
    prepare_qat,
    quantize,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.transformation import transform
from tests.models import with_norm_statistics
from tests.pace import fast

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph


class Net(nn.Module):
    """conv+BN+ReLU, a depthwise conv+BN, a residual, a classifier."""

    def __init__(self, width=6):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(x.mean((2, 3)))


class PreActivation(nn.Module):
    """A batch norm that no convolution precedes."""

    def __init__(self):
        super().__init__()
        self.bn, self.conv, self.fc = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.conv(F.relu(self.bn(x))).mean((2, 3)))


class Functional(nn.Module):
    """A functional batch norm before a convolution."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(F.relu(F.batch_norm(x, self.mean, self.var, training=self.training)))


def config(activation=True, **weight):
    weight = {"per_channel": True} | weight
    return QuantConfig(activation=TensorQuantConfig() if activation else "float", weight=TensorQuantConfig(**weight))


def image(batch=4, seed=1):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(batch=4, seed=2):
    return torch.randint(0, 4, (batch,), generator=torch.Generator().manual_seed(seed))


def net(seed=0):
    torch.manual_seed(seed)
    return with_norm_statistics(Net())


def calibrated(model=None, **options):
    model = net() if model is None else model
    return quantize(model, image(), config(**options), forward_loop=[image(), image(4, 5)])


def inserted(model, **options):
    result = transform(model, image())
    return insert_qdq(result.model, result.matches, config(**options))


def stubs(model):
    return [module for module in model.modules() if isinstance(module, QuantStub)]


def weight_quantizers(model):
    return [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert list(first) == list(second)
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert different == []


def quantized_weight(weight, bits=8):
    """Contract B4: scale = max|w| / ((qmax - qmin) / 2) per channel; the gradient passes where no code is clamped."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    flat = weight.detach().flatten(1)
    scale = flat.abs().amax(1).clamp(min=1e-8) / ((high - low) / 2)
    scale = scale.view(-1, *[1] * (weight.ndim - 1))
    codes = (weight.detach() / scale).round()
    inside = (codes >= low) & (codes <= high)
    value = codes.clamp(low, high) * scale
    return torch.where(inside, weight + (value - weight).detach(), value)


def single(bias=True, seed=0, **norm):
    """One convolution and its batch norm, as after some training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=bias), nn.BatchNorm2d(5, **norm))
    return with_norm_statistics(model)


def gain(norm):
    """gamma / sqrt(var + eps). The largest weight of a channel is a rounding tie, so the last bit must match."""
    return norm.weight * torch.rsqrt(norm.running_var + norm.eps)


def reference_step(model, x, bits=8):
    """BN(conv(x, fq(w s) / s) + b) in train mode, on the tensors of the float model, with batch statistics."""
    conv, norm = model
    s = gain(norm).detach().view(-1, 1, 1, 1)
    model.train()
    return norm(F.conv2d(x, quantized_weight(conv.weight * s, bits) / s, conv.bias, padding=1))


def test_a_head_convolution_trains_as_a_linear_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).eval()
    quantized = prepare_qat(quantize(model, image(), config(), forward_loop=[image()]))
    (head,) = [module for module in quantized.modules() if isinstance(module, QuantizedLayer) and module.kind == "head"]
    x = torch.randn(5, 6, 1, 1, requires_grad=True)
    with torch.no_grad():
        expected = F.conv2d(x, head.quantize_weight(head.weight), head.bias)
    output = head(x)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    (slope,) = torch.autograd.grad(output, x, grad)
    torch.testing.assert_close(slope, torch.einsum("nohw,oihw->nihw", grad, head.quantize_weight(head.weight).detach()))
    names = {
        type(output.grad_fn).__name__,
        *(type(function).__name__ for function, _ in output.grad_fn.next_functions if function),
    }
    assert not any("Convolution" in name for name in names)


class TestConvolutionAndBatchNorm:
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("bits", [8, 4])
    def test_a_training_step_equals_the_reference(self, bias, bits):
        model = single(bias, momentum=0.3)
        quantized = prepare_qat(calibrated(model, activation=False, n_bits=bits))
        reference = copy.deepcopy(model)
        for step in range(3):
            x, target = image(seed=step), torch.randn(4, 5, 8, 8)
            expected = reference_step(reference, x, bits)
            output = quantized(x)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            for net, y in ((reference, expected), (quantized, output)):
                net.zero_grad()
                F.mse_loss(y, target).backward()
            for name, parameter in reference.named_parameters():
                theirs = quantized.get_parameter(name)
                torch.testing.assert_close(theirs.grad, parameter.grad, rtol=1e-3, atol=2e-6, msg=name)
                with torch.no_grad():
                    parameter.sub_(0.1 * parameter.grad)
                    theirs.copy_(parameter)
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(quantized.get_buffer(name), buffer, rtol=1e-5, atol=1e-6, msg=name)

    def test_batch_norm_statistics_are_those_of_the_quantized_weight(self):
        model = single(momentum=1.0)  # momentum 1: the statistics of the last batch only
        quantized = prepare_qat(calibrated(model, activation=False, n_bits=2))
        conv, norm = model
        s = gain(norm).detach().view(-1, 1, 1, 1)
        with torch.no_grad():
            y = F.conv2d(image(), quantized_weight(conv.weight * s, 2) / s, conv.bias, padding=1)
            of_float = F.conv2d(image(), conv.weight, conv.bias, padding=1)
        quantized(image())
        buffers = dict(quantized.named_buffers())
        torch.testing.assert_close(buffers["1.running_mean"], y.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(buffers["1.running_var"], y.var((0, 2, 3)), rtol=1e-4, atol=1e-5)
        assert (buffers["1.running_var"] - of_float.var((0, 2, 3))).abs().max() > 1e-3

    @pytest.mark.parametrize("bits", [8, 4])
    def test_eval_after_training_equals_the_folded_convolution(self, bits):
        model = single()
        quantized = prepare_qat(calibrated(model, activation=False, n_bits=bits))
        optimizer = torch.optim.SGD(quantized.parameters(), 0.05)
        for step in range(3):
            optimizer.zero_grad()
            quantized(image(seed=step)).square().mean().backward()
            optimizer.step()
        quantized.eval()
        t = state(quantized)
        s = t["1.weight"] * torch.rsqrt(t["1.running_var"] + 1e-5)
        weight = quantized_weight(t["0.weight"] * s.view(-1, 1, 1, 1), bits)
        bias = (t["0.bias"] - t["1.running_mean"]) * s + t["1.bias"]
        with torch.no_grad():
            torch.testing.assert_close(
                quantized(image()), F.conv2d(image(), weight, bias, padding=1), rtol=1e-4, atol=1e-5
            )

    @pytest.mark.parametrize("gamma", [0.0, 1e-20, -1e-13, 1e-38])
    def test_a_channel_with_zero_gamma_outputs_its_bias(self, gamma):
        model = single()
        with torch.no_grad():
            model[1].weight[2] = gamma
        quantized = prepare_qat(calibrated(model, activation=False))
        output = quantized(image())
        output.square().sum().backward()
        torch.testing.assert_close(output[:, 2], model[1].bias[2].expand_as(output[:, 2]), rtol=0, atol=1e-6)
        assert torch.isfinite(output).all()
        assert all(torch.isfinite(parameter.grad).all() for parameter in quantized.parameters())
        with torch.no_grad():
            assert torch.isfinite(quantized.eval()(image())).all()

    def test_a_channel_with_zero_gamma_can_learn(self):
        model = single()
        with torch.no_grad():
            model[1].weight[2] = 0.0
        quantized = prepare_qat(calibrated(model, activation=False))
        (quantized(image())[:, 2] - image()[:, 0]).square().mean().backward()
        assert quantized.get_parameter("1.weight").grad[2] != 0

    def test_negative_gammas_are_supported(self):
        model = single()
        with torch.no_grad():
            model[1].weight[::2] *= -1
        quantized = prepare_qat(calibrated(model, activation=False))
        torch.testing.assert_close(quantized(image()), reference_step(model, image()), rtol=1e-4, atol=1e-5)

    def test_batch_norm_without_affine_is_supported(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5, affine=False)).eval()
        model[1].running_var.uniform_(0.5, 2)
        quantized = prepare_qat(calibrated(model, activation=False))
        s = torch.rsqrt(model[1].running_var + 1e-5).view(-1, 1, 1, 1)
        model.train()
        expected = model[1](F.conv2d(image(), quantized_weight(model[0].weight * s) / s, model[0].bias, padding=1))
        torch.testing.assert_close(quantized(image()), expected, rtol=1e-4, atol=1e-5)

    def test_transposed_convolutions_are_supported(self):
        torch.manual_seed(0)
        model = with_norm_statistics(nn.Sequential(nn.ConvTranspose2d(3, 4, 2, stride=2), nn.BatchNorm2d(4)))
        quantized = prepare_qat(calibrated(model, activation=False))
        s = gain(model[1]).detach().view(1, -1, 1, 1)
        model.train()
        weight = quantized_weight((model[0].weight * s).transpose(0, 1)).transpose(0, 1) / s
        expected = model[1](F.conv_transpose2d(image(), weight, model[0].bias, stride=2))
        torch.testing.assert_close(quantized(image()), expected, rtol=1e-4, atol=1e-5)


class TestSwitches:
    def test_prepare_qat_sets_train_mode_and_enables_quantizers(self):
        quantized = prepare_qat(calibrated())
        assert quantized.training
        assert all(quantizer.enabled for quantizer in (*stubs(quantized), *weight_quantizers(quantized)))
        assert not any(quantizer.frozen for quantizer in weight_quantizers(quantized))
        assert not any(stub.calibrating or stub.observes_in_training for stub in stubs(quantized))

    def test_disabled_quantizers_give_the_float_model(self):
        model = net()
        quantized = prepare_qat(calibrated(model))
        disable_fake_quant(quantized)
        reference = copy.deepcopy(model).train()
        torch.testing.assert_close(quantized(image()), reference(image()), rtol=1e-4, atol=1e-5)
        buffers = dict(quantized.named_buffers())
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(quantized.eval()(image()), reference.eval()(image()), rtol=1e-4, atol=1e-5)

    def test_enabling_again_restores_the_quantized_outputs(self):
        quantized = calibrated().eval()
        with torch.no_grad():
            before = quantized(image())
            disable_fake_quant(quantized)
            assert not torch.equal(quantized(image()), before)
            enable_fake_quant(quantized)
            assert torch.equal(quantized(image()), before)

    def test_enabling_without_ranges_is_an_error_that_names_a_stub(self):
        quantized = inserted(net())
        with pytest.raises(RuntimeError) as error:
            enable_fake_quant(quantized)
        assert any(stub.name in str(error.value) for stub in stubs(quantized))
        assert not any(quantizer.enabled for quantizer in (*stubs(quantized), *weight_quantizers(quantized)))

    @pytest.mark.parametrize("call", [prepare_qat, enable_fake_quant, disable_fake_quant, enable_observer])
    def test_a_float_model_is_refused(self, call):
        with pytest.raises(ScalepointError, match="insert_qdq"):
            call(net())

    def test_an_uncalibrated_model_uses_a_moving_average(self):
        quantized = prepare_qat(inserted(net()))
        assert all(stub.observes_in_training and stub.enabled for stub in stubs(quantized))
        quantized(image())
        first = [float(stub.scale) for stub in stubs(quantized)]
        quantized(image() * 3)
        second = [float(stub.scale) for stub in stubs(quantized)]
        assert second[0] > first[0]
        assert second[0] < 3 * first[0]

    def test_calibrated_ranges_stay_constant_by_default(self):
        quantized = prepare_qat(calibrated())
        before = [float(stub.scale) for stub in stubs(quantized)]
        quantized(image() * 10)
        assert [float(stub.scale) for stub in stubs(quantized)] == before
        enable_observer(quantized)
        quantized(image() * 10)
        assert float(stubs(quantized)[0].scale) > before[0]
        disable_observer(quantized)
        after = [float(stub.scale) for stub in stubs(quantized)]
        quantized(image() * 100)
        assert [float(stub.scale) for stub in stubs(quantized)] == after

    def test_observers_run_while_fake_quant_is_disabled(self):
        quantized = prepare_qat(inserted(net()), observe=True)
        disable_fake_quant(quantized)
        reference = net().train()
        torch.testing.assert_close(quantized(image()), reference(image()), rtol=1e-4, atol=1e-5)
        enable_fake_quant(quantized)
        disable_observer(quantized)
        quantized(image())
        assert all(float(stub.scale) != 1 for stub in stubs(quantized))

    def test_eval_mode_does_not_change_ranges(self):
        quantized = prepare_qat(inserted(net()))
        quantized(image())
        before = [float(stub.scale) for stub in stubs(quantized)]
        with torch.no_grad():
            quantized.eval()(image() * 100)
        assert [float(stub.scale) for stub in stubs(quantized)] == before

    def test_weight_scales_follow_training(self):
        quantized = prepare_qat(calibrated())
        before = weight_quantizers(quantized)[0].scale.clone()
        with torch.no_grad():
            quantized.get_parameter("conv1.weight").mul_(2)
        quantized(image())
        torch.testing.assert_close(weight_quantizers(quantized)[0].scale, before * 2)


class TestFrozenStatistics:
    @pytest.mark.parametrize("kind", [Net, PreActivation, Functional])
    def test_frozen_statistics_stay_frozen_after_train(self, kind):
        torch.manual_seed(0)
        model = with_norm_statistics(kind())
        quantized = prepare_qat(calibrated(model))
        freeze_bn_stats(quantized)
        before = {
            name: value.clone() for name, value in quantized.named_buffers() if name in dict(model.named_buffers())
        }
        assert len(before) >= 2
        for step in range(2):
            quantized.train()
            quantized(image(seed=step) * 3 + 1)
        after = dict(quantized.named_buffers())
        assert [name for name in before if not torch.equal(before[name], after[name])] == []

    @pytest.mark.parametrize("kind", [Net, PreActivation])
    def test_training_with_frozen_statistics_computes_the_deployed_outputs(self, kind):
        torch.manual_seed(0)
        quantized = prepare_qat(calibrated(with_norm_statistics(kind())))
        freeze_bn_stats(quantized)
        quantized.train()
        with torch.no_grad():
            trained = quantized(image())
            torch.testing.assert_close(trained, quantized.eval()(image()), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("kind", [Net, PreActivation])
    def test_affine_parameters_still_learn(self, kind):
        torch.manual_seed(0)
        quantized = prepare_qat(calibrated(with_norm_statistics(kind())))
        freeze_bn_stats(quantized)
        quantized.train()(image()).square().sum().backward()
        gains = [name for name, _ in quantized.named_parameters() if "bn" in name]
        assert gains
        assert all(quantized.get_parameter(name).grad.abs().sum() > 0 for name in gains)

    def test_the_gradient_is_that_of_the_folded_layer(self):
        model = single()
        quantized = prepare_qat(calibrated(model, activation=False))
        freeze_bn_stats(quantized)
        conv, norm = model
        s = gain(norm)
        weight = quantized_weight(conv.weight * s.view(-1, 1, 1, 1))
        bias = (conv.bias - norm.running_mean) * s + norm.bias
        F.conv2d(image(), weight, bias, padding=1).square().mean().backward()
        quantized.train()(image()).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                quantized.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name
            )

    @pytest.mark.parametrize("kind", [Net, PreActivation])
    def test_frozen_statistics_can_be_unfrozen(self, kind):
        torch.manual_seed(0)
        quantized = prepare_qat(calibrated(with_norm_statistics(kind())))
        freeze_bn_stats(quantized)
        quantized(image())
        freeze_bn_stats(quantized, False)
        quantized.train()
        before = state(quantized)
        quantized(image() * 3 + 1)
        changed = [name for name, value in state(quantized).items() if not torch.equal(value, before[name])]
        assert any(name.endswith("running_mean") for name in changed)

    def test_a_copy_keeps_frozen_statistics(self):
        torch.manual_seed(0)
        quantized = prepare_qat(calibrated(with_norm_statistics(PreActivation())))
        freeze_bn_stats(quantized)
        duplicate = copy.deepcopy(quantized).train()
        before = duplicate.get_buffer("bn.running_mean").clone()
        duplicate(image() * 3 + 1)
        assert torch.equal(duplicate.get_buffer("bn.running_mean"), before)


def switches(model):
    return (
        any(stub.observes_in_training for stub in stubs(model)),
        all(quantizer.enabled for quantizer in (*stubs(model), *weight_quantizers(model))),
    )


class TestSchedule:
    def test_switches_change_at_the_scheduled_steps(self):
        quantized = prepare_qat(inserted(net()))
        schedule = QATSchedule(enable_observer=1, enable_fake_quant=3, disable_observer=4)
        states = []
        for _ in range(6):
            schedule.step(quantized)
            states.append(switches(quantized))
            quantized(image())
        on, off = True, False
        assert states == [(off, off), (on, off), (on, off), (on, on), (off, on), (off, on)]

    def test_observers_may_end_before_fake_quant_begins(self):
        quantized = prepare_qat(inserted(net()))
        schedule = QATSchedule(enable_observer=0, enable_fake_quant=3, disable_observer=2)
        states = []
        for _ in range(4):
            schedule.step(quantized)
            states.append(switches(quantized))
            quantized(image())
        assert states == [(True, False), (True, False), (False, False), (False, True)]
        assert all(float(stub.scale) != 1 for stub in stubs(quantized))

    def test_observers_may_end_when_fake_quant_begins(self):
        quantized = prepare_qat(inserted(net()))
        schedule = QATSchedule(enable_observer=0, enable_fake_quant=2, disable_observer=2)
        for _ in range(3):
            schedule.step(quantized)
            quantized(image())
        expected = float(image().abs().max()) / 127.5
        assert float(stubs(quantized)[0].scale) == pytest.approx(expected, rel=0.01)

    def test_steps_before_fake_quant_run_in_float(self):
        quantized = prepare_qat(inserted(net()))
        QATSchedule(enable_observer=5, enable_fake_quant=5).step(quantized)
        torch.testing.assert_close(quantized(image()), net().train()(image()), rtol=1e-4, atol=1e-5)

    def test_statistics_freeze_at_the_scheduled_step(self):
        quantized = prepare_qat(calibrated())
        schedule = QATSchedule(freeze_bn=2)
        means = []
        for step in range(4):
            schedule.step(quantized)
            quantized.train()(image(seed=step))
            means.append(quantized.get_buffer("bn1.running_mean").clone())
        assert not torch.equal(means[0], means[1])
        assert torch.equal(means[1], means[2])
        assert torch.equal(means[2], means[3])

    def test_a_schedule_continues_after_a_resume(self):
        quantized = prepare_qat(inserted(net()))
        first = QATSchedule(enable_observer=0, enable_fake_quant=2, disable_observer=3)
        for _ in range(2):
            first.step(quantized)
            quantized(image())
        second = QATSchedule(enable_observer=0, enable_fake_quant=2, disable_observer=3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        second.step(quantized)
        assert switches(quantized) == (True, True)
        quantized(image())
        second.step(quantized)
        assert switches(quantized) == (False, True)

    @pytest.mark.parametrize(
        "fields",
        [
            {"enable_observer": -1},
            {"enable_observer": 3, "enable_fake_quant": 2},
            {"enable_observer": 3, "enable_fake_quant": 4, "disable_observer": 3},
            {"freeze_bn": -2},
        ],
        ids=str,
    )
    def test_invalid_schedules_are_refused(self, fields):
        with pytest.raises(ConfigError):
            QATSchedule(**fields)


class TestTraining:
    def test_parameter_names_are_those_of_the_float_model(self):
        model = net()
        quantized = prepare_qat(calibrated(model))
        names = [name for name, _ in model.named_parameters()]
        assert [name for name, _ in quantized.named_parameters()] == names
        assert all(parameter.requires_grad for parameter in quantized.parameters())

    @pytest.mark.parametrize("learn_scales", [False, True], ids=["ranges held", "learned"])
    @pytest.mark.parametrize("bits", [8, 4])
    def test_the_loss_falls(self, learn_scales, bits):
        quantized = prepare_qat(calibrated(n_bits=bits), learn_scales=learn_scales)
        scales = [parameter for name, parameter in quantized.named_parameters() if name.endswith("scale")]
        weights = [parameter for name, parameter in quantized.named_parameters() if not name.endswith("scale")]
        assert bool(scales) == learn_scales
        groups = [{"params": weights}, *([{"params": scales, "lr": 1e-4}] if scales else [])]
        optimizer = torch.optim.SGD(groups, 0.2, 0.9)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(quantized(image(16)), labels(16))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        assert all(torch.isfinite(value).all() for value in quantized.state_dict().values())

    def test_learned_scales_survive_adam(self):
        quantized = prepare_qat(calibrated(), learn_scales=True)
        optimizer = torch.optim.Adam(quantized.parameters(), 1e-3)
        losses = train(quantized, optimizer, [0] * 40)
        assert losses[-1] < losses[0]
        scales = [value for name, value in quantized.named_parameters() if name.endswith("scale")]
        assert all((scale > 0).all() for scale in scales)

    def test_the_callers_model_does_not_train(self):
        model = net()
        before = state(model)
        quantized = prepare_qat(calibrated(model))
        optimizer = torch.optim.SGD(quantized.parameters(), 0.1)
        quantized(image()).sum().backward()
        optimizer.step()
        assert_same(state(model), before)
        assert not model.training

    def test_learned_scales_are_parameters_with_gradients(self):
        quantized = calibrated()
        before = {id(parameter) for parameter in quantized.parameters()}
        count = len(stubs(quantized)) + len(weight_quantizers(quantized))
        prepare_qat(quantized, learn_scales=True)
        scales = [parameter for parameter in quantized.parameters() if id(parameter) not in before]
        assert len(scales) == count
        optimizer = torch.optim.SGD(quantized.parameters(), 1e-3)
        optimized_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert all(id(scale) in optimized_ids for scale in scales)
        old = [scale.detach().clone() for scale in scales]
        F.cross_entropy(quantized(image(16)), labels(16)).backward()
        assert all(scale.grad is not None and torch.isfinite(scale.grad).all() for scale in scales)
        assert sum(float(scale.grad.abs().sum()) > 0 for scale in scales) == count
        optimizer.step()
        assert all(not torch.equal(scale, was) for scale, was in zip(scales, old, strict=True))

    def test_learning_starts_from_the_calibrated_scales(self):
        quantized = quantize(
            net(), image(), config().model_copy(update={"correct_bias": False}), forward_loop=[image(), image(4, 5)]
        ).eval()
        with torch.no_grad():
            before = quantized(image())
            prepare_qat(quantized, learn_scales=True)
            torch.testing.assert_close(quantized.eval()(image()), before, rtol=1e-5, atol=1e-6)

    def test_learned_scales_are_deployed(self):
        quantized = prepare_qat(calibrated(), learn_scales=True)
        optimizer = torch.optim.SGD(quantized.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(quantized(image()), labels()).backward()
            optimizer.step()
        quantized.eval()
        with torch.no_grad():
            quantized(image())
        learned = dict(quantized.named_parameters())
        for name, module in quantized.named_modules():
            if isinstance(module, QuantStub | WeightFakeQuantize):
                scales = [
                    value for key, value in learned.items() if key.startswith(f"{name}.") and key.endswith("scale")
                ]
                assert len(scales) == 1
                torch.testing.assert_close(module.scale.flatten(), scales[0].detach().flatten())

    def test_learning_without_ranges_is_an_error(self):
        with pytest.raises(RuntimeError, match="calibrate"):
            prepare_qat(inserted(net()), learn_scales=True)

    def test_calibrating_again_after_training_works(self):
        from scalepoint.quantize import calibrate

        quantized = prepare_qat(calibrated(), observe=True)
        quantized(image() * 50)
        calibrate(quantized, [image()])
        assert quantized.training
        fresh = calibrated()
        with torch.no_grad():
            assert torch.isfinite(quantized.eval()(image())).all()
        # the same data, so the first stub has the same range, whatever it observed in training
        torch.testing.assert_close(
            stubs(quantized)[0].scale,
            quantize(net(), image(), config(), forward_loop=[image()]).get_submodule(stubs(fresh)[0].name).scale,
        )


def train(model, optimizer, steps, schedule=None):
    losses = []
    for step in steps:
        if schedule is not None:
            schedule.step(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(image(6, step)), labels(6, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def frozen(model):
    freeze_bn_stats(model)
    return model


RESUMED = {
    "ranges held": (Net, prepare_qat),
    "observing": (Net, lambda model: prepare_qat(model, observe=True)),
    "learned": (Net, lambda model: prepare_qat(model, learn_scales=True)),
    "statistics frozen": (Net, lambda model: frozen(prepare_qat(model))),
}


class TestResume:
    @pytest.mark.parametrize("case", fast(RESUMED, "observing", "learned"))
    def test_resuming_from_a_checkpoint_is_bit_equal(self, case, tmp_path):
        kind, prepare = RESUMED[case]
        torch.manual_seed(0)
        model = with_norm_statistics(kind())
        if kind is PreActivation:
            model.fc = nn.Linear(4, 4)
        one = prepare(calibrated(model))
        first = torch.optim.AdamW(one.parameters(), 0.01)
        train(one, first, range(3))
        torch.save({"model": one.state_dict(), "optimizer": first.state_dict()}, tmp_path / "checkpoint.pt")
        losses = train(one, first, range(3, 6))
        two = prepare_qat(calibrated(model), learn_scales=case == "learned")
        if case == "observing":
            enable_observer(two)
        second = torch.optim.AdamW(two.parameters(), 0.01)
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        two.load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        assert train(two, second, range(3, 6)) == losses
        assert_same(state(one), state(two))
        with torch.no_grad():
            assert torch.equal(one.eval()(image()), two.eval()(image()))

    def test_an_uncalibrated_model_can_load_a_checkpoint(self):
        one = prepare_qat(calibrated())
        first = torch.optim.SGD(one.parameters(), 0.05)
        train(one, first, range(2))
        two = inserted(net()).train()
        two.load_state_dict(one.state_dict())
        second = torch.optim.SGD(two.parameters(), 0.05)
        assert train(two, second, range(2, 4)) == train(one, first, range(2, 4))
        assert_same(state(one), state(two))

    def test_a_copy_made_during_training_is_independent(self):
        one = prepare_qat(calibrated(), observe=True)
        train(one, torch.optim.SGD(one.parameters(), 0.05), range(2))
        two = copy.deepcopy(one)
        before = state(one)
        losses = train(two, torch.optim.SGD(two.parameters(), 0.05), range(2, 5))
        assert_same(state(one), before)
        assert train(one, torch.optim.SGD(one.parameters(), 0.05), range(2, 5)) == losses
        assert_same(state(one), state(two))


PREPARED = {
    "ranges held": {},
    "observing": {"observe": True},
    "learned": {"learn_scales": True},
}


class TestCompile:
    @pytest.mark.parametrize(
        "case", ["ranges held", *(pytest.param(case, marks=pytest.mark.slow) for case in ("observing", "learned"))]
    )
    def test_a_compiled_step_is_the_eager_one(self, case):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        eager = prepare_qat(calibrated(with_norm_statistics(model)), **PREPARED[case])
        twin = copy.deepcopy(eager)
        compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
        for step, batch in enumerate((4, 7)):
            x, y = image(batch, step), labels(batch, step)
            losses = []
            for model, run in ((eager, eager), (twin, compiled)):
                model.zero_grad()
                loss = F.cross_entropy(run(x), y)
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
            for (name, ours), (_, theirs) in zip(eager.named_parameters(), twin.named_parameters(), strict=True):
                torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-6, msg=name)
        for name, value in state(eager).items():
            torch.testing.assert_close(twin.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(twin.eval()(image()), eager.eval()(image()), rtol=1e-5, atol=1e-6)


WORKER = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from scalepoint.quantize import QATSchedule, prepare_qat
from tests.quantize.test_qat import calibrated, image, inserted, labels, net
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
found = {}
for case in ("observed", "learned"):
    learned = case == "learned"
    model = prepare_qat(calibrated(), learn_scales=True) if learned else prepare_qat(inserted(net()))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.001 if learned else 0.05)
    schedule = QATSchedule(0, 1, 4)
    for step in range(5):
        if not learned:
            schedule.step(model)
        optimizer.zero_grad()
        F.cross_entropy(ddp(image(4, 10 * step + rank) * (1 + rank)), labels(4, 10 * step + rank)).backward()
        optimizer.step()
    ddp.eval()
    with torch.no_grad():
        output = ddp(image())  # rank 0's buffers are everybody's before a forward
    found[case] = {"state": model.state_dict(), "output": output}
torch.save(found, f"{folder}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.slow  # fast alternative: tests/ranks/test_training.py trains with two ranks
class TestTwoRanks:
    @pytest.mark.parametrize("case", ["observed", "learned"])
    def test_both_ranks_end_with_the_same_model(self, ranks, case):
        first, second = (rank[case] for rank in ranks)
        assert_same(first["state"], second["state"])
        assert torch.equal(first["output"], second["output"])
        assert torch.isfinite(first["output"]).all()
