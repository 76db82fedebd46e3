"""Contract A4: the fake quantizer's switches, modes, methods, cache."""

import copy
import warnings

import pytest
import torch
from torch import nn

from scalepoint.errors import NotObservedError
from scalepoint.spec import (
    CompressionTargetTensor,
    DefaultFakeQuantize,
    ExtendedQuantizationSpec,
    FakeQuantizeImplBase,
    PerBlockGranularity,
    PerChannelGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)
from tests.errors import raises

create = QuantizationComponentFactory.create_fake_quantizer
INT4 = QuantizationSpec(dtype="int4")


def calibrated(spec=INT4, target="weight", x=None):
    fq = create(spec, target)
    fq(torch.randn(8, 16) if x is None else x)
    return fq


def test_observing_and_simulating_are_on_at_first():
    fq = create(QuantizationSpec(), "weight")
    assert fq.observer_enabled.tolist() == fq.fake_quant_enabled.tolist() == [1]
    assert fq.observer_enabled.dtype == torch.uint8


@pytest.mark.parametrize("way_to_switch", ["method", "buffer", "fill", "replace", "state_dict"])
def test_a_switch_works_through_its_method_and_through_its_buffer(way_to_switch):
    fq = calibrated()
    x = torch.randn(8, 16) * 100
    if way_to_switch == "method":
        fq.disable_fake_quant()
    elif way_to_switch == "buffer":
        fq.fake_quant_enabled[0] = 0
    elif way_to_switch == "fill":
        fq.fake_quant_enabled.zero_()
    elif way_to_switch == "replace":
        fq.fake_quant_enabled = torch.zeros(1, dtype=torch.uint8)
    else:
        fq.load_state_dict({**fq.state_dict(), "fake_quant_enabled": torch.zeros(1, dtype=torch.uint8)})
    assert fq(x) is x
    fq.enable_fake_quant()
    assert fq.fake_quant_enabled.tolist() == [1]
    assert not torch.equal(fq(x), x)


def test_with_the_observer_off_the_stored_parameters_are_used():
    fq = calibrated()
    scale = fq.calculate_qparams().scale.clone()
    fq.disable_observer()
    fq(torch.randn(8, 16) * 100)
    assert torch.equal(fq.calculate_qparams().scale, scale)
    fq.enable_observer()
    fq(torch.randn(8, 16) * 100)
    assert not torch.equal(fq.calculate_qparams().scale, scale)


def test_with_simulation_off_it_observes_and_returns_the_input():
    fq = create(INT4, "activation")
    fq.disable_fake_quant()
    x = torch.randn(4)
    assert fq(x) is x
    assert fq.qparams_calculator.is_initialized


def test_frozen_without_parameters_is_an_error_that_says_what_to_do():
    fq = create(INT4, "activation")
    fq.name = "encoder.input"
    fq.disable_observer()
    with raises(NotObservedError, "encoder.input", "calibration data"):
        fq(torch.randn(4))


def test_observing_records_no_gradient_and_the_result_has_one_node():
    fq = create(INT4, "weight")
    x = torch.randn(8, 16, requires_grad=True)
    y = fq(x)
    assert not fq.calculate_qparams().scale.requires_grad
    assert [step[0].name() for step in y.grad_fn.next_functions] == ["torch::autograd::AccumulateGrad"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_result_is_in_the_dtype_of_the_input(dtype):
    assert calibrated()(torch.randn(8, 16).to(dtype)).dtype == dtype


def test_blocks_that_do_not_fit_disable_the_quantizer_with_one_warning():
    fq = create(QuantizationSpec(granularity=PerBlockGranularity(axis=1, block_size=5)), "weight")
    fq.name = "head.weight"
    x = torch.randn(4, 16)
    with pytest.warns(UserWarning, match="head.weight.*blocks of 5"):
        assert fq(x) is x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fq(x) is x
    assert fq.is_disabled()
    assert "do not divide" in fq.reason
    assert "disabled" in repr(fq)


def test_blocks_that_do_not_fit_are_an_error_when_strict():
    spec = ExtendedQuantizationSpec(granularity=PerBlockGranularity(axis=1, block_size=5), strict=True)
    with pytest.raises(ValueError, match="do not divide"):
        create(spec, "weight")(torch.randn(4, 16))


def test_quantize_gives_codes_in_the_storage_dtype_or_as_float():
    fq = calibrated()
    x = torch.randn(8, 16)
    qparams = fq.calculate_qparams()
    codes = fq.quantize(x, *qparams)
    wide = fq.quantize(x, *qparams, cast_to_target_dtype=False)
    assert (codes.dtype, wide.dtype) == (torch.int8, torch.float32)
    assert torch.equal(codes.float(), wide)
    assert fq.dequantize(codes, *qparams, output_dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    "spec",
    [
        QuantizationSpec(dtype="uint8", qscheme="asymmetric"),
        QuantizationSpec(qformulation="minval", granularity=PerChannelGranularity(axis=1)),
        QuantizationSpec(dtype="float8_e5m2"),
        QuantizationSpec(dtype="float4_e2m1fn", granularity=PerBlockGranularity(axis=1, block_size=8)),
    ],
    ids=["uint8", "minval", "fp8", "mxfp4"],
)
def test_dequantized_codes_are_the_simulation(spec):
    fq = calibrated(spec)
    fq.disable_observer()
    x = torch.randn(8, 16)
    qparams = fq.calculate_qparams()
    assert torch.equal(fq.dequantize(fq.quantize(x, *qparams), *qparams), fq(x))


def test_with_args_is_a_partial_constructor():
    granularity = PerChannelGranularity(axis=0)
    spec = QuantizationSpec(granularity=granularity)
    partial = DefaultFakeQuantize.with_args(
        dtype=spec.dtype,
        qscheme=spec.qscheme,
        qformulation=spec.qformulation,
        granularity=granularity,
        target_dtype=spec.target_dtype,
        quant_min=-128,
        quant_max=127,
    ).with_args(quantization_target="activation")
    quantizer = partial(qparams_calculator=QuantizationComponentFactory.create_qparams_calculator(spec, "activation"))
    assert quantizer.quantization_target is CompressionTargetTensor.ACTIVATION
    assert quantizer(torch.randn(2, 3)).shape == (2, 3)


def test_a_partial_of_the_factory_builds_quantizers_that_share_nothing():
    partial = QuantizationComponentFactory.create_fake_quantizer_partial(INT4, "weight")
    first, second = partial(), partial()
    first(torch.randn(4))
    assert not second.qparams_calculator.is_initialized
    assert first.qparams_calculator.range_calculator is not second.qparams_calculator.range_calculator


def test_convert_keeps_the_node():
    assert calibrated().convert(nn.Module(), object()) is None


def test_the_granularity_can_be_set_before_the_first_use_only():
    fq = create(QuantizationSpec(), "weight")
    fq.granularity = PerChannelGranularity(axis=1)
    fq(torch.randn(2, 5))
    assert fq.calculate_qparams().scale.shape == (1, 5)
    with pytest.raises(RuntimeError, match="after the first use"):
        fq.granularity = PerChannelGranularity(axis=0)


def test_a_quantizer_with_only_quantize_and_dequantize_works_and_passes_gradients():
    class Ternary(FakeQuantizeImplBase):
        def quantize(self, tensor, scale, zero_point, minval, cast_to_target_dtype=True):
            return tensor.sign()

        def dequantize(self, tensor, scale, zero_point, minval, output_dtype=torch.float32):
            return (tensor * scale * 64).to(output_dtype)

    spec = QuantizationSpec()
    fq = Ternary(
        spec.dtype, spec.qscheme, spec.qformulation, spec.granularity, spec.target_dtype, -128, 127,
        QuantizationComponentFactory.create_qparams_calculator(spec, "weight"), "weight",
    )  # fmt: skip
    x = torch.randn(10, requires_grad=True)
    y = fq(x)
    assert y.detach().abs().unique().numel() == 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(10))


