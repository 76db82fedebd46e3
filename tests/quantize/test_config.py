"""QuantConfig: the short form, overrides by name, glob, type and role, config files, and errors."""

import json

import pytest
import torch
from torch import nn

from scalepoint.errors import ConfigError, CoverageError, TargetError
from scalepoint.numerics import get_format
from scalepoint.quantize import (
    CalibrationMethod,
    Override,
    QuantConfig,
    QuantStub,
    TensorQuantConfig,
    calibrate,
    insert_qdq,
)
from scalepoint.spec import (
    ExtendedQuantizationSpec,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)
from scalepoint.targets import Accepted, Target, find_target, list_targets
from scalepoint.transformation import transform

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # emitted by torch when it copies a graph

INT4 = TensorQuantConfig(n_bits=4, per_channel=True)
INT2 = TensorQuantConfig(n_bits=2, per_channel=True)
INT8 = TensorQuantConfig(per_channel=True)
FP8 = QuantizationSpec(dtype="float8_e4m3fn")


class Net(nn.Module):
    """blocks.0, blocks.2 and head are linear layers, wide enough for the rules of every target."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 16))
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).mean((2, 3))))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return transform(Net().eval(), torch.randn(2, 3, 8, 8))


def inserted(result, *overrides, target=None, **fields):
    fields = {"activation": TensorQuantConfig(), "weight": INT8, **fields}
    return insert_qdq(result.model, result.matches, QuantConfig(overrides=overrides, **fields), target=target)


def weight_bits(model):
    """Return the weight bits of each layer; None for float."""
    bits = dict.fromkeys(("stem", "blocks.0", "blocks.2", "head"))
    for module in model.modules():
        if type(module).__name__ == "WeightFakeQuantize":
            for consumer in module.consumers:
                bits[consumer] = module.spec.n_bits
    return bits


def input_specs(model):
    """Return the dtype of the input of each layer."""
    stubs = [module for module in model.modules() if isinstance(module, QuantStub)]
    return {consumer: stub.spec.dtype for stub in stubs for consumer in stub.consumers}


class TestTensorQuantConfig:
    def test_the_defaults_are_those_of_the_contract(self):
        config = TensorQuantConfig()
        assert (config.n_bits, config.symmetric, config.per_channel) == (8, True, False)
        assert config.calibration_method is CalibrationMethod.MINMAX

    @pytest.mark.parametrize(
        ("bits", "symmetric", "low", "high"),
        [
            (8, True, -128, 127),
            (4, True, -8, 7),
            (2, True, -2, 1),
            (8, False, 0, 255),
            (4, False, 0, 15),
            (3, True, -4, 3),
            (5, False, 0, 31),
            (6, True, -32, 31),
            (7, False, 0, 127),
            (16, True, -32768, 32767),
        ],
    )
    def test_quant_min_and_quant_max_follow_n_bits(self, bits, symmetric, low, high):
        config = TensorQuantConfig(n_bits=bits, symmetric=symmetric)
        assert (config.quant_min, config.quant_max) == (low, high)
        spec = config.weight_spec()
        assert (spec.quant_min, spec.quant_max, spec.n_bits) == (low, high, bits)

    def test_per_channel_is_the_granularity_of_the_weight(self):
        assert isinstance(INT8.weight_spec().granularity, PerChannelGranularity)
        assert isinstance(TensorQuantConfig().weight_spec().granularity, PerTensorGranularity)

    def test_the_six_methods_of_the_contract_exist(self):
        expected = {"MINMAX", "MOVING_AVERAGE_MINMAX", "HISTOGRAM", "PERCENTILE", "ENTROPY", "MSE"}
        assert expected <= set(CalibrationMethod.__members__)

    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_every_method_has_a_spec_for_activations_and_weights(self, method):
        config = TensorQuantConfig(calibration_method=method)
        assert config.activation_spec().dtype == config.weight_spec().dtype == torch.int8

    @pytest.mark.parametrize("bits", [0, 1, 9, 32, -8, 8.0, "8", True])
    def test_an_unsupported_width_is_refused(self, bits):
        with pytest.raises(ConfigError, match=r"n_bits|int"):
            TensorQuantConfig(n_bits=bits)

    @pytest.mark.parametrize("bits", TensorQuantConfig.WIDTHS)
    def test_every_width_runs_on_the_reference_target(self, net, bits):
        tensor = TensorQuantConfig(n_bits=bits)
        model = inserted(net, activation=tensor, weight=tensor, target="reference")
        assert set(weight_bits(model).values()) == {bits}
        assert {get_format(dtype).bits for dtype in input_specs(model).values()} == {bits}
        x = torch.randn(4, 3, 8, 8)
        calibrate(model, [x], freeze_weights=True)
        with torch.no_grad():
            error = (model(x) - net.model(x)).norm() / net.model(x).norm()
        assert error < {2: 2.0, 3: 0.6, 4: 0.3, 5: 0.15, 6: 0.08, 7: 0.04, 8: 0.02, 16: 1e-4}[bits]

    @pytest.mark.parametrize("bits", [3, 5, 6, 7, 16])
    @pytest.mark.parametrize("method", list(CalibrationMethod))
    def test_every_method_has_a_spec_of_every_width(self, bits, method):
        config = TensorQuantConfig(n_bits=bits, symmetric=False, calibration_method=method)
        for spec, role in ((config.activation_spec(), "activation"), (config.weight_spec(), "weight")):
            x = torch.randn(16, 64)
            error = (QuantizationComponentFactory.create_fake_quantizer(spec, role)(x) - x).square().mean()
            assert error < 8.0 / 4 ** min(bits, 7)

    @pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
    @pytest.mark.parametrize("bits", [3, 5, 6, 7, 16])
    def test_the_error_of_a_target_without_a_width_names_the_nearest(self, net, target, bits):
        wide = TensorQuantConfig(n_bits=bits, per_channel=True)
        refusal = rf".*'{target}'.*int{bits} as {{}} .*nearest.*: "
        nearest = "int8" if target == "tensorrt" or bits > 5 else "int4"
        with pytest.raises(TargetError, match=rf"stem: {refusal.format('weight')}{nearest}"):
            inserted(net, Override(name="stem", weight=wide), activation=None, weight=None, target=target)
        with pytest.raises(TargetError, match=rf"head: {refusal.format('weight')}int[48]"):
            inserted(net, Override(name="head", weight=wide), activation=None, weight=None, target=target)
        with pytest.raises(TargetError, match=rf"{refusal.format('activation')}u?int8"):
            inserted(net, activation=TensorQuantConfig(n_bits=bits), weight=None, target=target)

    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param(TensorQuantConfig(n_bits=6, per_channel=True).weight_spec(), id="width"),
            pytest.param(
                ExtendedQuantizationSpec(qparam_calculator_cls="histogram_percentile", percentile=99.0), id="option"
            ),
            pytest.param(FP8, id="base"),
        ],
    )
    def test_specs_of_both_classes_round_trip_through_a_file(self, spec):
        config = QuantConfig(activation=spec, overrides=(Override(name="head", input=spec),))
        again = QuantConfig.from_yaml(config.to_yaml())
        assert again == config
        assert type(again.activation) is type(spec)

    def test_activations_per_channel_are_refused_with_the_reason(self, net):
        with pytest.raises(ConfigError, match="per_channel"):
            inserted(net, activation=TensorQuantConfig(per_channel=True))

    @pytest.mark.parametrize(
        ("kind", "wrong", "right"),
        [
            (TensorQuantConfig, "nbits", "n_bits"),
            (TensorQuantConfig, "symetric", "symmetric"),
            (QuantConfig, "activations", "activation"),
            (QuantConfig, "skip_weight_quant", "skip_weight_quant_for"),
            (Override, "weights", "weight"),
        ],
    )
    def test_a_misspelt_field_is_refused_with_the_nearest_named(self, kind, wrong, right):
        with pytest.raises(ValueError, match=rf"{wrong}.*'{right}'"):
            kind(**{wrong: 1})

    @pytest.mark.parametrize(
        "fields",
        [
            pytest.param({"weight": {"n_bit": 4}}, id="short-form"),
            pytest.param({"overrides": [{"name": "head", "wieght": "float"}]}, id="override"),
            pytest.param({"smooth_quant": {"alfa": 0.5}}, id="smooth"),
        ],
    )
    def test_a_misspelt_field_deep_in_a_mapping_is_refused_too(self, fields):
        with pytest.raises(ValueError, match="did you mean"):
            QuantConfig.from_dict(fields)

    def test_configs_are_frozen(self):
        with pytest.raises(ConfigError, match="frozen"):
            TensorQuantConfig().n_bits = 4


class TestOverride:
    @pytest.mark.parametrize("backwards", [False, True], ids=["broad-first", "narrow-first"])
    def test_an_exact_name_beats_a_glob_beats_a_type_in_any_order(self, net, backwards):
        overrides = [
            Override(type=nn.Linear, weight=INT4),
            Override(name="blocks.*", weight=INT2),
            Override(name="blocks.2", weight="float"),
        ]
        model = inserted(net, *(overrides[::-1] if backwards else overrides))
        assert weight_bits(model) == {"stem": 8, "blocks.0": 2, "blocks.2": None, "head": 4}

    @pytest.mark.parametrize(
        "fields",
        [{"name": "head"}, {"name": "he*"}, {"type": nn.Linear}],
        ids=["name", "glob", "type"],
    )
    def test_among_equals_the_later_wins(self, net, fields):
        first, second = Override(**fields, weight=INT4), Override(**fields, weight=INT2)
        assert weight_bits(inserted(net, first, second))["head"] == 2
        assert weight_bits(inserted(net, second, first))["head"] == 4

    def test_a_role_that_the_narrow_override_does_not_set_comes_from_the_broad_one(self, net):
        model = inserted(
            net, Override(type="Linear", weight=INT4), Override(name="head", input=FP8), activation=TensorQuantConfig()
        )
        assert weight_bits(model)["head"] == 4
        assert input_specs(model)["head"] == torch.float8_e4m3fn
        assert input_specs(model)["blocks.2"] == torch.int8

    def test_type_is_a_class_or_its_name(self, net):
        by_class = inserted(net, Override(type=nn.Conv2d, weight=INT4))
        by_name = inserted(net, Override(type="Conv2d", weight=INT4))
        assert weight_bits(by_class) == weight_bits(by_name) == {"stem": 4, "blocks.0": 8, "blocks.2": 8, "head": 8}

    def test_float_leaves_weight_and_input_unquantized(self, net):
        model = inserted(net, Override(name="head", weight="float", activation="float"))
        assert weight_bits(model)["head"] is None
        assert "head" not in input_specs(model)

    def test_weight_only(self, net):
        model = inserted(net, activation="float")
        assert input_specs(model) == {}
        assert None not in weight_bits(model).values()

    def test_the_output_role_is_that_of_an_output_point(self):
        class Pooled(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)

            def forward(self, x):
                return self.pool(self.conv(x))

        result = transform(Pooled().eval(), torch.randn(1, 3, 8, 8))
        both, one = inserted(result), inserted(result, Override(name="pool", output="float"))
        count = [sum(isinstance(module, QuantStub) for module in model.modules()) for model in (both, one)]
        assert count == [3, 2]

    def test_skip_weight_quant_for_keeps_the_input_quantized(self, net):
        model = inserted(net, skip_weight_quant_for=(nn.Linear,))
        assert weight_bits(model) == {"stem": 8, "blocks.0": None, "blocks.2": None, "head": None}
        assert set(input_specs(model)) == {"stem", "blocks.0", "blocks.2", "head"}

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"name": "haed"}, "'haed'.*'head'"),
            ({"name": "blocks.7"}, r"'blocks.7'.*blocks\.0"),
            ({"name": "decoder.*"}, r"decoder\.\*"),
            ({"type": nn.LSTM}, "LSTM"),
            ({"type": "Liner"}, "Liner.*'Linear'"),
        ],
        ids=["name", "index", "glob", "type", "misspelt-type"],
    )
    def test_an_override_that_matches_nothing_is_an_error(self, net, fields, words):
        with pytest.raises(ConfigError, match=words):
            inserted(net, Override(**fields, weight=INT4))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"weight": INT4}, "either a name .* or a type"),
            ({"name": "head", "type": "Linear", "weight": INT4}, "either a name"),
            ({"name": "head"}, "'head' is empty"),
            ({"type": 3, "weight": INT4}, "module class"),
        ],
        ids=["nowhere", "both", "nothing", "no-class"],
    )
    def test_an_invalid_override_is_refused(self, fields, words):
        with pytest.raises(ValueError, match=words):
            Override(**fields)

    @pytest.mark.parametrize("value", ["flaot", 8, torch.int8, [8]])
    def test_an_invalid_tensor_setting_is_refused(self, value):
        with pytest.raises(ValueError, match=r"float|QuantizationSpec"):
            QuantConfig(weight=value)

    def test_a_dot_in_a_name_matches_only_a_dot(self, net):
        with pytest.raises(ConfigError):
            inserted(net, Override(name="blocksX0", weight=INT4))


def rich_config():
    return QuantConfig(
        activation=TensorQuantConfig(symmetric=False, calibration_method="entropy"),
        weight=QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=16)),
        skip_weight_quant_for=(nn.LayerNorm, "Embedding"),
        overrides=(
            Override(name="head", weight="float", activation="float"),
            Override(name="blocks.*", input=FP8),
            Override(type=nn.Linear, weight=INT4, output=TensorQuantConfig(n_bits=4)),
        ),
    )


class TestFiles:
    def test_a_config_round_trips_through_a_dict(self):
        assert QuantConfig.from_dict(rich_config().to_dict()) == rich_config()

    def test_a_config_round_trips_through_yaml(self):
        assert QuantConfig.from_yaml(rich_config().to_yaml()) == rich_config()

    def test_a_config_round_trips_through_json(self):
        assert QuantConfig.from_json(json.dumps(rich_config().to_dict())) == rich_config()
        assert QuantConfig.from_json(rich_config().model_dump_json()) == rich_config()

    def test_to_dict_returns_plain_values(self):
        json.dumps(rich_config().to_dict())
        assert rich_config().to_dict()["skip_weight_quant_for"] in (
            ["LayerNorm", "Embedding"],
            ("LayerNorm", "Embedding"),
        )

    def test_an_empty_document_is_the_default(self):
        assert QuantConfig.from_dict({}) == QuantConfig() == QuantConfig.from_yaml("{}")

    def test_handwritten_yaml_is_read(self, net):
        text = """
        activation: {n_bits: 8, symmetric: false}
        weight: {dtype: int8, granularity: {type: per_channel}}
        overrides:
          - {name: head, weight: float, activation: float}
          - {type: Conv2d, weight: {n_bits: 4, per_channel: true}}
        """
        model = insert_qdq(net.model, net.matches, QuantConfig.from_yaml(text))
        assert weight_bits(model) == {"stem": 4, "blocks.0": 8, "blocks.2": 8, "head": None}
        assert input_specs(model)["stem"] == torch.uint8

    def test_insert_qdq_accepts_a_mapping(self, net):
        model = insert_qdq(net.model, net.matches, {"weight": {"n_bits": 4}, "activation": "float"})
        assert set(weight_bits(model).values()) == {4}

    @pytest.mark.parametrize("text", ["- 1", "just words", "[]"])
    def test_a_document_that_is_not_a_mapping_is_refused(self, text):
        with pytest.raises(ValueError, match=r"mapping|QuantConfig"):
            QuantConfig.from_yaml(text)

    def test_insert_qdq_refuses_an_invalid_config(self, net):
        with pytest.raises(ConfigError, match="QuantConfig"):
            insert_qdq(net.model, net.matches, 8)

    def test_the_schema_names_every_field(self):
        assert set(QuantConfig.model_fields) <= set(QuantConfig.model_json_schema()["properties"])


class TestTargets:
    @pytest.mark.parametrize(
        ("fields", "nearest"),
        [
            ({"activation": TensorQuantConfig(symmetric=False)}, "int8.*symmetric"),
            ({"weight": QuantizationSpec(qscheme="asymmetric")}, "int8.*symmetric"),
            ({"weight": INT4}, "int4 for conv.*int8 symmetric"),
            ({"weight": INT4, "skip_weight_quant_for": (nn.Conv2d,)}, "int4.*per_block"),
            ({"activation": QuantizationSpec(granularity=PerChannelGranularity(axis=1))}, "int8.*per_tensor"),
            (
                {
                    "weight": QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(axis=1, block_size=32)),
                    "skip_weight_quant_for": (nn.Conv2d,),
                },
                "blocks of 32 .*int4.*(64|128)",
            ),
            ({"activation": QuantizationSpec(dtype="float8_e5m2")}, "float8_e4m3fn"),
        ],
        ids=["asymmetric", "asymmetric-weight", "int4-conv", "int4-channel", "by-channel", "blocks-of-32", "e5m2"],
    )
    def test_the_error_for_an_unsupported_spec_names_the_nearest_supported_one(self, net, fields, nearest):
        with pytest.raises(TargetError, match=rf"tensorrt.*{nearest}"):
            inserted(net, target="tensorrt", **fields)

    def test_the_error_names_the_layer(self, net):
        with pytest.raises(TargetError, match=r"blocks\.2"):
            inserted(net, Override(name="blocks.2", weight=INT2), target="tensorrt")

    def test_the_defaults_of_a_target_are_valid_and_used(self, net):
        for name in list_targets():
            model = insert_qdq(net.model, net.matches, target=name)
            assert None not in weight_bits(model).values()
        model = insert_qdq(net.model, net.matches, target="tensorrt")
        assert {stub.spec.quant_min for stub in model.modules() if isinstance(stub, QuantStub)} == {-128}

    def test_the_reference_target_supports_everything(self, net):
        inserted(net, Override(name="head", weight=INT2), Override(name="stem", input=FP8), target="reference")

    def test_insert_qdq_uses_the_target_of_the_transform(self):
        result = transform(Net().eval(), torch.randn(2, 3, 8, 8), target="tensorrt")
        with pytest.raises(TargetError, match="tensorrt"):
            inserted(result, weight=INT2)

    def test_an_unknown_target_names_the_nearest(self, net):
        with pytest.raises(TargetError, match="'tensorrt'"):
            inserted(net, target="tensort")

    def test_a_custom_target_is_a_plain_value(self, net):
        base = find_target("reference")
        int8 = QuantizationSpec(granularity=PerChannelGranularity())
        mine = Target(
            "mine",
            "int8 weights alone",
            base.patterns,
            QuantizationSpec(),
            int8,
            accepts=(Accepted("weight", (torch.int8,)), Accepted("activation", (torch.int8,))),
            rules=(lambda facts: "heads stay" if facts.name == "head" else None,),
        )
        model = insert_qdq(net.model, net.matches, target=mine)
        assert weight_bits(model) == {"stem": 8, "blocks.0": 8, "blocks.2": 8, "head": None}
        with pytest.raises(TargetError, match="int8"):
            inserted(net, weight=INT4, target=mine)

    def test_a_target_with_unsupported_defaults_is_refused_when_created(self):
        base = find_target("reference")
        with pytest.raises(TargetError):
            Target("mine", "", base.patterns, base.activation, base.weight, (Accepted("weight", (torch.int8,)),))

    @pytest.mark.parametrize("fields", [{"name": "blocks.0"}, {"type": nn.Linear}], ids=["name", "type"])
    def test_an_override_by_name_beats_a_cost_rule(self, fields):
        """TensorRT has no int8 kernel for 8 x 8 weights (rule R16), but an override asks for it explicitly."""
        net = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(8, 8))})

        class Small(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = net["blocks"]

            def forward(self, x):
                return self.blocks(x)

        result = transform(Small().eval(), torch.randn(2, 8), target="tensorrt")
        with pytest.raises(CoverageError, match="R16"):
            inserted(result)
        model = inserted(result, Override(**fields, weight=INT8))
        assert any(type(module).__name__ == "WeightFakeQuantize" for module in model.modules())
