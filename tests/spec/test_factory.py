"""QuantizationComponentFactory, and the methods of components that a user's class may override."""

import pytest
import torch

from scalepoint.errors import SpecError
from scalepoint.numerics import E4M3
from scalepoint.spec import (
    CompressionTargetTensor,
    ExtendedQuantizationSpec,
    FakeQuantizeImplBase,
    MinMaxRangeCalculator,
    PerChannelGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationSpec,
    RangeCalculatorBase,
    RunningRangeMixin,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
    fp4_forward,
)

FACTORY = QuantizationComponentFactory
ACTIVATION = CompressionTargetTensor.ACTIVATION


@pytest.fixture
def registered():
    """Register classes for one test: registered(base, key, class) returns the key."""
    added = []

    def add(base, key, kind):
        base.register(key)(kind)
        added.append((base, key))
        return key

    yield add
    for base, key in added:
        del base._registry[key]


class TestTargets:
    def test_the_target_has_two_names_and_exactly_one_is_given(self):
        spec = QuantizationSpec()
        for create in (FACTORY.create_fake_quantizer, FACTORY.create_qparams_calculator):
            for built in (create(spec, "activation"), create(spec, quantization_target=ACTIVATION)):
                assert built.quantization_target == ACTIVATION
            for arguments in ({}, {"target": "weight", "quantization_target": "weight"}):
                with pytest.raises(SpecError, match="either"):
                    create(spec, **arguments)
        assert FACTORY.create_fake_quantizer_partial(spec, quantization_target="lut")().quantization_target == "lut"

    def test_a_range_calculator_has_a_target(self):
        assert FACTORY.create_range_calculator(QuantizationSpec()).quantization_target == "weight"
        assert FACTORY.create_range_calculator(QuantizationSpec(), ACTIVATION).quantization_target == ACTIVATION

    @pytest.mark.parametrize(
        ("target", "key"), [("weight", "static"), ("lut", "static"), ("activation", "moving_average")]
    )
    def test_the_default_calculator_depends_on_the_target(self, target, key):
        calculator = FACTORY.create_qparams_calculator(QuantizationSpec(), target)
        assert type(calculator) is QParamsCalculatorBase.get_class(key)

    def test_a_range_calculator_of_a_user_without_the_argument_gets_the_target(self, registered):
        class Wide(MinMaxRangeCalculator):
            def __init__(self, granularity):
                super().__init__(granularity)

        key = registered(RangeCalculatorBase, "wide of a test", Wide)
        built = FACTORY.create_range_calculator(QuantizationSpec(range_calculator_cls=key), "activation")
        assert built.quantization_target == "activation"

    def test_no_spec_gives_no_quantizer(self):
        assert FACTORY.construct(None, "weight") is None
        assert FACTORY.construct_partial(None, "weight") is None
        x = torch.randn(4, 6)
        built = (
            FACTORY.construct(QuantizationSpec(), "weight"),
            FACTORY.construct_partial(QuantizationSpec(), "weight")(),
        )
        assert torch.equal(built[0](x), built[1](x))


class TestOtherAttributesOfAPartialConstructor:
    def test_the_calculator_of_each_new_quantizer_has_them(self):
        original = FACTORY.construct_partial(QuantizationSpec(qparam_calculator_cls="static"), "activation")
        changed = FACTORY.reconstruct_partial_qparams_calculator(
            original, float_range=(-2.0, 2.0), qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)
        )
        first, second = changed(), changed()
        assert first.qparams_calculator is not second.qparams_calculator
        first(torch.tensor([[0.5, 1.0], [0.1, 0.3]]))
        torch.testing.assert_close(first.qparams_calculator.scale, torch.full((2, 1), 4 / 255))
        assert first.qscheme == "asymmetric"
        assert original().qparams_calculator.float_range == (None, None)

    def test_the_limits_of_the_codes_follow(self):
        original = FACTORY.construct_partial(QuantizationSpec(), "weight")
        quantizer = FACTORY.reconstruct_partial_qparams_calculator(original, quant_min=-3, quant_max=3)()
        assert quantizer(torch.randn(100)).unique().numel() <= 7

    def test_an_unknown_attribute_is_an_error(self):
        original = FACTORY.construct_partial(QuantizationSpec(), "weight")
        with pytest.raises(AttributeError, match="bits_per_colour"):
            FACTORY.reconstruct_partial_qparams_calculator(original, bits_per_colour=3)()


