"""Embedding tables stored as codes with one scale per row: on which targets, with which results, and exceptions."""

import pytest
import torch
from torch import nn

from scalepoint.errors import TargetError
from scalepoint.quantize import (
    Override,
    QuantConfig,
    coverage,
    disable_fake_quant,
    enable_fake_quant,
    load,
    prepare_qat,
    quantize,
    save,
)
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import WeightFakeQuantize
from scalepoint.targets import onnxruntime_target
from tests.errors import raises

ROWS, WIDTH = 600, 32


class Words(nn.Module):
    """A large table with a row of zeros, a small one, a layer, and a head that may be tied to the table."""

    def __init__(self, tied=False, max_norm=None):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0, max_norm=max_norm)
        self.types = nn.Embedding(2, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.relu(self.layer(self.words(ids) + self.types(ids % 2))))


def words(**kwargs):
    torch.manual_seed(0)
    model = Words(**kwargs).eval()
    with torch.no_grad():
        model.words.weight *= torch.logspace(-3, 2, ROWS)[:, None]  # rows of very different magnitude
    return model


def ids(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (4, 7), generator=generator) for _ in range(count)]


def make_quantized(model, config=None, target="onnxruntime"):
    return quantize(model, ids()[0], config, forward_loop=ids(), target=target, freeze_weights=True)


def row(model, name="words"):
    return next(operation for operation in coverage(model).operations if operation.name == name)


def table_of(model):
    return next(
        module for module in model.modules() if isinstance(module, QuantizedLayer) and module.kind == "embedding"
    )


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_tables_have_one_scale_per_row_on_targets_that_look_up_codes(target):
    quantized = make_quantized(words(), target=target)
    assert row(quantized).how == "w int8 per_channel"
    assert row(quantized).parameters == ROWS * WIDTH
    largest = words().words.weight.abs().amax(1)
    torch.testing.assert_close(table_of(quantized).weight_quant.scale[1:], largest[1:] / 127)


def test_a_small_table_stays_float_with_a_reason():
    types_row = row(make_quantized(words()), "types")
    assert types_row.precision == "float"
    assert types_row.reason == "its table has only 64 values"
    assert types_row.is_meant


def test_targets_without_table_support_keep_tables_float():
    assert row(make_quantized(words(), target="tensorrt")).reason == "it looks rows up and multiplies nothing"


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig(overrides=(Override(type="embedding", weight="float"),)),
        QuantConfig(overrides=(Override(type=nn.Embedding, weight="float"),)),
        QuantConfig(overrides=(Override(name="words", weight="float"),)),
        QuantConfig(skip_weight_quant_for=(nn.Embedding,)),
    ],
    ids=["kind", "class", "name", "skip"],
)
def test_a_config_can_keep_tables_float(config):
    types_row = row(make_quantized(words(), config))
    assert types_row.precision == "float"
    assert types_row.is_asked


def test_narrow_weights_of_layers_leave_the_table_at_eight_bits():
    quantized = make_quantized(words(), QuantConfig.weight_only("int4", 32))
    assert row(quantized).how == "w int8 per_channel"
    assert row(quantized, "layer").how == "w int4 per_block"


def test_a_small_table_is_quantized_if_the_config_asks_for_it():
    wish = QuantConfig(overrides=(Override(name="types", weight={"n_bits": 8, "per_channel": True}),))
    assert row(make_quantized(words(), wish), "types").how == "w int8 per_channel"


def test_four_bit_tables_in_blocks_are_used_where_the_runtime_gathers_them():
    wish = QuantConfig(overrides=(Override(name="words", weight={"n_bits": 4, "block_size": 16}),))
    assert row(make_quantized(words(), wish)).how == "w int4 per_block"
    with pytest.raises(TargetError, match=r"words.*int4 for embedding|words.*embedding"):
        make_quantized(words(), wish, target="openvino")


def test_blocks_across_the_rows_of_a_table_are_refused():
    across = {"dtype": "int4", "granularity": {"type": "per_block", "axis": 0, "block_size": 16}}
    wish = QuantConfig(overrides=(Override(name="words", weight=across),))
    with raises(TargetError, "words", "rows of a table"):
        make_quantized(words(), wish)


def test_rows_with_a_zero_point_are_refused_with_a_hint():
    uneven = {"dtype": "int8", "qscheme": "asymmetric", "granularity": {"type": "per_channel"}}
    wish = QuantConfig(overrides=(Override(name="words", weight=uneven),))
    with raises(TargetError, "words", "zero point", "weight='float'"):
        make_quantized(words(), wish)


def test_a_table_that_scales_its_rows_stays_float():
    captured = make_quantized(words(max_norm=1.0))
    assert {
        operation.precision for operation in coverage(captured).operations if operation.name.startswith("words")
    } == {"float"}
    symbolic = quantize(words(max_norm=1.0), None, forward_loop=ids(), target="onnxruntime")
    assert "max_norm" in row(symbolic).reason


def test_a_looked_up_row_is_code_times_scale_and_zero_rows_stay_zero():
    quantized = make_quantized(words())
    table = table_of(quantized)
    codes, scale = table.get_deployed().codes, table.weight_quant.scale
    token_ids = torch.arange(ROWS)
    with torch.no_grad():
        assert torch.equal(table(token_ids), codes.float() * scale[:, None])
        assert not table(torch.tensor([0])).any()


def test_disabled_quantizers_give_the_float_model_bit_for_bit():
    model = words()
    quantized = make_quantized(model)
    expected = model(ids()[0])
    assert not torch.equal(quantized(ids()[0]), expected)
    disable_fake_quant(quantized)
    with torch.no_grad():
        assert torch.equal(quantized(ids()[0]), expected)
    enable_fake_quant(quantized)
    assert not torch.equal(quantized(ids()[0]), expected)


def test_a_saved_and_loaded_table_gives_the_same_bits(tmp_path):
    quantized = make_quantized(words())
    save(quantized, tmp_path / "m")
    loaded = load(tmp_path / "m", words(), ids()[0])
    with torch.no_grad():
        assert torch.equal(loaded(ids()[1]), quantized(ids()[1]))


def test_training_moves_the_rows_that_were_read():
    quantized = quantize(words(), ids()[0], forward_loop=ids(), target="onnxruntime")
    prepare_qat(quantized)
    quantized.train()
    table = table_of(quantized)
    quantized(torch.tensor([[5, 9]])).sum().backward()
    moved = table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert moved == [5, 9]


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_a_tied_head_and_its_table_have_one_quantizer(cpu):
    quantized = make_quantized(words(tied=True), target=onnxruntime_target(cpu))
    table = table_of(quantized)
    assert len(table.sharing_layers) == 2
    assert {layer.kind for layer in table.sharing_layers} == {"embedding", "linear"}
    quantizers = [module for module in quantized.modules() if isinstance(module, WeightFakeQuantize)]
    assert len(quantizers) == 2  # one for table and head, one for the layer


def test_a_head_in_blocks_does_not_share_codes_with_the_table():
    quantized = make_quantized(words(tied=True), QuantConfig.weight_only("int4", 32))
    assert len(table_of(quantized).sharing_layers) == 1
