"""Outputs that depend on a choice among equal scores are compared with a simulation that makes the same choice."""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn

from scalepoint.errors import VerificationError
from scalepoint.formats import export
from scalepoint.quantize import quantize
from scalepoint.verification import Verification, verify
from scalepoint.verification.choices import FollowChoices, RuntimeChoice

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
RUNTIMES = [
    "onnxruntime",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
    ),
]


class Queries(nn.Module):
    """Like a detector with queries: only the tokens with the best scores reach the head."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value, self.head = nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores, indices = torch.topk(self.score(x).squeeze(-1), 6, dim=1)
        best = torch.relu(self.value(y)).gather(1, indices[..., None].expand(-1, -1, 16))
        return self.head(best), scores


class Case:
    """A quantized model with its file. With `is_tied` every score occurs four times."""

    def __init__(self, folder: Path, runtime: str = "onnxruntime", *, is_tied: bool = True) -> None:
        torch.manual_seed(0)
        tokens = torch.randn(2, 3, 8).repeat(1, 4, 1) if is_tied else torch.randn(2, 12, 8)
        self.inputs, self.runtime, self.path = (tokens, torch.randn(2, 12, 8)), runtime, folder / "m.onnx"
        self.model: fx.GraphModule = quantize(Queries().eval(), self.inputs, forward_loop=[self.inputs], target=runtime)
        export(self.model, self.path, self.inputs)

    def verify(self) -> Verification:
        return verify(self.path, self.model, self.inputs, runtime=self.runtime)

    def scale(self, layer: str, factor: float) -> None:
        """Multiply the weight scales of one layer in the file."""
        proto = onnx.load(self.path)
        scale = next(
            tensor
            for tensor in proto.graph.initializer
            if tensor.name.startswith(f"{layer}_") and tensor.name.endswith("linear.scale")
        )
        scale.CopyFrom(onnx.numpy_helper.from_array(factor * onnx.numpy_helper.to_array(scale), scale.name))
        onnx.save(proto, self.path)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_may_choose_differently_among_equal_scores(runtime: str, tmp_path: Path) -> None:
    result = Case(tmp_path, runtime).verify()
    assert result.holds
    assert result.sqnr > 40
    assert [(choice.where, choice.gap) for choice in result.choices] == [("topk", 0.0)]
    assert result.choices[0].sqnr > 100
    assert result.departure is None
    assert "topk (equal scores" in str(result.rows())
    result.check()


@pytest.mark.parametrize("layer", ["score", "value", "head"])
def test_a_changed_weight_before_or_after_the_choice_departs(layer: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.scale(layer, 3.0)
    result = case.verify()
    assert not result.holds
    assert result.choices == ()
    with pytest.raises(VerificationError):
        result.check()


def test_choices_by_scores_that_do_not_agree_are_not_followed(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.scale("score", -1.0)  # the file selects the worst scores
    result = case.verify()
    assert not result.holds
    assert result.choices == ()


def test_a_choice_that_contradicts_its_scores_departs(tmp_path: Path) -> None:
    case = Case(tmp_path)
    proto = onnx.load(case.path)
    node = next(node for node in proto.graph.node if node.op_type == "TopK")
    next(attribute for attribute in node.attribute if attribute.name == "largest").i = 0
    onnx.save(proto, case.path)
    result = case.verify()
    assert not result.holds
    assert result.choices == ()


def test_clearly_different_scores_are_compared_without_following_choices(tmp_path: Path) -> None:
    case = Case(tmp_path, is_tied=False)
    result = case.verify()
    assert result.holds
    assert result.choices == ()
    assert result.choices_text == ""
    case.scale("head", 3.0)
    assert not case.verify().holds


def _follow(
    scores: list[float], indices: list[int], torch_scores: list[float], *, k: int = 2
) -> tuple[list[int], FollowChoices]:
    """Return the indices of torch.topk over `torch_scores` if the runtime chose `indices` by `scores`."""
    follow = FollowChoices([RuntimeChoice("topk", np.array(scores, np.float32), np.array(indices))], bound=20.0)
    with follow:
        top = torch.topk(torch.tensor(torch_scores), k)
    assert torch.equal(top.values, torch.tensor(torch_scores)[top.indices])
    return top.indices.tolist(), follow


def test_a_rounding_may_decide_between_nearly_equal_scores() -> None:
    indices, follow = _follow([1.0, 5.0, 5.001, 2.0], [2, 1], [1.0, 5.001, 5.0, 2.0])
    assert indices == [2, 1]
    (choice,) = follow.followed
    assert 0 < choice.gap < 0.002
    assert "at most 0.001 apart" in str(choice)


@pytest.mark.parametrize(
    ("scores", "indices"),
    [
        ([1.0, 5.0, 5.0, 2.0], [1, 1]),
        ([1.0, 5.0, 5.0, 2.0], [2, 4]),
        ([1.0, 5.0, 5.0, 2.0], [2, 0]),
        ([-1.0, -5.0, -5.0, 2.0], [3, 0]),
    ],
    ids=["same index twice", "out of range", "not the best", "other scores"],
)
def test_an_invalid_choice_is_not_followed(scores: list[float], indices: list[int]) -> None:
    indices, follow = _follow(scores, indices, [1.0, 5.0, 5.0, 2.0])
    assert sorted(indices) == [1, 2]
    assert follow.followed == ()


def test_topk_sort_argmax_and_argmin_follow_the_choice() -> None:
    scores = torch.tensor([[3.0, 7.0, 7.0], [4.0, 4.0, 1.0]])
    best, order = np.array([2, 1]), np.array([[2, 1, 0], [1, 0, 2]])
    flat = RuntimeChoice("argmax", scores.flatten().numpy(), np.array(2))
    with FollowChoices([RuntimeChoice("argmax", scores.numpy(), best)], bound=20.0):
        assert scores.argmax(1).tolist() == best.tolist()
        assert scores.argmax(1, keepdim=True).flatten().tolist() == best.tolist()
        assert scores.max(1).indices.tolist() == best.tolist()
        assert (-scores).argmin(1).tolist() != best.tolist()  # these are other scores
    with FollowChoices([RuntimeChoice("argmin", -scores.numpy(), best)], bound=20.0):
        assert (-scores).argmin(1).tolist() == (-scores).min(1).indices.tolist() == best.tolist()
    with FollowChoices([RuntimeChoice("sort", scores.numpy(), order)], bound=20.0):
        assert scores.sort(1, descending=True).indices.tolist() == order.tolist()
        assert scores.argsort(1, descending=True).tolist() == order.tolist()
        assert scores.argsort(dim=1, descending=True, stable=True).tolist() == order.tolist()
    with FollowChoices([flat], bound=20.0):
        assert int(scores.argmax()) == 2
