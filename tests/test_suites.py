"""Test models of other projects are exported, or raise a ScalepointError."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import scalepoint
from scalepoint.errors import ScalepointError
from scalepoint.quantize import quantize
from tests.suites import Case, executorch_cases, torch_cases

pytestmark = pytest.mark.filterwarnings("ignore")


def export_case(case: Case, path: Path) -> None:
    quantized = quantize(
        case.model,
        case.args,
        kwargs=case.kwargs,
        forward_loop=lambda model: model(*case.args, **case.kwargs),
        freeze_weights=True,
        target="onnxruntime",
    )
    scalepoint.export(quantized, path, case.args, kwargs=case.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "step", "min_exported"), [(torch_cases, 7, 80), (executorch_cases, 4, 10)], ids=["torch", "executorch"]
)
def test_models_of_other_projects_are_exported_or_rejected(
    tmp_path: Path, suite: Callable[[], Iterator[Case]], step: int, min_exported: int
) -> None:
    """Every n-th model: all of them take half an hour."""
    if suite is executorch_cases:
        pytest.importorskip("executorch.backends.test.suite")
    exported = 0
    for number, case in enumerate(suite()):
        if number % step == 0:
            with suppress(ScalepointError):
                export_case(case, tmp_path / "model.onnx")
                exported += 1
    assert exported >= min_exported
