"""Build the Report, config.yaml and the reproduction call from the values of a run."""

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pprint import pformat
from typing import Any

import torch

from scalepoint import targets
from scalepoint.allocation import Allocation, Budget, Choice, Widths, front, thinned
from scalepoint.allocation.widths import Costs
from scalepoint.analysis import compare, histograms
from scalepoint.checking import check, has_rules
from scalepoint.formats.differences import describe_differences as otherwise
from scalepoint.formats.differences import describe_removed_casts as uncast
from scalepoint.options import DeployConfig, changed_values
from scalepoint.pipeline.fingerprints import fingerprint
from scalepoint.pipeline.job import SMOKE_BATCHES, Job
from scalepoint.pipeline.model_metadata import metadata_of
from scalepoint.pipeline.placement_rows import placement
from scalepoint.pipeline.result import Limits, Trial
from scalepoint.pipeline.stages import StageContext, package_version
from scalepoint.quantize import coverage, record_of
from scalepoint.report import (
    Allocated,
    AllocatedLayer,
    Attempt,
    ChosenCodes,
    FrontPoint,
    Histogram,
    Metric,
    Report,
    ReportedLayer,
    Reproduction,
    Tuned,
    advice,
)
from scalepoint.support.cpu import amx, instruction_set
from scalepoint.support.documents import dump_yaml
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target
from scalepoint.targets.registry import has_cpu_option
from scalepoint.tuning import TuneReport
from scalepoint.version import __version__

WORST = 4  # layers whose histograms are shown
MOST_POINTS = 200  # of the front
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino")
SMOKE = (
    f"{advice.SMOKE}: at most {SMOKE_BATCHES} batches, one trial, no float file, no latency, no errors by layer; a "
    "full run gives other numbers"
)
# Keys of a config file that are Python objects in a call of deploy.
OBJECTS = ("model", "data", "evaluate")
CONFIG_HEADER = """\
# A call from Python: its model, data and metric were objects, which have no name here. Name them to run this again:
#   scalepoint deploy package.module:model --data package.module:data -c config.yaml -o again
"""
# Options that the reproduction call leaves out: it makes the kept file without a search.
_SEARCHED = ("max_drop", "min_speed", "max_trials", "budget", "choices")
_SHOWN_APART = ("target", "cpu", "output", "quantization", "metadata", "allow_departure", "threads", "seed")
NOT_REPRODUCED = frozenset((*_SEARCHED, *_SHOWN_APART))


def build_report(
    context: StageContext, best: Trial, trials: Sequence[Trial], limits: Limits, allocation: Allocated | None = None
) -> Report:
    """The report of a run; the error of each layer is measured on the example inputs."""
    job = context.job
    layers, ranges = ((), ()) if job.is_smoke else _layer_errors(job, best)
    return Report(
        title=type(job.model).__name__,
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(best.model),
        environment=environment(job.target),
        config=best.config.to_dict(),
        accuracy=_metrics(best, limits.float_score),
        layers=layers,
        histograms=ranges,
        verification=best.verification,
        findings=_findings(job, best),
        timings=dict(context.timings),
        warnings=_warnings(job, best),
        graph=placement(best.model),
        attempts=tuple(Attempt(each.score, each.raised, each.start, each is best, each.speed) for each in trials),
        max_drop=limits.max_drop,
        min_speed=limits.min_speed,
        allocation=allocation,
        tuning=tuned_layers(best.tuned),
        reproduction=reproduction(context, best),
        migrated=record_of(best.model).migrated,
    )


def config_file(job: Job) -> str:
    """config.yaml: everything that was asked for, with every default written out."""
    values = {
        **dict(job.options),
        "cpu": job.target.options["cpu"] if has_cpu_option(job.target) else "auto",
        "metadata": job.metadata,
    }
    config = DeployConfig.model_validate(values).to_dict()
    return CONFIG_HEADER + dump_yaml({key: value for key, value in config.items() if key not in OBJECTS})


def _warnings(job: Job, best: Trial) -> tuple[str, ...]:
    constant = record_of(best.model).constant
    own = (*((SMOKE,) if job.is_smoke else ()), *((constant,) if constant else ()))
    return (*own, *otherwise(best.model, job.example), *uncast(best.model))


def _layer_errors(job: Job, best: Trial) -> tuple[tuple[ReportedLayer, ...], tuple[Histogram, ...]]:
    """The error of every layer, and the values of the worst ones."""
    data = job.example.as_data()
    compared = compare(None, best.model, data, local=False, progress=False)
    layers = tuple(
        ReportedLayer(row.name, row.sqnr_db, row.cosine, row.saturation, row.used_range, row.weight_sqnr_db)
        for row in compared.rows
    )
    worst = [row.name for row in compared.worst(WORST)]
    ranges = tuple(
        Histogram(each.name, "weight" if each.role == "weight" else "activation", each.edges, each.counts, low, high)
        for each in histograms(best.model, data, worst, progress=False)
        if (low := each.low) is not None and (high := each.high) is not None
    )
    return layers, ranges


def _findings(job: Job, best: Trial) -> tuple[str, ...] | None:
    """What the static rules of the target say about the file; None if it has none."""
    if not has_rules(job.target.name):
        return None
    version = 10 if job.options.float_dtype in (None, "float32") else 11  # types other than float32 need TensorRT 11
    return tuple(map(str, check(best.path, job.target.name, version=version)))


