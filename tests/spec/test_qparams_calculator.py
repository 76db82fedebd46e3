"""Contract A4: qparams calculators, their statistics and their errors."""

import pytest
import torch

from scalepoint.errors import FrozenError, NonFiniteError, UsageError
from scalepoint.spec import (
    CompressionTargetTensor,
    DefaultQParamsCalculator,
    DynamicQParamsCalculator,
    ExtendedQuantizationSpec,
    GlobalMinMaxQParamsCalculator,
    LearnedScaleQParamsCalculator,
    MinMaxRangeCalculator,
    MovingAverageQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationScheme,
    QuantizationSpec,
    RunningRangeMixin,
    StatefulQParamsCalculatorBase,
    StatelessQParamsCalculatorBase,
    StaticQParamsCalculator,
)
from tests.errors import raises

REMEMBERING = [
    "moving_average",
    "global_minmax",
    "histogram_percentile",
    "histogram_mse",
    "histogram_entropy",
]
STORING = ["static", *REMEMBERING]


def build(kind, granularity=None, scheme="symmetric", float_range=(None, None), **extra):
    granularity = granularity or PerTensorGranularity()
    return kind(
        torch.int8,
        QuantizationScheme(scheme),
        granularity,
        torch.int8,
        -128,
        127,
        MinMaxRangeCalculator(granularity),
        float_range,
        **extra,
    )


def create(key, **fields):
    spec = ExtendedQuantizationSpec(qparam_calculator_cls=key, **fields)
    return QuantizationComponentFactory.create_qparams_calculator(spec, CompressionTargetTensor.ACTIVATION)


@pytest.mark.parametrize("key", STORING)
def test_before_the_first_use_parameters_are_empty_with_a_warning(key):
    calculator = create(key)
    with pytest.warns(UserWarning, match="observed nothing yet"):
        scale, zero_point, minval = calculator.get_qparams()
    assert scale.numel() == zero_point.numel() == minval.numel() == 0
    assert zero_point.dtype == torch.int32


def test_float_dtypes_have_no_zero_point_and_no_minval():
    calculator = create("static", dtype="float8_e4m3fn")
    scale, zero_point, minval = calculator(torch.tensor([-3.0, 3.0]))
    assert torch.equal(scale, torch.tensor([3 / 448]))
    assert zero_point is None
    assert minval is None


