"""Sizes that depend on tensor values."""

import pytest
import torch
from torch import nn

from scalepoint.errors import ScalepointWarning
from scalepoint.graph import capture
from scalepoint.graph.value_dependent_sizes import record_sizes
from scalepoint.quantize import calibrate, coverage, insert_qdq
from scalepoint.transformation import transform


class Takes(nn.Module):
    """Takes the first n rows of a table, where n is the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x, n):
        k = n.item()
        torch._check(k >= 1)
        torch._check(k <= 8)
        rows = self.table(torch.ones(k, 8) * x.mean())
        return self.fc(x) + (rows @ rows.transpose(0, 1)).sum()


def test_macs_of_layers_with_such_sizes_are_those_of_the_example():
    inputs = (torch.randn(2, 8), torch.tensor(3))
    result = transform(Takes(), inputs)
    quantized = insert_qdq(result.model, result.matches)
    macs = {row.name: row.macs for row in coverage(quantized).operations}
    assert macs == {"fc": 2 * 8 * 16, "table": 3 * 8 * 8, "matmul": 3 * 3 * 8}
    calibrate(quantized, [inputs])
    assert coverage(quantized).share_of_macs() is not None


def test_the_size_of_nonzero_is_such_a_size():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(x[torch.nonzero(x[:, 0] > 0)[:, 0]])

    x = torch.ones(5, 8)
    x[1:3] = -1
    result = transform(Picks(), x)
    (row,) = coverage(insert_qdq(result.model, result.matches)).operations
    assert row.macs == 3 * 8 * 4


def test_a_failed_run_gives_a_warning():
    inputs = (torch.randn(2, 8), torch.tensor(3))
    graph_module = capture(Takes(), inputs)
    with pytest.warns(ScalepointWarning, match="MACs.*'le_1'$"):
        record_sizes(graph_module, (inputs[0], torch.tensor(9)))  # more rows than the table has
