"""Transform: counts on known models, fusions and refusals with reasons, plans, reports, and deterministic results."""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from scalepoint import patterns as public_patterns
from scalepoint.errors import GraphError, PatternError, ScalepointError
from scalepoint.graph import check_graph
from scalepoint.graph.nodes import get_kind
from scalepoint.patterns import (
    BASE_PATTERNS,
    Fused,
    Pattern,
    Point,
    TransformationPlan,
    chain,
    join,
    op,
    optional,
)
from scalepoint.patterns.fused import FusedAttention, FusedConvBN, FusedLinear, FusedLinearReLU, FusedNorm
from scalepoint.transformation import apply_transformation_plan, get_transformation_plan, transform
from tests.errors import raises
from tests.models import Decoder, ResNet, SilentSkip, UNet, VisionTransformer, resnet50, vit_b16, with_norm_statistics

GOLDEN = Path(__file__).parent / "golden"


def image(batch=1, size=32):
    return torch.randn(batch, 3, size, size)


def names_of_matches(result, pattern):
    return [match.name for match in result.matches if match.pattern.name == pattern]


def golden_text(matches):
    return "".join(f"{match.pattern.name} {match.name}\n" for match in matches)


def parity(model, result, *inputs):
    with torch.no_grad():
        expected, actual = model.eval()(*inputs), result.model.eval()(*inputs)
    assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    model = with_norm_statistics(resnet50(8, 10))
    return model, transform(model, image(1, 64))


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    model = vit_b16(24, 32, 10).eval()
    return model, transform(model, image())


class TestResNet50:
    def test_every_group_is_found(self, resnet):
        counts = resnet[1].report.counts()
        head = [match for match in resnet[1].matches if match.name.startswith("fc")]
        assert len(head) == 1
        assert {**counts, head[0].pattern.name: 1} == {
            "StemConvBNReLUMaxPoolPattern": 1,
            "ConvBNAddReLUPattern": 16,
            "ConvBNReLUPattern": 32,
            "ConvBNPattern": 4,
            "AdaptiveAvgPoolPattern": 1,
            head[0].pattern.name: 1,
        }
        assert sum(counts.values()) == 55

    def test_the_groups_have_the_expected_layer_names(self, resnet):
        result = resnet[1]
        assert names_of_matches(result, "StemConvBNReLUMaxPoolPattern") == ["conv1"]
        assert names_of_matches(result, "ConvBNPattern") == [f"layer{index}.0.downsample.0" for index in (1, 2, 3, 4)]
        assert {name.rpartition(".")[2] for name in names_of_matches(result, "ConvBNAddReLUPattern")} == {"conv3"}

    def test_nothing_is_left_over(self, resnet):
        unfused = [node.target for node in resnet[1].model.graph.nodes if get_kind(node) in ("conv", "batch_norm")]
        assert unfused == []
        assert not resnet[1].report.skipped

    def test_the_fused_modules_are_readable(self, resnet):
        model = resnet[1].model
        kinds = [type(module).__name__ for module in model.modules() if isinstance(module, Fused)]
        assert kinds.count("FusedConvBNAddReLU") == 16
        assert "FusedStemConvBNReLUMaxPool(" in str(model)

    @pytest.mark.parametrize("batch", [1, 3])
    def test_the_output_is_the_models(self, resnet, batch):
        parity(*resnet, image(batch, 64))

    def test_state_keeps_its_names(self, resnet):
        model, result = resnet
        assert list(result.model.state_dict()) == list(model.state_dict())
        assert [name for name, _ in result.model.named_parameters()] == [name for name, _ in model.named_parameters()]

    def test_the_graph_is_valid(self, resnet):
        check_graph(resnet[1].model)

    @pytest.mark.slow
    def test_an_image_that_is_one_pixel_at_the_last_pool_finds_the_same(self, resnet):
        result = transform(resnet[0], image(1, 32))
        assert golden_text(result.matches) == golden_text(resnet[1].matches)
        parity(resnet[0], result, image(3, 64))

    def test_transform_without_inputs_finds_the_same(self, resnet):
        result = transform(resnet[0], patterns=BASE_PATTERNS)
        assert golden_text(result.matches) == golden_text(resnet[1].matches)
        parity(resnet[0], result, image(3, 64))


class TestVisionTransformer:
    def test_every_group_is_found(self, vit):
        result = vit[1]
        assert len(names_of_matches(result, "MHAInProjectionPattern")) == 12
        assert len(names_of_matches(result, "ScaledDotProductAttentionPattern")) == 12
        assert len(names_of_matches(result, "LayerNormPattern")) == 25
        assert names_of_matches(result, "ConvBNPattern") == ["conv_proj"]
        with_gelu, without = names_of_matches(result, "LinearReLUPattern"), names_of_matches(result, "LinearPattern")
        in_blocks = [name for name in (*with_gelu, *without) if "encoder_layer_" in name]
        assert (len(with_gelu), len(in_blocks)) == (12, 36)
        assert [name for name in without if name not in in_blocks] == ["heads.head"]

    @pytest.mark.parametrize("batch", [1, 3])
    def test_the_output_is_the_models(self, vit, batch):
        parity(*vit, image(batch))

    def test_state_keeps_its_names(self, vit):
        assert list(vit[1].model.state_dict()) == list(vit[0].state_dict())

    def test_transform_without_inputs_finds_the_same(self, vit):
        result = transform(vit[0], patterns=BASE_PATTERNS)
        assert golden_text(result.matches) == golden_text(vit[1].matches)
        parity(vit[0], result, image(3))