@pytest.mark.parametrize("key", STORING)
def test_calling_stores_what_it_returns_in_the_rank_of_the_tensor(key):
    calculator = create(key)
    returned = calculator(torch.randn(2, 3, 4))
    assert returned.scale.shape == (1, 1, 1)
    for name, value in zip(("scale", "zero_point", "minval"), returned, strict=True):
        assert torch.equal(getattr(calculator, name), value)
    assert torch.equal(calculator.get_qparams().scale, returned.scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("key", [*STORING, "dynamic", "learned"])
def test_statistics_and_scales_are_float32_for_every_input_dtype(key, dtype):
    calculator = create(key)
    scale, _, minval = calculator(torch.randn(100).to(dtype))
    assert scale.dtype == minval.dtype == torch.float32
    for name in ("running_min", "running_max"):
        assert getattr(calculator, name, torch.zeros(1)).dtype == torch.float32


def test_static_looks_at_the_current_tensor_only():
    calculator = build(StaticQParamsCalculator)
    calculator(torch.tensor([10.0]))
    assert calculator(torch.tensor([1.0])).scale == torch.tensor([1 / 127.5])


@pytest.mark.parametrize("constant", [0.01, 0.5, 1.0])
def test_a_moving_average_takes_the_first_batch_as_it_is(constant):
    calculator = build(MovingAverageQParamsCalculator, averaging_constant=constant)
    calculator(torch.tensor([-1.0, 3.0]))
    assert (calculator.running_min, calculator.running_max) == (-1.0, 3.0)
    calculator(torch.tensor([-2.0, 1.0]))
    torch.testing.assert_close(calculator.running_min, torch.tensor([constant * -2.0 + (1 - constant) * -1.0]))
    torch.testing.assert_close(calculator.running_max, torch.tensor([constant * 1.0 + (1 - constant) * 3.0]))


def test_a_moving_average_widens_each_batch_to_include_zero_before_it_averages():
    calculator = build(MovingAverageQParamsCalculator, scheme="asymmetric")
    calculator(torch.tensor([0.5, 2.0]))
    scale, zero_point, _ = calculator(torch.tensor([-1.0, 2.0]))
    torch.testing.assert_close(calculator.running_min, torch.tensor([-0.01]))
    torch.testing.assert_close(scale, torch.tensor([2.01 / 255]))
    assert zero_point == -127


def test_a_rule_of_a_user_gets_ranges_that_include_zero():
    class Slowest(RunningRangeMixin):
        def update_running_range(self, min_val, max_val):
            return torch.maximum(self.running_min, min_val), torch.minimum(self.running_max, max_val)

    calculator = build(Slowest)
    for values in ([1.0, 4.0], [-3.0, -1.0]):
        calculator(torch.tensor(values))
    assert (calculator.running_min, calculator.running_max) == (0.0, 0.0)


def test_a_moving_average_constant_of_one_percent_is_the_default():
    assert build(MovingAverageQParamsCalculator).averaging_constant == 0.01


def test_global_minmax_only_widens():
    calculator = build(GlobalMinMaxQParamsCalculator)
    for values, low, high in [([-1.0, 1.0], -1, 1), ([-0.5, 4.0], -1, 4), ([0.0, 0.0], -1, 4), ([-7.0, 0.0], -7, 4)]:
        calculator(torch.tensor(values))
        assert (calculator.running_min, calculator.running_max) == (low, high)


@pytest.mark.parametrize("key", REMEMBERING)
def test_the_order_of_batches_matters_only_for_a_moving_average(key):
    batches = [torch.randn(50) * width for width in (0.1, 3.0, 1.0, 40.0)]
    forward, backward = create(key), create(key)
    for batch in batches:
        forward(batch)
    for batch in reversed(batches):
        backward(batch)
    assert torch.equal(forward.scale, backward.scale) is (key != "moving_average")


@pytest.mark.parametrize("key", REMEMBERING[1:])
@pytest.mark.parametrize("granularity", [PerTensorGranularity(), PerChannelGranularity(axis=0)], ids=str)
def test_merging_parts_equals_observing_all_data(key, granularity):
    batches = [torch.randn(4, 64) * width for width in (1.0, 5.0, 0.2)]
    all_data, first, second = (create(key, granularity=granularity) for _ in range(3))
    for batch in batches:
        all_data(batch)
    first(batches[0])
    second(batches[1])
    second(batches[2])
    first.merge(second)
    assert torch.equal(first.scale, all_data.scale)
    assert first.observed_batches == 3


def test_merging_moving_averages_weighs_by_batches():
    first, second = create("moving_average"), create("moving_average")
    first(torch.tensor([1.0]))
    for _ in range(3):
        second(torch.tensor([5.0]))
    first.merge(second)
    torch.testing.assert_close(first.running_max, torch.tensor([4.0]))


def test_merging_into_an_empty_one_takes_over_and_merging_an_empty_one_changes_nothing():
    first, second = create("histogram_mse"), create("histogram_mse")
    first(torch.randn(100))
    before = first.scale.clone()
    first.merge(second)
    assert torch.equal(first.scale, before)
    second.merge(first)
    assert torch.equal(second.scale, before)


def test_a_calculator_without_statistics_cannot_be_merged():
    with pytest.raises(UsageError, match="use moving_average, global_minmax"):
        create("static").merge(create("static"))
    with pytest.raises(ValueError, match="the same spec"):
        create("global_minmax").merge(create("moving_average"))


@pytest.mark.parametrize("key", STORING)
def test_export_mode_stops_updating_until_it_is_left(key):
    calculator = create(key)
    first = calculator(torch.tensor([-3.0, 3.0]))
    calculator.set_export_mode()
    assert torch.equal(calculator(torch.tensor([-100.0, 100.0])).scale, first.scale)
    calculator.set_export_mode(False)
    assert calculator(torch.tensor([-100.0, 100.0])).scale > first.scale


def test_the_range_given_is_returned_unchanged_by_later_batches():
    calculator = build(GlobalMinMaxQParamsCalculator)
    first = calculator(torch.tensor([1.0])).scale
    before = first.clone()
    calculator(torch.tensor([50.0]))
    assert torch.equal(first, before)


class TestFloatRange:
    @pytest.mark.parametrize("key", STORING)
    def test_both_ends_fixed_are_computed_once_and_never_observed(self, key):
        calculator = create(key, float_range=[-2.0, 6.0], qscheme="asymmetric")
        first = calculator(torch.randn(10))
        assert torch.equal(first.scale, torch.tensor([8 / 255]))
        assert torch.equal(first.minval, torch.tensor([-2.0]))
        assert torch.equal(calculator(torch.randn(10) * 100).scale, first.scale)
        assert calculator.observed_batches == 0

    @pytest.mark.parametrize("key", ["static", "moving_average", "global_minmax"])
    @pytest.mark.parametrize(
        "granularity", [PerTensorGranularity(), PerBlockGranularity(axis=1, block_size=2)], ids=["tensor", "block"]
    )
    def test_one_end_fixed_replaces_the_observed_one(self, key, granularity):
        x = torch.tensor([[-1.0, 3.0, -2.0, 5.0]])
        calculator = create(key, float_range=[-10.0, None], qscheme="asymmetric", granularity=granularity)
        scale, _, minval = calculator(x)
        assert (minval == -10).all()
        torch.testing.assert_close(scale.max(), torch.tensor(15 / 255))

    def test_a_symmetric_scheme_takes_the_larger_end(self):
        calculator = create("static", float_range=[0.0, 5.0])
        scale, _, minval = calculator(torch.randn(10) * 100)
        assert torch.equal(scale, torch.tensor([5 / 127.5]))
        assert minval == -5

    def test_observed_ends_are_widened_to_hold_zero(self):
        scale, zero_point, minval = create("static", qscheme="asymmetric")(torch.tensor([2.0, 6.0]))
        assert (scale, zero_point, minval) == (torch.tensor([6 / 255]), -128, 0.0)


class TestGranularity:
    def test_it_may_be_set_before_the_first_use_and_reaches_the_range_calculator(self):
        calculator = build(MovingAverageQParamsCalculator)
        calculator.granularity = PerChannelGranularity(axis=1)
        assert calculator.range_calculator.granularity == PerChannelGranularity(axis=1)
        assert calculator(torch.randn(2, 5)).scale.shape == (1, 5)

    def test_it_may_not_be_set_after_the_first_use(self):
        calculator = build(StaticQParamsCalculator)
        calculator(torch.randn(4))
        with pytest.raises(FrozenError, match="call reset"):
            calculator.granularity = PerChannelGranularity(axis=0)
        assert issubclass(FrozenError, RuntimeError)

    def test_a_reset_makes_it_new(self):
        calculator = create("histogram_mse")
        calculator(torch.randn(4))
        calculator.reset()
        assert not calculator.is_initialized
        assert calculator.observed_batches == 0
        calculator.granularity = PerChannelGranularity(axis=0)
        assert calculator(torch.randn(3, 4)).scale.shape == (3, 1)

    def test_after_a_reset_a_wide_first_batch_is_forgotten(self):
        calculator = create("moving_average")
        calculator(torch.tensor([100.0]))
        calculator.reset()
        calculator(torch.tensor([1.0]))
        assert calculator.running_max == 1.0


class TestNonFinite:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
    @pytest.mark.parametrize("key", STORING)
    def test_a_bad_batch_names_quantizer_batch_and_share_and_changes_nothing(self, key, bad):
        calculator = create(key)
        calculator.name = "layer1.conv.weight"
        calculator(torch.randn(10))
        before = {name: value.clone() for name, value in calculator.state_dict().items()}
        with raises(NonFiniteError, "layer1.conv.weight", "batch 1", "of 3 values"):
            calculator(torch.tensor([1.0, bad, 2.0]))
        after = calculator.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())

    def test_a_bad_batch_may_be_skipped_and_is_counted(self):
        calculator = create("global_minmax", on_nan="skip")
        calculator.name = "stem"
        with pytest.warns(UserWarning, match="stem, batch 0: 1 NaN"):
            calculator(torch.tensor([float("nan")]))
        assert not calculator.is_initialized
        calculator(torch.tensor([1.0]))
        calculator(torch.tensor([float("inf"), 5.0]))
        assert calculator.running_max == 1.0
        assert (calculator.observed_batches, calculator.skipped_batches) == (1, 2)


