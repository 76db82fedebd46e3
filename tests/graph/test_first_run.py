"""Models that create buffers or caches in their first forward, and forwards that return nothing."""

import pytest
import torch
from torch import nn

from scalepoint.errors import CaptureError
from scalepoint.graph import capture


class Anchors(nn.Module):
    """Computes its anchors when the size of its input changes, as detection heads do."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.shape = None

    def forward(self, x):
        y = self.head(self.stem(x).relu())
        if self.shape != y.shape[2:]:
            self.anchors = torch.arange(y.shape[2] * y.shape[3], dtype=y.dtype).view(1, 1, *y.shape[2:])
            self.shape = y.shape[2:]
        return y + self.anchors


class LateBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.is_built = False

    def forward(self, x):
        y = self.conv(x)
        if not self.is_built:
            self.register_buffer("grid", torch.full(y.shape[2:], 0.5))
            self.is_built = True
        return y * self.grid


class Cached(nn.Module):
    """Stores a table in a dict, by size."""

    def __init__(self):
        super().__init__()
        self.conv, self.tables = nn.Conv1d(4, 8, 3, padding=1), {}

    def forward(self, x):
        size = int(x.shape[-1])
        if size not in self.tables:
            self.tables[size] = torch.linspace(0, 1, size)
        return self.conv(x) * self.tables[size]


CASES = {
    "anchors": (Anchors, (2, 3, 8, 8)),
    "a buffer": (LateBuffer, (2, 3, 8, 8)),
    "a dict": (Cached, (2, 4, 16)),
}


@pytest.mark.parametrize(("kind", "shape"), CASES.values(), ids=CASES)
def test_a_tensor_created_in_the_first_forward_is_a_constant_with_values(kind, shape):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    graph = capture(model, x)
    names = set(vars(model)) | set(model._buffers)
    assert not names & {"anchors", "grid"}, "the caller's model is untouched"
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x))
        torch.testing.assert_close(graph(x[:1]), kind.forward(model, x[:1]))


def test_a_flag_that_a_trace_sets_is_restored():
    model = LateBuffer().eval()
    capture(model, torch.randn(2, 3, 8, 8), copy=False)
    assert model.is_built is False
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 8, 6, 6)


class Forgets(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        self.conv(x)


def test_a_forward_that_returns_nothing_is_reported():
    with pytest.raises(CaptureError, match=r"Forgets\.forward returns None") as error:
        capture(Forgets(), torch.randn(1, 3, 8, 8))
    assert error.value.code == "SP-G001"
