"""feed_data limits, counts and checks batches and functions in the same way."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from scalepoint.analysis import compare, sensitivity
from scalepoint.analysis.histograms import histograms
from scalepoint.errors import CalibrationError, UsageError
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import QuantConfig, SmoothQuantConfig, calibrate, insert_qdq, quantize
from scalepoint.quantize.batches import to_model_inputs
from scalepoint.quantize.feeding import feed_data
from scalepoint.transformation import transform


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


def batches(count):
    return [torch.randn(2, 4) for _ in range(count)]


def looping(count):
    def loop(model):
        for batch in batches(count):
            model(batch)

    return loop


def stubborn(model):
    """A data function that catches every exception and continues."""
    for batch in batches(50):
        try:
            model(batch)
        except Exception:  # noqa: S112  # that is what it is about
            continue


@pytest.mark.parametrize("data", [batches(50), looping(50), stubborn, (batch for batch in batches(50))])
def test_all_data_ends_after_max_batches(data):
    model = Counted()
    assert feed_data(model, data, "testing", max_batches=2, progress=False).calls == 2
    assert model.calls == 2


def test_reversed_and_read_only_arrays_are_accepted():
    plain = np.arange(8, dtype=np.float32).reshape(2, 4)
    fixed = plain.copy()
    fixed.setflags(write=False)
    for array in (plain[:, ::-1], fixed, np.ones((), np.float32)):
        expected = torch.tensor(array.tolist())
        (tensor,), _ = to_model_inputs(array, Counted())
        (example,), _ = as_inputs(array, None)
        assert torch.equal(tensor, expected)
        assert torch.equal(example, expected)
    assert to_model_inputs(plain, Counted())[0][0].data_ptr() == plain.ctypes.data  # other arrays are not copied


def test_a_generator_is_not_read_beyond_the_used_batches():
    generated_indices = []

    def generated():
        for batch in batches(10):
            generated_indices.append(batch)
            yield batch

    feed_data(Counted(), generated(), "testing", max_batches=3, progress=False)
    assert len(generated_indices) == 3


def test_max_batches_stops_a_function_in_all_callers():
    net, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), []

    def loop(model):
        for batch in batches(50):
            model(batch)
            calls.append(1)

    model = quantize(net, torch.randn(2, 4), forward_loop=loop, max_batches=2, progress=False)
    assert len(calls) == 2
    assert compare(net, model, loop, max_batches=3, progress=False).batches == 3
    calls.clear()
    sensitivity(model, loop, max_batches=4, progress=False)
    assert len(calls) == 4
    calls.clear()
    histograms(model, loop, ["0"], max_batches=1, progress=False)
    assert len(calls) == 1


def test_max_batches_stops_smoothing_too():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.calls = nn.LayerNorm(4), nn.Linear(4, 4), 0

        def forward(self, x):
            return self.linear(self.norm(x))

    result = transform(Normed().eval(), torch.randn(2, 4))
    model = insert_qdq(result.model, result.matches, QuantConfig(smooth_quant=SmoothQuantConfig(enabled=True)))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    calibrate(model, looping(9), max_batches=2, progress=False)
    assert len(calls) == 4  # two passes


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "0 batches"), (lambda model: None, "never called the model")],
    ids=["empty", "idle"],
)
def test_data_that_never_reaches_the_model_is_an_error(data, message):
    with pytest.raises(CalibrationError, match=message):
        feed_data(Counted(), data, "testing", progress=False)


@pytest.mark.parametrize("data", [torch.zeros(2, 4), {"x": torch.zeros(2, 4)}, "batches", 3])
def test_invalid_data_is_refused(data):
    with pytest.raises(UsageError, match="iterable of batches"):
        feed_data(Counted(), data, "testing", progress=False)


@pytest.mark.parametrize(
    ("data", "way_out"),
    [(lambda: iter(batches(2)), r"list\(function\(\)\)"), (TensorDataset(torch.zeros(2, 4)), "in a DataLoader")],
    ids=["a function that makes batches", "a dataset"],
)
def test_nearly_valid_data_is_refused_with_a_hint(data, way_out):
    with pytest.raises(UsageError, match=way_out):
        feed_data(Counted(), data, "testing", progress=False)


def test_batches_with_nan_can_be_skipped():
    data = batches(4)
    data[1][0, 0] = float("nan")
    fed = feed_data(Counted(), data, "testing", skip_nan=True, progress=False)
    assert (fed.calls, fed.skipped) == (3, [1])


def test_hooks_are_removed_also_after_an_error():
    model = Counted()
    with pytest.raises(RuntimeError) as caught:
        feed_data(model, [torch.zeros(2, 4), torch.zeros(2, 5)], "testing", progress=False)
    assert "testing: batch 1" in caught.value.__notes__
    assert any("(2, 5) torch.float32" in note for note in caught.value.__notes__)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_labels_are_dropped():
    assert to_model_inputs((torch.zeros(1), torch.ones(1)), Counted())[0][0].item() == 0
    assert len(to_model_inputs((torch.zeros(1), torch.ones(1)), Counted())[0]) == 1


def test_without_a_terminal_a_phase_prints_one_line(capfd):
    feed_data(Counted(), batches(3), "testing")
    assert capfd.readouterr().err.startswith("testing: 3 batches in ")
