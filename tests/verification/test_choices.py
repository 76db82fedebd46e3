"""Outputs that depend on a choice among equal scores are compared with the simulation given the same choice."""

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
    """As a detector with queries: the tokens with the best scores go on."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value, self.head = nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores, places = torch.topk(self.score(x).squeeze(-1), 6, dim=1)
        best = torch.relu(self.value(y)).gather(1, places[..., None].expand(-1, -1, 16))
        return self.head(best), scores


class Case:
    """A quantized model with its file. Every score occurs four times unless the tokens differ."""

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
            each
            for each in proto.graph.initializer
            if each.name.startswith(f"{layer}_") and each.name.endswith("linear.scale")
        )
        scale.CopyFrom(onnx.numpy_helper.from_array(factor * onnx.numpy_helper.to_array(scale), scale.name))
        onnx.save(proto, self.path)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_may_choose_others_among_equal_scores(runtime: str, tmp_path: Path) -> None:
    found = Case(tmp_path, runtime).verify()
    assert found.holds
    assert found.sqnr > 40
    assert [(each.where, each.gap) for each in found.choices] == [("topk", 0.0)]
    assert found.choices[0].sqnr > 100
    assert found.departure is None
    assert "topk (equal scores" in str(found.rows())
    found.check()


@pytest.mark.parametrize("layer", ["score", "value", "head"])
def test_a_changed_weight_before_or_after_the_choice_departs(layer: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.scale(layer, 3.0)
    found = case.verify()
    assert not found.holds
    assert found.choices == ()
    with pytest.raises(VerificationError):
        found.check()


def test_scores_that_do_not_agree_excuse_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.scale("score", -1.0)  # the file prefers the worst
    found = case.verify()
    assert not found.holds
    assert found.choices == ()


def test_a_choice_that_is_wrong_by_its_own_scores_departs(tmp_path: Path) -> None:
    case = Case(tmp_path)
    proto = onnx.load(case.path)
    node = next(node for node in proto.graph.node if node.op_type == "TopK")
    next(each for each in node.attribute if each.name == "largest").i = 0
    onnx.save(proto, case.path)
    found = case.verify()
    assert not found.holds
    assert found.choices == ()


def test_scores_that_differ_clearly_are_compared_as_ever(tmp_path: Path) -> None:
    case = Case(tmp_path, is_tied=False)
    found = case.verify()
    assert found.holds
    assert found.choices == ()
    assert found.chosen == ""
    case.scale("head", 3.0)
    assert not case.verify().holds


def _follow(
    scores: list[float], indices: list[int], mine: list[float], *, k: int = 2
) -> tuple[list[int], FollowChoices]:
    """The indices of torch.topk over `mine` while a runtime chose `indices` by `scores`."""
    follow = FollowChoices([RuntimeChoice("topk", np.array(scores, np.float32), np.array(indices))], bound=20.0)
    with follow:
        found = torch.topk(torch.tensor(mine), k)
    assert torch.equal(found.values, torch.tensor(mine)[found.indices])
    return found.indices.tolist(), follow


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
    ids=["twice the same", "out of range", "not the best", "other scores"],
)
def test_a_wrong_choice_is_not_taken_over(scores: list[float], indices: list[int]) -> None:
    found, follow = _follow(scores, indices, [1.0, 5.0, 5.0, 2.0])
    assert sorted(found) == [1, 2]
    assert follow.followed == ()


def test_every_operation_that_chooses_takes_the_choice_over() -> None:
    scores = torch.tensor([[3.0, 7.0, 7.0], [4.0, 4.0, 1.0]])
    one, all_of_them = np.array([2, 1]), np.array([[2, 1, 0], [1, 0, 2]])
    flat = RuntimeChoice("argmax", scores.flatten().numpy(), np.array(2))
    with FollowChoices([RuntimeChoice("argmax", scores.numpy(), one)], bound=20.0):
        assert scores.argmax(1).tolist() == one.tolist()
        assert scores.argmax(1, keepdim=True).flatten().tolist() == one.tolist()
        assert scores.max(1).indices.tolist() == one.tolist()
        assert (-scores).argmin(1).tolist() != one.tolist()  # these are other scores
    with FollowChoices([RuntimeChoice("argmin", -scores.numpy(), one)], bound=20.0):
        assert (-scores).argmin(1).tolist() == (-scores).min(1).indices.tolist() == one.tolist()
    with FollowChoices([RuntimeChoice("sort", scores.numpy(), all_of_them)], bound=20.0):
        assert scores.sort(1, descending=True).indices.tolist() == all_of_them.tolist()
        assert scores.argsort(1, descending=True).tolist() == all_of_them.tolist()
        assert scores.argsort(dim=1, descending=True, stable=True).tolist() == all_of_them.tolist()
    with FollowChoices([flat], bound=20.0):
        assert int(scores.argmax()) == 2
