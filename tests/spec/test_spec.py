"""Contract A1: fields, derived values, every rule with its error, and dumps."""

import json

import pytest
import torch
import yaml

from scalepoint.errors import SpecError
from scalepoint.numerics import Float6
from scalepoint.spec import (
    DefaultFakeQuantize,
    DefaultQParamsCalculator,
    FakeQuantizeImplBase,
    GlobalMinMaxQParamsCalculator,
    MinMaxRangeCalculator,
    MovingAverageQParamsCalculator,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QParamsCalculatorBase,
    QuantizationFormulation,
    QuantizationScheme,
    QuantizationSpec,
    RangeCalculatorBase,
    StaticQParamsCalculator,
    default_activation_quantization_spec,
    default_weight_quantization_spec,
)

SPECS = {
    "default": QuantizationSpec(),
    "asymmetric per channel": QuantizationSpec(qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)),
    "uint8 minval": QuantizationSpec(dtype="uint8", qformulation="minval"),
    "int4 block": QuantizationSpec(
        dtype=torch.int4,
        qscheme="symmetric_with_clipping",
        granularity=PerBlockGranularity(axis=1, block_size=32, pad=True),
    ),
    "tile": QuantizationSpec(granularity={"type": "per_block", "block_size": [4, -1, 1]}),
    "fixed range": QuantizationSpec(float_range=[-3, None], qparam_calculator_cls="global_minmax"),
    "mxfp8": QuantizationSpec(dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu"),
    "mxfp6": QuantizationSpec(
        dtype="float6_e3m2fn", granularity=PerBlockGranularity(axis=1, block_size=32), qparam_calculator_cls="static"
    ),
    "nvfp4": QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn"),
    "weight": default_weight_quantization_spec(),
    "activation": default_activation_quantization_spec(),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def test_the_defaults_follow_the_contract():
    spec = QuantizationSpec()
    assert spec.dtype == torch.int8
    assert spec.qscheme is QuantizationScheme.SYMMETRIC
    assert spec.qformulation is QuantizationFormulation.ZP
    assert spec.granularity == PerTensorGranularity()
    assert spec.fake_quantize_cls is DefaultFakeQuantize
    assert spec.qparam_calculator_cls is DefaultQParamsCalculator
    assert spec.range_calculator_cls is MinMaxRangeCalculator
    assert spec.float_range == [None, None]
    assert spec.scale_dtype is None
    assert spec.get_extra_args() == {}


def test_the_weight_default_is_per_channel_and_static_and_the_activation_default_a_moving_average():
    weight, activation = default_weight_quantization_spec(), default_activation_quantization_spec()
    assert weight.granularity == PerChannelGranularity(axis=0)
    assert weight.qparam_calculator_cls is StaticQParamsCalculator
    assert activation.granularity == PerTensorGranularity()
    assert activation.qparam_calculator_cls is MovingAverageQParamsCalculator
    assert weight.qscheme is activation.qscheme is QuantizationScheme.SYMMETRIC


@pytest.mark.parametrize(
    ("dtype", "bits", "target", "limits", "clipped"),
    [
        ("int8", 8, torch.int8, (-128, 127), (-127, 127)),
        ("int4", 4, torch.int8, (-8, 7), (-7, 7)),
        ("int2", 2, torch.int8, (-2, 1), (-1, 1)),
        ("uint8", 8, torch.uint8, (0, 255), (0, 255)),
        ("uint4", 4, torch.uint8, (0, 15), (0, 15)),
        ("uint2", 2, torch.uint8, (0, 3), (0, 3)),
        ("float8_e4m3fn", 8, torch.float8_e4m3fn, (-448, 448), None),
        ("float8_e5m2", 8, torch.float8_e5m2, (-57344, 57344), None),
        ("float6_e2m3fn", 6, torch.float8_e4m3fn, (-7.5, 7.5), None),
        ("float6_e3m2fn", 6, torch.float8_e4m3fn, (-28, 28), None),
        ("float4_e2m1fn_x2", 4, torch.float8_e4m3fn, (-6, 6), None),
    ],
)
def test_width_storage_and_limits_follow_from_dtype_and_scheme(dtype, bits, target, limits, clipped):
    spec = QuantizationSpec(dtype=dtype)
    assert (spec.n_bits, spec.target_dtype, (spec.quant_min, spec.quant_max)) == (bits, target, limits)
    assert QuantizationSpec.get_n_bits_from_dtype(dtype) == bits
    assert QuantizationSpec.get_target_dtype(spec.dtype) == target
    assert QuantizationSpec.get_quant_range(dtype, "symmetric") == limits
    if clipped:
        spec = QuantizationSpec(dtype=dtype, qscheme="symmetric_with_clipping")
        assert (spec.quant_min, spec.quant_max) == clipped


@pytest.mark.parametrize(
    ("alias", "dtype"),
    [
        ("float4_e2m1fn", torch.float4_e2m1fn_x2),
        ("float6_e2m3", Float6.E2M3),
        ("float6_e3m2fn", Float6.E3M2),
        ("float8_e4m3", torch.float8_e4m3fn),
        ("torch.int8", torch.int8),
    ],
)
def test_an_alias_names_its_dtype(alias, dtype):
    assert QuantizationSpec(dtype=alias).dtype == dtype


def test_e8m0_has_an_alias_as_a_scale():
    assert QuantizationSpec(dtype="float8_e5m2", scale_dtype="float8_e8m0").scale_dtype == torch.float8_e8m0fnu


def test_fp4_without_a_scale_type_has_e8m0_scales():
    assert QuantizationSpec(dtype="float4_e2m1fn").scale_dtype == torch.float8_e8m0fnu
    assert QuantizationSpec(dtype=torch.float4_e2m1fn_x2, scale_dtype=None).scale_dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2", Float6.E2M3], ids=str)
def test_fp6_has_e8m0_scales_and_no_others(dtype):
    assert QuantizationSpec(dtype=dtype).scale_dtype == torch.float8_e8m0fnu
    with pytest.raises(SpecError, match=r"must be float8_e8m0fnu for float6_e.m.fn"):
        QuantizationSpec(dtype=dtype, scale_dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int9"}, "Unsupported dtype: 'int9'"),
        ({"dtype": torch.float16}, "'float16'.*Allowed dtypes: float4_e2m1fn_x2, .*uint8"),
        ({"dtype": torch.int3}, "Allowed dtypes"),
        ({"dtype": 8}, "Unsupported dtype"),
        ({"qscheme": "symmetricc"}, "symmetric_with_clipping"),
        ({"qformulation": "min_val"}, "minval"),
        ({"granularity": "per_tensor"}, "dict with 'type'"),
        ({"granularity": {"type": "per_chanel"}}, "did you mean 'per_channel'"),
        ({"granularity": {"type": "per_channel", "axes": 0}}, "did you mean 'axis'"),
        ({"granularity": {"axis": 0}}, "dict with 'type'"),
        ({"fake_quantize_cls": "defalt"}, "did you mean 'default'"),
        ({"qparam_calculator_cls": "moving_avg"}, "did you mean 'moving_average'"),
        ({"range_calculator_cls": "minmaxx"}, "did you mean 'minmax'"),
        ({"range_calculator_cls": StaticQParamsCalculator}, "is not a RangeCalculatorBase"),
        ({"range_calculator_cls": 3}, "registered class or a key"),
        ({"float_range": None}, r"must be \[low, high\]"),
        ({"float_range": [0.0, 1.0, 2.0]}, r"must be \[low, high\]"),
        ({"float_range": [0.0, True]}, "True .*number"),
        ({"float_range": ["0", 1]}, "'0' .*number"),
        ({"float_range": [1.0, 2.0]}, "at most 0"),
        ({"float_range": [-2.0, -1.0]}, "at least 0"),
        ({"float_range": [0.0, 0.0]}, "below high"),
        ({"float_range": [float("nan"), 1.0]}, "finite"),
        ({"float_range": [None, float("inf")]}, "finite"),
        ({"dtype": "float8_e4m3fn", "qscheme": "asymmetric"}, "use qscheme='symmetric'"),
        ({"dtype": "float4_e2m1fn", "qscheme": "symmetric_with_clipping"}, "use qscheme='symmetric'"),
        ({"dtype": "float8_e5m2", "qformulation": "minval"}, "use qformulation='zp'"),
        ({"dtype": "float6_e2m3fn", "qscheme": "asymmetric"}, "float6_e2m3fn.*asymmetric.*qscheme="),
        ({"dtype": "float6_e3m2fn", "qformulation": "minval"}, "use qformulation='zp'"),
        ({"dtype": "float6_e3m3fn"}, "did you mean 'float6_e3m2fn'"),
        ({"dtype": "float8_e4m3fn", "scale_dtype": "float6_e3m2fn"}, "torch does not have float6_e3m2fn"),
        ({"dtype": "int8", "scale_dtype": "float8_e8m0fnu"}, "must be None for int8"),
        ({"dtype": "float8_e4m3fn", "scale_dtype": "float8_e4m3fn"}, "None or float8_e8m0fnu"),
        ({"dtype": "float4_e2m1fn", "scale_dtype": "float32"}, "float8_e8m0fnu or float8_e4m3fn"),
        ({"scale_dtype": "float8_typo"}, "'float8_typo'.*did you mean"),
        ({"granularty": {"type": "per_tensor"}}, "'granularty'.*'granularity'"),
        ({"bits": 8}, "no field 'bits'.*Known: dtype"),
    ],
    ids=str,
)
def test_invalid_fields_are_errors_with_a_hint(fields, message):
    with pytest.raises(SpecError, match=message):
        QuantizationSpec(**fields)


