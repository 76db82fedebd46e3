"""Comparing a Core ML file with its model bit by bit."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from scalepoint.formats import export, find_format
from scalepoint.quantize import quantize
from tests.formats.apple.conftest import pictures


class Twins(nn.Module):
    """Two heads with equal weights, like those of an untrained detector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"first": self.first(x), "second": self.second(x.abs())}


def test_equal_weights_that_coremltools_stores_once_count_for_both_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = pictures()
    model = quantize(Twins().eval(), x, forward_loop=[x], target="coreml")
    export(model, tmp_path / "m.mlpackage", x)
    compare = find_format("coreml").compare
    assert compare is not None
    assert list(compare(tmp_path / "m.mlpackage", model)) == []
    other = Twins().eval()
    nn.init.normal_(other.second.weight)
    changed = quantize(other, x, forward_loop=[x], target="coreml")
    assert any("second" in difference for difference in compare(tmp_path / "m.mlpackage", changed))
