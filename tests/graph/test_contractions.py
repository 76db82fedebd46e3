"""einsum and tensordot with a weight become linear layers if one computes the same."""

import pytest
import torch
from torch import nn

from scalepoint.graph import capture
from scalepoint.graph.nodes import get_kind


class Product(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.function(x, self.weight)


def einsum(terms, *, turned=False):
    return lambda x, w: torch.einsum(terms, w, x) if turned else torch.einsum(terms, x, w)


X = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        pytest.param(einsum("blhd,od->blho"), (6, 4), id="a linear layer"),
        pytest.param(einsum("blhd,do->blho"), (4, 6), id="transposed"),
        pytest.param(einsum("blhd,hdge->blge"), (3, 4, 2, 6), id="heads to heads"),
        pytest.param(einsum("blhd,dhe->ble"), (4, 3, 6), id="heads to a row, turned"),
        pytest.param(einsum("blhd,edf->belhf"), (7, 4, 6), id="an output before tokens"),
        pytest.param(einsum("blhd,ol->bohd"), (6, 5), id="over the tokens"),
        pytest.param(einsum("oh,blhd->blod", turned=True), (6, 3), id="the weight first"),
        pytest.param(einsum("...d,do->...o"), (4, 6), id="an ellipsis"),
        pytest.param(lambda x, w: torch.tensordot(x, w, dims=2), (3, 4, 6), id="tensordot"),
        pytest.param(lambda x, w: torch.tensordot(x, w, dims=([1], [1])), (6, 5), id="tensordot of axes"),
    ],
)
def test_it_is_a_linear_layer_with_the_same_result(function, shape):
    model = Product(function, *shape).eval()
    graph = capture(model, X)
    assert [get_kind(node) for node in graph.graph.nodes].count("linear") == 1
    for x in (X, X[:1], torch.cat([X, X[:1]])):
        torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        pytest.param(einsum("blhd,hde->blhe"), (3, 4, 6), id="a weight a head"),
        pytest.param(einsum("blhd,d->blh"), (4,), id="a vector"),
        pytest.param(einsum("blhd,od->blh"), (6, 4), id="outputs that are added up"),
        pytest.param(einsum("blhd,dd->blh"), (4, 4), id="a diagonal"),
        pytest.param(einsum("blhd,do->blho"), (1, 6), id="a summed axis of size 1 in the weight"),
        pytest.param(lambda x, w: torch.tensordot(x, w, dims=1), (1, 6), id="tensordot with a summed axis of size 1"),
    ],
)
def test_a_contraction_that_no_linear_layer_computes_is_not_rewritten(function, shape):
    model = Product(function, *shape).eval()
    graph = capture(model, X)
    assert "linear" not in [get_kind(node) for node in graph.graph.nodes]
    torch.testing.assert_close(graph(X), model(X))


def test_a_summed_axis_of_size_1_in_the_data_is_not_rewritten():
    model, x = Product(einsum("blhd,hdo->blo"), 3, 4, 6).eval(), X[..., :1, :]
    graph = capture(model, x)
    assert "linear" not in [get_kind(node) for node in graph.graph.nodes]
    torch.testing.assert_close(graph(x), model(x))