class TestOtherModels:
    def test_a_unet_fuses_its_convolutions_and_transposed_ones(self):
        model = with_norm_statistics(UNet())
        result = transform(model, image(1, 16))
        counts = result.report.counts()
        assert (counts["ConvBNReLUPattern"], counts["ConvBNPattern"]) == (10, 1)
        assert names_of_matches(result, "ConvTransposeBNReLUPattern") == ["up1", "up2"]
        parity(model, result, image(3, 16))

    def test_a_decoder_fuses_attention_norms_and_projections(self):
        model = Decoder().eval()
        result = transform(model, torch.randint(0, 50, (1, 6)))
        counts = result.report.counts()
        assert (counts["ScaledDotProductAttentionPattern"], counts["RMSNormPattern"]) == (2, 5)
        linear = [match for match in result.matches if "linear" in {get_kind(node) for node in match.nodes.values()}]
        assert len(linear) == 15
        parity(model, result, torch.randint(0, 50, (3, 9)))

    def test_nothing_with_weights_is_silently_missing(self):
        plan = get_transformation_plan(SilentSkip().eval(), torch.randn(1, 5, 8))
        names = " ".join([*(match.name for match in plan.matches), *(refusal.name for refusal in plan.refusals)])
        text = render(plan.table(), 200)
        for name in ("attention.in_proj", "attention.out_proj", "lstm", "head"):
            assert name in names
            assert name in text
        assert places_of_kind(plan, "linear") == 4

    def test_a_recurrent_layer_says_why_it_stays_float(self):
        result = transform(SilentSkip().eval(), torch.randn(1, 5, 8))
        reported = [*result.report.skipped, *result.report.refusals]
        assert any("lstm" in item.name and item.reason for item in reported)


class Reads(nn.Module):
    """A forward that is a function of x and a weight."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.function(x, self.weight)


class Cell(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        y = self.cell(x)
        return y[0] if isinstance(y, tuple) else y


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 3)

    def forward(self, x):
        return self.bilinear(x, x)


def unmatched_operations(result):
    return [(item.name, item.reason) for item in result.report.refusals if not item.pattern]


class TestWeightsThatAreReadInAnUnknownWay:
    @pytest.mark.parametrize(
        ("model", "weight"),
        [
            pytest.param(Reads(lambda x, w: torch.einsum("bi,oi->b", x, w), 3, 4), "weight", id="einsum"),
            pytest.param(Reads(lambda x, w: torch.baddbmm(x[None], x[None], w), 1, 4, 4), "weight", id="baddbmm"),
            pytest.param(Reads(lambda x, w: w[(x > 0).long()], 2, 4), "weight", id="a-table-by-index"),
            pytest.param(Reads(torch.cdist, 3, 4), "weight", id="distances"),
            pytest.param(Cell(nn.LSTMCell(4, 3)), "cell.weight_ih", id="lstm-cell"),
            pytest.param(Cell(nn.GRUCell(4, 3)), "cell.weight_ih", id="gru-cell"),
            pytest.param(Pair(), "bilinear.weight", id="bilinear"),
        ],
    )
    def test_they_are_reported_with_a_reason(self, model, weight):
        result = transform(model, torch.randn(2, 4))
        assert [reason for _, reason in unmatched_operations(result)] == [
            f"reads the weight {weight} in an unknown way: it stays float"
        ]
        parity(model, result, torch.randn(3, 4))

    def test_all_weights_that_one_module_reads_are_reported(self):
        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

            def forward(self, x):
                return torch.einsum("bi,oi->b", x, self.one) + torch.einsum("bi,oi->b", x, self.two)

        operations = unmatched_operations(transform(Sums(), torch.randn(2, 4)))
        assert {reason for _, reason in operations} == {"reads the weights one, two in an unknown way: it stays float"}

    def test_weights_in_branches_are_reported_with_the_branch(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return torch.cond(x.sum() > 0, lambda x: self.yes(x) + 0, lambda x: self.no(x) * 2, (x,))

        operations = unmatched_operations(transform(Branches(), torch.randn(2, 4)))
        assert {reason for _, reason in operations} == {
            "is in a branch of torch.cond, which is not transformed: it stays float"
        }

    def test_they_are_also_reported_without_example_inputs(self):
        assert unmatched_operations(transform(Pair())) == [
            ("bilinear", "reads the weight bilinear.weight in an unknown way: it stays float")
        ]

    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(lambda x, w: x + w, id="a-position"),
            pytest.param(lambda x, w: torch.cat([x, w.expand(x.shape[0], -1)]), id="a-token"),
            pytest.param(lambda x, w: x * w.sigmoid(), id="a-scale"),
            pytest.param(lambda x, w: torch.where(x > 0, x, w), id="a-fill"),
            pytest.param(lambda x, w: x - torch.tanh(w).unsqueeze(0).squeeze(0), id="of-parameters-alone"),
        ],
    )
    @pytest.mark.parametrize("inputs", [True, False], ids=["with-inputs", "without"])
    def test_parameters_that_are_added_scaled_or_concatenated_are_not_reported(self, function, inputs):
        assert unmatched_operations(transform(Reads(function, 1, 4), torch.randn(2, 4) if inputs else None)) == []

    @pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=["tokens", "windows"])
    def test_a_weight_as_the_left_operand_is_a_linear_layer(self, batch):
        model = Reads(lambda x, w: w @ x, 3, 4)
        result = transform(model, torch.randn(*batch, 4, 5))
        assert result.report.counts() == {"LinearPattern": 1}
        parity(model, result, torch.randn(*batch, 4, 5))

    def test_the_experts_of_a_mixture_are_reported(self):
        model = Reads(lambda x, w: torch.nn.functional.grouped_mm(x, w, offs=torch.tensor([2, 4]).int()), 2, 8, 8)
        result = transform(model.bfloat16(), torch.randn(4, 8).bfloat16())
        assert unmatched_operations(result) == [("grouped_linear", "no pattern matches grouped_linear: it stays float")]


def places_of_kind(plan, kind):
    return sum(kind in {get_kind(node) for node in match.nodes.values()} for match in plan.matches)


class TestPoolsThatChangeNothing:
    @pytest.mark.parametrize("inputs", [True, False], ids=["with-inputs", "without"])
    @pytest.mark.parametrize(
        ("pool", "is_idle"),
        [
            pytest.param(nn.MaxPool2d(1), True, id="max-of-one"),
            pytest.param(nn.AvgPool2d(1, 1), True, id="average-of-one"),
            pytest.param(nn.AdaptiveAvgPool2d((None, None)), True, id="adaptive-to-what-comes"),
            pytest.param(nn.MaxPool2d(1, 2), False, id="every-second"),
            pytest.param(nn.MaxPool2d(3, 1, 1), False, id="max-of-nine"),
            pytest.param(nn.AvgPool2d(1, 1, divisor_override=2), False, id="another-divisor"),
            pytest.param(nn.AdaptiveAvgPool2d(8), False, id="adaptive-to-the-size-of-this-image"),
            pytest.param(nn.AdaptiveAvgPool2d((None, 8)), False, id="adaptive-in-one-axis"),
        ],
    )
    def test_they_are_removed_and_others_are_not(self, pool, is_idle, inputs):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), pool, nn.ReLU()).eval()
        result = transform(model, image(1, 8) if inputs else None)
        assert (result.report.counts() == {"ConvBNReLUPattern": 1}) is is_idle
        parity(model, result, image(3, 8))
        parity(model, result, image(1, 16) if not inputs else image(1, 8))


class Residual(nn.Module):
    """relu(bn(conv(x)) + x), with the operands of the add in both orders or with a function."""

    def __init__(self, add):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.add = add

    def forward(self, x):
        return torch.relu(self.add(self.bn(self.conv(x)), x))


class TwoBranches(nn.Module):
    """Two convolutions meet in an add; the one after three operations is the main branch."""

    def __init__(self, long_first):
        super().__init__()
        self.a1, self.a2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 4, 1)
        self.long_first = long_first

    def forward(self, x):
        long, short = self.a2(self.a1(x).relu()), self.b(x)
        return (long + short if self.long_first else short + long).relu()


class TwoReaders(nn.Module):
    """The convolution's output is also read by `other`."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.other = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.act(self.bn(y)).mean() + self.other(y).mean()


