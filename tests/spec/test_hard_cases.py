"""Usages that failed once or easily could: shapes, aliases, graphs after eager calls, inference mode, defaults."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from scalepoint.errors import NonFiniteError, NotObservedError, TensorError
from scalepoint.spec import (
    DefaultFakeQuantize,
    ExtendedQuantizationSpec,
    FakeQuantizeImplBase,
    MinMaxRangeCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTokenGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationSpec,
    StaticQParamsCalculator,
    default_weight_quantization_spec,
)


def create(target="activation", **fields):
    return QuantizationComponentFactory.create_fake_quantizer(ExtendedQuantizationSpec(**fields), target)


def frozen(x, target="activation", **fields):
    fq = create(target, **fields)
    fq(x)
    fq.disable_observer()
    return fq


CHANNEL = {"granularity": PerChannelGranularity(axis=0)}
BLOCK = {"granularity": PerBlockGranularity(axis=1, block_size=32)}


class TestGraphs:
    @pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
    def test_a_quantizer_used_eagerly_before_is_exported(self, strict):
        x = torch.randn(4, 8)
        fq = frozen(x)
        expected = fq(x)
        assert torch.equal(torch.export.export(fq, (x,), strict=strict).module()(x), expected)

    @pytest.mark.parametrize("fields", [{}, CHANNEL, {"dtype": "uint8", "qscheme": "asymmetric"}], ids=str)
    def test_a_quantizer_used_eagerly_before_is_compiled(self, fields):
        x = torch.randn(4, 8)
        fq = frozen(x, **fields)
        expected = fq(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(fq, fullgraph=True, backend="aot_eager")(x), expected)

    def test_a_graph_contains_the_switches_that_were_loaded_before(self):
        x = torch.randn(4, 8)
        source = frozen(x)
        source.disable_fake_quant()
        fresh = create()
        fresh.load_state_dict(source.state_dict())
        assert torch.equal(torch.export.export(fresh, (x,)).module()(x), x)

    def test_a_state_loaded_after_compiling_is_followed(self):
        x = torch.randn(4, 8)
        fq = frozen(x)
        torch._dynamo.reset()
        compiled = torch.compile(fq, fullgraph=True, backend="aot_eager")
        assert not torch.equal(compiled(x), x)
        off = copy.deepcopy(fq)
        off.disable_fake_quant()
        fq.load_state_dict(off.state_dict())
        assert torch.equal(compiled(x), x)

    def test_a_nan_in_a_compiled_batch_does_not_poison_the_running_range(self):
        for warm in (True, False):
            fq = create(qparam_calculator_cls="global_minmax")
            if warm:
                fq(torch.ones(4))
            torch._dynamo.reset()
            torch.compile(fq, fullgraph=True, backend="aot_eager")(torch.full((4,), torch.nan))
            assert fq.qparams_calculator.skipped_batches == 1
            fq(torch.full((4,), 2.0))
            assert fq.qparams_calculator.running_max == 2.0

    def test_blocks_that_do_not_fit_pass_through_in_a_graph_too(self):
        fq = create(**BLOCK)
        x = torch.randn(4, 48)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(fq, fullgraph=True, backend="aot_eager")(x), x)


class TestShapes:
    @pytest.mark.parametrize(
        ("fields", "before", "after"),
        [
            (CHANNEL, (4, 8), (1, 8)),
            (CHANNEL, (4, 8), (6, 8)),
            (BLOCK, (4, 64), (2, 128)),
            ({"granularity": PerTokenGranularity()}, (2, 3, 8), (1, 3, 8)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("calculator", ["static", "moving_average", "global_minmax", "histogram_mse", "learned"])
    def test_parameters_for_other_blocks_are_refused_and_nothing_changes(self, fields, before, after, calculator):
        fq = frozen(torch.randn(before), qparam_calculator_cls=calculator, **fields)
        state = {name: value.clone() for name, value in fq.state_dict().items()}
        with pytest.raises(TensorError, match=r"blocks before|needs"):
            fq(torch.randn(after))
        if calculator != "static":
            fq.enable_observer()
            with pytest.raises(TensorError, match=r"blocks before|needs"):
                fq(torch.randn(after))
            state["observer_enabled"].fill_(1)
        assert all(torch.equal(value, state[name]) for name, value in fq.state_dict().items())

    def test_another_batch_size_is_fine_where_the_blocks_are_the_same(self):
        fq = frozen(torch.randn(2, 3, 5), granularity=PerChannelGranularity(axis=1))
        assert fq(torch.randn(7, 3, 5)).shape == (7, 3, 5)

    def test_a_frozen_quantizer_is_disabled_if_its_blocks_do_not_divide(self):
        fq = frozen(torch.randn(4, 64), **BLOCK)
        x = torch.randn(4, 48)
        with pytest.warns(UserWarning, match="is disabled"):
            assert fq(x) is x

    @pytest.mark.parametrize("key", ["percentile", "mse", "entropy"])
    def test_a_scalar_tensor_has_a_range_under_every_calculator(self, key):
        assert create(range_calculator_cls=key)(torch.tensor(2.0)).shape == ()

    @pytest.mark.parametrize("key", ["histogram_percentile", "histogram_mse", "histogram_entropy"])
    def test_a_histogram_takes_scalars_and_ragged_blocks(self, key):
        create(qparam_calculator_cls=key)(torch.tensor(2.0))
        fq = create(qparam_calculator_cls=key, granularity=PerBlockGranularity(axis=1, block_size=3, pad=True))
        fq(torch.randn(2, 8))
        assert fq.calculate_qparams().scale.shape == (2, 3)
        assert fq.qparams_calculator.counts.sum(1).tolist() == [3, 3, 2, 3, 3, 2]

    def test_ragged_blocks_keep_the_memory_format(self):
        x = torch.randn(2, 10, 4, 4).contiguous(memory_format=torch.channels_last)
        fq = create(granularity=PerBlockGranularity(axis=1, block_size=4, pad=True))
        assert fq(x).is_contiguous(memory_format=torch.channels_last)


class TestNonFinite:
    @pytest.mark.parametrize(
        "fields", [{"range_calculator_cls": key} for key in ("percentile", "mse", "entropy")], ids=str
    )
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
    def test_every_range_calculator_detects_one_bad_value(self, fields, bad):
        x = torch.randn(5000)
        x[17] = bad
        with pytest.raises(NonFiniteError, match="of 5000 values"):
            create(**fields)(x)

    def test_a_double_beyond_float32_is_distinguished_from_infinity(self):
        with pytest.raises(NonFiniteError, match="range of float32"):
            create()(torch.tensor([1e300], dtype=torch.float64))

    def test_fixed_ends_read_no_value(self):
        fq = create(float_range=[-1, 1], qparam_calculator_cls="histogram_mse")
        assert torch.isnan(fq(torch.tensor([torch.nan])))


class TestTransforms:
    def test_observing_inside_vmap_is_an_error_and_changes_no_state(self):
        fq = create()
        fq(torch.randn(4))
        with pytest.raises(TensorError, match="disable_observer"):
            torch.vmap(fq)(torch.randn(3, 4))
        assert fq(torch.randn(4)).shape == (4,)

    def test_observing_a_fake_tensor_is_refused(self):
        from torch._subclasses import FakeTensorMode

        fq = create()
        with pytest.raises(TensorError, match="FakeTensor"):
            fq(FakeTensorMode().from_tensor(torch.randn(4)))
        assert fq(torch.randn(4)).shape == (4,)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp rules
    @pytest.mark.parametrize("fields", [{}, {"dtype": "float8_e4m3fn"}, {"qformulation": "minval"}], ids=str)
    def test_forward_mode_sees_the_straight_through_tangent(self, fields):
        fq = frozen(torch.linspace(-1, 1, 9), **fields)
        x = torch.tensor([0.3, 50.0])
        _, tangent = torch.func.jvp(fq, (x,), (torch.ones(2),))
        assert tangent.tolist() == [1.0, 0.0]


class TestInferenceMode:
    def test_a_quantizer_made_inside_works_outside(self):
        with torch.inference_mode():
            fq = create()
        fq(torch.randn(4))
        fq.disable_observer()
        fq.set_export_mode()
        fq.load_state_dict(create().state_dict())

    @pytest.mark.parametrize("key", ["moving_average", "histogram_mse", "learned", "static"])
    def test_a_quantizer_calibrated_inside_is_used_saved_and_loaded_outside(self, key):
        fq = create(qparam_calculator_cls=key)
        x = torch.randn(4, 8)
        with torch.inference_mode():
            fq(x)
        fq.disable_observer()
        assert fq(x.clone().requires_grad_()).requires_grad
        fresh = create(qparam_calculator_cls=key)
        fresh.load_state_dict(fq.state_dict())
        assert torch.equal(fresh(x), fq(x))

    def test_a_cache_filled_inside_does_not_break_training_outside(self):
        weight = torch.randn(8, 8)
        fq = frozen(weight, "weight").eval()
        with torch.inference_mode():
            fq(weight)
        x = torch.randn(2, 8, requires_grad=True)
        nn.functional.linear(x, fq(weight)).sum().backward()
        assert x.grad is not None

    def test_an_inference_tensor_can_be_learned_from(self):
        fq = create(qparam_calculator_cls="learned")
        with torch.inference_mode():
            x = torch.randn(8)
        fq(x).sum().backward()
        assert fq.qparams_calculator.scale.grad is not None


class TestAliases:
    def test_no_statistic_shares_memory_with_the_input_or_another(self, tmp_path):
        x = torch.tensor([1.0, 2.0, 3.0])
        fq = create(qparam_calculator_cls="global_minmax", granularity=PerChannelGranularity(axis=0))
        fq(x)
        x.zero_()
        assert fq.qparams_calculator.running_max.tolist() == [1.0, 2.0, 3.0]
        save_file(fq.state_dict(), tmp_path / "state.safetensors")

    @pytest.mark.parametrize("key", ["static", "moving_average", "global_minmax", "histogram_mse", "learned"])
    def test_a_fixed_range_is_saved_as_any_other(self, key, tmp_path):
        fq = create(float_range=[-1, 1], qparam_calculator_cls=key, **CHANNEL)
        fq(torch.randn(4, 8))
        save_file(fq.state_dict(), tmp_path / "state.safetensors")

    def test_a_cached_result_may_be_written_to(self):
        weight = torch.randn(8, 8)
        fq = frozen(weight, "weight").eval()
        before = fq(weight).clone()
        fq(weight).mul_(100)
        assert torch.equal(fq(weight), before)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"qparam_calculator_cls": "histogram_entropy"}, {"range_calculator_cls": "mse"}, {"dtype": "float8_e4m3fn"}],
    ids=str,
)
def test_the_default_dtype_of_torch_changes_nothing(default, fields):
    x = torch.randn(400, 400, requires_grad=True)
    expected = create(**fields)(x)
    torch.set_default_dtype(default)
    try:
        fq = create(**fields)
        assert torch.equal(fq(x), expected)
        fq(x).sum().backward()
        assert fq.calculate_qparams().scale.dtype == torch.float32
        assert torch.equal(create(float_range=[-1, 1])(x), create(float_range=[-1, 1])(x))
    finally:
        torch.set_default_dtype(torch.float32)


class TestReplacedDefaults:
    def test_a_replaced_default_quantizer_is_used_by_default_specs(self):
        class Mine(DefaultFakeQuantize):
            pass

        with pytest.warns(UserWarning, match="is now Mine"):
            FakeQuantizeImplBase.register("default")(Mine)
        try:
            spec = QuantizationSpec()
            assert spec.fake_quantize_cls is Mine
            assert QuantizationSpec(**spec.model_dump()) == spec
        finally:
            FakeQuantizeImplBase._registry["default"] = DefaultFakeQuantize

    def test_a_replaced_static_calculator_serves_the_default_of_weights(self):
        class Mine(StaticQParamsCalculator):
            pass

        with pytest.warns(UserWarning, match="is now Mine"):
            QParamsCalculatorBase.register("static")(Mine)
        try:
            assert default_weight_quantization_spec().qparam_calculator_cls is Mine
            calculator = QuantizationComponentFactory.create_qparams_calculator(QuantizationSpec(), "weight")
            assert type(calculator) is Mine
        finally:
            QParamsCalculatorBase._registry["static"] = StaticQParamsCalculator


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: create("weights"), ValueError),
        (lambda: create()([1.0]), TensorError),
        (lambda: create()(None), TensorError),
        (lambda: create()(torch.randn(4).to(torch.float8_e4m3fn)), TensorError),
        (lambda: create().qparams_calculator(torch.empty(0)), TensorError),
        (lambda: QuantizationSpec(granularity={"type": 5}), ValueError),
        (lambda: QuantizationSpec(granularity={"type": ["a"]}), ValueError),
        (lambda: QuantizationSpec(float_range=[-(10**400), 1]), ValueError),
        (lambda: QuantizationSpec(float_range=[-1e300, 1e300]), ValueError),
        (lambda: QuantizationSpec.from_dict({1: 2}), ValueError),
        (lambda: QuantizationSpec.from_yaml(b"dtype: int8"), ValueError),
        (lambda: QuantizationSpec.from_json(None), ValueError),
        (lambda: QuantizationSpec.get_quant_range("int4", "foo"), ValueError),
        (lambda: ExtendedQuantizationSpec(dtype="int1", qscheme="symmetric_with_clipping"), ValueError),
        (lambda: PerChannelGranularity(axis=True), ValueError),
        (lambda: PerChannelGranularity(axis="1"), ValueError),
        (lambda: setattr(create(), "granularity", "per_channel"), ValueError),
    ],
)
def test_bad_input_raises_the_right_error(call, kind):
    with pytest.raises(kind):
        call()


def test_a_granularity_given_as_a_dict_is_built():
    fq = create()
    fq.granularity = {"type": "per_channel", "axis": 0}
    assert fq.granularity == PerChannelGranularity(axis=0)


def test_export_mode_before_anything_was_observed_is_an_error_not_an_observation():
    fq = create()
    fq.set_export_mode()
    with pytest.raises(NotObservedError, match="calibration data"):
        fq(torch.randn(4))


def test_parameters_on_another_device_are_named_while_observing_too():
    fq = create()
    fq(torch.randn(4))
    fq.to("meta")
    with pytest.raises(TensorError, match="parameters are on meta"):
        fq(torch.randn(4))


def test_the_dynamic_calculator_shows_the_parameters_of_the_last_call():
    fq = create(qparam_calculator_cls="dynamic")
    fq(torch.tensor([1.0]))
    assert fq.calculate_qparams().scale == torch.tensor([1 / 127.5])


def test_a_partial_of_the_factory_takes_more_arguments():
    partial = QuantizationComponentFactory.create_fake_quantizer_partial(QuantizationSpec(), "weight")
    assert partial.with_args(strict=True)().strict
    assert partial.__name__ == "create_fake_quantizer"


def test_a_subclass_may_change_the_default_dtype_to_fp4():
    class Four(QuantizationSpec):
        dtype: QuantizationSpec.model_fields["dtype"].annotation = torch.float4_e2m1fn_x2

    assert Four().scale_dtype == torch.float8_e8m0fnu


def test_a_granularity_alone_round_trips():
    granularity = PerBlockGranularity(axis=1, block_size=8)
    assert PerBlockGranularity.model_validate(granularity.model_dump()) == granularity
    assert granularity.model_dump(exclude_defaults=True)["block_size"] == 8


def test_float_ranges_are_equal_by_value():
    assert (QuantizationSpec().float_range != [None, None]) is False


def test_a_range_calculator_is_reachable_with_its_own_granularity():
    assert isinstance(create(**CHANNEL).qparams_calculator.range_calculator, MinMaxRangeCalculator)
    assert create(**CHANNEL).qparams_calculator.range_calculator.granularity == PerChannelGranularity(axis=0)