def tuned_layers(tuned: TuneReport | None) -> Tuned | None:
    """What tuning did, as the report shows it."""
    if tuned is None:
        return None
    layers = tuple(
        ChosenCodes(row.name, row.kind, row.before, row.after, row.moved, row.step, row.notes) for row in tuned.layers
    )
    return Tuned(layers, tuned.left, tuned.samples, tuned.seconds)


def _metrics(best: Trial, float_score: float | None) -> tuple[Metric, ...]:
    if float_score is None or best.score is None:
        return ()
    if best.is_judged_in_runtime:
        return (Metric("score", float_score, runtime_value=best.score),)
    return (Metric("score", float_score, quantized_value=best.score),)


def reproduction(context: StageContext, best: Trial) -> Reproduction:
    """The call that makes the kept file again without a search, and fingerprints of what went in."""
    job = context.job
    versions = {name: package_version(name) for name in PACKAGES}
    pinned = [f"{name}=={number}" for name, number in versions.items() if number]
    config = best.config.to_dict()
    has_both = bool(job.example.args and job.example.kwargs)  # inputs only by name are a dict of example_inputs
    yours = "model, example_inputs, calibration_data" + (" and kwargs" if has_both else "")
    lines = [f"# {yours} are yours", "import scalepoint"]
    arguments = {"target": repr(job.target.name), **reproduced_options(job, best)}
    if has_both:
        arguments["kwargs"] = "kwargs"
    if hasattr(targets, f"{job.target.name}_target") and job.target.options:
        lines.append("from scalepoint import targets")
        values = ", ".join(f"{name}={value!r}" for name, value in job.target.options.items())
        arguments["target"] = f"targets.{job.target.name}_target({values})"
    if config:
        text = pformat(config, width=100, sort_dicts=False)
        lines += ["from scalepoint.quantize import QuantConfig", "", f"config = QuantConfig.from_dict(\n{text}\n)"]
        arguments["config"] = "config"
    keywords = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    lines += ["", f"done = scalepoint.deploy(\n    model,\n    example_inputs,\n    calibration_data,\n{keywords})"]
    return Reproduction(
        install=f"pip install scalepoint=={__version__} {' '.join(pinned)}",
        call="\n".join(lines),
        marks={
            "model": context.model_fingerprint,
            "calibration data": context.data_fingerprint or "read once, not marked",
            "example inputs": job.example.fingerprint(),
            "config": fingerprint(config),
        },
    )


def reproduced_options(job: Job, best: Trial) -> dict[str, str]:
    """Options that differ from the defaults, as Python source. `threads` and `seed` are always shown."""
    values: dict[str, Any] = {
        name: value for name, value in changed_values(job.options).items() if name not in NOT_REPRODUCED
    }
    declared = to_jsonable(metadata_of(job.model))
    if own := {key: value for key, value in job.metadata.items() if declared.get(key) != value}:
        values["metadata"] = own
    if job.is_smoke:
        values["smoke"] = True
    if best.verification is not None and not best.verification.holds:
        values["allow_departure"] = True
    values |= {"threads": job.options.threads, "seed": job.options.seed}
    return {name: pformat(value, width=100, sort_dicts=False) for name, value in values.items()}


def environment(target: Target) -> dict[str, Any]:
    """What the numbers depend on: versions, machine, options of the target."""
    return {
        "scalepoint": __version__,
        "torch": str(torch.__version__),
        **{name: number for name in PACKAGES[1:] if (number := package_version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": instruction_set(),
        **({"amx": str(amx())} if amx().is_announced else {}),
        **{f"target {name}": str(value) for name, value in target.options.items()},
    }


def allocated(widths: Widths, chosen: Mapping[str, str], unit: Costs, budget: Budget | None = None) -> Allocated:
    """What every layer got, and the front that it was chosen from."""
    items = {item.name: {each.name: each for each in item.choices} for item in widths.items(unit)}
    layers = tuple(
        AllocatedLayer(
            name=name,
            kind=row.kind,
            weights=row.weights // len(row.layers),
            chosen=chosen[row.name],
            errors={each.name: each.error / len(row.layers) for each in row.widths},
            refused=row.refused,
        )
        for row in widths.rows
        for name in row.layers
    )
    points = [
        FrontPoint(widths.shown(unit, each.cost), each.error, _layer_counts(widths, each.chosen))
        for each in thinned(front(widths.items(unit)), MOST_POINTS)
    ]
    uniform = {}
    for name in dict.fromkeys(width.name for row in widths.rows for width in row.widths):
        if all(name in choices for choices in items.values()):
            whole = _total(items, dict.fromkeys(items, name))
            uniform[name] = (widths.shown(unit, whole.cost), whole.error)
    total = _total(items, chosen)
    return Allocated(
        unit=unit,
        reached=widths.shown(unit, total.cost),
        error=total.error,
        layers=layers,
        front=tuple(points),
        uniform=uniform,
        limit=budget.limit if budget else None,
    )


def _total(items: Mapping[str, Mapping[str, Choice]], chosen: Mapping[str, str]) -> Allocation:
    picked = [items[name][width] for name, width in chosen.items()]
    return Allocation(chosen, sum(each.error for each in picked), sum(each.cost for each in picked))


def _layer_counts(widths: Widths, chosen: Mapping[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in widths.rows:
        counts[chosen[row.name]] = counts.get(chosen[row.name], 0) + len(row.layers)
    return counts
