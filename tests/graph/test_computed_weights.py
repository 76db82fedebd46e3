"""Weights and biases that are computed from parameters, inputs that are buffers, and the forms of a product."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.graph import Operation, capture
from scalepoint.graph.constant_nodes import find_constant_nodes
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.operations import ComputedTensor


class Function(nn.Module):
    """A function of the input and of parameters of these shapes, in order."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.parameter_list = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x):
        return self.function(x, *self.parameter_list)


def products(graph_module):
    nodes = [node for node in graph_module.graph.nodes if get_kind(node) in ("linear", "conv", "conv_transpose")]
    return [graph_module.get_submodule(node.target) for node in nodes]


def same(model, graph_module, *inputs):
    with torch.no_grad():
        torch.testing.assert_close(graph_module(*inputs), model(*inputs))


def standardized(w):
    return (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)


TOKENS, IMAGE = (2, 5, 8), (2, 8, 6, 6)
COMPUTED = [
    pytest.param(lambda x, w: F.conv2d(x, standardized(w)), IMAGE, [(8, 8, 3, 3)], id="standardized"),
    pytest.param(lambda x, w, g: F.conv2d(x, w * g), IMAGE, [(8, 8, 3, 3), (8, 1, 1, 1)], id="a-gain"),
    pytest.param(lambda x, w: F.conv_transpose2d(x, w * 2), IMAGE, [(8, 4, 3, 3)], id="transposed-convolution"),
    pytest.param(lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True)), TOKENS, [(6, 8)], id="normalized"),
    pytest.param(lambda x, w: F.linear(x, w.chunk(3)[1]), TOKENS, [(24, 8)], id="a-part-of-a-packed-one"),
    pytest.param(lambda x, w: x @ w[1], TOKENS, [(3, 8, 6)], id="one-of-many"),
    pytest.param(lambda x, w: w[1] @ x.transpose(1, 2), TOKENS, [(3, 6, 8)], id="on-the-left"),
    pytest.param(lambda x, w: x @ (w * 2).T, TOKENS, [(6, 8)], id="scaled-and-turned"),
    pytest.param(
        lambda x, w, q, v: F.linear(x, w, torch.cat((q, torch.zeros_like(q), v))),
        TOKENS,
        [(24, 8), (8,), (8,)],
        id="bias-around-zeros",
    ),
    pytest.param(lambda x, w, b: F.conv2d(x, w, b.repeat(2)), IMAGE, [(8, 8, 3, 3), (4,)], id="bias-of-a-convolution"),
    pytest.param(
        lambda x, w, b: torch.addmm(b * 2, x.view(-1, 8), w).view(-1, 5, 6), TOKENS, [(8, 6), (6,)], id="bias-of-addmm"
    ),
]