class TestHooks:
    def test_initialize_state_is_called_once_and_compute_qparams_may_return_a_plain_tuple(self, registered):
        class RecordingCalculator(RunningRangeMixin, StatefulQParamsCalculatorBase):
            def __init__(self, **fields):
                super().__init__(**fields)
                self.calls = []

            def _initialize_state(self, tensor, min_val, max_val):
                super()._initialize_state(tensor, min_val, max_val)
                self.calls.append(("start", float(min_val), float(max_val)))

            def update_running_range(self, min_val, max_val):
                self.calls.append(("update", float(min_val), float(max_val)))
                return torch.minimum(self.running_min, min_val), torch.maximum(self.running_max, max_val)

            def compute_qparams(self, tensor, min_val, max_val):
                scale, zero_point, minval = super().compute_qparams(tensor, min_val, max_val)
                return scale * 2, zero_point, minval

        key = registered(QParamsCalculatorBase, "recording of a test", RecordingCalculator)
        quantizer = FACTORY.create_fake_quantizer(QuantizationSpec(qparam_calculator_cls=key), "activation")
        for values in ([1.0, 4.0], [-8.0, -1.0], [2.0, 3.0]):
            quantizer(torch.tensor(values))
        calculator = quantizer.qparams_calculator
        assert calculator.calls == [("start", 0, 4), ("update", -8, 0), ("update", 0, 3)]
        torch.testing.assert_close(calculator.scale, torch.tensor([2 * 8 / 127.5]))

    @pytest.mark.parametrize("base", ["default", "abstract"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fused_fake_quant_dequant_computes_the_result_in_float32(self, registered, base, dtype):
        parent = FakeQuantizeImplBase.get_class("default") if base == "default" else FakeQuantizeImplBase

        class Halved(parent):
            def quantize(self, tensor, scale, zero_point, minval, cast_to_target_dtype=True):
                raise AssertionError

            dequantize = quantize

            def _fused_fake_quant_dequant(self, tensor, scale, zero_point, minval):
                assert tensor.dtype == torch.float32
                return tensor / 2 + scale

        key = registered(FakeQuantizeImplBase, f"halved of a test {base}", Halved)
        quantizer = FACTORY.create_fake_quantizer(QuantizationSpec(fake_quantize_cls=key), "weight")
        x = torch.randn(8, dtype=dtype)
        expected = (x.float() / 2 + x.float().abs().max() / 127.5).to(dtype)
        assert torch.equal(quantizer(x), expected)
        quantizer.disable_observer()
        with torch.no_grad():
            assert all(torch.equal(quantizer(x), expected) for _ in range(3))

    def test_a_subclass_may_call_the_default_arithmetic(self, registered):
        class Shifted(FakeQuantizeImplBase.get_class("default")):
            def _fused_fake_quant_dequant(self, tensor, scale, zero_point, minval):
                return super()._fused_fake_quant_dequant(tensor, scale, zero_point, minval) + 1

        key = registered(FakeQuantizeImplBase, "shifted of a test", Shifted)
        x = torch.randn(4, 6, requires_grad=True)
        plain = FACTORY.create_fake_quantizer(QuantizationSpec(), "weight")(x)
        shifted = FACTORY.create_fake_quantizer(QuantizationSpec(fake_quantize_cls=key), "weight")(x)
        assert torch.equal(shifted, plain + 1)
        shifted.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    def test_a_quantizer_may_be_built_without_what_its_calculator_has(self):
        calculator = FACTORY.create_qparams_calculator(
            QuantizationSpec(dtype="int4", qscheme="asymmetric"), "activation"
        )
        kind = FakeQuantizeImplBase.get_class("default")
        quantizer = kind(torch.int4, qparams_calculator=calculator, granularity=calculator.granularity)
        assert (quantizer.qscheme, quantizer.quant_min, quantizer.quant_max) == ("asymmetric", -8, 7)
        assert (quantizer.quantization_target, quantizer.target_dtype) == (ACTIVATION, torch.int8)
        with pytest.raises(SpecError, match="qparams_calculator="):
            kind(torch.int4)


class TestStatelessCalculators:
    def test_only_dynamic_calculators_are_stateless(self):
        for key in QParamsCalculatorBase.list_registry_keys():
            if key in ("default", "palette"):  # a marker, and one with a spec of its own
                continue
            quantizer = FACTORY.create_fake_quantizer(ExtendedQuantizationSpec(qparam_calculator_cls=key), "activation")
            calculator = quantizer.qparams_calculator
            assert isinstance(calculator, StatefulQParamsCalculatorBase) == (key != "dynamic"), key
            assert (
                quantizer.is_stateless == isinstance(calculator, StatelessQParamsCalculatorBase) == (key == "dynamic")
            )

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float4_e2m1fn_x2"])
    def test_a_rule_of_a_user_computes_the_parameters_of_every_tensor(self, registered, dtype):
        class Doubled(StatelessQParamsCalculatorBase):
            def compute_qparams(self, tensor, min_val, max_val):
                scale, zero_point, minval = super().compute_qparams(tensor, min_val, max_val)
                return scale * 2, zero_point, minval

        key = registered(QParamsCalculatorBase, f"doubled of a test {dtype}", Doubled)
        quantizer, plain = (
            FACTORY.create_fake_quantizer(QuantizationSpec(dtype=dtype, qparam_calculator_cls=name), "activation")
            for name in (key, "dynamic")
        )
        quantizer.disable_observer()
        for size in (3, 5):
            x = torch.randn(size)
            quantizer(x), plain(x)
            doubled, single = (part.qparams_calculator.stored.scale for part in (quantizer, plain))
            assert torch.equal(doubled, 2 * single)


class TestFp4Forward:
    def test_it_rounds_to_the_nearest_value_and_ties_to_the_even_code(self):
        values = torch.tensor([0.0, 0.2, 0.25, 0.3, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0, 1e30])
        rounded = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0])
        assert torch.equal(fp4_forward(values), rounded)
        assert torch.equal(fp4_forward(-values), -rounded)
        assert fp4_forward(torch.tensor([1.3], dtype=torch.bfloat16)).dtype == torch.float32

    def test_nan_stays_nan(self):
        assert fp4_forward(torch.tensor([float("nan"), float("inf")])).isnan().tolist() == [True, False]


def test_a_float_format_has_no_scheme_to_change():
    original = FACTORY.construct_partial(QuantizationSpec(dtype=E4M3), "weight")
    quantizer = FACTORY.reconstruct_partial_qparams_calculator(original, float_range=(-1.0, 1.0))()
    quantizer(torch.randn(8))
    assert float(quantizer.qparams_calculator.scale) == pytest.approx(1 / 448)