class TestLearned:
    def test_the_first_range_sets_the_scale_and_gradients_change_it(self):
        calculator = build(LearnedScaleQParamsCalculator)
        parameter = calculator.scale
        scale = calculator(torch.randn(100)).scale
        assert calculator.scale is parameter
        assert scale.requires_grad
        before = parameter.detach().clone()
        calculator(torch.randn(100) * 50)
        assert torch.equal(parameter, before)

    def test_an_optimizer_built_before_the_first_use_still_learns(self):
        calculator = build(LearnedScaleQParamsCalculator)
        optimizer = torch.optim.SGD(calculator.parameters(), lr=0.1)
        scale = calculator(torch.randn(100)).scale
        before = calculator.scale.detach().clone()
        (scale.sum() * 1000).backward()
        optimizer.step()
        assert not torch.equal(calculator.scale, before)

    def test_a_negative_scale_is_kept_positive(self):
        calculator = build(LearnedScaleQParamsCalculator)
        calculator(torch.randn(10))
        with torch.no_grad():
            calculator.scale.fill_(-1.0)
        assert calculator(torch.randn(10)).scale > 0

    def test_export_mode_gives_a_constant(self):
        calculator = build(LearnedScaleQParamsCalculator)
        calculator(torch.randn(10))
        calculator.set_export_mode()
        assert not calculator(torch.randn(10)).scale.requires_grad

    def test_a_scale_that_must_be_a_power_of_two_cannot_be_learned(self):
        with pytest.raises(ValueError, match="leave out scale_dtype="):
            create("learned", dtype="float4_e2m1fn")

    def test_the_learned_scale_survives_a_state_dict(self):
        calculator, fresh = create("learned"), create("learned")
        calculator(torch.randn(10))
        fresh.load_state_dict(calculator.state_dict())
        assert torch.equal(fresh.scale, calculator.scale)