def test_a_class_that_is_not_registered_is_refused():
    class Unregistered(MinMaxRangeCalculator):
        pass

    with pytest.raises(ValueError, match=r"RangeCalculatorBase\.register"):
        QuantizationSpec(range_calculator_cls=Unregistered)


def test_a_registered_class_is_accepted_and_dumps_as_its_key():
    spec = QuantizationSpec(qparam_calculator_cls=GlobalMinMaxQParamsCalculator)
    assert spec.to_dict()["qparam_calculator_cls"] == "global_minmax"


def test_users_may_extend_the_supported_dtypes(monkeypatch):
    monkeypatch.setattr(QuantizationSpec, "SUPPORTED_DTYPES", QuantizationSpec.SUPPORTED_DTYPES | {torch.int6})
    spec = QuantizationSpec(dtype="int6")
    assert (spec.n_bits, spec.quant_min, spec.quant_max, spec.target_dtype) == (6, -32, 31, torch.int8)


def test_a_dtype_without_arithmetic_is_refused_even_when_it_was_declared_supported(monkeypatch):
    monkeypatch.setattr(QuantizationSpec, "SUPPORTED_DTYPES", QuantizationSpec.SUPPORTED_DTYPES | {torch.float16})
    with pytest.raises(ValueError, match="dtype float16 is not supported"):
        QuantizationSpec(dtype="float16")


