"""Opaque modules of leave=: they are freed with their graph, and their MACs are counted."""

import gc
import weakref

import pytest
import torch
from torch import nn

from scalepoint.errors import CaptureError
from scalepoint.graph import capture
from scalepoint.quantize import coverage, insert_qdq
from scalepoint.transformation import transform


class Net(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.fails = fails

    def forward(self, x):
        x = self.last(self.middle(self.middle(self.first(x))))
        if self.fails and float(x.sum()) > 1e9:
            x = x + 1
        return x


@pytest.mark.usefixtures("fast_gc_collect")
def test_an_opaque_module_is_freed_with_its_graph():
    graph_module = capture(Net(), torch.randn(2, 8), leave=["middle"])
    module = weakref.ref(graph_module.get_submodule("middle"))
    del graph_module
    gc.collect()
    assert module() is None


@pytest.mark.usefixtures("fast_gc_collect")
def test_an_opaque_module_is_freed_after_a_failed_capture():
    model = Net(fails=True)
    module = weakref.ref(model.middle)
    with pytest.raises(CaptureError):
        capture(model, torch.randn(2, 8), leave=["middle"], copy=False)
    del model
    gc.collect()
    assert module() is None


@pytest.mark.parametrize("batch", [1, 4])
def test_the_macs_of_an_opaque_module_are_counted(batch):
    result = transform(Net(), torch.randn(batch, 8), leave=["middle"])
    rows = [row for row in coverage(insert_qdq(result.model, result.matches)).operations if row.kind == "left"]
    assert [row.macs for row in rows] == [batch * 16 * 16] * 2
    assert [row.parameters for row in rows] == [16 * 16 + 16] * 2
    assert [row.shared for row in rows] == [0, 16 * 16 + 16]
