"""Values that users pass as a model or as inputs: accepted if the meaning is clear, else refused with advice."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scalepoint
from scalepoint.errors import CaptureError
from scalepoint.graph import capture
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize.batches import drop_extra_inputs

X = torch.randn(2, 8)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.fc(x) * scale


class Open(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        return sum(xs)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model))])
def test_wrappers_of_a_model_are_removed(wrap) -> None:
    model = net()
    graph = capture(wrap(model), X)
    assert dict(graph.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert torch.equal(graph(X), model(X))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Two, r"class.*Two\(...\).eval\(\)"),
        (Two().state_dict(), "state_dict"),
        (3, "3 .*nn.Module"),
        ({}, "{} .*nn.Module"),
        ("model.pt", "is not an nn.Module"),
    ],
    ids=["class", "state_dict", "number", "dict", "path"],
)
def test_deploy_refuses_a_value_that_is_not_a_model_before_any_work(value, message, tmp_path) -> None:
    with pytest.raises(CaptureError, match=message):
        scalepoint.deploy(value, X, [X], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_script_modules_are_refused(tmp_path) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(CaptureError, match="this is a ScriptModule"):
        scalepoint.deploy(scripted, X, [X], output=tmp_path / "out")


def test_numpy_arrays_are_converted_at_any_depth() -> None:
    array = X.numpy()
    args, kwargs = as_inputs((array, [array], {"a": (array,)}), {"b": array})
    for tensor in (args[0], args[1][0], args[2]["a"][0], kwargs["b"]):
        assert torch.equal(tensor, X)
    assert as_inputs(array, None)[0][0].shape == (2, 8)
    assert as_inputs({"x": np.ones(3)}, None)[1]["x"].dtype == torch.float64


@pytest.mark.parametrize(
    ("model", "batch", "input_count"),
    [(Two(), (X, 3), 1), (Open(), (X, X, X), 3), (nn.Sequential(), (X, X), 1), (Two(), (), 0)],
    ids=["keyword-only", "open", "sequential", "none"],
)
def test_labels_after_the_inputs_are_dropped(model, batch, input_count) -> None:
    args, kwargs = drop_extra_inputs(model, batch, {"scale": 2.0})
    assert (len(args), kwargs) == (input_count, {"scale": 2.0})
