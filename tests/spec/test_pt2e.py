"""Fake quantizers in torchao's prepare_pt2e, its switches, and calculators of users."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from scalepoint.errors import SpecError
from scalepoint.spec import (
    CompressionTargetTensor,
    FakeQuantizeImplBase,
    PerChannelGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationSpec,
    StaticQParamsCalculator,
)
from tests.errors import raises

WEIGHT, ACTIVATION = CompressionTargetTensor.WEIGHT, CompressionTargetTensor.ACTIVATION


def partial(target, **fields):
    return QuantizationComponentFactory.create_fake_quantizer_partial(QuantizationSpec(**fields), target)


@pytest.fixture(scope="module")
def pt2e():
    pytest.importorskip("torchao")
    from torchao.quantization import pt2e as package  # optional

    return package


def prepared(model, example, activation, weight):
    """Run torchao's prepare_pt2e with a quantizer that annotates linear layers with these two specs."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e  # optional
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

    class Linears(Quantizer):
        def annotate(self, graph_module):
            for node in graph_module.graph.nodes:
                if node.target is torch.ops.aten.linear.default:
                    specs = {node.args[0]: activation, node.args[1]: weight}
                    annotation = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
                    node.meta["quantization_annotation"] = annotation
            return graph_module

        def validate(self, graph_module):
            pass

    return prepare_pt2e(torch.export.export(model, (example,)).module(), Linears())


def torchao_specs(activation, weight, **fields):
    from torchao.quantization.pt2e.quantizer import QuantizationSpec as TorchaoSpec  # optional

    per_channel = partial(WEIGHT, granularity=PerChannelGranularity())
    return (
        TorchaoSpec(dtype=torch.int8, observer_or_fake_quant_ctr=partial(ACTIVATION), qscheme=activation),
        TorchaoSpec(dtype=torch.int8, observer_or_fake_quant_ctr=per_channel, qscheme=weight, ch_axis=0, **fields),
    )


def quantizers(model):
    """Those of activations, and those of weights, of a net of two linear layers."""
    quantizers = {
        id(quantizer): quantizer for quantizer in model.modules() if isinstance(quantizer, FakeQuantizeImplBase)
    }.values()
    return [
        [quantizer for quantizer in quantizers if quantizer.quantization_target == kind]
        for kind in (ACTIVATION, WEIGHT)
    ]


@pytest.mark.parametrize(
    ("activation", "weight", "fields", "expected"),
    [
        (torch.per_tensor_symmetric, torch.per_channel_symmetric, {}, ("symmetric", "symmetric", -128)),
        (torch.per_tensor_affine, torch.per_channel_symmetric, {}, ("asymmetric", "symmetric", -128)),
        (torch.per_tensor_affine, torch.per_channel_affine, {}, ("asymmetric", "asymmetric", -128)),
        (None, None, {"quant_min": -127, "quant_max": 127}, ("symmetric", "symmetric", -127)),
    ],
)
def test_prepare_pt2e_takes_our_quantizers_with_the_schemes_of_torchao(pt2e, activation, weight, fields, expected):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e  # optional

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(16, 6)
    model_prepared = prepared(model, x, *torchao_specs(activation, weight, **fields))
    output = model_prepared(x)
    activations, weights = quantizers(model_prepared)
    assert [len(activations), len(weights)] == [2, 2]
    for quantizer, scheme, low in [(activations[0], expected[0], -128), (weights[0], expected[1], expected[2])]:
        assert quantizer.qscheme == quantizer.qparams_calculator.qscheme == scheme
        assert quantizer.quant_min == quantizer.qparams_calculator.quant_min == low
    assert {tuple(quantizer.qparams_calculator.scale.shape) for quantizer in weights} == {(8, 1), (3, 1)}
    assert 0 < (output - model(x)).abs().max() < 0.1
    model_prepared.apply(pt2e.disable_observer)
    output = model_prepared(x)
    assert torch.equal(convert_pt2e(model_prepared)(x), output)


