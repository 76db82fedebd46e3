"""Cross-layer equalization: ranges that meet, a float output that stays, clamps, dead channels, what is refused."""

import pytest
import torch
from torch import nn

from scalepoint.quantize import TensorQuantConfig
from tests.quantize.migrations.models import (
    Chain,
    done,
    error,
    float_change,
    migrated,
    pictures,
    refusals,
    rows,
    seeded,
)

LEAKY = lambda: nn.LeakyReLU(0.2)  # noqa: E731  # a class with a setting
ALL = ["0 -> 3", "3 -> 6", "6 -> 10"]


def folded(quantized, name):
    """The weight of a layer as its kernel has it."""
    results = [
        m for n, m in quantized.named_modules() if hasattr(m, "fold_norm") and m.weight_quant.consumers == [name]
    ]
    return results[0].fold_norm()[0].detach()


@pytest.mark.parametrize("activation", [nn.ReLU, LEAKY, nn.PReLU, nn.Identity], ids=["relu", "leaky", "prelu", "none"])
def test_the_float_output_stays(activation):
    model, data = seeded(Chain, activation), pictures()
    quantized = migrated(model, data, "equalize")
    assert done(quantized) == ALL
    assert float_change(model, quantized, (*data, *pictures(seed=9))) < 2e-6


def test_the_ranges_of_a_depthwise_triple_become_equal():
    quantized = migrated(seeded(Chain), pictures(), "equalize")
    first, middle = folded(quantized, "0"), folded(quantized, "3")
    third = folded(quantized, "6").view(4, 3, 2).abs().amax(1).reshape(-1)
    ranges = torch.stack([first.abs().amax((1, 2, 3)), middle.abs().amax((1, 2, 3)), third])
    assert float((ranges.amax(0) / ranges.amin(0)).max()) < 1.12


def test_one_round_is_the_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    first, second = (model[k].weight.detach().clone() for k in (0, 2))
    quantized = migrated(model, rows(4), "equalize")
    s = (first.abs().amax(1) / second.abs().amax(0)).sqrt()
    state = quantized.state_dict()
    torch.testing.assert_close(state["0.weight"], first / s[:, None], rtol=1e-5, atol=0)
    torch.testing.assert_close(state["0.bias"], model[0].bias.detach() / s, rtol=1e-5, atol=0)
    torch.testing.assert_close(state["2.weight"], second * s, rtol=1e-5, atol=0)


def test_weights_with_one_scale_lose_less_accuracy():
    model, data = seeded(Chain), pictures()
    with torch.no_grad():
        model[1].weight[:4] *= 100  # what a layer with one scale cannot hold
        model[3].weight[:4] /= 100
    tensor = {"weight": TensorQuantConfig()}
    plain = error(model, migrated(model, data, **tensor), data)
    assert error(model, migrated(model, data, "equalize", **tensor), data) < plain / 2


def test_dead_channels_are_left_alone():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), rows(4)
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2], model[2].weight[:, 4] = 0, 0.5, 0
    quantized = migrated(model, data, "equalize")
    state = quantized.state_dict()
    assert torch.equal(state["2.weight"][:, 2], model[2].weight[:, 2])
    assert torch.equal(state["0.weight"][4], model[0].weight[4])
    assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())
    assert float_change(model, quantized, data) < 1e-6


def test_several_readers_share_the_factors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(x).relu()
            return self.b(h) + self.c(h)

    model, data = seeded(Two), rows(4)
    quantized = migrated(model, data, "equalize")
    assert done(quantized) == ["a -> b, c"]
    assert float_change(model, quantized, data) < 1e-6
    times = [quantized.state_dict()[f"{item}.weight"] / getattr(model, item).weight.detach() for item in "bc"]
    torch.testing.assert_close(times[0][0], times[1][0])


def test_concatenated_and_split_channels_are_traced():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(3, 4, 1),
                nn.Conv2d(4, 3, 1),
                nn.Conv2d(4, 3, 1),
            )

        def forward(self, x):
            joined = torch.cat([self.a(x), self.b(x)], 1).relu()
            first, second = joined[:, 2:6], torch.cat([joined[:, :2], joined[:, 6:]], 1)
            return self.c(first) + self.d(second)

    model, data = seeded(Forked), pictures()
    quantized = migrated(model, data, "equalize")
    assert done(quantized) == ["a -> c, d", "b -> c, d"]
    assert float_change(model, quantized, data) < 1e-6


class ReadByMore(nn.Module):
    """The second reader is no layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h) + h.sigmoid()


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(self.a(x).relu()).relu())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b((self.a(x) + x).relu())


class Curved(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "name", "why"),
    [
        (ReadByMore, "a", "sigmoid"),
        (Twice, "a", "used elsewhere"),
        (Tied, "a.linear", "used elsewhere"),
        (Tied, "b", "used elsewhere"),
        (Residual, "a", "add"),
        (Curved, "0", "gelu"),
    ],
)
def test_operations_that_do_not_commute_with_scaling_are_refused_with_the_reason(build, name, why):
    model, data = seeded(build), rows(4)
    quantized = migrated(model, data, "equalize")
    assert why in refusals(quantized)[name]
    assert done(quantized) == []
    assert float_change(model, quantized, data) < 1e-6


def test_a_batch_norm_without_affine_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    quantized = migrated(model, pictures(), "equalize")
    assert "no weight and bias of its own" in refusals(quantized)["0"]


class Clamped(nn.Sequential):
    def __init__(self, clamp, bias):
        super().__init__(nn.Conv2d(3, 4, 1), clamp, nn.Conv2d(4, 2, 1))
        nn.init.uniform_(self[0].weight, -0.2, 0.2)
        nn.init.constant_(self[0].bias, bias)


class TestClamps:
    def test_a_clamp_that_no_value_reaches_is_passed(self):
        model, data = seeded(Clamped, nn.ReLU6(), 0.1), pictures()
        quantized = migrated(model, data, "equalize")
        assert done(quantized) == ["0 -> 2"]
        assert not torch.equal(quantized.state_dict()["0.weight"], model[0].weight)
        assert float_change(model, quantized, data) < 1e-6

    @pytest.mark.parametrize(("clamp", "bias"), [(nn.ReLU6(), 7.0), (nn.Hardtanh(), 3.0), (nn.Hardtanh(), -3.0)])
    def test_a_clamp_that_is_reached_is_refused(self, clamp, bias):
        model, data = seeded(Clamped, clamp, bias), pictures()
        quantized = migrated(model, data, "equalize")
        assert "reach the clamp" in refusals(quantized)["0 -> 2"]
        assert torch.equal(quantized.state_dict()["0.weight"], model[0].weight)

    def test_only_channels_away_from_the_clamp_are_scaled(self):
        model, data = seeded(Clamped, nn.ReLU6(), 0.1), pictures()
        with torch.no_grad():
            model[0].bias[1] = 6.5
        quantized = migrated(model, data, "equalize")
        assert done(quantized) == ["0 -> 2"]
        assert torch.equal(quantized.state_dict()["0.weight"][1], model[0].weight[1])
        assert float_change(model, quantized, data) < 1e-6

    def test_a_factor_that_would_reach_the_clamp_is_limited(self):
        model, data = seeded(Clamped, nn.ReLU6(), 0.1), pictures()
        with torch.no_grad():
            model[2].weight *= 1e3  # wants the activations a thousand times larger
        quantized = migrated(model, data, "equalize")
        assert float_change(model, quantized, data) < 1e-6
        scaled = quantized.state_dict()["0.weight"] / model[0].weight.detach()
        assert float(scaled.max()) > 1.5  # and still it goes as far as it may