@each_spec
def test_a_spec_cannot_be_changed(spec):
    with pytest.raises(SpecError, match="frozen"):
        spec.dtype = torch.int4


@each_spec
@pytest.mark.parametrize("form", ["dump", "dict", "json", "yaml", "through plain json", "through plain yaml"])
def test_a_dump_loads_back_equal_with_an_equal_hash(spec, form):
    again = {
        "dump": lambda: QuantizationSpec(**spec.model_dump()),
        "dict": lambda: QuantizationSpec.from_dict(spec.to_dict()),
        "json": lambda: QuantizationSpec.from_json(spec.to_json()),
        "yaml": lambda: QuantizationSpec.from_yaml(spec.to_yaml()),
        "through plain json": lambda: QuantizationSpec(**json.loads(json.dumps(spec.to_dict()))),
        "through plain yaml": lambda: QuantizationSpec(**yaml.safe_load(yaml.safe_dump(spec.to_dict()))),
    }[form]()
    assert again == spec
    assert hash(again) == hash(spec)


@each_spec
def test_a_dump_holds_the_derived_values_and_the_type_of_the_granularity(spec):
    dump = spec.model_dump()
    assert {"n_bits", "target_dtype", "quant_min", "quant_max"} <= set(dump)
    assert dump["granularity"]["type"] in ("per_tensor", "per_channel", "per_block")


@pytest.mark.parametrize("target", ["int8", "torch.int8", torch.int8], ids=str)
def test_derived_values_that_agree_are_accepted(target):
    spec = QuantizationSpec(dtype="int4", n_bits=4, quant_min=-8.0, quant_max=7, target_dtype=target)
    assert spec == QuantizationSpec(dtype="int4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_bits": 3}, "n_bits=3 .*dtype='int8'.*dtype='int3'"),
        ({"n_bits": 12}, "n_bits=12 .*dtype='int8'.*n_bits=8"),
        ({"dtype": "uint8", "n_bits": 4}, "pass dtype='uint4'"),
        ({"dtype": "float8_e5m2", "n_bits": 4}, "n_bits=4 contradicts dtype='float8_e5m2'"),
        ({"n_bits": None}, "n_bits=None contradicts"),
        ({"dtype": "int2", "n_bits": "2"}, "n_bits='2' contradicts"),
        ({"quant_min": 0}, "quant_min=0 .*'symmetric'.*quant_min=-128"),
        ({"quant_max": 255}, "quant_max=255 .*quant_max=127"),
        ({"qscheme": "symmetric_with_clipping", "quant_min": -128}, "'symmetric_with_clipping', .*quant_min=-127"),
        ({"target_dtype": "uint8"}, "target_dtype='uint8'.*target_dtype='int8'"),
        ({"dtype": "int4", "target_dtype": torch.int4}, "target_dtype=torch.int4 contradicts"),
        ({"target_dtype": 8}, "target_dtype=8 contradicts"),
    ],
    ids=str,
)
def test_a_contradicting_derived_value_is_an_error_with_a_hint(fields, message):
    with pytest.raises(SpecError, match=message):
        QuantizationSpec(**fields)
    with pytest.raises(SpecError, match=message):
        QuantizationSpec.from_dict(fields)
    with pytest.raises(SpecError, match=message):
        QuantizationSpec().model_copy(update=fields)


