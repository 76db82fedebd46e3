"""Global settings of torch do not change results, and are restored afterwards."""

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
    """Creates its first state in the default dtype."""

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
def test_quantizing_gives_the_same_result_under_any_settings(state):
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    result = scalepoint.transform(model, X)
    plain = insert_qdq(result.model, result.matches)
    inside_state = insert_qdq(result.model, result.matches)
    for model_to_tune, context in ((plain, default_settings), (inside_state, state)):
        with context():
            calibrate(model_to_tune, [X], progress=False, freeze_weights=True)
            tune(model_to_tune, [X], TuneConfig(), progress=False)
    expected, actual = plain.state_dict(), inside_state.state_dict()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_deploy_works_under_any_settings_and_restores_them(state, tmp_path: Path):
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
def test_a_double_model_that_creates_tensors_in_the_default_dtype_is_captured(tmp_path: Path):
    with default_dtype(torch.float64):
        model = model_of()
        done = scalepoint.deploy(
            model, X.double(), [X.double()], output=tmp_path / "out", smoke=True, progress=False,
            evaluate=lambda run: -float((run(X.double()).double() - model(X.double())).abs().mean()),
        )  # fmt: skip
    assert done.verification is not None
    assert done.verification.holds


def test_tensors_created_in_inference_mode_can_be_used_for_tuning(tmp_path: Path):
    with torch.inference_mode():
        x, model = X.clone(), model_of()
        done = scalepoint.deploy(model, x, [x], output=tmp_path / "out", smoke=True, progress=False, accuracy="best")
    assert done.verification is not None
    assert done.verification.holds


def test_code_of_the_user_runs_under_its_default_dtype():
    with default_dtype(torch.float64), default_settings():
        assert torch.get_default_dtype() == torch.float32
        with default_settings(), caller_dtype():
            assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("kind", ["batches", "function"])
@pytest.mark.filterwarnings("ignore:the model computes in float64")
def test_data_is_created_under_the_default_dtype_of_the_caller(tmp_path: Path, kind):
    """A model in double, and data that is created in each pass, in the default dtype."""
    dtypes = []

    class Batches:
        def __iter__(self):
            for _ in range(2):
                dtypes.append(torch.get_default_dtype())
                yield torch.rand(4, 12)

    def function(model):
        for batch in Batches():
            model(batch)
            dtypes.append(torch.get_default_dtype())

    with default_dtype(torch.float64):
        model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
        data = Batches() if kind == "batches" else function
        options = {"output": tmp_path / "out", "smoke": True, "progress": False, "config": {"speed_first": False}}
        done = scalepoint.deploy(model, torch.rand(4, 12), data, **options)
        assert torch.get_default_dtype() == torch.float64
    assert done.verification.holds
    assert set(dtypes) == {torch.float64}


def test_a_model_called_by_a_data_function_runs_in_float32_and_restores_the_dtype_of_the_caller():
    """Also if the model raises an error that the function catches."""
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    result = scalepoint.transform(model, X)
    plain, inside_state = (insert_qdq(result.model, result.matches) for _ in range(2))
    calibrate(plain, [X], progress=False, freeze_weights=True)
    dtypes = []

    def function(model):
        try:
            model(X, X, X)
        except TypeError:
            dtypes.append(torch.get_default_dtype())
        model(X)

    with default_dtype(torch.float64):
        calibrate(inside_state, function, progress=False, freeze_weights=True)
    assert dtypes == [torch.float64]
    assert all(torch.equal(inside_state.state_dict()[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("method", ["minmax", "moving_average_minmax", "histogram", "percentile", "entropy", "mse"])
def test_calibrate_and_tune_name_the_dtypes_of_their_tensors(monkeypatch, method):
    """Also while the default dtype is not switched to float32 around them."""
    model = model_of(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
    result = scalepoint.transform(model, X)
    config = {"activation": {"calibration_method": method}}
    plain, in_double = (insert_qdq(result.model, result.matches, config) for _ in range(2))
    monkeypatch.setattr(torch_state, "_default_dtype", lambda dtype: nullcontext())
    for model_to_tune, dtype in ((plain, torch.float32), (in_double, torch.float64)):
        with default_dtype(dtype):
            calibrate(model_to_tune, [X], progress=False, freeze_weights=True)
            tune(model_to_tune, [X], TuneConfig(), progress=False)
    actual = in_double.state_dict()
    for name, value in plain.state_dict().items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name
