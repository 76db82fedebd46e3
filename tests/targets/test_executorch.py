"""Placement of quantizers for ExecuTorch, and what the target refuses. ExecuTorch need not be installed."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import CoverageError, TargetError
from scalepoint.quantize import Override, QuantConfig, QuantStub, insert_qdq, quantize
from scalepoint.quantize.record import record_of
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.targets import find_target
from scalepoint.transformation import transform
from tests.errors import raises
from tests.models import resnet50, vit_b16

INT4 = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static")
STATIC = QuantizationSpec(dtype="int8", qscheme="asymmetric", qparam_calculator_cls="global_minmax")


def transform_and_insert(model, x, config=None):
    result = transform(model.eval(), (x,), target="executorch")
    return insert_qdq(result.model, result.matches, config)


def stubs(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantStub)}


def is_dynamic(stub):
    return stub.calculator.always_called


def test_every_tensor_between_convolutions_is_quantized_once():
    quantized = transform_and_insert(resnet50(width=8, classes=10), torch.randn(2, 3, 64, 64))
    kinds = [module.kind for module in quantized.modules() if type(module).__name__ == "QuantizedLayer"]
    assert (kinds.count("conv"), kinds.count("linear")) == (53, 1)
    # the input, 53 convolutions, 16 adds, the average pool (max pool and flatten share a stub), the head
    assert len(stubs(quantized)) == 1 + 53 + 16 + 1 + 1
    assert not any(map(is_dynamic, stubs(quantized).values()))


def test_linear_layers_of_a_transformer_have_dynamic_scales_and_float_outputs():
    quantized = transform_and_insert(vit_b16(hidden=48, image=32), torch.randn(2, 3, 32, 32))
    stubs_by_name = stubs(quantized)
    dynamic = [name for name, stub in stubs_by_name.items() if is_dynamic(stub)]
    assert len(dynamic) == 12 * 4 + 1  # qkv, out, two of the MLP; the head
    assert len(stubs_by_name) == len(dynamic)  # the patch embedding, between float tensors, is float
    with torch.no_grad():
        quantized(torch.randn(2, 3, 32, 32))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(self.embed(x).flatten(2).transpose(1, 2)))


def test_a_patch_embedding_is_int8_only_with_static_scales():
    rows = [
        record_of(transform_and_insert(Patches(), torch.randn(2, 3, 8, 8), config)).coverage.operations[0]
        for config in (None, QuantConfig(activation=STATIC))
    ]
    assert [(row.name, row.state.value) for row in rows] == [("embed", "float"), ("embed", "quantized")]
    assert "static scales" in rows[0].reason


def test_a_static_linear_layer_has_a_quantized_output_for_xnnpack():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    dynamic = stubs(transform_and_insert(model, torch.randn(2, 8)))
    assert [is_dynamic(stub) for stub in dynamic.values()] == [True, True]
    static = stubs(transform_and_insert(model, torch.randn(2, 8), QuantConfig(activation=STATIC)))
    assert len(static) == 4  # input and output of each: the GELU between them is float
    assert not any(map(is_dynamic, static.values()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QuantConfig(activation=STATIC.replace(dtype="uint8")), "uint8 as activation"),
        (QuantConfig(weight=QuantizationSpec(qscheme="asymmetric")), "asymmetric as weight"),
        (QuantConfig(weight=INT4), "int4 for conv"),
        (QuantConfig(weight=QuantizationSpec(dtype="float8_e4m3fn")), "dtype float8_e4m3fn as weight"),
    ],
    ids=["unsigned activations", "asymmetric weights", "int4 convolutions", "float8"],
)
def test_specs_that_xnnpack_cannot_run_are_refused_with_the_nearest_one(config, message):
    with pytest.raises(TargetError, match=message) as caught:
        transform_and_insert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8), config)
    assert "nearest supported: int8" in str(caught.value)


def test_group_sizes_without_an_xnnpack_kernel_are_refused():
    wrong = INT4.replace(granularity=PerBlockGranularity(block_size=16))
    with pytest.raises(TargetError, match="int4 in blocks of 16"):
        transform_and_insert(nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64), QuantConfig(weight=wrong))


def test_a_convolution_over_three_axes_is_refused_before_any_data_is_read(tmp_path):
    pytest.importorskip("executorch")

    def never():
        yield pytest.fail("data was read")

    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU())
    with raises(TargetError, "'executorch'", "three axes") as caught:
        scalepoint.deploy(
            model.eval(), torch.randn(1, 3, 8, 8, 8), never(), target="executorch", output=tmp_path / "out"
        )
    assert "deploy for 'onnxruntime'" in str(caught.value)


def test_narrow_weights_with_float_activations_have_no_kernel():
    with raises(CoverageError, "float activations", "leave those to the target"):
        transform_and_insert(
            nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64), QuantConfig(activation="float", weight=INT4)
        )


def test_int4_weights_after_convolutions_need_dynamic_activations():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))
    x, only = torch.randn(1, 3, 8, 8), Override(name="3", weight=INT4)
    with raises(TargetError, "3: ", "'executorch'", "4-bit weights"):
        transform_and_insert(model, x, QuantConfig(overrides=(only,)))
    rows = find_target("executorch").activation_for("LinearPattern")
    quantized = transform_and_insert(
        model, x, QuantConfig(overrides=(Override(name="3", weight=INT4, activation=rows),))
    )
    assert sum(map(is_dynamic, stubs(quantized).values())) == 1


def test_the_declaration_tells_the_linear_layers_apart():
    target = find_target("executorch")
    assert target.activation_for("LinearPattern").qparam_calculator_cls.always_called
    assert target.activation_for("ConvBNPattern") == target.activation


def test_rows_are_added_to_a_float_bias():
    """A bias cannot be quantized if the scale of the input is computed in every call."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8)).eval(), torch.randn(4, 64)
    quantized = quantize(model, x, forward_loop=[x], target="executorch")
    with torch.no_grad():
        expected, actual = model(x), quantized(x)
    assert 10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()) > 35
