"""High-bias absorption: a constant that a ReLU always passes moves into the next bias; the float output stays."""

import pytest
import torch
from torch import nn

from tests.quantize.migrations.models import done, float_change, migrated, pictures, refusals, seeded


class Pair(nn.Sequential):
    def __init__(self, *, norm=False, padding=0, activation=nn.ReLU, bias=True):
        norms = [nn.BatchNorm2d(4)] if norm else []
        after = [nn.BatchNorm2d(2)] if norm else []
        kernel = 1 + 2 * padding
        super().__init__(
            nn.Conv2d(3, 4, 1), *norms, activation(), nn.Conv2d(4, 2, kernel, padding=padding, bias=bias), *after
        )

    def raise_first(self, by=20.0):
        with torch.no_grad():
            (self[1] if isinstance(self[1], nn.BatchNorm2d) else self[0]).bias[:2] += by
        return self


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("norm", [True, False], ids=["batch norm", "plain"])
def test_a_high_bias_moves_into_the_next_layer(norm, bias):
    model, data = seeded(Pair, norm=norm, bias=bias).raise_first(), pictures()
    quantized = migrated(model, data, "absorb")
    assert len(done(quantized)) == 1
    assert float_change(model, quantized, data) < 1e-6
    name = "1.bias" if norm else "0.bias"
    moved = model.state_dict()[name] - quantized.state_dict()[name]
    assert bool((moved[:2] > 5).all())


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"padding": 1}, "pads with zeros"), ({"activation": nn.GELU}, "gelu"), ({"activation": nn.Identity}, "no ReLU")],
)
def test_sites_that_would_not_be_exact_are_refused(options, reason):
    model, data = seeded(Pair, **options).raise_first(), pictures()
    quantized = migrated(model, data, "absorb")
    assert any(reason in refusal for refusal in refusals(quantized).values()), refusals(quantized)
    assert not done(quantized)
    assert torch.equal(quantized.state_dict()["0.bias"], model[0].bias)


def test_without_a_channel_above_zero_nothing_is_absorbed():
    quantized = migrated(seeded(Pair), pictures(), "absorb")
    assert "no channel is always above zero" in refusals(quantized).values()