class TestDynamic:
    def test_each_call_has_its_own_scale_also_in_export_mode(self):
        calculator = build(DynamicQParamsCalculator)
        calculator.set_export_mode()
        assert calculator(torch.tensor([1.0])).scale != calculator(torch.tensor([9.0])).scale

    def test_each_token_has_its_own_scale_whatever_the_batch(self):
        calculator = build(DynamicQParamsCalculator, PerTokenGranularity())
        for shape in [(2, 5, 16), (3, 7, 16)]:
            x = torch.randn(shape)
            torch.testing.assert_close(calculator(x).scale, x.abs().amax(-1, keepdim=True) / 127.5)


def test_the_default_is_a_marker_that_cannot_be_built():
    with pytest.raises(RuntimeError, match="is a marker class"):
        build(DefaultQParamsCalculator)


@pytest.mark.parametrize(
    ("target", "kind"), [("weight", StaticQParamsCalculator), ("activation", MovingAverageQParamsCalculator)]
)
def test_the_default_is_resolved_by_what_the_tensor_is(target, kind):
    assert type(QuantizationComponentFactory.create_qparams_calculator(QuantizationSpec(), target)) is kind


def test_batches_may_differ_in_rank_per_tensor():
    calculator = create("global_minmax")
    calculator(torch.randn(4))
    calculator(torch.full((2, 3, 4), 9.0))
    assert calculator.running_max == 9.0


def test_histogram_memory_does_not_grow_with_batches():
    calculator = create("histogram_mse", bins=256)
    calculator(torch.randn(1000))
    sizes = {name: value.shape for name, value in calculator.state_dict().items()}
    for scale in (1e-3, 1.0, 1e5):
        calculator(torch.randn(1000) * scale)
    assert {name: value.shape for name, value in calculator.state_dict().items()} == sizes
    assert calculator.counts.sum() == 4000


def test_the_repr_shows_small_parameters_and_export_mode():
    calculator = build(StaticQParamsCalculator)
    text = calculator.extra_repr()
    assert "scale=tensor([])" in text
    assert "zero_point=tensor([], dtype=torch.int32)" in text
    assert "export_mode=False" in text
    calculator(torch.randn(1))
    calculator.set_export_mode(True)
    assert "export_mode=True" in repr(calculator)


def test_nvfp4_stores_the_tensor_scale_in_addition_to_the_product():
    calculator = create(
        "static",
        dtype="float4_e2m1fn",
        scale_dtype="float8_e4m3fn",
        granularity=PerBlockGranularity(axis=1, block_size=16),
    )
    x = torch.randn(4, 64)
    scale = calculator(x).scale
    torch.testing.assert_close(calculator.tensor_scale, x.abs().max() / (448 * 6))
    inner = scale / calculator.tensor_scale
    torch.testing.assert_close(inner, inner.to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("key", QParamsCalculatorBase.list_registry_keys())
def test_calculators_are_at_most_two_classes_below_the_stateful_or_stateless_base(key):
    line = QParamsCalculatorBase.get_class(key).__mro__
    base = StatelessQParamsCalculatorBase if key == "dynamic" else StatefulQParamsCalculatorBase
    assert key == "default" or line.index(base) <= 2


@pytest.mark.parametrize("key", REMEMBERING)
def test_the_names_in_the_state_dict_do_not_change(key):
    histogram = ["counts", "power"] if key.startswith("histogram") else []
    assert list(create(key).state_dict()) == [
        "scale",
        "zero_point",
        "minval",
        "observed_batches",
        "skipped_batches",
        "export_mode",
        "running_min",
        "running_max",
        *histogram,
    ]


@pytest.mark.parametrize("key", REMEMBERING)
def test_a_seeded_calculator_starts_with_the_range_of_the_parameters(key):
    first = create("static", qscheme="asymmetric")(torch.tensor([-1.0, 3.0]))
    calculator = create(key, qscheme="asymmetric")
    calculator.seed(first)
    assert torch.equal(calculator.get_qparams().scale, first.scale)
    torch.testing.assert_close(calculator.running_max - calculator.running_min, torch.tensor([4.0]))