class TestWeightCache:
    @pytest.fixture
    def frozen(self):
        layer = nn.Linear(16, 8)
        fq = calibrated(x=layer.weight.detach()).eval()
        fq.disable_observer()
        return fq, layer

    def test_an_unchanged_weight_gives_the_same_object(self, frozen):
        fq, layer = frozen
        with torch.no_grad():
            assert fq(layer.weight) is fq(layer.weight)

    @pytest.mark.parametrize("change", ["optimizer", "copy_", "load_state_dict", "replace data", "scale", "clear"])
    def test_a_change_is_noticed(self, frozen, change):
        fq, layer = frozen
        with torch.no_grad():
            before = fq(layer.weight)
        if change == "optimizer":
            layer(torch.randn(4, 16)).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=1.0).step()
        elif change == "copy_":
            with torch.no_grad():
                layer.weight.copy_(torch.randn(8, 16))
        elif change == "load_state_dict":
            layer.load_state_dict(nn.Linear(16, 8).state_dict())
        elif change == "replace data":
            layer.weight.data = torch.randn(8, 16)
        elif change == "scale":
            fq.qparams_calculator.scale.mul_(3)
        else:
            layer.weight.data.mul_(5)
            fq.clear_cache()
        with torch.no_grad():
            after = fq(layer.weight)
        assert after is not before
        assert not torch.equal(after, before)
        fresh = copy.deepcopy(fq)
        fresh.cache_weights = False
        assert torch.equal(after, fresh(layer.weight.detach()))

    def test_two_weights_in_turn_get_their_own_results(self, frozen):
        fq, layer = frozen
        other = torch.randn(8, 16)
        with torch.no_grad():
            first, second = fq(layer.weight), fq(other)
            assert torch.equal(fq(layer.weight), first)
            assert torch.equal(fq(other), second)
            assert not torch.equal(first, second)

    def test_gradients_flow_in_eval(self, frozen):
        fq, layer = frozen
        fq(layer.weight).sum().backward()
        assert layer.weight.grad.abs().sum() > 0

    @pytest.mark.parametrize("mode", ["training", "observing", "switched off", "activation"])
    def test_nothing_is_cached_in_training_or_if_it_is_disabled(self, frozen, mode):
        fq, layer = frozen
        if mode == "training":
            fq.train()
        elif mode == "observing":
            fq.enable_observer()
        elif mode == "switched off":
            fq.cache_weights = False
        else:
            fq.quantization_target = CompressionTargetTensor.ACTIVATION
        with torch.no_grad():
            assert fq(layer.weight) is not fq(layer.weight)
        assert fq._cache is None

    def test_the_cache_is_not_copied_and_not_saved(self, frozen):
        fq, layer = frozen
        with torch.no_grad():
            fq(layer.weight)
        assert copy.deepcopy(fq)._cache is None
        assert all(value.numel() <= 1 for value in fq.state_dict().values())

    def test_going_back_to_training_frees_it(self, frozen):
        fq, layer = frozen
        with torch.no_grad():
            fq(layer.weight)
        fq.train()
        assert fq._cache is None


def test_the_repr_contains_name_dtype_limits_scheme_and_state():
    fq = calibrated()
    fq.name = "conv.weight"
    assert "'conv.weight', weight, int4 [-8, 7], symmetric, zp, PerTensorGranularity()" in repr(fq)
    assert "observer=on, fake_quant=on" in repr(fq)
