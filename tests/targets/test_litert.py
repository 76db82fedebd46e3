"""Placement of quantizers for LiteRT, and what the target refuses. LiteRT need not be installed."""

import pytest
import torch
from torch import nn

from scalepoint.errors import TargetError
from scalepoint.graph.nodes import get_kind
from scalepoint.quantize import QuantConfig, QuantStub, insert_qdq, quantize
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.spec import PerBlockGranularity, QuantizationSpec
from scalepoint.targets import find_target
from scalepoint.transformation import transform
from tests.errors import raises


def transform_and_insert(model, x, config=None):
    result = transform(model.eval(), (x,), target="litert")
    return insert_qdq(result.model, result.matches, config)


def stubs(model):
    return [name for name, module in model.named_modules() if isinstance(module, QuantStub)]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(nn.functional.avg_pool2d(torch.cat([self.one(x), self.two(x)], 1), 2))


def calls(model, name):
    return [str(node.target) for node in model.graph.nodes if get_kind(node) == "quant"].count(name)


def test_a_concat_shares_its_scale_with_its_inputs_and_an_average_pool_with_its_input():
    quantized = transform_and_insert(Branches(), torch.randn(1, 3, 8, 8))
    assert stubs(quantized) == [f"{name}_quant" for name in ("x", "cat_fused", "last_fused")]
    assert calls(quantized, "cat_fused_quant") == 4  # its inputs, its output, after the pool


class Dense(Branches):
    """The second branch goes into both concats, the first one only into the inner concat, through a pool."""

    def forward(self, x):
        one, two = nn.functional.max_pool2d(self.one(x), 3, 1, 1), self.two(x)
        inner = torch.cat([one, two], 1)
        return torch.cat([inner, two], 1)


def test_inputs_with_other_readers_keep_their_scale_and_nested_concats_share_one():
    quantized = transform_and_insert(Dense(), torch.randn(1, 3, 8, 8))
    assert stubs(quantized) == [f"{name}_quant" for name in ("x", "cat_1_fused", "two_fused")]
    assert calls(quantized, "cat_1_fused_quant") == 4  # the convolution, the pool, the inner concat, the outer
    assert calls(quantized, "two_fused_quant") == 1


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Conv3d(3, 4, 3), torch.randn(1, 3, 8, 8, 8), "convolution over three axes"),
        (nn.ConvTranspose2d(4, 4, 2, groups=2), torch.randn(1, 4, 8, 8), "transposed convolution in groups"),
        (nn.ConvTranspose1d(4, 4, 2), torch.randn(1, 4, 8), "groups or over one axis"),
    ],
    ids=["volumes", "groups", "one axis"],
)
def test_operations_without_a_litert_operator_are_refused_with_another_target(model, x, message):
    with pytest.raises(TargetError, match=f"'litert'.*{message}") as caught:
        transform_and_insert(nn.Sequential(model, nn.ReLU()), x)
    assert "deploy for 'onnxruntime'" in str(caught.value)


def test_unsigned_activations_are_refused_with_the_nearest_choice():
    wrong = QuantConfig(activation=QuantizationSpec(dtype="uint8", qscheme="asymmetric"))
    with raises(TargetError, "uint8 as activation", "int8"):
        transform_and_insert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8), wrong)


def test_other_block_sizes_are_refused_with_the_supported_ones():
    blocks = QuantizationSpec(dtype="int4", granularity=PerBlockGranularity(block_size=16))
    with raises(TargetError, "int4 in blocks of 16", "32/64/128/256"):
        transform_and_insert(nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64), QuantConfig(weight=blocks))


def test_scales_of_blocks_are_representable_in_the_file_and_the_kernel():
    blocks = QuantizationSpec(
        dtype="int4", granularity=PerBlockGranularity(block_size=32), qparam_calculator_cls="static"
    )
    model, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64)
    model[0].weight.data[0], model[0].weight.data[1] = 0, 1e-6
    quantized = quantize(model.eval(), x, QuantConfig(weight=blocks), forward_loop=[x], target="litert")
    scale = next(layer.weight_quant.scale for layer in quantized.modules() if isinstance(layer, QuantizedLayer))
    assert scale.shape == (8, 2)
    assert (scale > 0).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(scale.to(dtype).to(torch.float32), scale)


def test_the_declaration_names_its_format_and_runtime():
    target = find_target("litert")
    assert (target.format, target.runtime, target.bias) == ("litert", "litert", "int32")
    assert target.activation_for("LinearPattern").qparam_calculator_cls.always_called
