"""The user's metric: on what it is run, and what it gave: a number, or a word about what is wrong with it."""

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalepoint import ranks
from scalepoint.ambient import as_called
from scalepoint.deployment.run import Run
from scalepoint.errors import NonFiniteError, ScalepointWarning, UsageError, shown
from scalepoint.graph.modes import evaluating
from scalepoint.progress import Event, tell
from scalepoint.verification import RuntimeModel, Status, Verification


def judged_as(value: Any, *, is_float: bool) -> float:
    """The score. Of the float model it must be a number, as everything is measured against it; of a file that gives
    none there is a warning, and it is ranked last."""
    try:
        score = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements is a RuntimeError
        raise UsageError(f"evaluate returned {shown(value)}: it must return one number, higher is better") from error
    if math.isnan(score) and is_float:
        raise NonFiniteError(
            "evaluate gave NaN for the float model, so no file can be judged by it: look for an empty data set, a "
            "division by zero or NaN in the model's output"
        )
    if math.isnan(score):
        warnings.warn(
            ScalepointWarning(
                "evaluate gave NaN for the quantized file, a number for the float model: its output holds NaN, or the "
                "metric divides by zero; it is ranked last, and its score says nothing"
            ),
            stacklevel=2,
        )
    return score


def judged(run: Run, model: nn.Module, path: Path | None = None, *, in_runtime: bool = False) -> float | None:
    """The score of the float model, or of a file: in its runtime, or as simulated."""
    if run.evaluate is None:
        return None
    name = "the float model" if path is None else path.parent.name
    doing = "evaluating the float model" if path is None else "evaluating the file"
    with run.stage(f"{name} evaluated", doing, run.marks_of_judging(path)) as stage:
        score = stage.reuse(lambda saved: float(saved["score"]))
        if score is None:
            score = float(ranks.told(doing, lambda: _score(run, model, path, in_runtime=in_runtime)))
            stage.keep({"score": score})
    if path is None:
        tell(Event("metric", "float score", value=score))
    return score


def _score(run: Run, model: nn.Module, path: Path | None, *, in_runtime: bool) -> float:
    assert run.evaluate is not None  # noqa: S101  # asked before
    with _runner(run, model, path if in_runtime else None) as runner, evaluating(runner), torch.no_grad(), as_called():
        return judged_as(run.evaluate(runner), is_float=path is None)


def _runner(run: Run, model: nn.Module, path: Path | None) -> AbstractContextManager[Any]:
    """What the metric calls: the file in its runtime, or a model."""
    runtime = run.target.runtime
    if path is None or runtime is None:
        return nullcontext(model)
    return RuntimeModel(path, run.model, run.inputs, runtime=runtime, threads=run.threads)


def runs_in_runtime(found: Verification | None) -> bool:
    """Whether the metric can be run on the file itself."""
    return found is not None and found.status == Status.OK and found.is_run