def test_a_changed_copy_is_checked_as_a_new_spec_is():
    spec = QuantizationSpec(dtype="int4", granularity={"type": "per_channel", "axis": 0})
    assert spec.model_copy() == spec.model_copy(deep=True) == spec
    copied = spec.model_copy(update={"dtype": "int8"})
    assert (copied.dtype, copied.n_bits, copied.granularity) == (torch.int8, 8, spec.granularity)
    with pytest.raises(SpecError, match="no field 'dtyp'"):
        spec.model_copy(update={"dtyp": "int8"})


def test_arguments_are_never_changed():
    granularity, float_range = {"type": "per_channel", "axis": 0}, [-1, 2]
    fields = {"granularity": granularity, "float_range": float_range, "n_bits": 8}
    QuantizationSpec(**fields)
    QuantizationSpec.from_dict(fields)
    assert fields == {"granularity": granularity, "float_range": float_range, "n_bits": 8}
    assert granularity == {"type": "per_channel", "axis": 0}
    assert float_range == [-1, 2]


def test_float_range_is_stored_as_floats_and_cannot_be_changed():
    stored = QuantizationSpec(float_range=(-1, 2)).float_range
    assert stored == [-1.0, 2.0]
    assert all(type(end) is float for end in stored)
    with pytest.raises(TypeError):
        stored[0] = 0.0


def test_specs_are_equal_and_hash_by_value():
    assert len({QuantizationSpec(), QuantizationSpec(dtype="int8"), QuantizationSpec(dtype="int4")}) == 2


def test_replace_validates_and_adapts_the_scale_dtype():
    spec = QuantizationSpec(dtype="float4_e2m1fn")
    assert spec.replace(dtype="int8").scale_dtype is None
    with pytest.raises(ValueError, match="did you mean 'qscheme'"):
        spec.replace(qsheme="symmetric")


def test_the_json_schema_names_every_field_and_the_schemes():
    schema = QuantizationSpec.model_json_schema()
    assert set(schema["properties"]) == set(QuantizationSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert "symmetric_with_clipping" in json.dumps(schema)


@pytest.mark.parametrize("text", ["[1, 2]", "just a word", "3", ""])
def test_a_document_that_is_not_a_mapping_is_a_document_error(text):
    with pytest.raises(ValueError, match="mapping"):
        QuantizationSpec.from_yaml(text)


class TestExtraFields:
    def test_added_fields_are_given_by_name_and_reach_every_component(self):
        temperatures = {}

        def remember(name, base):
            def __init__(self, *args, temperature, **kwargs):  # noqa: N807
                temperatures[name] = temperature
                super(type(self), self).__init__(*args, **kwargs)

            return type(name, (base,), {"__init__": __init__})

        parts = {
            "range_calculator_cls": (RangeCalculatorBase, MinMaxRangeCalculator),
            "qparam_calculator_cls": (QParamsCalculatorBase, StaticQParamsCalculator),
            "fake_quantize_cls": (FakeQuantizeImplBase, DefaultFakeQuantize),
        }
        fields = {
            field: registry.register(f"test_{field}")(remember(field, base))
            for field, (registry, base) in parts.items()
        }

        class Warm(QuantizationSpec):
            temperature: float
            power: int = 2

        spec = Warm(temperature=0.5, **fields)
        assert spec.get_extra_args() == {"temperature": 0.5, "power": 2}
        from scalepoint.spec import QuantizationComponentFactory

        quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
        assert temperatures == dict.fromkeys(parts, 0.5)
        x = torch.randn(4, 4)
        assert (quantizer(x) - x).abs().max() < 0.1
        assert Warm.from_yaml(spec.to_yaml()) == spec
        for field, (registry, _) in parts.items():
            del registry._registry[f"test_{field}"]

    def test_a_misspelt_added_field_is_refused_too(self):
        class Warm(QuantizationSpec):
            temperature: float = 1.0

        with pytest.raises(ValueError, match="did you mean 'temperature'"):
            Warm(temprature=2.0)
