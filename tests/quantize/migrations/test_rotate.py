"""Rotations of the residual stream and of heads: exact for pre-norm transformers, refused with a reason elsewhere."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import TensorQuantConfig
from tests.models import VisionTransformer
from tests.quantize.migrations.models import (
    Attention,
    Language,
    done,
    error,
    float_change,
    migrated,
    refusals,
    report,
    seeded,
    tokens,
)
from tests.quantize.test_smooth import ScaledRMSNorm, WrittenRMSNorm

STREAM = "the stream of attention.norm"
HEADS = "attention.v -> attention.o"
NORMS = {
    "RMSNorm": nn.RMSNorm,
    "RMSNorm without affine": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without affine": lambda width: nn.LayerNorm(width, elementwise_affine=False),
}


@pytest.mark.parametrize(
    ("norm", "width"), [*zip(NORMS, (16, 24, 36, 16), strict=True), ("RMSNorm", 18), ("LayerNorm", 18)]
)
def test_the_float_output_stays(norm, width):
    model, data = seeded(Language, NORMS[norm], width, positions=True), tokens()
    quantized = migrated(model, data, "rotate")
    assert done(quantized) == [STREAM, HEADS]
    assert float_change(model, quantized, (*data, *tokens(seed=5))) < 3e-6
    assert ("random" in report(quantized).done[0].note) == (width == 18)


def test_a_norm_in_single_operations_is_rotated():
    model, data = seeded(Language, WrittenRMSNorm), tokens()
    quantized = migrated(model, data, "rotate")
    assert done(quantized) == [f"{STREAM}.pow", HEADS]
    assert float_change(model, quantized, data) < 3e-6


def test_a_norm_that_multiplies_by_a_number_is_rotated():
    model, data = seeded(Language, ScaledRMSNorm), tokens()
    quantized = migrated(model, data, "rotate")
    assert done(quantized)
    assert float_change(model, quantized, data) < 3e-6


@pytest.mark.parametrize("migration", ["awq", "smooth"])
def test_a_norm_that_multiplies_by_a_number_has_no_weight_to_scale(migration):
    model, data = seeded(Language, ScaledRMSNorm), tokens()
    quantized = migrated(model, data, migration)
    assert float_change(model, quantized, data) < 3e-6
    assert any("multiplies by a number" in reason for reason in refusals(quantized).values())


def test_the_stream_is_rotated():
    model, data = seeded(Language), tokens()
    with torch.no_grad():
        model.table.weight[:, 5] *= 60
    quantized = migrated(model, data, "rotate")
    before, after = model.table.weight, quantized.state_dict()["table.weight"]
    torch.testing.assert_close(before.norm(dim=1), after.norm(dim=1))
    assert float(after.abs().max()) < float(before.detach().abs().max()) / 2
    assert torch.equal(quantized.state_dict()["norm.weight"], torch.ones(16))


def test_four_bits_lose_less_with_outlier_channels():
    model, data = seeded(Language, width=64, heads=4), tokens()
    with torch.no_grad():
        layers = (model.attention.q, model.attention.k, model.attention.v, model.mlp.gate, model.mlp.up)
        for norm in (model.attention.norm, model.mlp.norm):
            norm.weight[5] *= 30
        for layer in layers:
            layer.weight[:, 5] /= 30
    bits = {"activation": TensorQuantConfig(n_bits=4), "weight": TensorQuantConfig(n_bits=4, per_channel=True)}
    plain = error(model, migrated(model, data, **bits), data)
    assert error(model, migrated(model, data, "rotate", **bits), data) < 0.9 * plain


@pytest.mark.parametrize("options", [{"packed": True}, {"heads": 4, "shared": 2}], ids=["packed", "grouped"])
def test_heads_of_every_layout_are_rotated(options):
    model, data = seeded(Language, **options), tokens()
    quantized = migrated(model, data, "rotate")
    assert len(done(quantized)) == 2
    assert float_change(model, quantized, data) < 3e-6


def test_a_reader_without_a_bias_gets_one():
    model, data = seeded(Language, nn.LayerNorm, bias=False), tokens()
    quantized = migrated(model, data, "rotate")
    assert STREAM in done(quantized)
    assert "attention.q.bias" in report(quantized).added
    assert float_change(model, quantized, data) < 3e-6


def test_a_tied_embedding_is_untied():
    model, data = seeded(Language, tied=True), tokens()
    quantized = migrated(model, data, "rotate")
    assert STREAM in done(quantized)
    assert float_change(model, quantized, data) < 3e-6
    assert torch.equal(model.head.weight, model.table.weight)


def test_a_vision_transformer_with_packed_attention_is_rotated():
    torch.manual_seed(0)
    model = seeded(VisionTransformer, 32, 4, 1, 32, 16, 10)
    data = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    quantized = migrated(model, data, "rotate")
    assert len(done(quantized)) == 2, refusals(quantized)
    assert float_change(model, quantized, data) < 5e-6


class Stack(nn.Module):
    """One layer between what `before` and `after` make of the stream."""

    def __init__(self, before=None, after=None, head=True):
        super().__init__()
        self.table, self.before, self.after = nn.Embedding(20, 16), before, after
        self.attention = Attention(nn.LayerNorm, 16, 2, 2)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4) if head else None

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.before(x) if self.before else x
        x = self.attention(x)
        x = self.after(x) if self.after else x
        return self.head(self.norm(x)) if self.head else self.norm(x)


class Scaled(nn.Module):
    """A weight for each channel of the stream."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        return x * self.scale


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(16), persistent=False)

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"before": nn.LayerNorm(16)}, "not a pre-norm model"),
        ({"after": nn.GELU()}, "gelu"),
        ({"after": Scaled()}, "mul"),
        ({"before": Offset()}, "not saved"),
        ({"head": False}, "output of the model"),
    ],
    ids=["post-norm", "an activation", "a layer scale", "a buffer that is not saved", "an output"],
)
def test_operations_that_do_not_commute_are_refused_with_the_reason(options, reason):
    model, data = seeded(Stack, **options), tokens()
    quantized = migrated(model, data, "rotate")
    reasons = " ".join(note for name, note in refusals(quantized).items() if "stream" in name)
    assert reason in reasons
    assert HEADS in done(quantized)
    assert float_change(model, quantized, data) < 3e-6


def test_a_layer_that_is_used_twice_is_refused():
    class Repeated(Language):
        def forward(self, tokens):
            x = self.table(tokens)
            return self.head(self.norm(self.attention(self.attention(x))))

    model, data = seeded(Repeated), tokens()
    quantized = migrated(model, data, "rotate")
    assert not done(quantized)
    assert "used" in refusals(quantized)[STREAM]
    assert float_change(model, quantized, data) < 1e-6
