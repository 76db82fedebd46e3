"""Contract A2: block sizes, axes from layers, errors."""

import pytest
import torch
from torch import nn

from scalepoint.errors import BlockSizeMismatchError, SpecError
from scalepoint.spec import (
    CompressionTargetTensor,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
    QuantizationComponentFactory,
    QuantizationGranularity,
    QuantizationSpec,
    resolve_block_sizes,
)


@pytest.mark.parametrize(
    ("granularity", "shape", "block"),
    [
        (PerTensorGranularity(), (10, 20, 30), (10, 20, 30)),
        (PerTensorGranularity(), (), ()),
        (PerChannelGranularity(axis=0), (10, 20, 30), (1, 20, 30)),
        (PerChannelGranularity(axis=1), (10, 20, 30), (10, 1, 30)),
        (PerChannelGranularity(axis=-1), (10, 20, 30), (10, 20, 1)),
        (PerChannelGranularity(axis=-3), (10, 20, 30), (1, 20, 30)),
        (PerBlockGranularity(axis=0, block_size=5), (10, 20), (5, 1)),
        (PerBlockGranularity(axis=1, block_size=4), (10, 20), (1, 4)),
        (PerBlockGranularity(axis=1, block_size=8), (7, 16, 3, 3), (1, 8, 3, 3)),
        (PerBlockGranularity(axis=0, block_size=4), (8,), (4,)),
        (PerBlockGranularity(axis=2, block_size=3), (8, 16, 3, 3), (1, 1, 3, 3)),
        (PerBlockGranularity(axis=-1, block_size=4), (10, 20), (1, 4)),
        (PerBlockGranularity(block_size=(4, 2, -1, 1)), (8, 16, 3, 3), (4, 2, 3, 1)),
        (PerBlockGranularity(block_size=(2,)), (10,), (2,)),
        (PerBlockGranularity(axis=1, block_size=8, pad=True), (4, 20), (1, 8)),
        (PerBlockGranularity(axis=1, block_size=32, pad=True), (4, 20), (1, 20)),
        (PerTokenGranularity(), (2, 5, 16), (1, 1, 16)),
    ],
    ids=str,
)
def test_the_extent_of_a_block_on_every_axis(granularity, shape, block):
    assert granularity.get_block_size(shape) == block


@pytest.mark.parametrize(
    ("axis", "shape", "weight", "activation"),
    [
        (1, (4, 8, 3, 5), (1, 4, 3, 5), (1, 4, 1, 1)),
        (0, (4, 8, 3, 5), (4, 1, 3, 5), (4, 1, 1, 1)),
        (-1, (2, 3, 8), (1, 1, 4), (1, 1, 4)),
        (-1, (4, 8), (1, 4), (1, 4)),
    ],
    ids=str,
)
def test_blocks_of_an_activation_have_size_1_on_all_other_axes(axis, shape, weight, activation):
    granularity = PerBlockGranularity(axis=axis, block_size=4)
    assert granularity.get_block_size(shape) == weight
    assert granularity.get_block_size(shape, CompressionTargetTensor.WEIGHT) == weight
    assert granularity.get_block_size(shape, quantization_target=CompressionTargetTensor.ACTIVATION) == activation


@pytest.mark.parametrize("calculator", ["static", "moving_average", "histogram_mse", "dynamic", "learned"])
def test_a_quantizer_has_one_scale_for_each_block_of_its_target(calculator):
    x = torch.randn(4, 8, 3, 5)
    spec = QuantizationSpec(granularity=PerBlockGranularity(axis=1, block_size=4), qparam_calculator_cls=calculator)
    for target, counts in (("weight", (4, 2, 1, 1)), ("activation", (4, 2, 3, 5))):
        quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, target)
        y = quantizer(x)
        assert quantizer.qparams_calculator.stored.scale.shape == counts
        assert quantizer.get_block_size(x.shape) == tuple(
            size // count for size, count in zip(x.shape, counts, strict=True)
        )
        quantizer.disable_observer()
        torch.testing.assert_close(quantizer(x), y)


def test_a_granularity_of_a_user_may_take_the_shape_alone():
    class Rows(PerTokenGranularity):
        def get_block_size(self, shape):
            return (1, *shape[1:])

    QuantizationGranularity.register("rows of a test")(Rows)
    try:
        quantizer = QuantizationComponentFactory.create_fake_quantizer(
            QuantizationSpec(granularity=Rows(), qparam_calculator_cls="static"), "activation"
        )
        quantizer(torch.randn(3, 4))
        assert quantizer.qparams_calculator.scale.shape == (3, 1)
    finally:
        del QuantizationGranularity._registry["rows of a test"]


