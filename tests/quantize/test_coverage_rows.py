"""Coverage is complete: every parameter that the graph reads is in a row, and every product has its MACs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.errors import CoverageError
from scalepoint.quantize import QuantConfig, coverage, insert_qdq
from scalepoint.quantize.placement import CONSTANT_REASON
from scalepoint.transformation import transform


class Net(nn.Module):
    """A linear layer after a function of the input and of parameters of these shapes."""

    def __init__(self, function, out, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.last = nn.Linear(out, 16)

    def forward(self, x):
        return self.last(self.function(x, *self.weights))


def covered(model, *inputs, target="reference"):
    result = transform(model.eval(), inputs, target=target)
    return coverage(insert_qdq(result.model, result.matches, QuantConfig()))


def counted(report):
    return sum(row.parameters - row.shared for row in report.operations)


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def experts(x, router, up):
    return torch.bmm(x[:, None], up[(x @ router.T).argmax(-1)])[:, 0]


def all_experts(x, up):
    return torch.bmm(x.expand(3, -1, -1), up).sum(0)


def grouped(x, up):
    return F.grouped_mm(x, up, offs=torch.tensor([1, 2, 4]).int())


X = (4, 16)
PRODUCTS = [  # function of input and parameters, its output size, shapes of the parameters, MACs without the last layer
    pytest.param(lambda x, w: torch.einsum("bi,oi->bo", x, w), 16, [(16, 16)], 4 * 256, id="einsum"),
    pytest.param(lambda x, w: torch.einsum("...i,io->...o", x, w), 16, [(16, 16)], 4 * 256, id="einsum-ellipsis"),
    pytest.param(lambda x, w: torch.tensordot(x, w, dims=1), 16, [(16, 16)], 4 * 256, id="tensordot"),
    pytest.param(lambda x, w: torch.baddbmm(x[None], x[None], w)[0], 16, [(1, 16, 16)], 4 * 256, id="baddbmm"),
    pytest.param(lambda x, w: F.bilinear(x, x, w), 8, [(8, 16, 16)], 4 * 8 * 256, id="bilinear"),
    pytest.param(lambda x, w: x * (x @ w)[:, None], 16, [(16,)], 4 * 16, id="vector"),
    pytest.param(experts, 16, [(3, 16), (3, 16, 16)], 4 * 16 * 3 + 4 * 256, id="experts-that-the-data-choose"),
    pytest.param(all_experts, 16, [(3, 16, 16)], 3 * 4 * 256, id="all-experts"),
    pytest.param(lambda x, w: F.linear(x, F.linear(x, w).mean(0).view(16, 16)), 16, [(256, 16)], 4 * 4096 + 4 * 256),
]


class TestMacs:
    @pytest.mark.parametrize(("function", "out", "shapes", "macs"), PRODUCTS)
    def test_every_product_has_macs(self, function, out, shapes, macs):
        model = Net(function, out, *shapes)
        report = covered(model, torch.randn(X))
        assert sum(row.macs for row in report.operations) == macs + 4 * out * 16
        assert counted(report) == size(model)

    def test_experts_of_a_mixture_have_macs(self):
        model = Net(grouped, 16, (3, 16, 16)).bfloat16()
        report = covered(model, torch.randn(X).bfloat16())
        assert {row.kind: (row.macs, row.parameters) for row in report.operations} == {
            "grouped_linear": (4 * 256, 3 * 256),
            "linear": (4 * 256, 272),
        }

    @pytest.mark.parametrize("stride", [1, 2])
    def test_a_convolution_with_a_computed_weight_has_macs(self, stride):
        def dynamic(x, table):
            weight = (x.mean((0, 2, 3)) @ table).view(16, 16, 3, 3)
            return F.conv2d(x, weight, stride=stride, padding=1).mean((2, 3))

        report = covered(Net(dynamic, 16, (16, 16 * 16 * 9)), torch.randn(2, 16, 8, 8))
        (row,) = [row for row in report.operations if row.kind == "conv"]
        assert row.macs == 2 * (8 // stride) ** 2 * 16 * 16 * 9
        assert row.reason == "its weight is computed from the data, not stored"


class TestParameters:
    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(lambda x, w: x + w, id="a-position"),
            pytest.param(lambda x, w: torch.cat([x, w.expand(x.shape[0], -1)], 1)[:, 16:], id="a-token"),
            pytest.param(lambda x, w: x * w.sigmoid(), id="a-scale"),
        ],
    )
    def test_a_parameter_that_is_not_a_weight_has_its_own_row_and_passes_strict(self, function):
        model = Net(function, 16, (16,))
        report = covered(model, torch.randn(X))
        (row,) = [row for row in report.operations if row.kind == "parameter"]
        assert (row.name, row.parameters, row.macs, row.precision) == ("weights.0", 16, 0, "float")
        assert counted(report) == size(model)
        assert report.unrequested_float == ()

    def test_a_parameter_with_an_unknown_reader_is_listed_with_a_reason(self):
        model = Net(torch.cdist, 16, (16, 16))
        report = covered(model, torch.randn(X))
        assert [row.reason for row in report.unrequested_float] == [
            "reads the weight weights.0 in an unknown way: it stays float"
        ]
        assert counted(report) == size(model)

    def test_a_shared_parameter_counts_once_per_precision(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.fc = nn.Embedding(32, 16), nn.Linear(16, 16)

            def forward(self, ids):
                return F.linear(self.fc(self.fc(self.table(ids))), self.table.weight)

        report = covered(Tied(), torch.randint(0, 32, (2, 5)))
        assert report.share_of_parameters() == pytest.approx(
            {"w int8 per_channel, x uint8": (512 + 272) / (1024 + 272), "float": 512 / (1024 + 272)}
        )

    @pytest.mark.parametrize("mode", ["mean", "sum"])
    def test_a_bag_of_embeddings_has_a_row(self, mode):
        class Bags(nn.Module):
            def __init__(self):
                super().__init__()
                self.bag, self.fc = nn.EmbeddingBag(32, 16, mode=mode), nn.Linear(16, 16)

            def forward(self, ids):
                return self.fc(self.bag(ids))

        report = covered(Bags(), torch.randint(0, 32, (2, 5)))
        assert next((row.kind, row.parameters, row.precision) for row in report.operations) == (
            "embedding_bag",
            512,
            "float",
        )

    def test_a_layer_whose_result_is_dropped_does_not_count(self):
        class Pools(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.pooler = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x):
                y = self.fc(x)
                torch.tanh(self.pooler(y))
                return y

        assert [row.name for row in covered(Pools(), torch.randn(X)).operations] == ["fc"]

    def test_a_weight_that_is_a_buffer_counts(self):
        class Frozen(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("weight", torch.randn(16, 16))

            def forward(self, x):
                return F.linear(x, self.weight)

        (row,) = covered(Frozen(), torch.randn(X)).operations
        assert row.parameters == 256


class TestConstants:
    class Biased(nn.Module):
        """A table of positions through two layers, as in a relative position bias."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16))
            self.register_buffer("table", torch.randn(1, 2))

        def forward(self, x):
            return self.fc(x) + self.mlp(self.table)

    def test_layers_of_constants_stay_float_and_have_no_macs(self):
        model = self.Biased()
        report = covered(model, torch.randn(X), target="onnxruntime")
        rows = {row.name: row for row in report.operations}
        assert {rows[name].reason for name in ("mlp.0", "mlp.2")} == {CONSTANT_REASON}
        assert report.share_of_macs() == {rows["fc"].how: 1.0, "float": 0.0}
        assert counted(report) == size(model)
        assert report.unrequested_float == ()

    def test_a_model_of_constants_only_is_refused_with_that_reason(self):
        class Alone(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(16, 16)
                self.register_buffer("table", torch.randn(1, 16))

            def forward(self, x):
                return x + self.fc(self.table)

        with pytest.raises(CoverageError, match="computed from constants only"):
            covered(Alone(), torch.randn(X))


def test_a_batch_norm_with_a_computed_scale_is_not_folded():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            gain = x.mean((0, 2, 3))
            n = self.norm
            return F.batch_norm(self.conv(x), n.running_mean, n.running_var, gain, n.bias)

    model, x = Conditional().eval(), torch.randn(2, 8, 6, 6)
    result = transform(model, x)
    quantized = insert_qdq(result.model, result.matches)
    torch.testing.assert_close(quantized(x), model(x))
