"""AWQ: scales by data, less error, s = 1 on ties, zero channels, and every way from a norm or a layer to linears."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from tests.pace import fast
from tests.quantize.migrations.models import (
    Language,
    done,
    error,
    float_change,
    migrated,
    refusals,
    report,
    rows,
    seeded,
    tokens,
)
from tests.quantize.test_smooth import BareFunctionalNorm, WrittenRMSNorm

INT4 = {"weight": TensorQuantConfig(n_bits=4, per_channel=True)}
NORMS = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without affine": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "F.layer_norm without affine": BareFunctionalNorm,
    "RMSNorm": nn.RMSNorm,
    "RMSNorm written out": WrittenRMSNorm,
}
SITES = ["attention.norm", "attention.v", "mlp.norm", "mlp.up", "norm"]


def sources(quantized):
    return [name.split(" ->")[0].removesuffix(".pow").removesuffix(".layer_norm") for name in done(quantized)]


@pytest.mark.parametrize("norm", fast(NORMS, "LayerNorm", "RMSNorm written out"))
def test_all_sites_of_a_transformer_are_found(norm):
    model, data = seeded(Language, NORMS[norm]), tokens()
    quantized = migrated(model, data, "awq", **INT4)
    assert sources(quantized) == SITES
    assert float_change(model, quantized, (*data, *tokens(seed=5))) < 2e-6


@pytest.mark.parametrize(
    "options", [{"packed": True}, {"heads": 4, "shared": 2}], ids=["packed q, k, v", "grouped heads"]
)
def test_channels_of_values_are_traced_through_attention(options):
    model, data = seeded(Language, **options), tokens()
    quantized = migrated(model, data, "awq", **INT4)
    name = "attention.qkv" if "packed" in options else "attention.v"
    assert f"{name} -> attention.o" in done(quantized)
    assert float_change(model, quantized, data) < 2e-6
    if "packed" in options:  # queries and keys stay as they are, apart from the norm before
        before = migrated(model, data, **INT4).state_dict()["attention.qkv.bias"]
        after = quantized.state_dict()["attention.qkv.bias"]
        assert torch.equal(before[:32], after[:32])
        assert not torch.equal(before[32:], after[32:])


class Outliers(nn.Module):
    """A norm with a few large channels that small weights read."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.out(self.norm(x))


def test_weights_of_four_bits_lose_less():
    model, data = seeded(Outliers), rows(32)
    with torch.no_grad():
        model.norm.weight[:3], model.out.weight[:, :3] = 40, model.out.weight[:, :3] / 20
    fields = {**INT4, "activation": "float"}
    plain = error(model, migrated(model, data, **fields), data)
    assert error(model, migrated(model, data, "awq", **fields), data) < 0.7 * plain


def test_a_tie_changes_nothing():
    model, data = seeded(Outliers), rows(32)
    with torch.no_grad():
        model.out.weight.zero_()
    quantized = migrated(model, data, "awq", **INT4, activation="float")
    assert report(quantized).done[0].note.startswith("a = 0,")
    assert torch.equal(quantized.state_dict()["norm.weight"], model.norm.weight)


def test_channels_that_are_always_zero_are_safe():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(self.up(x).relu())

    model, data = seeded(Gated), rows()
    with torch.no_grad():
        model.up.weight[3], model.up.bias[3] = 0, -1
    quantized = migrated(model, data, "awq", **INT4)
    state = quantized.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())
    assert torch.equal(state["down.weight"][:, 3], model.down.weight[:, 3])
    assert float_change(model, quantized, data) < 1e-6


def test_a_reader_that_is_not_linear_and_a_float_reader_are_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(8, 8)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).softmax(1))

    model = seeded(Mixed)
    quantized = migrated(model, [torch.randn(2, 3, 8, 8)], "awq", **INT4)
    assert "not a linear layer" in refusals(quantized)["a"]
    model, data = seeded(Outliers), rows(32)
    quantized = migrated(model, data, "awq", weight="float")
    assert "no weight that reads it is quantized" in refusals(quantized)["norm -> out"]


def test_batches_of_any_size_give_the_same():
    model, data = seeded(Outliers), torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    config = QuantConfig(migrate=("awq",), **INT4)
    results = [
        quantize(model, data, config, forward_loop=list(data.split(size))).state_dict()["out.weight"]
        for size in (12, 5)
    ]
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)
