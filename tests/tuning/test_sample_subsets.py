"""Some samples per step: fewer values, no held-out samples, and whole batches if samples depend on each other."""

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


class Dependent(nn.Module):
    """The output of a sample depends on the others."""

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
    data, observed = list(pictures(64, 1).split(16)), []
    model = quantize(net().eval(), data[0], WIDTHS, forward_loop=data, progress=False)
    run = StreamWalk.run_piece

    def watched(self, piece, entries, **options):
        if torch.is_grad_enabled():
            observed.extend(len(value) for value in entries.values() if isinstance(value, Tensor) and value.ndim > 1)
        return run(self, piece, entries, **options)

    with monkeypatch.context() as patch:
        patch.setattr(StreamWalk, "run_piece", watched)
        report = tune(model, data, STEPS, progress=False)
    return model, report, observed


def test_a_step_uses_the_samples_that_have_the_given_number_of_values(monkeypatch):
    model, report, observed = tuned(Net, monkeypatch)
    assert set(observed) <= set(range(sample_subsets.MIN_SAMPLES, 17))
    assert min(observed) == 3  # of the first piece, whose samples have more than a thousand values
    assert all(piece.after <= piece.before for piece in report.pieces)
    again, _, _ = tuned(Net, monkeypatch)
    assert all(map(torch.equal, codes(model), codes(again)))


def test_samples_that_depend_on_each_other_stay_in_one_batch(monkeypatch):
    _, _, observed = tuned(Dependent, monkeypatch)
    assert set(observed) == {16}


def test_each_step_draws_other_samples_among_the_allowed_positions():
    positions = torch.tensor([1, 2, 5, 6, 7])
    results = [sample_subsets.draw_samples(positions, 8, 2, step) for step in range(40)]
    assert {len(result) for result in results} == {2}
    assert {int(position) for result in results for position in result} == {1, 2, 5, 6, 7}
    assert torch.equal(sample_subsets.draw_samples(positions, 8, 2, 3), results[3])