class TestComputedWeights:
    @pytest.mark.parametrize(("function", "shape", "parameters"), COMPUTED)
    def test_a_product_references_its_computed_weight(self, function, shape, parameters):
        model, x = Function(function, *parameters).eval(), torch.randn(shape)
        graph_module = capture(model, x)
        (product,) = products(graph_module)
        assert isinstance(product, Operation)
        assert product.is_computed
        assert isinstance(product.weight, torch.Tensor)
        stored = {id(tensor) for tensor in product.tensors()}
        assert {id(value) for value in graph_module.parameters()} == stored
        same(model, graph_module, x)

    def test_it_follows_its_parameters_and_passes_gradients_to_them(self):
        model = Function(lambda x, w: F.linear(x, w / w.norm(dim=1, keepdim=True)), (6, 8))
        graph_module = capture(model, torch.randn(2, 8))
        parameter = next(graph_module.parameters())
        with torch.no_grad():
            parameter.copy_(torch.randn(6, 8))
        x = torch.randn(2, 8)
        torch.testing.assert_close(graph_module(x), F.linear(x, parameter / parameter.norm(dim=1, keepdim=True)))
        graph_module(x).sum().backward()
        assert parameter.grad is not None

    def test_a_deepcopy_has_its_own_computed_weight(self):
        graph_module = capture(Function(lambda x, w: F.linear(x, w * 2), (6, 8)), torch.randn(2, 8))
        twin = copy.deepcopy(graph_module)
        (computed,) = [module for module in twin.modules() if isinstance(module, ComputedTensor)]
        assert [id(tensor) for source in computed.sources() for tensor in source.tensors()] == [
            id(value) for value in twin.parameters()
        ]

    def test_it_is_not_in_the_state_dict(self):
        model = Function(lambda x, w: F.linear(x, w * 2), (6, 8))
        assert list(capture(model, torch.randn(2, 8)).state_dict()) == list(model.state_dict())

    def test_a_weight_from_random_numbers_is_not_constant(self):
        model = Function(lambda x, w: F.linear(x, w + torch.randn(6, 8)), (6, 8))
        graph_module = capture(model, torch.randn(2, 8))
        assert not any(isinstance(module, ComputedTensor) for module in graph_module.modules())

    def test_a_weight_that_data_select_is_not_constant(self):
        model = Function(lambda x, w: F.linear(x, w[(x.sum() > 0).long()]), (2, 6, 8))
        graph_module = capture(model, torch.randn(2, 8))
        assert not any(isinstance(module, ComputedTensor) for module in graph_module.modules())

    def test_a_buffer_that_is_written_is_not_constant(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(8, 8)
                self.register_buffer("seen", torch.zeros(8))

            def forward(self, x):
                self.seen.add_(1)
                return F.linear(x, self.fc.weight, self.seen * 2)

        graph = capture(Counts(), torch.randn(2, 8)).graph
        assert not [node for node in find_constant_nodes(graph) if "seen" in str(node.target)]


class TestAProductOfABuffer:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: (nn.Linear(8, 4), torch.randn(3, 8)), id="linear"),
            pytest.param(lambda: (nn.Conv2d(8, 4, 3), torch.randn(1, 8, 5, 5)), id="conv"),
            pytest.param(lambda: (nn.ConvTranspose2d(8, 4, 3), torch.randn(1, 8, 5, 5)), id="transposed"),
            pytest.param(lambda: (nn.LayerNorm(8), torch.randn(3, 8)), id="layer-norm"),
            pytest.param(lambda: (nn.Embedding(9, 8), torch.arange(4)), id="embedding"),
        ],
    )
    def test_calls_the_users_own_module(self, make):
        class Adds(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, table = make()
                self.register_buffer("table", table)

            def forward(self, x):
                return x + self.layer(self.table).sum()

        model, x = Adds().eval(), torch.randn(2, 8)
        graph_module = capture(model, x)
        (node,) = [node for node in graph_module.graph.nodes if node.op == "call_module" and node.target == "layer"]
        assert [source.target for source in node.all_input_nodes] == ["table"]
        same(model, graph_module, x)

    def test_it_keeps_the_order_of_the_operands_of_attention(self):
        def attend(x, query):
            return F.scaled_dot_product_attention(query, x[:, None], x[:, None])

        model, x = Function(attend, (2, 1, 3, 8)), torch.randn(2, 5, 8)
        graph_module = capture(model, x, dynamic=False)
        (node,) = [node for node in graph_module.graph.nodes if get_kind(node) == "attention"]
        arguments = graph_module.get_submodule(node.target).arguments
        assert [node.args[arguments[name].index].name for name in ("query", "key", "value")] == [
            "parameter_list_0",
            "unsqueeze",
            "unsqueeze_1",
        ]
        same(model, graph_module, x)


class TestFormsOfAProduct:
    @pytest.mark.parametrize(
        ("function", "parameters"),
        [
            pytest.param(torch.addmm, [(6,), (8, 6)], id="plain"),
            pytest.param(lambda b, x, w: torch.addmm(b, x, w, beta=2.0, alpha=0.5), [(6,), (8, 6)], id="factors"),
            pytest.param(lambda b, x, w: torch.addmm(b, x, w.t(), beta=0.5), [(6,), (6, 8)], id="turned-factors"),
            pytest.param(torch.addmm, [(1,), (8, 6)], id="one-bias-for-all"),
            pytest.param(torch.addmm, [(2, 6), (8, 6)], id="a-bias-for-each-row"),
            pytest.param(lambda b, x, w: torch.addmm(b, w, x.t()), [(6, 1), (6, 8)], id="weight-on-the-left"),
        ],
    )
    def test_addmm_is_a_linear_layer(self, function, parameters):
        model, x = Function(lambda x, b, w: function(b, x, w), *parameters), torch.randn(2, 8)
        graph_module = capture(model, x, dynamic=False)
        assert len(products(graph_module)) == 1
        same(model, graph_module, x)

    @pytest.mark.parametrize(
        ("function", "shape", "weight"),
        [
            pytest.param(lambda x, w: F.linear(x, w, x.mean((0, 1))), TOKENS, (8, 8), id="linear"),
            pytest.param(lambda x, w: F.conv2d(x, w, x.mean((0, 2, 3))), IMAGE, (8, 8, 3, 3), id="conv"),
            pytest.param(lambda x, w: F.conv1d(x, w, bias=x.mean((0, 2))), (2, 8, 9), (8, 8, 3), id="keyword"),
            pytest.param(
                lambda x, w: F.conv_transpose2d(x, w, x.mean((0, 2, 3))), IMAGE, (8, 8, 3, 3), id="transposed"
            ),
        ],
    )
    def test_a_bias_that_depends_on_data_is_added_after_the_product(self, function, shape, weight):
        model, x = Function(function, weight), torch.randn(shape)
        graph_module = capture(model, x)
        (product,) = products(graph_module)
        assert product.bias is None
        same(model, graph_module, x)

    @pytest.mark.parametrize(
        ("function", "shape"),
        [
            pytest.param(lambda x, w: x @ w, (8,), id="vector"),
            pytest.param(lambda x, w: torch.bmm(x.expand(3, -1, -1), w), (3, 8, 6), id="experts"),
        ],
    )
    def test_a_parameter_that_is_not_a_matrix_gives_no_linear_layer(self, function, shape):
        model, x = Function(function, shape), torch.randn(1, 4, 8)
        graph_module = capture(model, x, dynamic=False)
        assert products(graph_module) == []
        same(model, graph_module, x)