class TestFusions:
    @pytest.mark.parametrize(
        "add",
        [
            pytest.param(lambda y, x: y + x, id="branch-first"),
            pytest.param(lambda y, x: x + y, id="residual-first"),
            pytest.param(torch.add, id="torch.add"),
            pytest.param(lambda y, x: torch.add(x, y), id="torch.add-residual-first"),
            pytest.param(lambda y, x: y.add_(x), id="in-place"),
        ],
    )
    def test_the_order_of_the_operands_does_not_matter(self, add):
        model = with_norm_statistics(Residual(add))
        result = transform(model, image(1, 8))
        assert result.report.counts() == {"ConvBNAddReLUPattern": 1}
        parity(model, result, image(3, 8))

    def test_a_scaled_add_keeps_its_factor(self):
        model = with_norm_statistics(Residual(lambda y, x: torch.add(y, x, alpha=3)))
        parity(model, transform(model, image(1, 8)), image(3, 8))

    def test_an_add_of_a_number_is_not_a_residual(self):
        model = with_norm_statistics(Residual(lambda y, x: y + 1.0))
        result = transform(model, image(1, 8))
        assert "ConvBNAddReLUPattern" not in result.report.counts()
        parity(model, result, image(3, 8))

    def test_an_add_of_a_parameter_is_not_a_residual(self):
        class Biased(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.offset = nn.Conv2d(3, 4, 1), nn.Parameter(torch.randn(1, 4, 1, 1))

            def forward(self, x):
                return torch.relu(self.conv(x) + self.offset)

        model = Biased()
        result = transform(model, image(1, 8))
        parity(model, result, image(3, 8))
        assert list(result.model.state_dict()) == list(model.state_dict())

    def test_a_tensor_added_to_itself_is_not_a_residual(self):
        model = with_norm_statistics(Residual(lambda y, x: y + y))
        result = transform(model, image(1, 8))
        assert "ConvBNAddReLUPattern" not in result.report.counts()
        parity(model, result, image(3, 8))

    @pytest.mark.parametrize("long_first", [True, False], ids=["long-first", "short-first"])
    def test_the_longer_of_two_branches_takes_the_add(self, long_first):
        model = TwoBranches(long_first).eval()
        result = transform(model, image(1, 8))
        assert names_of_matches(result, "ConvBNAddReLUPattern") == ["a2"]
        assert names_of_matches(result, "ConvBNPattern") == ["b"]
        reported = [refusal for refusal in result.report.refusals if refusal.name == "b" and "a2" in refusal.reason]
        assert reported
        parity(model, result, image(3, 8))

    def test_an_output_with_two_readers_ends_the_group_and_the_other_reader_is_reported(self):
        model = with_norm_statistics(TwoReaders())
        result = transform(model, image(1, 8))
        assert result.report.counts() == {"ConvBNPattern": 2}
        assert all(match.roles == ("conv",) for match in result.matches)
        reported = [
            item.reason for item in result.report.refusals if (item.pattern, item.name) == ("ConvBNReLUPattern", "conv")
        ]
        assert len(reported) == 1
        assert "other" in reported[0]
        parity(model, result, image(3, 8))

    def test_a_tensor_that_the_model_also_returns_is_not_fused_away(self):
        class Returned(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

            def forward(self, x):
                y = self.bn(self.conv(x))
                return torch.relu(y), y

        model = with_norm_statistics(Returned())
        result = transform(model, image(1, 8))
        x = image(3, 8)
        for actual, expected in zip(result.model(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected)
        assert result.report.counts() == {"ConvBNPattern": 1}

    def test_the_same_block_called_twice_is_fused_twice_over_one_set_of_parameters(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

            def forward(self, x):
                return torch.relu(self.bn(self.conv(torch.relu(self.bn(self.conv(x))))))

        model = with_norm_statistics(Twice())
        result = transform(model, image(1, 8))
        assert result.report.counts() == {"ConvBNReLUPattern": 2}
        assert list(result.model.state_dict()) == list(model.state_dict())
        parity(model, result, image(3, 8))

    @pytest.mark.parametrize("scale", [lambda s: s / 2.0, lambda s: s * 0.5], ids=["div", "mul"])
    @pytest.mark.parametrize(
        "mask",
        [
            pytest.param(lambda s: s, id="plain"),
            pytest.param(lambda s: s + torch.full((5, 5), -1e4).triu(1), id="added-mask"),
            pytest.param(lambda s: s.masked_fill(torch.ones(5, 5).tril() == 0, float("-inf")), id="filled-mask"),
        ],
    )
    def test_attention_spelled_out_is_one_core(self, scale, mask):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                scores = mask(scale(self.q(x) @ self.k(x).transpose(-2, -1)))
                return torch.softmax(scores, -1) @ self.v(x)

        model = Attention().eval()
        result = transform(model, torch.randn(1, 5, 4))
        assert sum(issubclass(match.pattern.make, FusedAttention) for match in result.matches) == 1
        parity(model, result, torch.randn(3, 5, 4))

    @pytest.mark.parametrize(
        "between",
        [
            pytest.param(lambda s, v: (s * 0.5).softmax(-1).type_as(s) @ v, id="type-of-the-scores"),
            pytest.param(lambda s, v: torch.softmax((s + torch.ones(5, 5)).float(), -1).type_as(s) @ v, id="as-t5"),
            pytest.param(lambda s, v: (s + torch.ones(5, 5) + torch.ones(5, 1)).softmax(-1) @ v, id="bias-and-mask"),
            pytest.param(
                lambda s, v: (s.view(-1, 1, 5, 5) + torch.ones(1, 5, 5)).view(-1, 5, 5).softmax(-1) @ v, id="windows"
            ),
            pytest.param(lambda s, v: (s * torch.ones(5, 1)).softmax(-1) @ v, id="a-learned-scale"),
        ],
    )
    def test_attention_is_one_core_with_any_operations_before_its_softmax(self, between):
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return between(self.q(x) @ self.k(x).transpose(-2, -1), self.v(x))

        model = Attention().eval()
        result = transform(model, torch.randn(1, 5, 4))
        counts = result.report.counts()
        assert counts == {"AttentionSpelledOutPattern": 1, "MHAInProjectionPattern": 3}
        parity(model, result, torch.randn(3, 5, 4))

    def test_rms_norm_spelled_out_is_one_norm(self):
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.rand(4))

            def forward(self, x):
                return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

        model = Norm()
        result = transform(model, torch.randn(1, 5, 4))
        assert [issubclass(match.pattern.make, FusedNorm) for match in result.matches] == [True]
        parity(model, result, torch.randn(3, 5, 4))

    @pytest.mark.parametrize(
        "gelu",
        [
            pytest.param(F.gelu, id="function"),
            pytest.param(lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), id="erf"),
            pytest.param(
                lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3)))), id="tanh"
            ),
        ],
    )
    def test_a_linear_layer_is_fused_with_any_form_of_gelu(self, gelu):
        class MLP(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return gelu(self.fc(x))

        model = MLP().eval()
        result = transform(model, torch.randn(1, 4))
        assert [issubclass(match.pattern.make, FusedLinearReLU) for match in result.matches] == [True]
        parity(model, result, torch.randn(3, 4))


def small():
    torch.manual_seed(0)
    return with_norm_statistics(SmallNet())


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.head(self.dropout(x.mean((2, 3))))


class BreaksOnce(Fused):
    """A fused class of a user whose constructor raises."""

    def __init__(self, parts, wiring):
        raise RuntimeError("no kernel for this shape")


class TestPlans:
    def test_a_match_that_is_switched_off_is_skipped_and_the_rest_applied(self):
        model = small()
        plan = get_transformation_plan(model, image(1, 8))
        assert [match.name for match in plan.matches] == ["conv1", "conv2", "head"]
        plan.matches[0].apply = False
        result = apply_transformation_plan(plan)
        assert [match.name for match in result.matches] == ["conv2", "head"]
        assert [match.name for match in result.report.skipped] == ["conv1"]
        assert result.report.skipped[0].reason
        parity(model, result, image(3, 8))

    def test_a_reason_set_by_the_user_is_kept(self):
        plan = get_transformation_plan(small(), image(1, 8))
        plan.matches[0].apply, plan.matches[0].reason = False, "accuracy drops here"
        assert apply_transformation_plan(plan).report.skipped[0].reason == "accuracy drops here"

    def test_a_fused_class_that_raises_is_skipped_with_its_reason_and_the_rest_is_applied(self):
        model = small()
        broken = Pattern("Broken", chain(op("conv"), op("batch_norm"), op("relu")), BreaksOnce)
        plan = get_transformation_plan(model, image(1, 8), [broken, *BASE_PATTERNS])
        result = apply_transformation_plan(plan)
        skipped = [(match.pattern.name, match.name, match.reason) for match in result.report.skipped]
        assert skipped == [("Broken", "conv1", "RuntimeError: no kernel for this shape")]
        assert [match.name for match in result.matches] == ["conv2", "head"]
        check_graph(result.model)
        parity(model, result, image(3, 8))

    def test_a_fused_class_that_raises_does_not_change_the_graph(self):
        model = small()
        broken = Pattern("Broken", chain(op("conv"), op("batch_norm"), op("relu")), BreaksOnce)
        result = transform(model, image(1, 8), [broken])
        assert not any(isinstance(module, Fused) for module in result.model.modules())
        assert list(result.model.state_dict()) == list(model.state_dict())

    def test_a_condition_that_raises_is_skipped_with_its_reason_and_the_rest_is_applied(self):
        def fails(node, nodes):
            raise ZeroDivisionError("a user's own fault")

        broken = Pattern("Broken", chain(op("conv", where=fails), op("batch_norm"), op("relu")), Fused)
        result = transform(small(), image(1, 8), [broken, *BASE_PATTERNS])
        assert [match.name for match in result.matches] == ["conv1", "conv2", "head"]
        reported = [item.reason for item in (*result.report.skipped, *result.report.refusals) if "Broken" in str(item)]
        assert any("a user's own fault" in reason for reason in reported)

    def test_a_plan_survives_json(self):
        model = small()
        plan = get_transformation_plan(model, image(1, 8))
        plan.matches[1].apply, plan.matches[1].reason = False, "sensitive"
        text = plan.to_json()
        assert json.loads(text)["version"] == 1
        other = get_transformation_plan(model, image(1, 8))
        other.load_json(text)
        assert [(m.name, m.apply, m.reason) for m in other.matches] == [
            (m.name, m.apply, m.reason) for m in plan.matches
        ]
        assert other.to_json() == text

    @pytest.mark.parametrize("row_count", [0, 1, 2])
    def test_a_saved_plan_of_a_part_of_the_matches_is_refused_and_changes_nothing(self, row_count):
        plan = get_transformation_plan(small(), image(1, 8))
        saved = json.loads(plan.to_json())
        cut = {**saved, "matches": [{**row, "apply": False} for row in saved["matches"][:row_count]]}
        with pytest.raises(PatternError, match="does not contain") as caught:
            plan.load_json(json.dumps(cut))
        for row in saved["matches"][row_count:]:
            assert f"{row['pattern']} at {row['where']}" in str(caught.value)
        assert plan.to_json() == json.dumps(saved, indent=2)

    def test_a_plan_keeps_apart_two_matches_at_one_module(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                return self.fc(self.fc(x))

        plan = get_transformation_plan(Twice(), torch.randn(1, 4))
        plan.matches[0].apply = False
        other = get_transformation_plan(Twice(), torch.randn(1, 4))
        other.load_json(plan.to_json())
        assert [match.apply for match in other.matches] == [False, True]

    @pytest.mark.parametrize("make", [SmallNet, UNet])
    def test_a_plan_of_another_model_is_refused_and_changes_nothing(self, make):
        text = get_transformation_plan(SilentSkip(), torch.randn(1, 5, 8)).to_json()
        plan = get_transformation_plan(with_norm_statistics(make()), image(1, 8))
        before = plan.to_json()
        with pytest.raises(PatternError, match="another model"):
            plan.load_json(text)
        assert plan.to_json() == before

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param("[]", id="a-list"),
            pytest.param("{}", id="nothing"),
            pytest.param('{"version": 99, "matches": []}', id="another-version"),
            pytest.param('{"version": 1, "matches": {}}', id="no-list"),
            pytest.param('{"version": 1, "matches": [3]}', id="no-row"),
            pytest.param('{"version": 1, "matches": [{"where": "conv1", "apply": "yes"}]}', id="no-bool"),
            pytest.param('{"version": 1, "matches": [{"where": [], "pattern": {}, "apply": true}]}', id="no-names"),
            pytest.param('{"version": 1', id="cut-off"),
        ],
    )
    def test_invalid_plans_are_refused(self, text):
        plan = get_transformation_plan(small(), image(1, 8))
        with pytest.raises(ValueError, match=r"SP-"):
            plan.load_json(text)

    def test_applying_a_plan_twice_does_not_damage_the_first_result(self):
        model = small()
        plan = get_transformation_plan(model, image(1, 8))
        first = apply_transformation_plan(plan)
        with contextlib.suppress(ScalepointError):
            apply_transformation_plan(plan)
        assert first.report.counts() == {"ConvBNReLUPattern": 1, "ConvBNAddReLUPattern": 1, "LinearPattern": 1}
        assert all(match.apply for match in first.matches)
        parity(model, first, image(3, 8))


