"""What a caller has set for all of torch changes nothing here, and is there again afterwards."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.quantize import calibrate, insert_qdq
from scalepoint.support import torch_state
from scalepoint.support.torch_state import caller_dtype, default_settings
from scalepoint.tuning import TuneConfig, tune

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Makes its first state in the default dtype."""

    def __init__(self):
        super().__init__()
        self.into, self.again = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 16)
        for _ in range(2):
            state = torch.tanh(self.into(x) + self.again(state))
        return state


def model_of(kind=Recurrent):
    torch.manual_seed(0)
    return kind().eval()


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "double by default": lambda: default_dtype(torch.float64),
    "meta by default": lambda: default_device("meta"),
    "in meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_quantizing_is_the_same_wherever_it_is_called_from(state):
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    found = scalepoint.transform(model, X)
    plain = insert_qdq(found.model, found.matches)
    there = insert_qdq(found.model, found.matches)
    for made, where in ((plain, default_settings), (there, state)):
        with where():
            calibrate(made, [X], progress=False, freeze_weights=True)
            tune(made, [X], TuneConfig(), progress=False)
    expected, gotten = plain.state_dict(), there.state_dict()
    for name, value in expected.items():
        assert gotten[name].dtype == value.dtype, name
        assert torch.equal(gotten[name], value), name


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_deploy_makes_a_file_that_runs_and_leaves_the_settings_alone(state, tmp_path: Path):
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    with state():
        before = (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"))
        was_inferring = torch.is_inference_mode_enabled()
        done = scalepoint.deploy(model, X, [X], output=tmp_path / "out", smoke=True, progress=False)
        assert (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")) == before
        assert torch.is_inference_mode_enabled() == was_inferring
    assert done.verification is not None
    assert done.verification.holds


@pytest.mark.filterwarnings("ignore:the model computes in float64")
def test_a_double_model_that_makes_tensors_by_default_is_captured_as_it_was_written(tmp_path: Path):
    with default_dtype(torch.float64):
        model = model_of()
        done = scalepoint.deploy(
            model, X.double(), [X.double()], output=tmp_path / "out", smoke=True, progress=False,
            evaluate=lambda run: -float((run(X.double()).double() - model(X.double())).abs().mean()),
        )  # fmt: skip
    assert done.verification is not None
    assert done.verification.holds


def test_tensors_that_inference_mode_made_can_be_tuned_with(tmp_path: Path):
    with torch.inference_mode():
        x, model = X.clone(), model_of()
        done = scalepoint.deploy(model, x, [x], output=tmp_path / "out", smoke=True, progress=False, accuracy="best")
    assert done.verification is not None
    assert done.verification.holds


def test_the_users_code_sees_the_dtype_it_was_called_under():
    with default_dtype(torch.float64), default_settings():
        assert torch.get_default_dtype() == torch.float32
        with default_settings(), caller_dtype():
            assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("kind", ["batches", "function"])
@pytest.mark.filterwarnings("ignore:the model computes in float64")
def test_data_is_made_under_the_dtype_of_the_caller(tmp_path: Path, kind):
    """A model in double, and data that is made anew each time, in the default dtype."""
    seen = []

    class Batches:
        def __iter__(self):
            for _ in range(2):
                seen.append(torch.get_default_dtype())
                yield torch.rand(4, 12)

    def function(model):
        for batch in Batches():
            model(batch)
            seen.append(torch.get_default_dtype())

    with default_dtype(torch.float64):
        model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
        data = Batches() if kind == "batches" else function
        given = {"output": tmp_path / "out", "smoke": True, "progress": False, "config": {"speed_first": False}}
        done = scalepoint.deploy(model, torch.rand(4, 12), data, **given)
        assert torch.get_default_dtype() == torch.float64
    assert done.verification.holds
    assert set(seen) == {torch.float64}


def test_a_model_that_a_function_calls_runs_under_the_dtype_of_torch_and_gives_that_of_the_caller_back():
    """Also where the model raises and the function goes on."""
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    found = scalepoint.transform(model, X)
    plain, there = (insert_qdq(found.model, found.matches) for _ in range(2))
    calibrate(plain, [X], progress=False, freeze_weights=True)
    seen = []

    def function(model):
        try:
            model(X, X, X)
        except TypeError:
            seen.append(torch.get_default_dtype())
        model(X)

    with default_dtype(torch.float64):
        calibrate(there, function, progress=False, freeze_weights=True)
    assert seen == [torch.float64]
    assert all(torch.equal(there.state_dict()[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("method", ["minmax", "moving_average_minmax", "histogram", "percentile", "entropy", "mse"])
def test_calibrate_and_tune_name_the_dtypes_of_their_tensors(monkeypatch, method):
    """Also while the default dtype is not switched to float32 around them."""
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    found = scalepoint.transform(model, X)
    config = {"activation": {"calibration_method": method}}
    plain, there = (insert_qdq(found.model, found.matches, config) for _ in range(2))
    monkeypatch.setattr(torch_state, "_default_dtype", lambda dtype: nullcontext())
    for made, dtype in ((plain, torch.float32), (there, torch.float64)):
        with default_dtype(dtype):
            calibrate(made, [X], progress=False, freeze_weights=True)
            tune(made, [X], TuneConfig(), progress=False)
    gotten = there.state_dict()
    for name, value in plain.state_dict().items():
        assert gotten[name].dtype == value.dtype, name
        assert torch.equal(gotten[name], value), name
