"""The fields of ExtendedQuantizationSpec take effect, or they are an error."""

import pytest
import torch

from scalepoint.spec import ExtendedQuantizationSpec, QuantizationComponentFactory, QuantizationSpec

create = QuantizationComponentFactory.create_fake_quantizer


@pytest.mark.parametrize("bits", [1, 3, 5, 6, 7, 16])
@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
def test_every_integer_width_quantizes_within_half_a_step(kind, bits, scheme):
    spec = ExtendedQuantizationSpec(dtype=f"{kind}{bits}", qscheme=scheme)
    assert spec.n_bits == bits
    fq = create(spec, "weight")
    x = torch.randn(64, 64)
    error = (fq(x) - x).abs().max()
    scale, zero_point, minval = fq.calculate_qparams()
    assert error <= scale.max() * 1.001 if scheme == "asymmetric" or bits > 1 else error < 4 * scale.max()
    codes = fq.quantize(x, scale, zero_point, minval)
    assert codes.dtype == spec.target_dtype
    assert codes.to(torch.int32).min() >= spec.quant_min
    assert codes.to(torch.int32).max() <= spec.quant_max


def test_a_wide_integer_is_stored_in_sixteen_bits():
    assert ExtendedQuantizationSpec(dtype="int16").target_dtype == torch.int16
    assert ExtendedQuantizationSpec(dtype="uint16").target_dtype == torch.uint16


def test_the_base_spec_does_not_know_the_extra_widths():
    with pytest.raises(ValueError, match="Allowed dtypes"):
        QuantizationSpec(dtype="int3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"percentile": 99.0}, "percentile=99.0 has no effect"),
        ({"bins": 128}, "bins=128 has no effect"),
        ({"search_steps": 10}, "has no effect"),
        ({"averaging_constant": 0.5, "qparam_calculator_cls": "static"}, "has no effect"),
        ({"scale_rounding": "ceil"}, "is for float8_e8m0fnu scales"),
        ({"exact_zero": True}, "is for qformulation='minval'"),
        ({"percentile": 40, "range_calculator_cls": "percentile"}, "more than 50"),
        ({"bins": 17, "qparam_calculator_cls": "histogram_mse"}, "multiple of 2"),
        ({"on_nan": "ignore"}, "'error' or 'skip'"),
        ({"percentle": 99.0}, "did you mean 'percentile'"),
    ],
    ids=str,
)
def test_an_option_without_effect_or_out_of_bounds_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExtendedQuantizationSpec(**fields)


def test_options_reach_their_component():
    spec = ExtendedQuantizationSpec(qparam_calculator_cls="histogram_percentile", percentile=90.0, bins=512)
    calculator = create(spec, "activation").qparams_calculator
    assert (calculator.percentile, calculator.bins) == (90.0, 512)
    calculator(torch.randn(1000))
    assert calculator.counts.shape == (1, 512)


def test_the_default_calculator_of_activations_uses_the_averaging_constant():
    spec = ExtendedQuantizationSpec(averaging_constant=0.5)
    assert create(spec, "activation").qparams_calculator.averaging_constant == 0.5


def test_exact_zero_makes_zero_exact_under_minval():
    x = torch.linspace(-0.37, 1.0, 50)
    for exact in (False, True):
        spec = ExtendedQuantizationSpec(qscheme="asymmetric", qformulation="minval", exact_zero=exact)
        fq = create(spec, "weight")
        fq(x)
        fq.disable_observer()
        assert bool(fq(torch.zeros(1)) == 0) is exact


def test_an_extended_spec_round_trips_and_differs_from_a_base_spec():
    spec = ExtendedQuantizationSpec(range_calculator_cls="percentile", percentile=99.5)
    assert ExtendedQuantizationSpec.from_json(spec.to_json()) == spec
    assert spec != QuantizationSpec(range_calculator_cls="percentile")


def test_fields_of_a_further_subclass_reach_the_components_with_their_defaults():
    class Warm(ExtendedQuantizationSpec):
        temperature: float = 1.0

    extra = Warm().get_extra_args()
    assert extra["temperature"] == 1.0
    assert set(extra) == set(Warm.model_fields) - set(QuantizationSpec.model_fields)