def render(table, width):
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as output:
        console.print(table)
    return output.get()


class TestTables:
    def test_tables_fit_forty_columns(self, resnet):
        plan = TransformationPlan(resnet[1].model, resnet[1].matches)
        for table in (plan.table(), resnet[1].report.table()):
            text = render(table, 40)
            assert max(map(len, text.splitlines())) <= 40

    def test_no_name_of_the_report_is_cut_in_forty_columns(self, resnet):
        text = "".join(character for character in render(resnet[1].report.table(), 40) if character.isalnum())
        assert "…" not in render(resnet[1].report.table(), 40)
        assert "16" in text
        assert "32" in text

    def test_markup_in_names_is_shown_literally(self):
        model = nn.Sequential()
        model.add_module("[red]", nn.Conv2d(3, 4, 1))
        model.add_module("[/]", nn.ReLU())
        model.add_module("[link=file:x]", nn.Linear(8, 2))
        plan = get_transformation_plan(model.eval(), image(1, 8))
        plan.matches[0].reason = "[bold]because[/bold]"
        text = render(plan.table(), 200)
        assert "[red]" in text
        assert "[link=file:x]" in text
        assert "[bold]because[/bold]" in text

    def test_markup_in_pattern_names_is_shown_literally(self):
        plain = Pattern("[red]Mine[/red]", chain(op("linear")), FusedLinear)
        result = transform(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4), [plain])
        assert "[red]Mine[/red]" in render(result.report.table(), 100)

    def test_control_characters_in_names_do_not_reach_the_terminal(self):
        model = nn.Sequential()
        model.add_module("a\x1b[31mb", nn.Linear(4, 4))
        plan = get_transformation_plan(model.eval(), torch.randn(1, 4))
        assert "\x1b" not in render(plan.table(), 200)

    def test_the_table_shows_what_is_applied_and_why_not(self):
        plan = get_transformation_plan(small(), image(1, 8))
        plan.matches[0].apply, plan.matches[0].reason = False, "sensitive"
        text = render(plan.table(), 200)
        row = next(line for line in text.splitlines() if "conv1" in line)
        assert "no" in row
        assert "sensitive" in row

    def test_the_report_counts_what_was_skipped(self):
        plan = get_transformation_plan(small(), image(1, 8))
        plan.matches[0].apply = False
        assert "2 groups, 1 skipped" in render(apply_transformation_plan(plan).report.table(), 100)


