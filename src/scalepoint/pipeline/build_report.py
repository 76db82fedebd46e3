"""Build the Report from the values of a run."""

import math
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from scalepoint.analysis import compare, histograms
from scalepoint.formats.differences import describe_differences, describe_removed_casts
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.job import SMOKE_BATCHES, Job
from scalepoint.pipeline.placement_nodes import build_placement_nodes
from scalepoint.pipeline.reproduction import REPORTED_PACKAGES, build_reproduction
from scalepoint.pipeline.result import Limits, Trial
from scalepoint.pipeline.stages import package_version
from scalepoint.quantize import coverage, record_of
from scalepoint.report import Report
from scalepoint.report.model import SMOKE_WARNING
from scalepoint.results import LayerError, PrecisionAllocation, Score, TensorHistogram
from scalepoint.support.cpu import instruction_set, probe_amx_once
from scalepoint.targets import Target
from scalepoint.version import __version__

HISTOGRAM_LAYERS = 4  # number of worst layers whose values are shown as histograms
SMOKE_NOTE = (
    f"{SMOKE_WARNING}: at most {SMOKE_BATCHES} batches, one trial, no float file, no latency, no errors per layer; a "
    "full run gives other numbers"
)


def build_report(
    context: StageContext, best: Trial, trials: Sequence[Trial], limits: Limits, allocation: PrecisionAllocation | None
) -> Report:
    """Build the report of a run. The error of each layer is measured here, on the example inputs."""
    job = context.job
    layers, output_db, ranges = ((), None, ()) if job.is_smoke else _measure_errors(job, best)
    return Report(
        title=type(job.model).__name__,
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(best.model),
        environment=describe_environment(job.target),
        config=best.config.to_dict(),
        accuracy=_scores(best, limits.float_score),
        layers=layers,
        output_db=output_db,
        histograms=ranges,
        verification=best.verification,
        findings=_findings(job, best),
        timings=dict(context.timings),
        warnings=_warnings(job, best),
        graph=build_placement_nodes(best.model),
        trials=tuple(trial.summary(is_best=trial is best) for trial in trials),
        max_drop=limits.max_drop,
        min_speed=limits.min_speed,
        allocation=allocation,
        tuning=best.tuned,
        reproduction=build_reproduction(context, best, trials),
        migrated=record_of(best.model).migrated,
    )


def _warnings(job: Job, best: Trial) -> tuple[str, ...]:
    constant_note = record_of(best.model).constant
    warnings = [SMOKE_NOTE] if job.is_smoke else []
    if constant_note:
        warnings.append(constant_note)
    warnings += describe_differences(best.model, job.example)
    warnings += describe_removed_casts(best.model)
    return tuple(warnings)


def _measure_errors(job: Job, best: Trial) -> tuple[tuple[LayerError, ...], float | None, tuple[TensorHistogram, ...]]:
    """Return the errors of all layers and of the worst output, and histograms of the worst layers."""
    data = job.example.as_data()
    comparison = compare(None, best.model, data, local=False, progress=False)
    worst_names = [row.name for row in comparison.worst(HISTOGRAM_LAYERS)]
    values = histograms(best.model, data, worst_names, progress=False)
    levels = [output.sqnr_db for output in comparison.outputs]
    output_db = min(levels, key=lambda level: (not math.isnan(level), level), default=None)
    return (
        comparison.rows,
        output_db,
        tuple(tensor for tensor in values if tensor.low is not None and tensor.high is not None),
    )


def _findings(job: Job, best: Trial) -> tuple[str, ...] | None:
    """Check the file by the static rules of the target; None if the target has no rules."""
    from scalepoint.checking import check, has_rules  # noqa: PLC0415

    if not has_rules(job.target.name):
        return None
    version = 10 if job.options.float_dtype in (None, "float32") else 11  # types other than float32 need TensorRT 11
    return tuple(map(str, check(best.path, job.target.name, version=version)))


def _scores(best: Trial, float_score: float | None) -> tuple[Score, ...]:
    if float_score is None or best.score is None:
        return ()
    return (Score("score", best.score, float_score, "runtime" if best.is_judged_in_runtime else "simulation"),)


def describe_environment(target: Target) -> dict[str, Any]:
    """Return what the measured numbers depend on: versions, machine, options of the target."""
    return {
        "scalepoint": __version__,
        "torch": str(torch.__version__),
        **{name: number for name in REPORTED_PACKAGES[1:] if (number := package_version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": instruction_set(),
        **({"amx": str(probe_amx_once())} if probe_amx_once().is_announced else {}),
        **{f"target {name}": str(value) for name, value in target.options.items()},
    }
