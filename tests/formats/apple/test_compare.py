"""A Core ML file against its model, bit by bit."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from scalepoint.formats import export, find_format
from scalepoint.quantize import quantize
from tests.formats.apple.conftest import pictures


class Twins(nn.Module):
    """Two heads of equal weights, as a detector has them before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.Conv2d(3, 16, 3)
        self.one = copy.deepcopy(self.many)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"many": self.many(x), "one": self.one(x.abs())}


def test_equal_weights_that_coremltools_stores_once_are_in_the_file_for_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = pictures()
    model = quantize(Twins().eval(), x, forward_loop=[x], target="coreml")
    export(model, tmp_path / "m.mlpackage", x)
    compare = find_format("coreml").compare
    assert compare is not None
    assert list(compare(tmp_path / "m.mlpackage", model)) == []
    other = Twins().eval()
    nn.init.normal_(other.one.weight)
    changed = quantize(other, x, forward_loop=[x], target="coreml")
    assert any("one" in each for each in compare(tmp_path / "m.mlpackage", changed))