class Wrong(Fused):
    """A fused module that does not compute the same as its parts."""

    def forward(self, *inputs):
        return super().forward(*inputs) + 1


class NotANumber(Fused):
    def forward(self, *inputs):
        return super().forward(*inputs) * float("nan")


class TestChecks:
    def test_a_checked_transform_passes(self):
        model = small()
        assert transform(model, image(1, 8), check=True).report.counts()

    def test_a_check_restores_modes_and_statistics(self):
        model = small().train()
        before = copy.deepcopy(model.state_dict())
        result = transform(model, image(2, 8), check=True)
        assert model.training
        assert model.bn1.training
        assert result.model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    @pytest.mark.parametrize("fused_class", [Wrong, NotANumber])
    def test_a_fused_class_that_computes_something_else_is_detected(self, fused_class):
        wrong = Pattern("WrongPattern", chain(op("linear")), fused_class)
        with pytest.raises(GraphError):
            transform(small(), image(1, 8), [wrong], check=True)

    def test_a_check_takes_inputs_as_transform_does(self):
        model = nn.Linear(4, 3).eval()
        x = torch.randn(2, 4)
        for args, kwargs in ((x, None), ((x,), None), ([x], None), ({"input": x}, None), ((), {"input": x})):
            transform(model, args, kwargs=kwargs, check=True)

    def test_a_check_of_a_trusted_file(self, tmp_path):
        x = torch.randn(2, 4)
        torch.export.save(torch.export.export(nn.Linear(4, 3).eval(), (x,)), tmp_path / "model.pt2")
        result = transform(tmp_path / "model.pt2", x, check=True, trust=True)
        assert result.report.counts() == {"LinearPattern": 1}
        wrong = Pattern("WrongPattern", chain(op("linear")), Wrong)
        with pytest.raises(GraphError):
            transform(tmp_path / "model.pt2", x, [wrong], check=True, trust=True)

    def test_a_check_of_a_model_that_writes_into_its_input(self):
        class Writes(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                x.add_(1)
                return self.fc(x)

        x = torch.randn(2, 4)
        original = x.clone()
        transform(Writes().eval(), x, check=True)
        assert torch.equal(x, original)

    def test_an_output_of_zeros_passes(self):
        model = nn.Linear(4, 3).eval()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        transform(model, torch.randn(2, 4), check=True)


SCRIPT = """
import sys, warnings
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from scalepoint import transform
from tests.models import {models}
for model, x in {cases}:
    for match in transform(model.eval(), x).matches:
        print(match.pattern.name, match.name)
"""
SMALL_SCRIPT = SCRIPT.format(
    models="ResNet, VisionTransformer",
    cases="(ResNet((1, 1, 1, 1), 4, 5), torch.randn(1, 3, 32, 32)), "
    "(VisionTransformer(8, 2, 2, 16, 8, 3), torch.randn(1, 3, 16, 16))",
)
WHOLE_SCRIPT = SCRIPT.format(
    models="resnet50, vit_b16",
    cases="(resnet50(8, 10), torch.randn(1, 3, 64, 64)), (vit_b16(24, 32, 10), torch.randn(1, 3, 32, 32))",
)


def outputs(script, seeds):
    """Run the script in new processes, two at a time, and return what they print."""
    root = Path(__file__).parents[2]
    texts = []
    for pair in (seeds[start : start + 2] for start in range(0, len(seeds), 2)):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                cwd=root,
                env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in pair
        ]
        texts += [process.communicate(timeout=120)[0] for process in running]
    return texts


