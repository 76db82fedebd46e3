"""Embedding tables as codes with a scale a row: where they are, what they give, how they are left out."""

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
        model.words.weight *= torch.logspace(-3, 2, ROWS)[:, None]  # rows of very different size
    return model


def ids(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (4, 7), generator=generator) for _ in range(count)]


def made(model, config=None, target="onnxruntime"):
    return quantize(model, ids()[0], config, forward_loop=ids(), target=target, freeze_weights=True)


def row(model, name="words"):
    return next(each for each in coverage(model).operations if each.name == name)


def table_of(model):
    return next(each for each in model.modules() if isinstance(each, QuantizedLayer) and each.kind == "embedding")


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_table_has_a_scale_a_row_on_the_targets_that_look_it_up_so(target):
    quantized = made(words(), target=target)
    assert row(quantized).how == "w int8 per_channel"
    assert row(quantized).parameters == ROWS * WIDTH
    largest = words().words.weight.abs().amax(1)
    torch.testing.assert_close(table_of(quantized).weight_quant.scale[1:], largest[1:] / 127)


def test_a_small_table_stays_float_and_says_so():
    found = row(made(words()), "types")
    assert found.precision == "float"
    assert found.reason == "its table has only 64 values"
    assert found.is_meant


def test_a_target_that_declares_none_keeps_tables_float():
    assert row(made(words(), target="tensorrt")).reason == "it looks rows up and multiplies nothing"


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
def test_a_config_leaves_tables_out(config):
    found = row(made(words(), config))
    assert found.precision == "float"
    assert found.is_asked


def test_narrow_weights_of_layers_leave_the_table_at_eight_bits():
    quantized = made(words(), QuantConfig.weight_only("int4", 32))
    assert row(quantized).how == "w int8 per_channel"
    assert row(quantized, "layer").how == "w int4 per_block"


def test_a_small_table_that_the_config_asks_for_is_taken():
    wish = QuantConfig(overrides=(Override(name="types", weight={"n_bits": 8, "per_channel": True}),))
    assert row(made(words(), wish), "types").how == "w int8 per_channel"


def test_a_table_of_four_bits_in_blocks_is_taken_where_the_runtime_gathers_it():
    wish = QuantConfig(overrides=(Override(name="words", weight={"n_bits": 4, "block_size": 16}),))
    assert row(made(words(), wish)).how == "w int4 per_block"
    with pytest.raises(TargetError, match=r"words.*int4 for embedding|words.*embedding"):
        made(words(), wish, target="openvino")


def test_blocks_across_the_rows_of_a_table_are_refused():
    across = {"dtype": "int4", "granularity": {"type": "per_block", "axis": 0, "block_size": 16}}
    wish = QuantConfig(overrides=(Override(name="words", weight=across),))
    with raises(TargetError, "words", "rows of a table"):
        made(words(), wish)


def test_rows_with_a_zero_point_are_refused_with_the_way_out():
    uneven = {"dtype": "int8", "qscheme": "asymmetric", "granularity": {"type": "per_channel"}}
    wish = QuantConfig(overrides=(Override(name="words", weight=uneven),))
    with raises(TargetError, "words", "zero point", "weight='float'"):
        made(words(), wish)


def test_a_table_that_scales_its_rows_stays_float():
    captured = made(words(max_norm=1.0))
    assert {each.precision for each in coverage(captured).operations if each.name.startswith("words")} == {"float"}
    symbolic = quantize(words(max_norm=1.0), None, forward_loop=ids(), target="onnxruntime")
    assert "max_norm" in row(symbolic).reason


def test_what_is_looked_up_is_code_times_scale_and_the_row_of_zeros_stays():
    quantized = made(words())
    table = table_of(quantized)
    codes, scale = table.get_deployed().codes, table.weight_quant.scale
    given = torch.arange(ROWS)
    with torch.no_grad():
        assert torch.equal(table(given), codes.float() * scale[:, None])
        assert not table(torch.tensor([0])).any()


def test_quantizers_off_is_the_float_model_bit_for_bit():
    model = words()
    quantized = made(model)
    wanted = model(ids()[0])
    assert not torch.equal(quantized(ids()[0]), wanted)
    disable_fake_quant(quantized)
    with torch.no_grad():
        assert torch.equal(quantized(ids()[0]), wanted)
    enable_fake_quant(quantized)
    assert not torch.equal(quantized(ids()[0]), wanted)


def test_saved_and_loaded_it_gives_the_same_bits(tmp_path):
    quantized = made(words())
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
    quantized = made(words(tied=True), target=onnxruntime_target(cpu))
    table = table_of(quantized)
    assert len(table.sharing_layers) == 2
    assert {each.kind for each in table.sharing_layers} == {"embedding", "linear"}
    quantizers = [each for each in quantized.modules() if isinstance(each, WeightFakeQuantize)]
    assert len(quantizers) == 2  # of the table with the head, and of the layer


def test_a_head_in_blocks_has_codes_of_its_own():
    quantized = made(words(tied=True), QuantConfig.weight_only("int4", 32))
    assert len(table_of(quantized).sharing_layers) == 1
