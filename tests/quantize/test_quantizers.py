"""Quantizers against the formulas of the contract (B4), computed independently in numpy; switches and state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scalepoint.errors import ScalepointError
from scalepoint.quantize import CalibrationMethod, QuantStub, TensorQuantConfig, WeightFakeQuantize
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationSpec

EPS = float(np.finfo(np.float32).eps)
FORMATS = [(8, True), (4, True), (2, True), (8, False), (4, False), (2, False)]


def limits(bits, symmetric):
    """Signed codes when symmetric, unsigned when not."""
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def weight_parameters(w, bits, symmetric):
    """Contract B4 for one tensor, in float64."""
    low, high = limits(bits, symmetric)
    if symmetric:
        return max(np.abs(w).max(), 1e-8) / ((high - low) / 2), 0
    lo, hi = min(0.0, w.min()), max(0.0, w.max())
    scale = max(hi - lo, 1e-8) / (high - low)
    return scale, int(np.clip(np.round(-lo / scale), low, high))


def activation_parameters(x, bits, symmetric):
    """Contract A3 for one tensor: the scale is floored."""
    low, high = limits(bits, symmetric)
    if symmetric:
        return max(np.abs(x).max() / ((high - low) / 2), EPS), 0
    lo, hi = min(0.0, x.min()), max(0.0, x.max())
    scale = max((hi - lo) / (high - low), EPS)
    return scale, int(np.clip(np.round(-lo / scale), low, high))


def fake_quantized(x, scale, zero_point, bits, symmetric):
    low, high = limits(bits, symmetric)
    scale = np.float32(scale)
    codes = np.clip(np.round(np.float32(x) / scale) + zero_point, low, high)
    return ((codes - zero_point) * scale).astype(np.float32)


def agrees(actual, expected, scale):
    """Equal except for a value halfway between two codes."""
    difference = np.abs(actual.detach().numpy() - expected)
    assert (difference > 1e-5 * np.abs(expected).max() + 1e-30).mean() < 0.01
    assert difference.max() <= 1.001 * np.max(scale)


def calibrated(data, *args, **kwargs):
    stub = QuantStub(["reader"], *args, **kwargs)
    stub.calibrating = True
    for batch in data if isinstance(data, list) else [data]:
        stub(batch)
    stub.calibrating = False
    stub.compute_parameters()
    stub.enabled = True
    return stub


def weight_quantizer(*args, **kwargs):
    quantizer = WeightFakeQuantize(*args, **kwargs)
    quantizer.enabled = True
    return quantizer


class TestWeight:
    @pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
    @pytest.mark.parametrize("shift", [0.0, 3.0, -3.0], ids=["centred", "positive", "negative"])
    def test_the_formulas_of_the_contract_per_tensor(self, bits, symmetric, shift):
        w = torch.randn(5, 7) + shift
        quantizer = weight_quantizer(["fc"], bits, symmetric)
        output = quantizer(w)
        scale, zero_point = weight_parameters(w.double().numpy(), bits, symmetric)
        assert quantizer.scale.shape == quantizer.zero_point.shape == ()
        assert float(quantizer.scale) == pytest.approx(scale, rel=1e-6)
        assert int(quantizer.zero_point) == zero_point
        agrees(output, fake_quantized(w.numpy(), scale, zero_point, bits, symmetric), scale)

    @pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
    @pytest.mark.parametrize("axis", [0, 1, -1, 3])
    def test_the_formulas_of_the_contract_per_channel(self, bits, symmetric, axis):
        w = torch.randn(4, 6, 3, 2) * torch.logspace(-3, 3, 4).view(4, 1, 1, 1)
        quantizer = weight_quantizer(["conv"], bits, symmetric, True, channel_axis=axis)
        output = quantizer(w)
        slices = np.moveaxis(w.double().numpy(), axis, 0)
        parameters = [weight_parameters(part, bits, symmetric) for part in slices]
        assert quantizer.scale.shape == quantizer.zero_point.shape == (w.shape[axis],)
        np.testing.assert_allclose(quantizer.scale.numpy(), [scale for scale, _ in parameters], rtol=1e-6)
        assert quantizer.zero_point.tolist() == [zero for _, zero in parameters]
        expected = np.stack(
            [fake_quantized(part, *pair, bits, symmetric) for part, pair in zip(slices, parameters, strict=True)]
        )
        agrees(output, np.moveaxis(expected, 0, axis), max(scale for scale, _ in parameters))

    @pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
    @pytest.mark.parametrize("size", [0.0, 1e-12, 9e-9])
    def test_the_range_is_floored_at_1e_8(self, bits, symmetric, size):
        quantizer = weight_quantizer(["fc"], bits, symmetric)
        output = quantizer(torch.full((3, 3), size))
        low, high = limits(bits, symmetric)
        expected = 1e-8 / ((high - low) / 2 if symmetric else high - low)
        assert float(quantizer.scale) == pytest.approx(expected, rel=1e-6)
        assert torch.isfinite(output).all()

    @pytest.mark.parametrize("per_channel", [False, True])
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_zero_weights_stay_exactly_zero(self, symmetric, per_channel):
        w = torch.randn(4, 5)
        w[2] = 0
        output = weight_quantizer(["fc"], 4, symmetric, per_channel)(w)
        assert (output[2] == 0).all()
        assert weight_quantizer(["fc"], 8, symmetric, per_channel)(torch.zeros(4, 5)).eq(0).all()

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(0, 10_000),
        st.sampled_from(FORMATS),
        st.floats(-30, 30),
    )
    def test_no_value_moves_by_more_than_a_step(self, seed, fmt, exponent):
        w = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
        bits, symmetric = fmt
        quantizer = weight_quantizer(["fc"], bits, symmetric, True)
        error = (quantizer(w) - w).abs().amax(1)
        # there is one code more below zero than above, or the zero point is rounded: half a step more at the ends
        assert (error <= quantizer.scale * 1.001).all()

    def test_it_is_identity_until_enabled(self):
        quantizer, w = WeightFakeQuantize(["fc"], 4), torch.randn(3, 3)
        assert not quantizer.enabled
        assert quantizer(w) is w
        quantizer.enabled = True
        assert not torch.equal(quantizer(w), w)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_the_axis_and_the_config_can_be_read(self, axis):
        short = WeightFakeQuantize(["fc"], 4, False, True, channel_axis=axis)
        assert short.channel_axis == axis
        assert short.config == TensorQuantConfig(n_bits=4, symmetric=False, per_channel=True)
        assert (short.config.quant_min, short.config.quant_max) == (0, 15)
        spec = QuantizationSpec(granularity=PerChannelGranularity(axis=axis))
        assert WeightFakeQuantize(["fc"], spec=spec).channel_axis == axis
        assert WeightFakeQuantize(["fc"], channel_axis=axis).channel_axis == axis

    def test_the_scale_follows_the_current_weight(self):
        quantizer, w = weight_quantizer(["fc"]), torch.randn(3, 3)
        quantizer(w)
        before = float(quantizer.scale)
        quantizer(w * 3)
        assert float(quantizer.scale) == pytest.approx(3 * before)

    def test_a_frozen_scale_is_constant(self):
        quantizer, w = weight_quantizer(["fc"], per_channel=True), torch.randn(3, 3)
        quantizer.freeze(w)
        scale = quantizer.scale.clone()
        assert quantizer.frozen
        output = quantizer(w * 100)
        assert torch.equal(quantizer.scale, scale)
        top = scale * 127
        assert (output.amax(1) <= top * 1.0001).all()

    def test_freeze_stores_the_scale_of_the_current_weight(self):
        live, frozen, w = (
            weight_quantizer(["fc"], 4, False, True),
            weight_quantizer(["fc"], 4, False, True),
            torch.randn(3, 9),
        )
        frozen.freeze(w)
        assert torch.equal(live(w), frozen(w))
        assert torch.equal(live.scale, frozen.scale)
        assert torch.equal(live.zero_point, frozen.zero_point)

    def test_gradients_pass_straight_to_the_weight(self):
        w = torch.randn(4, 4, requires_grad=True)
        weight_quantizer(["fc"])(w).sum().backward()
        inside = w.grad[w.detach().abs() < w.detach().abs().max()]
        assert (inside == 1).all()

    def test_a_disabled_quantizer_is_the_identity(self):
        quantizer, w = weight_quantizer(["fc"], 2), torch.randn(3, 3)
        quantizer.enabled = False
        assert torch.equal(quantizer(w), w)

    def test_codes_are_integers_of_the_range(self):
        quantizer, w = weight_quantizer(["fc"], 4, per_channel=True), torch.randn(3, 64)
        output = quantizer(w)
        codes = quantizer.codes(w)
        assert codes.dtype == torch.int8
        assert -8 <= int(codes.min()) <= int(codes.max()) <= 7
        torch.testing.assert_close(codes.float() * quantizer.scale.view(3, 1), output)

    def test_a_block_that_does_not_divide_warns_and_passes(self):
        spec = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=4))
        quantizer = weight_quantizer(["fc"], spec=spec)
        quantizer.name, w = "fc.weight", torch.randn(3, 6)
        with pytest.warns(UserWarning, match=r"fc\.weight"):
            assert torch.equal(quantizer(w), w)
        assert torch.equal(quantizer(w), w)  # once per quantizer


class TestActivation:
    def test_a_new_stub_has_the_defaults_of_the_contract(self):
        stub, x = QuantStub(["conv1", "conv2"]), torch.randn(4)
        assert (stub.calibrating, stub.enabled) == (False, False)
        assert stub.consumers == ["conv1", "conv2"]
        assert (float(stub.scale), int(stub.zero_point)) == (1.0, 0)
        assert (stub.scale.dtype, stub.zero_point.dtype) == (torch.float32, torch.int32)
        assert {"scale", "zero_point"} <= set(dict(stub.named_buffers()))
        assert stub(x) is x
        assert not list(stub.parameters())
        assert stub.fixed_parameters is False
        assert stub.config == TensorQuantConfig()

    @pytest.mark.parametrize("method", [method for method in CalibrationMethod if method != CalibrationMethod.MSE])
    def test_the_config_is_the_short_form(self, method):
        assert QuantStub(["conv"], 4, False, method).config == TensorQuantConfig(
            n_bits=4, symmetric=False, calibration_method=method
        )

    @pytest.mark.parametrize(
        "spec",
        [
            QuantizationSpec(dtype="float8_e4m3fn"),
            QuantizationSpec(qscheme="symmetric_with_clipping", qparam_calculator_cls="global_minmax"),
            QuantizationSpec(dtype="uint8", qparam_calculator_cls="global_minmax"),
            QuantizationSpec(granularity=PerBlockGranularity(axis=1, block_size=4)),
        ],
        ids=["fp8", "with clipping", "unsigned symmetric", "blocks"],
    )
    def test_the_config_of_a_spec_without_short_form_is_the_spec(self, spec):
        stub = QuantStub(["conv"], spec=spec)
        assert stub.config == spec
        assert stub.config.n_bits == 8

    @pytest.mark.parametrize("kind", [QuantStub, WeightFakeQuantize])
    def test_consumers_may_be_modules(self, kind):
        reader, other = nn.Linear(2, 2), nn.Conv2d(1, 1, 1)
        stub = kind({reader})
        assert reader in stub.consumers
        assert "for Linear" in repr(stub)
        assert not [*stub.children()][1:]  # the consumer is not registered as a submodule
        assert "for fc, Conv2d" in repr(kind(["fc", other]))
        assert kind("fc").consumers == ["fc"]

    def test_the_error_names_the_class_of_a_module_consumer(self):
        with pytest.raises(RuntimeError, match="Linear"):
            QuantStub({nn.Linear(2, 2)}).compute_parameters()

    def test_fixed_parameters_is_true_with_fixed_calibration(self):
        assert QuantStub(["conv"], fixed_calibration=(0.5, 0)).fixed_parameters is True

    @pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
    @pytest.mark.parametrize("shift", [0.0, 3.0, -3.0], ids=["centred", "positive", "negative"])
    def test_the_formulas_of_the_contract(self, bits, symmetric, shift):
        batches = [torch.randn(4, 5) + shift, torch.randn(2, 5) * 2 + shift]
        stub = calibrated(batches, bits, symmetric)
        values = torch.cat([batch.flatten() for batch in batches]).double().numpy()
        scale, zero_point = activation_parameters(values, bits, symmetric)
        assert float(stub.scale) == pytest.approx(scale, rel=1e-6)
        assert int(stub.zero_point) == zero_point
        x = torch.randn(100) * 4
        agrees(stub(x), fake_quantized(x.numpy(), scale, zero_point, bits, symmetric), scale)

    def test_while_calibrating_the_tensor_passes_unchanged(self):
        stub, x = QuantStub(["a"], 2), torch.randn(9)
        stub.calibrating = True
        assert torch.equal(stub(x), x)

    def test_nothing_observed_is_an_error_that_names_the_stub(self):
        stub = QuantStub(["layer1.conv2"])
        stub.name = "layer1.relu_quant"
        with pytest.raises(RuntimeError, match=r"layer1\.relu_quant.*layer1\.conv2"):
            stub.compute_parameters()
        with pytest.raises(RuntimeError, match=r"reader"):
            QuantStub(["reader"]).compute_parameters()

    def test_tensors_are_observed_only_while_calibrating(self):
        stub = QuantStub(["a"])
        stub(torch.randn(3))
        with pytest.raises(RuntimeError):
            stub.compute_parameters()

    def test_a_fixed_calibration_is_never_overridden(self):
        stub = QuantStub(["a"], symmetric=False, fixed_calibration=(0.25, 3))
        stub.calibrating = True
        stub(torch.randn(100) * 1000)
        stub.compute_parameters()
        stub.reset()
        stub.compute_parameters()
        assert (float(stub.scale), int(stub.zero_point)) == (0.25, 3)
        stub.calibrating, stub.enabled = False, True
        assert stub(torch.tensor([0.3, -5.0, 1e6])).tolist() == [0.25, -0.75, 63.0]

    @pytest.mark.parametrize(
        "fixed_calibration", [(0.0, 0), (-1.0, 0), (float("nan"), 0), (math.inf, 0), (1.0, 300), (1.0,), "ab"]
    )
    def test_an_invalid_fixed_calibration_is_refused(self, fixed_calibration):
        with pytest.raises(ValueError, match="fixed_calibration"):
            QuantStub(["a"], fixed_calibration=fixed_calibration)

    @pytest.mark.parametrize("symmetric", [False, True])
    @pytest.mark.parametrize("value", [0.0, 1e-30, 1e-38, -1e-30, 1.0, -2.5, 1e30, 1e38, 3e38, -3e38])
    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_constants_of_any_size_are_defined(self, method, value, symmetric):
        x = torch.full((4, 4), value)
        stub = calibrated([x, x], 8, symmetric, method)
        output = stub(x)
        assert torch.isfinite(stub.scale)
        assert float(stub.scale) > 0
        assert torch.isfinite(output).all()
        assert (output - x).abs().max() <= float(stub.scale) * 1.001
        assert stub(torch.zeros(3)).eq(0).all()

    def test_the_full_range_of_float32_does_not_overflow(self):
        x = torch.tensor([-3e38, 3e38])
        stub = calibrated(x, 8, False)
        assert torch.isfinite(stub.scale)
        assert torch.isfinite(stub(x)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_outputs_have_the_float_dtype_of_the_input(self, dtype):
        x = (torch.randn(64) * 100).to(dtype)
        stub, plain = calibrated(x), calibrated(x.float())
        assert stub.scale.dtype == torch.float32
        assert torch.equal(stub.scale, plain.scale)
        output = stub(x)
        assert output.dtype == dtype
        torch.testing.assert_close(output, plain(x.float()).to(dtype), rtol=0, atol=0)

    def test_the_largest_half_precision_value_does_not_overflow(self):
        x = torch.tensor([-65504.0, 65504.0], dtype=torch.float16)
        for symmetric in (False, True):
            stub = calibrated(x, 8, symmetric)
            assert torch.isfinite(stub.scale)
            assert stub(x * 0.5).isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_moving_the_model_to_another_type_keeps_the_scale(self, dtype):
        stub = calibrated(torch.randn(64) * 1e-6)
        scale = stub.scale.clone()
        stub.to(dtype)
        assert torch.equal(stub.scale.float(), scale)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
    def test_integer_tensors_pass_unobserved(self, dtype):
        x = torch.ones(3, dtype=dtype)
        stub = QuantStub(["a"])
        stub.calibrating = stub.enabled = True
        assert torch.equal(stub(x), x)
        with pytest.raises(RuntimeError):
            stub.compute_parameters()

    def test_complex_numbers_are_refused(self):
        stub = QuantStub(["a"])
        stub.calibrating = True
        with pytest.raises(ScalepointError, match="complex"):
            stub(torch.zeros(3, dtype=torch.complex64))

    def test_an_empty_tensor_passes_and_is_not_observed(self):
        stub, x = QuantStub(["a"]), torch.empty(0, 3)
        stub.calibrating = stub.enabled = True
        assert stub(x).shape == (0, 3)
        with pytest.raises(RuntimeError, match="observed"):
            stub.compute_parameters()
        stub.enabled = False
        stub(torch.ones(2, 3))
        stub(x)
        stub.compute_parameters()
        assert float(stub.scale) == pytest.approx(1 / 127.5)

    def test_a_scalar_is_quantized(self):
        stub = calibrated(torch.tensor(2.0))
        assert stub(torch.tensor(1.0)).shape == ()

    def test_nan_and_infinity_are_refused_by_name(self):
        for value in (math.nan, math.inf, -math.inf):
            stub = QuantStub(["a"])
            stub.name, stub.calibrating = "relu_quant", True
            with pytest.raises(ValueError, match="relu_quant"):
                stub(torch.tensor([1.0, value]))

    @pytest.mark.parametrize("kind", ["transposed", "expanded", "channels_last", "strided"])
    def test_the_layout_of_a_tensor_does_not_matter(self, kind):
        x = torch.randn(2, 4, 6, 8)
        x = {
            "transposed": x.transpose(1, 3),
            "expanded": x[:, :1].expand(2, 4, 6, 8),
            "channels_last": x.to(memory_format=torch.channels_last),
            "strided": x[..., ::2],
        }[kind]
        one, other = calibrated(x), calibrated(x.contiguous())
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one(x), other(x.contiguous()))

    def test_the_input_tensor_is_not_changed(self):
        x = torch.randn(3, 3)
        before, version = x.clone(), x._version
        calibrated(x)(x)
        assert torch.equal(x, before)
        assert x._version == version

    def test_gradients_are_one_inside_the_range_and_zero_outside(self):
        stub = calibrated(torch.tensor([-1.0, 1.0]))
        x = torch.tensor([0.3, -0.7, 5.0, -5.0], requires_grad=True)
        stub(x).sum().backward()
        assert x.grad.tolist() == [1, 1, 0, 0]

    @pytest.mark.parametrize("first", [True, False], ids=["wide-first", "wide-last"])
    def test_reset_discards_observations(self, first):
        stub, batches = QuantStub(["a"]), [torch.ones(3) * 100, torch.ones(3)]
        stub.calibrating = True
        stub(batches[0] if first else batches[1])
        stub.reset()
        stub(batches[1] if first else batches[0])
        stub.compute_parameters()
        assert float(stub.scale) == pytest.approx((1 if first else 100) / 127.5)


class TestState:
    @pytest.mark.parametrize("method", list(CalibrationMethod))
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_a_stub_loads_bit_equal_into_a_fresh_one(self, method, symmetric):
        stub = calibrated([torch.randn(50), torch.randn(70)], 4, symmetric, method)
        fresh = QuantStub(["reader"], 4, symmetric, method)
        fresh.load_state_dict(stub.state_dict())
        x = torch.randn(100)
        assert fresh.enabled
        assert torch.equal(fresh(x), stub(x))

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("per_channel", [False, True])
    def test_a_weight_quantizer_loads_bit_equal_into_a_fresh_one(self, per_channel, frozen):
        quantizer, w = weight_quantizer(["fc"], 4, False, per_channel), torch.randn(5, 3)
        quantizer.freeze(w) if frozen else quantizer(w)
        fresh = weight_quantizer(["fc"], 4, False, per_channel)
        fresh.load_state_dict(quantizer.state_dict())
        assert fresh.frozen is frozen
        assert torch.equal(fresh.scale, quantizer.scale)
        assert torch.equal(fresh(w * 2), quantizer(w * 2))

    def test_the_state_contains_the_switches(self):
        stub = calibrated(torch.randn(9))
        stub.enabled, stub.calibrating = False, True
        fresh = QuantStub(["reader"])
        fresh.load_state_dict(stub.state_dict())
        assert (fresh.enabled, fresh.calibrating) == (False, True)

    def test_a_copy_is_equal_and_independent(self):
        stub = calibrated(torch.randn(50))
        twin, x = copy.deepcopy(stub), torch.randn(9)
        assert torch.equal(twin(x), stub(x))
        twin.scale.fill_(5.0)
        twin.enabled = False
        assert float(stub.scale) != 5.0
        assert stub.enabled
        twin.reset()
        stub.compute_parameters()

    def test_a_state_contains_only_tensors(self):
        state = {**calibrated(torch.randn(9)).state_dict(), **weight_quantizer(["a"]).state_dict()}
        assert all(isinstance(value, torch.Tensor) for value in state.values())

    @pytest.mark.parametrize("method", [CalibrationMethod.MINMAX, CalibrationMethod.ENTROPY])
    def test_observing_more_batches_needs_no_more_memory(self, method):
        def room(count):
            stub = QuantStub(["a"], calibration_method=method)
            stub.calibrating = True
            for _ in range(count):
                stub(torch.randn(1000))
            return sum(value.numel() * value.element_size() for value in stub.state_dict().values())

        assert room(40) == room(4) < 1_000_000

    def test_repr_describes_the_quantizer(self):
        stub = calibrated(torch.randn(9))
        assert "int8" in repr(stub)
        assert "reader" in repr(stub)


def weight_module():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.quant = nn.Parameter(torch.randn(4, 3)), weight_quantizer(["fc"], per_channel=True)
            self.quant.freeze(self.weight)

        def forward(self, x):
            return x @ self.quant(self.weight).T

    return Weighted()


class TestTracing:
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_a_stub_can_be_exported(self, symmetric):
        stub, x = calibrated(torch.randn(50), 8, symmetric).eval(), torch.randn(4, 3)
        exported = torch.export.export(stub, (x,)).module()
        assert torch.equal(exported(x * 2), stub(x * 2))

    def test_a_disabled_stub_exports_no_nodes(self):
        program = torch.export.export(QuantStub(["a"]).eval(), (torch.randn(3),))
        assert not [node for node in program.graph.nodes if node.op == "call_function" and "quant" in str(node.target)]

    @pytest.mark.parametrize("symmetric", [False, True])
    def test_a_stub_compiles_without_a_graph_break(self, symmetric):
        stub, x = calibrated(torch.randn(50), 8, symmetric), torch.randn(4, 3)
        compiled = torch.compile(stub, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), stub(x))
        stub.enabled = False
        assert torch.equal(compiled(x), x)

    def test_a_frozen_weight_exports_and_compiles(self):
        module, x = weight_module().eval(), torch.randn(2, 3)
        expected = module(x)
        assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), expected)

    def test_an_unfrozen_weight_compiles_and_trains(self):
        module, x = weight_module(), torch.randn(2, 3)
        module.quant.unfreeze()
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        compiled(x).sum().backward()
        assert torch.isfinite(module.weight.grad).all()
        with torch.no_grad():
            module.weight.mul_(2)
        assert torch.equal(compiled(x), module(x))

    def test_an_observing_stub_compiles(self):
        stub, x = QuantStub(["a"]), torch.randn(4, 3)
        stub.calibrating = True
        torch.compile(stub, fullgraph=True, backend="eager")(x)
        stub.compute_parameters()
        assert float(stub.scale) == pytest.approx(float(x.abs().max()) / 127.5)

    def test_inference_mode_leaves_usable_buffers(self):
        stub = QuantStub(["a"])
        stub.calibrating = True
        with torch.inference_mode():
            stub(torch.randn(5))
            stub.compute_parameters()
        stub.enabled, stub.calibrating = True, False
        x = torch.randn(5, requires_grad=True)
        stub(x).sum().backward()
