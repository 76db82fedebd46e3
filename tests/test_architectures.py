"""Every architecture becomes a graph of fused modules that computes the same and misses no weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scalepoint.errors import CaptureError
from scalepoint.patterns.fused import FusedAttention
from scalepoint.transformation import TransformationResult, transform
from tests.architectures import ARCHITECTURES, Architecture, Inputs
from tests.weighted import (
    batch,
    count_executed,
    count_matched,
    count_reported,
    relative_difference,
    run,
    unreported_operations,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # DeBERTa's

TOLERANCE = 1e-4
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@dataclass
class Case:
    """A model, its description before and after the transformation (running it may add hooks), and the result."""

    model: nn.Module
    inputs: Inputs
    before: dict[str, Any]
    after: dict[str, Any]
    result: TransformationResult


def as_parameter(architecture: Architecture) -> Any:
    marks = [] if architecture.quick else [pytest.mark.slow]
    if architecture.cannot:
        marks.append(pytest.mark.xfail(reason=architecture.cannot, raises=CaptureError))
    return pytest.param(architecture, id=architecture.name, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[as_parameter(architecture) for architecture in ARCHITECTURES.values()])
def case(request: pytest.FixtureRequest) -> Case:
    model, inputs = request.param.build()
    before = description(model)
    result = transform(model, inputs)
    return Case(model, inputs, before, description(model), result)


def description(model: nn.Module) -> dict[str, Any]:
    """Everything that capture could change: values, identities, modes, gradients, hooks, the random state."""
    return {
        "state": {name: (id(value), value.clone()) for name, value in tensors(model)},
        "modes": [(name, type(module), module.training) for name, module in model.named_modules()],
        "gradients": [(name, value.requires_grad, value.grad) for name, value in tensors(model)],
        "hooks": {hooks: sum(len(getattr(module, hooks)) for module in model.modules()) for hooks in HOOKS},
        "random": torch.get_rng_state(),
    }


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("samples", [[0], [0, 1, 0]], ids=["batch-1", "batch-3"])
def test_outputs_equal_the_models(case: Case, samples: list[int]) -> None:
    inputs = batch(case.inputs, samples)
    with torch.no_grad():
        expected, actual = run(case.model, inputs), run(case.result.model.eval(), inputs)
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    assert relative_difference(expected, actual) <= TOLERANCE


def test_state_has_the_models_names(case: Case) -> None:
    assert set(case.result.model.state_dict()) == set(case.model.state_dict())


def test_no_weight_is_missing_from_the_report(case: Case) -> None:
    assert [f"{match.name}: {match.reason}" for match in case.result.report.skipped] == []
    assert unreported_operations(case.result) == []


def test_every_weighted_operation_that_the_model_runs_is_in_a_match_or_reported(case: Case) -> None:
    reported = count_reported(case.result)
    counts = {kind: count + reported[kind] for kind, count in count_matched(case.result).items()}
    assert counts == count_executed(case.model, case.inputs)


# Experts of a mixture, batch norms without a convolution before them, tables of positions.
KINDS_WITHOUT_PATTERN = ("grouped_linear", "batch_norm", "rel_pos_", "embed_positions")


def test_operations_without_a_pattern_are_the_expected_ones(case: Case) -> None:
    unmatched = [f"{item.name}: {item.reason}" for item in case.result.report.refusals if not item.pattern]
    assert [line for line in unmatched if not any(kind in line for kind in KINDS_WITHOUT_PATTERN)] == []


def test_the_callers_model_is_untouched(case: Case) -> None:
    before, after = case.before, case.after
    assert after["modes"] == before["modes"]
    assert after["gradients"] == before["gradients"]
    assert after["hooks"] == before["hooks"]
    assert torch.equal(after["random"], before["random"])
    assert before["state"].keys() == after["state"].keys()
    for name, (identity, value) in before["state"].items():
        assert after["state"][name][0] == identity, name
        assert same_bits(after["state"][name][1], value), name


def test_the_result_owns_copies(case: Case) -> None:
    theirs = {value.untyped_storage().data_ptr() for _, value in tensors(case.model) if value.numel()}
    shared = [name for name, value in tensors(case.result.model) if value.untyped_storage().data_ptr() in theirs]
    assert shared == []


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "cores"),
    [
        pytest.param("bert", 2, id="encoder"),
        pytest.param("gpt2", 2, id="causal"),
        pytest.param("llama", 2, id="grouped-query"),
        pytest.param("swin", 4, id="windows"),
        pytest.param("t5", 6, id="relative-bias-and-cross"),
        pytest.param("whisper", 6, id="cross"),
    ],
)
def test_attention_is_found_in_all_forms(name: str, cores: int, implementation: str) -> None:
    model, inputs = ARCHITECTURES[name].build()
    model.set_attn_implementation(implementation)
    result = transform(model, inputs, check=True)
    assert sum(issubclass(match.pattern.make, FusedAttention) for match in result.matches) == cores


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cores"), [("swin_t", 12), ("swin_v2_t", 12), ("swinv2", 4), ("vit_small", 2)])
def test_windowed_attention_is_found(name: str, cores: int) -> None:
    model, inputs = ARCHITECTURES[name].build()
    result = transform(model, inputs, check=True)
    assert sum(issubclass(match.pattern.make, FusedAttention) for match in result.matches) == cores


def without_dropout(model: nn.Module) -> nn.Module:
    """Set all dropout rates to zero, including those in attributes."""
    for module in model.modules():
        random = "dropout" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (random and name == "p")):
                setattr(module, name, 0.0)
    return model


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return the gradients of the sum of squares of all outputs, by parameter, without parameters that have none."""
    outputs = [value for value in pytree.tree_leaves(run(model.train(), inputs)) if isinstance(value, Tensor)]
    sum(value.square().sum() for value in outputs if value.requires_grad).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(item, id=item.name, marks=[] if item.name in ("resnet18", "bert") else [pytest.mark.slow])
        for item in ARCHITECTURES.values()
        if item.quick
    ],
)
def test_gradients_in_train_mode_equal_the_models(architecture: Architecture) -> None:
    model, inputs = architecture.build()
    graph = transform(without_dropout(model), inputs).model
    expected, actual = gradients(model, inputs), gradients(graph, inputs)
    assert actual.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((actual[name] - value).abs().max()) <= 1e-4 * scale, name
