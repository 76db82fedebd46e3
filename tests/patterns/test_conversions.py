"""Conversions of the graph before patterns are matched."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.patterns.base import measure_depth
from scalepoint.transformation import transform


class Head(nn.Module):
    """A global pool, a flatten, a classifier."""

    def __init__(self, features, flatten):
        super().__init__()
        self.conv, self.fc, self.flatten = nn.Conv2d(8, 8, 3), nn.Linear(features, 5), flatten

    def forward(self, x):
        return self.fc(self.flatten(F.adaptive_avg_pool2d(self.conv(x), 1)))


@pytest.mark.parametrize("inputs", [True, False], ids=["with-inputs", "without"])
@pytest.mark.parametrize(
    ("features", "flatten", "becomes"),
    [
        pytest.param(8, lambda x: x.flatten(1), "HeadPattern", id="from-1"),
        pytest.param(8, lambda x: torch.flatten(x, -3), "HeadPattern", id="from-the-third-last"),
        pytest.param(8, nn.Flatten(), "HeadPattern", id="module"),
        pytest.param(1, lambda x: x.flatten(2), "LinearPattern", id="from-2"),
        pytest.param(1, nn.Flatten(2), "LinearPattern", id="module-from-2"),
        pytest.param(1, lambda x: x.flatten(1, 2), "LinearPattern", id="up-to-2"),
        pytest.param(16, lambda x: x.flatten(), "LinearPattern", id="all"),
    ],
)
def test_a_classifier_becomes_a_convolution_only_if_its_inputs_are_channels(features, flatten, becomes, inputs):
    model, x = Head(features, flatten).eval(), torch.randn(2, 8, 4, 4)
    result = transform(model, x if inputs else None, dynamic=False)
    assert becomes in result.report.counts()
    torch.testing.assert_close(result.model(x), model(x))


def test_an_image_without_a_batch_keeps_its_classifier():
    model, x = Head(8, lambda x: x.flatten(0)).eval(), torch.randn(8, 4, 4)
    result = transform(model, x, dynamic=False)
    assert "HeadPattern" not in result.report.counts()
    torch.testing.assert_close(result.model(x), model(x))


def test_layers_whose_results_are_not_used_are_removed():
    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.fc(x)
            torch.tanh(self.pooler(y[:, 0]))
            return y

    result = transform(Pools(), torch.randn(2, 5, 8))
    assert [match.name for match in result.matches] == ["fc"]
    assert "pooler.weight" in result.model.state_dict()


def test_the_depth_of_a_node_is_the_longest_path_and_is_not_stored_on_the_graph():
    class Ways(nn.Module):
        def forward(self, x):
            y = torch.relu(torch.relu(x))
            return x + y

    graph = transform(Ways(), torch.randn(2, 3), patterns=()).model.graph
    before = set(vars(graph))
    assert [measure_depth(node) for node in graph.nodes] == [1, 2, 3, 4, 5]
    assert set(vars(graph)) == before
