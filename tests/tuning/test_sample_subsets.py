"""Some samples of a batch for a step: fewer values, never others that judge, never where samples hang together."""

import pytest
import torch
from torch import Tensor, nn

from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.tuning import TuneConfig, sample_subsets, tune
from scalepoint.tuning.walk import StreamWalk
from tests.tuning.test_tune import Net, codes, pictures

WIDTHS = QuantConfig(
    activation=TensorQuantConfig(n_bits=4, symmetric=False), weight=TensorQuantConfig(n_bits=3, per_channel=True)
)
STEPS = TuneConfig(steps=("intercept", "clip"), iterations=12)


class Together(nn.Module):
    """What it makes of a sample hangs on the others."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        x = self.conv(x)
        return x - x.mean(0, keepdim=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sample_subsets, "VALUES_PER_STEP", 4096)


def tuned(net, monkeypatch):
    """The model, and how many samples ran with gradients at each step."""
    torch.manual_seed(0)
    data, seen = list(pictures(64, 1).split(16)), []
    model = quantize(net().eval(), data[0], WIDTHS, forward_loop=data, progress=False)
    run = StreamWalk.run_piece

    def watched(self, piece, entries, **options):
        if torch.is_grad_enabled():
            seen.extend(len(value) for value in entries.values() if isinstance(value, Tensor) and value.ndim > 1)
        return run(self, piece, entries, **options)

    with monkeypatch.context() as patch:
        patch.setattr(StreamWalk, "run_piece", watched)
        report = tune(model, data, STEPS, progress=False)
    return model, report, seen


def test_a_step_takes_as_many_samples_as_hold_so_many_values(monkeypatch):
    model, report, seen = tuned(Net, monkeypatch)
    assert set(seen) <= set(range(sample_subsets.MIN_SAMPLES, 17))
    assert min(seen) == 3  # of the first piece, whose samples have more than a thousand values
    assert all(piece.after <= piece.before for piece in report.pieces)
    again, _, _ = tuned(Net, monkeypatch)
    assert all(map(torch.equal, codes(model), codes(again)))


def test_samples_that_hang_together_stay_together(monkeypatch):
    _, _, seen = tuned(Together, monkeypatch)
    assert set(seen) == {16}


def test_each_step_draws_others_of_the_places_it_may():
    places = torch.tensor([1, 2, 5, 6, 7])
    found = [sample_subsets.draw_samples(places, 8, 2, step) for step in range(40)]
    assert {len(each) for each in found} == {2}
    assert {int(place) for each in found for place in each} == {1, 2, 5, 6, 7}
    assert torch.equal(sample_subsets.draw_samples(places, 8, 2, 3), found[3])