def test_block_sizes_are_resolved_against_a_shape():
    assert resolve_block_sizes((8, 16, 3), (4, -1, 3)) == [4, 16, 3]
    for sizes, words in [((4, 4), "2 axes"), ((4, 0, 1), "positive"), ((4, -2, 1), "positive")]:
        with pytest.raises(ValueError, match=words):
            resolve_block_sizes((8, 16, 3), sizes)
    with pytest.raises(BlockSizeMismatchError, match="do not divide"):
        resolve_block_sizes((8, 16, 3), (3, -1, -1))


@pytest.mark.parametrize(
    ("granularity", "shape", "message"),
    [
        (PerChannelGranularity(), (4, 4), "has no axis"),
        (PerBlockGranularity(block_size=4), (4, 4), "has no axis"),
        (PerChannelGranularity(axis=1), (5,), "axis 1 .*outside"),
        (PerChannelGranularity(axis=-3), (5, 10), "axis -3 .*outside"),
        (PerChannelGranularity(axis=0), (), "outside shape"),
        (PerBlockGranularity(axis=1, block_size=3), (6,), "axis 1 .*outside"),
        (PerBlockGranularity(axis=1, block_size=(2, 2)), (4, 4), "leave out axis="),
        (PerBlockGranularity(block_size=(2, 4)), (4, 4, 4), "tensors of 2 axes"),
        (PerTokenGranularity(), (), "PerTensorGranularity"),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_a_value_error(granularity, shape, message):
    with pytest.raises(ValueError, match=message):
        granularity.get_block_size(shape)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (PerBlockGranularity(axis=0, block_size=3), (10, 20)),
        (PerBlockGranularity(axis=1, block_size=7), (10, 20, 30)),
        (PerBlockGranularity(axis=0, block_size=10), (5,)),
        (PerBlockGranularity(block_size=(2, 7, -1)), (10, 20, 30)),
    ],
    ids=str,
)
def test_blocks_that_do_not_divide_raise_a_block_size_mismatch_error(granularity, shape):
    with pytest.raises(BlockSizeMismatchError, match="do not divide"):
        granularity.get_block_size(shape)
    assert issubclass(BlockSizeMismatchError, ValueError)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "per_block", "axis": 1, "block_size": 0},
        {"type": "per_block", "axis": 1, "block_size": -1},
        {"type": "per_block", "block_size": [2, 0]},
        {"type": "per_block", "block_size": []},
        {"type": "per_block", "axis": 1},
        {"type": "per_channel", "axis": 0, "block_size": 4},
        {"type": "per_tensor", "axis": 0},
        {"type": "per_colour"},
        {},
        "per_tensor",
        None,
    ],
    ids=str,
)
def test_an_invalid_granularity_is_an_error(fields):
    with pytest.raises(ValueError, match=r".+"):
        QuantizationGranularity.build(fields)


@pytest.mark.parametrize(
    "granularity",
    [
        PerTensorGranularity(),
        PerTokenGranularity(),
        PerChannelGranularity(),
        PerChannelGranularity(axis=-1),
        PerBlockGranularity(axis=1, block_size=32),
        PerBlockGranularity(block_size=(1, -1), pad=True),
    ],
    ids=str,
)
def test_a_dump_has_its_type_and_builds_the_same_again(granularity):
    dump = granularity.model_dump()
    assert QuantizationGranularity.get_class(dump["type"]) is type(granularity)
    assert QuantizationGranularity.build(dump) == granularity
    assert hash(QuantizationGranularity.build(dump)) == hash(granularity)


def test_a_default_pad_is_not_dumped():
    assert PerBlockGranularity(axis=1, block_size=32).model_dump() == {"type": "per_block", "axis": 1, "block_size": 32}


@pytest.mark.parametrize(
    ("layer", "output", "input_"),
    [
        (nn.Linear(2, 2), 0, 1),
        (nn.Conv2d(2, 2, 1), 0, 1),
        (nn.Conv3d, 0, 1),
        (nn.ConvTranspose1d(2, 2, 1), 1, 0),
        (nn.ConvTranspose2d, 1, 0),
    ],
    ids=str,
)
def test_a_missing_axis_is_taken_from_the_layer(layer, output, input_):
    assert PerChannelGranularity().resolve(layer).axis == output
    assert PerBlockGranularity(block_size=4).resolve(layer).axis == input_


def test_an_axis_that_was_given_stays():
    assert PerChannelGranularity(axis=2).resolve(nn.Linear).axis == 2
    assert PerBlockGranularity(block_size=(2, 2)).resolve(nn.Linear).axis is None
    assert PerTensorGranularity().resolve(nn.Linear) == PerTensorGranularity()


def test_a_granularity_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        PerChannelGranularity(axis=0).axis = 1


def test_the_base_class_names_the_missing_method():
    with pytest.raises(SpecError, match="implement get_block_size"):
        QuantizationGranularity().get_block_size((2, 2))
