"""Indexing by a constant mask is refused, and the mask is not used as indices 0 and 1."""

import pytest
import torch
from torch import nn

from scalepoint import deploy
from scalepoint.errors import TargetError


class PicksChannels(nn.Module):
    """Returns some of its channels, picked by a mask or by indices."""

    def __init__(self, by_mask):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        keep = torch.tensor([True, False, True, True, False, False, True, True])
        self.register_buffer("keep", keep if by_mask else keep.nonzero()[:, 0])

    def forward(self, x):
        return self.conv(x)[:, self.keep]


def deploy_model(model, folder):
    x = torch.randn(2, 4, 8)
    return deploy(model.eval(), x, [x], target="litert", output=folder, smoke=True, progress=False)


def test_a_constant_mask_is_refused(tmp_path):
    with pytest.raises(TargetError, match=r"index.*(depends on the data|by a mask)"):
        deploy_model(PicksChannels(by_mask=True), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tflite"))


def test_constant_indices_are_written(tmp_path):
    pytest.importorskip("ai_edge_litert")
    assert deploy_model(PicksChannels(by_mask=False), tmp_path / "out").verification.sqnr > 30
