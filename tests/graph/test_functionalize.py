"""In-place writes become values, and a batch norm stays one operation in all cases."""

import pytest
import torch
from torch import nn

from scalepoint.graph.capture import capture
from scalepoint.patterns import get_kind


class Head(nn.Module):
    """The end of torchvision's EfficientNet: an in-place dropout after a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
        self.drop, self.head = nn.Dropout(0.2, inplace=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.drop(self.pool(self.norm(self.conv(x))).flatten(1)))


class ThroughAView(nn.Module):
    """A write through a reshape whose base is read afterwards, so that the base must change too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y.view(-1).relu_()
        return y * 2


class ThroughASecondView(nn.Module):
    """Another view of the written memory is read afterwards, the base is not."""

    def forward(self, x):
        y = x * 2
        other = y.transpose(1, 2)
        y.flatten(1).relu_()
        return other + 1


class ReadBefore(nn.Module):
    """Readers before the write read the old values."""

    def forward(self, x):
        y = x * 2
        before = y + 1
        return before, y.flatten(1).relu_()


@pytest.mark.parametrize(
    "model", [Head(), ThroughAView(), ThroughASecondView(), ReadBefore()], ids=lambda m: type(m).__name__
)
def test_outputs_are_those_of_the_model(model):
    torch.manual_seed(0)
    model, x = model.eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(capture(model, (x,))(x), model(x))


@pytest.mark.parametrize("model", [Head(), ThroughAView()], ids=lambda model: type(model).__name__)
def test_a_batch_norm_is_one_operation_that_owns_its_statistics(model):
    graph = capture(model.eval(), (torch.randn(2, 3, 8, 8),))
    norms = [node for node in graph.graph.nodes if get_kind(node) == "batch_norm"]
    assert [str(node.target) for node in norms] == ["norm"]
    assert isinstance(graph.get_submodule("norm"), nn.BatchNorm2d)


def test_an_in_place_dropout_after_a_flatten_is_kept():
    graph = capture(Head(), (torch.randn(2, 3, 8, 8),))
    assert [get_kind(node) for node in graph.graph.nodes].count("dropout") == 1
