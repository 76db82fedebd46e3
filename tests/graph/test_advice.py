"""Errors of capture and their advice, and models with unusual inputs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from scalepoint.errors import CaptureError
from scalepoint.graph import capture
from scalepoint.graph.origin import get_origin
from tests.errors import raises


class WithoutMask(nn.Module):
    """Takes another branch while it is traced, and fails there, as some models do without a mask."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.fault = nn.Linear(8, 8), fault

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            x = x + torch.ones(5, 3) if self.fault == "shape" else x + None.shape[0]
        return self.layer(x)


class Cache:
    """An output that a graph cannot return."""


class Remembers(nn.Module):
    def __init__(self, **config: bool) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(8, 8), SimpleNamespace(**config)

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        return self.layer(x), Cache()


class TestAdvice:
    @pytest.mark.parametrize("fault", ["shape", "attribute"])
    def test_a_failure_that_only_a_trace_has_is_not_blamed_on_tensor_values(self, fault):
        with raises(CaptureError, "another branch", "torch.export") as caught:
            capture(nn.Sequential(nn.Linear(8, 8), WithoutMask(fault)), torch.randn(2, 8))
        assert "independent of tensor values" not in str(caught.value)
        assert "leave=['1']" in str(caught.value)
        assert f"{Path(__file__).name}:" in str(caught.value)

    def test_a_returned_cache_is_reported_with_the_setting_that_disables_it(self):
        with raises(CaptureError, "Cache", "use_cache=True") as caught:
            capture(Remembers(use_cache=True), torch.randn(2, 8))
        assert "torch.where" not in str(caught.value)

    def test_an_output_class_that_a_graph_cannot_return_is_reported(self):
        with raises(CaptureError, "Cache", "Return tensors"):
            capture(Remembers(), torch.randn(2, 8))


def test_the_line_of_a_notebook_cell_is_reported():
    scope = {"torch": torch, "nn": nn}
    code = """
class Typed(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x
"""
    exec(compile(code, "<ipython-input-3-abc>", "exec"), scope)  # noqa: S102  # as a notebook does
    with pytest.raises(CaptureError, match="at <ipython-input-3-abc>:4"):
        capture(scope["Typed"](), torch.randn(2, 8))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def test_packed_sequences_are_reported_with_advice():
    with raises(CaptureError, "recurrent layer", "padded"):
        capture(Packed(), (torch.randn(2, 5, 8), torch.tensor([5, 3])))


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.layer(x) + sum(rest)


def test_the_batch_of_variadic_inputs_is_free():
    model, x = Rest().eval(), torch.randn(4, 8)
    graph = capture(model, (x, x + 1, x + 2))
    assert get_origin(graph).fixed_batch == {}
    y = torch.randn(3, 8)
    assert torch.equal(graph.eval()(y, y, y), model(y, y, y))
