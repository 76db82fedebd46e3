"""torch.autocast and grad modes in a forward: captured in the dtypes of the parameters, with a warning."""

import warnings

import pytest
import torch
from torch import nn

from scalepoint import transform
from scalepoint.errors import ScalepointWarning
from scalepoint.graph import capture
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.origin import get_origin

X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """Uses of autocast: as a block, nested, as a decorator, off for the head; with the dtype of a tensor."""

    def __init__(self, enabled=True):
        super().__init__()
        self.enabled = enabled
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    @torch.autocast("cpu", torch.bfloat16)
    def squared(self, x):
        return x * x if self.enabled else (x.float() * x.float())

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            x = torch.relu(self.norm(self.conv(x)))
            with torch.no_grad():
                x = x + torch.ones(9, 1, 1, 1, dtype=x.dtype)[0]
            with torch.autocast("cpu", enabled=False):
                x = x.float() * 2
        x = self.squared(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float().mean((2, 3)))


def model_of(**options):
    torch.manual_seed(0)
    return Mixed(**options).eval()


def test_a_model_that_casts_is_captured_as_one_that_does_not():
    with pytest.warns(ScalepointWarning, match=r"torch.autocast.*test_inline_blocks.py:\d+.*bfloat16"):
        result = capture(model_of(), X)
    plain = model_of(enabled=False)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        assert torch.allclose(result(X), plain(X), atol=1e-6)
    kinds = [get_kind(node) for node in result.graph.nodes]
    assert {"conv", "linear", "batch_norm"} <= set(kinds)
    assert len(get_origin(result).ignored_autocast) == 2


def test_its_layers_are_matched():
    with pytest.warns(ScalepointWarning, match=r"torch\.autocast"):
        result = transform(model_of(), X, target="onnxruntime")
    assert {match.name for match in result.matches} >= {"conv", "head"}


def test_autocast_works_again_afterwards():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capture(model_of(), X)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.bfloat16


def test_a_disabled_autocast_block_gives_no_warning():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(9, 4)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.head(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = capture(Off().eval(), X)
    assert "head" in {node.target for node in result.graph.nodes}


def test_a_set_grad_enabled_block_is_inlined():
    class Graded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 4)

        def forward(self, x):
            with torch.enable_grad():
                x = torch.relu(self.first(x))
            with torch.no_grad():
                return self.second(x)

    model = Graded().eval()
    result = capture(model, X)
    assert {"first", "second"} <= {node.target for node in result.graph.nodes}
    assert torch.equal(result(X), model(X))