def golden(name, text):
    """Return the stored text. SCALEPOINT_REGENERATE=1 replaces it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SCALEPOINT_REGENERATE"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    return path.read_text()


class TestDeterminism:
    def test_resnet50_gives_the_golden_text(self, resnet):
        text = golden_text(resnet[1].matches)
        assert text == golden("resnet50", text)

    def test_vit_b16_gives_the_golden_text(self, vit):
        text = golden_text(vit[1].matches)
        assert text == golden("vit_b16", text)

    def test_a_process_with_another_hash_seed_gives_the_same_text(self):
        torch.manual_seed(0)
        cases = [(ResNet((1, 1, 1, 1), 4, 5), image()), (VisionTransformer(8, 2, 2, 16, 8, 3), image(1, 16))]
        expected = "".join(golden_text(transform(model.eval(), x).matches) for model, x in cases)
        assert expected.count("\n") > 20
        assert outputs(SMALL_SCRIPT, [1]) == [expected]

    @pytest.mark.slow
    def test_twenty_processes_give_the_golden_texts(self, resnet, vit):
        expected = golden_text(resnet[1].matches) + golden_text(vit[1].matches)
        assert outputs(WHOLE_SCRIPT, range(20)) == [expected] * 20

    def test_a_second_transform_gives_the_same_graph(self):
        first, second = (transform(small(), image(1, 8)) for _ in range(2))
        assert first.model.code == second.model.code


class TestTheResult:
    def test_a_deepcopy_is_equal_and_independent(self, resnet):
        model, result = resnet
        twin = copy.deepcopy(result.model).eval()
        x = image(2, 64)
        expected = model(x)
        torch.testing.assert_close(twin(x), expected)
        with torch.no_grad():
            for value in twin.parameters():
                value.zero_()
        torch.testing.assert_close(result.model.eval()(x), expected)
        assert twin(x).abs().sum() == 0

    def test_a_deepcopy_of_a_deepcopy_works_after_the_first_is_gone(self):
        model = small()
        twin = copy.deepcopy(copy.deepcopy(transform(model, image(1, 8)).model))
        x = image(2, 8)
        torch.testing.assert_close(twin.eval()(x), model(x))

    def test_statistics_update_under_their_original_names(self):
        model = small()
        result = transform(model, image(1, 8))
        before = {name: value.clone() for name, value in result.model.named_buffers()}
        result.model.train()(image(4, 8))
        after = dict(result.model.named_buffers())
        for name in ("bn1.running_mean", "bn2.running_var"):
            assert not torch.equal(before[name], after[name])
        assert int(after["bn1.num_batches_tracked"]) == 1
        assert int(model.bn1.num_batches_tracked) == 0

    def test_train_and_eval_reach_every_part(self):
        result = transform(small().train(), image(2, 8))
        for mode in (False, True):
            result.model.train(mode)
            for module in result.model.modules():
                assert module.training is mode
                for part in getattr(module, "parts", {}).values():
                    assert part.training is mode

    def test_gradients_are_the_models(self):
        model = small()
        model.dropout.p = 0.0
        result = transform(model, image(1, 8))
        x = image(4, 8)
        twin = copy.deepcopy(model).train()
        twin(x).square().sum().backward()
        result.model.train()(x).square().sum().backward()
        assert all(value.grad is None for value in model.parameters())
        expected = dict(twin.named_parameters())
        for name, value in result.model.named_parameters():
            torch.testing.assert_close(value.grad, expected[name].grad)

    @pytest.mark.slow
    def test_every_parameter_of_resnet50_gets_a_gradient(self):
        result = transform(resnet50(4, 5), image(2, 64))
        result.model.train()(image(2, 64)).sum().backward()
        assert [name for name, value in result.model.named_parameters() if value.grad is None] == []

    def test_the_callers_model_is_untouched(self):
        model = small().train()
        before, modules = copy.deepcopy(model.state_dict()), list(model.named_modules())
        result = transform(model, image(2, 8))
        with torch.no_grad():
            for value in result.model.parameters():
                value.zero_()
        assert list(model.named_modules()) == modules
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_shared_parameters_are_the_callers_own(self):
        model = small()
        result = transform(model, image(1, 8), copy=False)
        parameters = dict(model.named_parameters())
        assert all(value is parameters[name] for name, value in result.model.named_parameters())
        assert list(model.named_modules(remove_duplicate=False)) == list(model.named_modules())
        assert not any(isinstance(module, Fused) for module in model.modules())

    def test_a_replaced_weight_is_the_one_that_runs(self):
        result = transform(small(), image(1, 8))
        before = result.model(image(1, 8))
        result.model.load_state_dict({name: torch.zeros_like(v) for name, v in result.model.state_dict().items()})
        result.model.head.bias = nn.Parameter(torch.ones(5))
        assert not torch.equal(before, result.model(image(1, 8)))
        assert torch.equal(result.model(image(1, 8)), torch.ones(1, 5))

    def test_the_result_is_exported(self):
        model = small()
        result = transform(model, image(2, 8))
        x = image(2, 8)
        torch.testing.assert_close(torch.export.export(result.model.eval(), (x,)).module()(x), model(x))

    def test_a_fused_module_has_its_weight_and_parts(self):
        result = transform(small(), image(1, 8))
        fused = result.model.get_submodule(result.matches[0].fused)
        assert fused.weight is result.model.conv1.weight
        assert fused.part("batch_norm") is result.model.bn1
        assert fused.part("nothing") is None


class FusedLinearDropoutAdd(Fused):
    """y = dropout(linear(x)) + r, a pattern of a user."""


LINEAR_DROPOUT_ADD = Pattern(
    "LinearDropoutAddPattern",
    chain(op("linear"), optional(op("dropout")), join("add")),
    FusedLinearDropoutAdd,
    (Point.INPUT, Point.RESIDUAL_INPUT),
)


class TestUserPatterns:
    def test_it_matches_and_fuses(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

            def forward(self, x):
                return x + self.dropout(self.fc(x))

        model = nn.Sequential(Block(), Block()).eval()
        result = transform(model, torch.randn(1, 4), [LINEAR_DROPOUT_ADD], check=True)
        assert names_of_matches(result, "LinearDropoutAddPattern") == ["0.fc", "1.fc"]
        assert [match.roles for match in result.matches] == [("linear", "dropout", "add")] * 2
        parity(model, result, torch.randn(3, 4))

    def test_it_is_matched_before_shorter_patterns_in_any_order(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
        long = Pattern("Long", chain(op("linear"), op("relu")), Fused)
        short = Pattern("Short", chain(op("linear")), Fused)
        for patterns in ([long, short], [short, long]):
            assert golden_text(transform(model, torch.randn(1, 4), patterns).matches) == "Long 0\nShort 2\n"

    def test_the_first_of_two_patterns_of_equal_length_wins(self):
        model = nn.Sequential(nn.Linear(4, 4)).eval()
        one, two = (Pattern(name, chain(op("linear")), Fused) for name in ("One", "Two"))
        assert golden_text(transform(model, torch.randn(1, 4), [one, two]).matches) == "One 0\n"
        assert golden_text(transform(model, torch.randn(1, 4), [two, one]).matches) == "Two 0\n"

    def test_a_condition_refuses_with_its_reason(self):
        def is_small(node, nodes):
            return "too wide for the kernel"

        picky = Pattern("Picky", chain(op("linear", where=is_small)), Fused)
        result = transform(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4), [picky])
        assert result.matches == []
        assert [(item.name, item.reason) for item in result.report.refusals] == [("0", "too wide for the kernel")]

    def test_without_patterns_the_captured_graph_is_returned(self):
        model = small()
        result = transform(model, image(1, 8), [])
        assert result.matches == []
        parity(model, result, image(3, 8))


class TestInvalidPatterns:
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda: Pattern("P", (), Fused), id="empty"),
            pytest.param(lambda: Pattern("P", chain(optional(op("conv"))), Fused), id="optional-first"),
            pytest.param(lambda: Pattern("P", chain(join("add")), Fused), id="join-first"),
            pytest.param(lambda: Pattern("P", chain(op("conv"), op("conv")), Fused), id="a-role-twice"),
            pytest.param(lambda: Pattern("P", chain(op("conv")), nn.Module), id="no-fused-class"),
            pytest.param(lambda: Pattern("P", chain(op("conv")), FusedConvBN({}, [])), id="an-instance"),
            pytest.param(lambda: Pattern("", chain(op("conv")), Fused), id="no-name"),
            pytest.param(lambda: Pattern("P", ("conv",), Fused), id="no-elements"),
            pytest.param(lambda: Pattern("P", op("conv"), Fused), id="no-chain"),
            pytest.param(lambda: Pattern("P", chain(op("conv")), Fused, ("sideways",)), id="no-points"),
            pytest.param(lambda: op(""), id="no-role"),
        ],
    )
    def test_an_invalid_pattern_is_refused_when_it_is_created(self, make):
        with pytest.raises(PatternError):
            make()

    def test_two_patterns_of_one_name_are_refused(self):
        twins = [Pattern("Mine", chain(op(kind)), Fused) for kind in ("linear", "conv")]
        with raises(PatternError, "two patterns", "'Mine'"):
            transform(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4), twins)

    def test_values_that_are_not_patterns_are_refused(self):
        with pytest.raises(PatternError):
            transform(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4), ["LinearPattern"])

    def test_a_pattern_class_instead_of_an_instance_is_refused_with_advice(self):
        with pytest.raises(PatternError, match=r"pass LinearPattern\(\)"):
            transform(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4), [public_patterns.LinearPattern])


class TestBasePatternClasses:
    TABLE = {  # contract B2
        "ConvBNPattern": (Point.INPUT,),
        "ConvBNReLUPattern": (Point.INPUT,),
        "ConvBNAddReLUPattern": (Point.INPUT, Point.RESIDUAL_INPUT),
        "StemConvBNReLUMaxPoolPattern": (Point.INPUT,),
        "LinearPattern": (Point.INPUT,),
        "LinearReLUPattern": (Point.INPUT,),
        "LayerNormPattern": (),
        "MHAInProjectionPattern": (Point.INPUT,),
        "ScaledDotProductAttentionPattern": (Point.INPUT, Point.KEY_INPUT, Point.VALUE_INPUT),
        "AdaptiveAvgPoolPattern": (Point.INPUT, Point.OUTPUT),
    }

    @pytest.mark.parametrize("name", TABLE)
    def test_each_can_be_imported_by_name_and_is_in_the_base_set(self, name):
        kind = getattr(public_patterns, name)
        assert kind().qdq_points == self.TABLE[name]
        assert kind() in BASE_PATTERNS
        assert kind().name == name

    def test_a_match_is_identified_by_its_class_even_if_a_target_changed_the_points(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
        for target in (None, "onnxruntime", "openvino", "tensorrt", "executorch", "coreml", "litert"):
            first, second = transform(model, image(1, 8), target=target).matches
            assert isinstance(first.pattern, public_patterns.ConvBNReLUPattern)
            assert isinstance(second.pattern, public_patterns.ConvBNPattern)

    def test_only_the_listed_patterns_are_matched(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
        result = transform(model, image(1, 8), patterns=[public_patterns.ConvBNReLUPattern(qdq_points=())])
        assert [match.pattern.qdq_points for match in result.matches] == [()]
