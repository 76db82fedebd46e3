"""Models that others wrote to be hard: the whole way to a file, or an error of ours; never a traceback."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import scalepoint
from scalepoint.errors import ScalepointError
from scalepoint.quantize import quantize
from tests.suites import Case, of_executorch, of_torch

pytestmark = pytest.mark.filterwarnings("ignore")


def written(case: Case, path: Path) -> None:
    made = quantize(
        case.model,
        case.args,
        kwargs=case.kwargs,
        forward_loop=lambda model: model(*case.args, **case.kwargs),
        freeze_weights=True,
        target="onnxruntime",
    )
    scalepoint.export(made, path, case.args, kwargs=case.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "step", "least"), [(of_torch, 7, 80), (of_executorch, 4, 10)], ids=["torch", "executorch"]
)
def test_models_of_others_are_written_or_refused(
    tmp_path: Path, suite: Callable[[], Iterator[Case]], step: int, least: int
) -> None:
    """Every n-th of them: all take half an hour."""
    if suite is of_executorch:
        pytest.importorskip("executorch.backends.test.suite")
    done = 0
    for number, case in enumerate(suite()):
        if number % step == 0:
            with suppress(ScalepointError):
                written(case, tmp_path / "model.onnx")
                done += 1
    assert done >= least
