"""Build the Report, the text of config.yaml and the reproduction call from the values of a run."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pprint import pformat
from typing import Any

import torch

from scalepoint import targets
from scalepoint.analysis import compare, histograms
from scalepoint.formats.differences import describe_differences, describe_removed_casts
from scalepoint.options import DeployConfig, changed_values
from scalepoint.pipeline.fingerprints import fingerprint
from scalepoint.pipeline.job import SMOKE_BATCHES, Job
from scalepoint.pipeline.model_metadata import read_library_metadata
from scalepoint.pipeline.placement_nodes import build_placement_nodes
from scalepoint.pipeline.result import Limits, Trial
from scalepoint.pipeline.stages import StageContext, package_version
from scalepoint.quantize import coverage, record_of
from scalepoint.report import Report, Reproduction
from scalepoint.report.model import SMOKE_WARNING
from scalepoint.results import LayerError, PrecisionAllocation, Score, TensorHistogram
from scalepoint.support.cpu import instruction_set, probe_amx_once
from scalepoint.support.documents import dump_yaml
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target
from scalepoint.targets.registry import has_cpu_option
from scalepoint.version import __version__

HISTOGRAM_LAYERS = 4  # number of worst layers whose values are shown as histograms
REPORTED_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino")
SMOKE_NOTE = (
    f"{SMOKE_WARNING}: at most {SMOKE_BATCHES} batches, one trial, no float file, no latency, no errors per layer; a "
    "full run gives other numbers"
)
# Keys of a config file that name objects; a call of deploy has the objects themselves, so they cannot be written.
OBJECT_KEYS = ("model", "data", "evaluate")
CONFIG_HEADER = """\
# Written by a call from Python. Its model, data and metric are objects without a name. Name them to run this again:
#   scalepoint deploy package.module:model --data package.module:data -c config.yaml -o again
"""
# Options that the reproduction call omits, because it makes the best file directly, without a search.
SEARCH_OPTIONS = ("max_drop", "min_speed", "max_trials", "budget", "choices")
SEPARATE_OPTIONS = ("target", "cpu", "output", "quantization", "metadata", "allow_departure", "threads", "seed")
OMITTED_OPTIONS = frozenset((*SEARCH_OPTIONS, *SEPARATE_OPTIONS))


def build_report(
    context: StageContext,
    best: Trial,
    trials: Sequence[Trial],
    limits: Limits,
    allocation: PrecisionAllocation | None = None,
) -> Report:
    """Build the report of a run. The error of each layer is measured here, on the example inputs."""
    job = context.job
    layers, ranges = ((), ()) if job.is_smoke else _layer_errors(job, best)
    return Report(
        title=type(job.model).__name__,
        target=job.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(best.model),
        environment=describe_environment(job.target),
        config=best.config.to_dict(),
        accuracy=_scores(best, limits.float_score),
        layers=layers,
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
        reproduction=build_reproduction(context, best),
        migrated=record_of(best.model).migrated,
    )


def config_yaml(job: Job) -> str:
    """Return the text of config.yaml: all options of the run, including defaults."""
    values = {
        **dict(job.options),
        "cpu": job.target.options["cpu"] if has_cpu_option(job.target) else "auto",
        "metadata": job.metadata,
    }
    config = DeployConfig.model_validate(values).to_dict()
    return CONFIG_HEADER + dump_yaml({key: value for key, value in config.items() if key not in OBJECT_KEYS})


def _warnings(job: Job, best: Trial) -> tuple[str, ...]:
    constant_note = record_of(best.model).constant
    warnings = [SMOKE_NOTE] if job.is_smoke else []
    if constant_note:
        warnings.append(constant_note)
    warnings += describe_differences(best.model, job.example)
    warnings += describe_removed_casts(best.model)
    return tuple(warnings)


def _layer_errors(job: Job, best: Trial) -> tuple[tuple[LayerError, ...], tuple[TensorHistogram, ...]]:
    """Return the error of every layer, and histograms of the worst layers that have a fixed range."""
    data = job.example.as_data()
    comparison = compare(None, best.model, data, local=False, progress=False)
    worst_names = [row.name for row in comparison.worst(HISTOGRAM_LAYERS)]
    values = histograms(best.model, data, worst_names, progress=False)
    return comparison.rows, tuple(tensor for tensor in values if tensor.low is not None and tensor.high is not None)


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


def build_reproduction(context: StageContext, best: Trial) -> Reproduction:
    """Return the call that makes the best file again without a search, and fingerprints of its inputs."""
    job = context.job
    versions = {name: package_version(name) for name in REPORTED_PACKAGES}
    pinned = [f"{name}=={number}" for name, number in versions.items() if number]
    config = best.config.to_dict()
    has_both = bool(job.example.args and job.example.kwargs)  # inputs only by name are passed as a dict
    your_objects = "model, example_inputs, calibration_data" + (" and kwargs" if has_both else "")
    lines = [f"# {your_objects} are yours", "import scalepoint"]
    arguments = {"target": repr(job.target.name), **options_as_source(job, best)}
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
            "calibration data": context.data_fingerprint or "read once, no fingerprint",
            "example inputs": job.example.fingerprint(),
            "config": fingerprint(config),
        },
    )


def options_as_source(job: Job, best: Trial) -> dict[str, str]:
    """Return the options that differ from the defaults, as Python source. `threads` and `seed` are always included."""
    values: dict[str, Any] = {
        name: value for name, value in changed_values(job.options).items() if name not in OMITTED_OPTIONS
    }
    from_library = to_jsonable(read_library_metadata(job.model))
    if from_user := {key: value for key, value in job.metadata.items() if from_library.get(key) != value}:
        values["metadata"] = from_user
    if job.is_smoke:
        values["smoke"] = True
    if best.verification is not None and not best.verification.holds:
        values["allow_departure"] = True
    values |= {"threads": job.options.threads, "seed": job.options.seed}
    return {name: pformat(value, width=100, sort_dicts=False) for name, value in values.items()}


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
