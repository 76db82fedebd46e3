"""Inputs and options that make no sense: an error of ours that says which, before any work."""

import os

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import CalibrationError, CaptureError, ConfigError, ScalepointError, TensorError, UsageError
from scalepoint.quantize import calibrate, insert_qdq
from scalepoint.verification import verify
from tests.errors import raises

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(10).reshape(2, 5)


def linear(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(self.table(ids))


def deploy(model, example, data, folder, **options):
    return scalepoint.deploy(model, example, data, output=folder / "out", smoke=True, progress=False, **options)


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)


ODD = {
    "sparse": (X.to_sparse, "sparse_coo"),
    "sparse rows": (X.to_sparse_csr, "sparse_csr"),
    "meta": (lambda: X.to("meta"), "meta device"),
    "nested": (lambda: nested(torch.strided), "nested"),
    "jagged": (lambda: nested(torch.jagged), "nested"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "says"), ODD.values(), ids=ODD)
def test_a_tensor_that_is_not_dense_is_refused_as_example_and_as_data(make, says, tmp_path) -> None:
    with pytest.raises(TensorError, match=says):
        deploy(linear(), make(), [X], tmp_path)
    with pytest.raises(TensorError, match=f"batch 1 .*{says}"):
        deploy(linear(), X, [X, make()], tmp_path)
    assert not (tmp_path / "out" / "model.onnx").exists()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transform_and_calibrate_refuse_such_tensors() -> None:
    with pytest.raises(TensorError, match="nested"):
        scalepoint.transform(linear(), nested(torch.strided))
    result = scalepoint.transform(linear(), X)
    model = insert_qdq(result.model, result.matches)
    with pytest.raises(TensorError, match="batch 0"):
        calibrate(model, [X.to_sparse()], progress=False)


@pytest.mark.parametrize("number", [10, -1, 2**40])
def test_ids_out_of_range_name_the_batch_and_the_largest_id(number, tmp_path) -> None:
    wrong = IDS.clone()
    wrong[1, 2] = number
    with raises(CaptureError, "example inputs", f" to {max(number, 9)};", "table", "below 10"):
        deploy(Tokens().eval(), wrong, [IDS], tmp_path)
    with raises(CalibrationError, "batch 1", f" to {max(number, 9)};", "below 10"):
        deploy(Tokens().eval(), IDS, [IDS, wrong], tmp_path)


def test_ids_out_of_range_in_a_function_for_data_and_in_verify(tmp_path) -> None:
    with raises(CalibrationError, "batch 1", " to 99"):
        deploy(Tokens().eval(), IDS, lambda model: (model(IDS), model(IDS * 11)), tmp_path)
    done = deploy(Tokens().eval(), IDS, [IDS], tmp_path, force=True)
    with pytest.raises(UsageError, match="to 99"):
        verify(done.path, done.model, IDS * 11)


def test_an_index_error_of_the_users_code_is_not_changed(tmp_path) -> None:
    def data(model):
        return tuple(model(IDS))[3]

    with pytest.raises(IndexError, match="tuple index out of range"):
        deploy(Tokens().eval(), IDS, data, tmp_path)


def test_an_index_error_in_forward_is_not_reported_as_ids_out_of_range(tmp_path) -> None:
    class Wrong(Tokens):
        factors = (1.0, 2.0)

        def forward(self, ids):
            return super().forward(ids) * self.factors[5]

    with pytest.raises(CaptureError, match="tuple index out of range") as caught:
        deploy(Wrong().eval(), IDS, [IDS], tmp_path)
    assert "takes ids below" not in str(caught.value)


@pytest.mark.parametrize("seed", ["abc", 1.5, None, 2**64, -(2**63) - 1])
def test_an_invalid_seed_is_refused(seed, tmp_path) -> None:
    with pytest.raises(UsageError, match="seed: must be"):
        deploy(linear(), X, [X], tmp_path, seed=seed)


@pytest.mark.parametrize("budget", ["small", "size=abc", "mass=3", "size=nan", {"size": 7}, 7, "size=", {}, "=3"])
def test_an_invalid_budget_is_refused(budget, tmp_path) -> None:
    with pytest.raises(ConfigError):
        deploy(linear(), X, [X], tmp_path, budget=budget)


def test_many_more_threads_than_cpus_are_refused(tmp_path) -> None:
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(UsageError, match=f"must be at most {most}"):
        deploy(linear(), X, [X], tmp_path, threads=most + 1)
    done = deploy(linear(), X, [X], tmp_path)
    with pytest.raises(UsageError, match=f"must be at most {most}"):
        verify(done.path, done.model, X, threads=most + 1)
    with pytest.raises(UsageError, match=f"must be at most {most}"):
        scalepoint.benchmark(done.path, done.path, threads=most + 1)


def test_no_result_shows_a_control_character(tmp_path) -> None:
    kind = type("Net\x1b[31m", (nn.Sequential,), {})
    done = deploy(linear(kind), X, [X], tmp_path, metadata={"made by": "\x1b[31m"})
    results = [done, done.trials, done.report, done.coverage, done.verification, scalepoint.transform(linear(kind), X)]
    assert [type(line) for line in results if "\x1b" in repr(line) + str(line)] == []


def test_every_refusal_is_a_scalepoint_error(tmp_path) -> None:
    for options in ({"seed": "abc"}, {"budget": "size=abc"}, {"threads": 10**6}):
        with pytest.raises(ScalepointError):
            deploy(linear(), X, [X], tmp_path, **options)