def test_the_switches_of_torchao_reach_our_quantizers(pt2e):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(16, 6)
    graph = prepared(model, x, *torchao_specs(torch.per_tensor_symmetric, torch.per_channel_symmetric))
    graph(x)
    (first, *_), _ = quantizers(graph)
    scale = first.qparams_calculator.scale.clone()
    graph.apply(pt2e.disable_observer)
    graph(x * 50)
    assert torch.equal(first.qparams_calculator.scale, scale)
    graph.apply(pt2e.enable_observer)
    graph(x * 50)
    assert not torch.equal(first.qparams_calculator.scale, scale)
    graph.apply(pt2e.disable_fake_quant)
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.slow
def test_a_quantizer_created_before_torchao_was_imported_also_reacts(pt2e):
    program = """
import torch
from scalepoint.spec import QuantizationComponentFactory, QuantizationSpec
model = torch.nn.Sequential(QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(), "activation"))
import torchao.quantization.pt2e as pt2e
model(torch.ones(3))
model.apply(pt2e.disable_observer)
print(bool(model[0].observer_enabled))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("fields", "overrides", "words"),
    [
        ({}, {"qscheme": torch.per_channel_symmetric}, "per_channel_symmetric contradicts"),
        ({"granularity": PerChannelGranularity(axis=0)}, {"qscheme": torch.per_tensor_affine}, "contradicts"),
        ({}, {"qscheme": torch.per_channel_affine_float_qparams}, "QuantizationScheme"),
        ({}, {"is_dynamic": True}, "'dynamic'"),
    ],
)
def test_fields_that_contradict_the_spec_are_errors(fields, overrides, words):
    with pytest.raises(SpecError, match=words):
        partial(ACTIVATION, **fields).with_args(**overrides)()


def test_the_storage_dtype_is_accepted_for_a_narrow_dtype():
    narrow = partial(WEIGHT, dtype="int4").with_args(dtype=torch.int8, quant_min=-8, quant_max=7)()
    assert (narrow.dtype, narrow.n_bits, narrow.quant_min) == (torch.int4, 4, -8)


class TestACalculatorOfAUser:
    def test_it_may_return_a_plain_tuple(self):
        class Doubled(StaticQParamsCalculator):
            def compute_qparams(self, tensor, min_val, max_val):
                scale, zero_point, minval = super().compute_qparams(tensor, min_val, max_val)
                return scale * 2, zero_point, minval

        QParamsCalculatorBase.register("doubled for a test")(Doubled)
        try:
            spec = QuantizationSpec(qparam_calculator_cls=Doubled)
            quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "activation")
            x = torch.tensor([-1.0, 0.3, 1.0])
            quantizers = quantizer(x)
            scale = torch.tensor(2 / 127.5)
            torch.testing.assert_close(quantizer.qparams_calculator.scale, scale.reshape(1))
            torch.testing.assert_close(quantizers, (x / scale).round() * scale)
            assert quantizer.qparams_calculator(x).scale.shape == (1,)
        finally:
            del QParamsCalculatorBase._registry["doubled for a test"]

    def test_a_scale_is_enough_for_a_float_dtype(self):
        class Alone(StaticQParamsCalculator):
            def compute_qparams(self, tensor, min_val, max_val):
                return (max_val / 448,)

        spec = QuantizationSpec(dtype="float8_e4m3fn")
        quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
        quantizer.qparams_calculator.__class__ = Alone
        assert torch.equal(quantizer(torch.tensor([448.0, 2.0])), torch.tensor([448.0, 2.0]))

    @pytest.mark.parametrize("wrong", [None, 1.0, (1, 2, 3, 4), ("scale", None, None)])
    def test_other_results_are_errors_with_the_name_of_the_class(self, wrong):
        class Wrong(StaticQParamsCalculator):
            def compute_qparams(self, tensor, min_val, max_val):
                return wrong

        quantizer = QuantizationComponentFactory.create_fake_quantizer(QuantizationSpec(), "weight")
        quantizer.qparams_calculator.__class__ = Wrong
        with raises(SpecError, "Wrong", "(scale, zero_point, minval)"):
            quantizer(torch.ones(3))
