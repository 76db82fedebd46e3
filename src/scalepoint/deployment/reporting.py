"""From what a deployment did to its report."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pprint import pformat
from typing import Any

import torch

from scalepoint import targets
from scalepoint.analysis import compare, histograms
from scalepoint.checking import check, has_rules
from scalepoint.deployment.known import known_of
from scalepoint.deployment.marks import mark, mark_of_values
from scalepoint.deployment.placed import placement
from scalepoint.deployment.run import SMOKE_BATCHES, Run, package_version
from scalepoint.deployment.trials import Bar, Trial
from scalepoint.formats.otherwise import otherwise, uncast
from scalepoint.plain import plain
from scalepoint.processor import amx
from scalepoint.quantize import coverage, record_of
from scalepoint.report import (
    Allocated,
    Attempt,
    ChosenCodes,
    Histogram,
    Metric,
    Report,
    ReportedLayer,
    Reproduction,
    Tuned,
    advice,
)
from scalepoint.targets import Target
from scalepoint.targets.cpu import instruction_set
from scalepoint.tuning import TuneReport
from scalepoint.version import __version__

WORST = 4
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino")
SMOKE = (
    f"{advice.SMOKE}: at most {SMOKE_BATCHES} batches, one trial, no float file, no latency, no errors by layer; a "
    "full run gives other numbers"
)


def make_report(
    run: Run, best: Trial, trials: Sequence[Trial], bar: Bar, allocation: Allocated | None = None
) -> Report:
    """Everything that was found, and how each layer fares on the example inputs."""
    layers, ranges = ((), ()) if run.smoke else _by_layer(run, best)
    return Report(
        title=type(run.model).__name__,
        target=run.target.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        coverage=coverage(best.model),
        environment=environment(run.target),
        config=best.config.to_dict(),
        accuracy=_metric(best, bar.float_score),
        layers=layers,
        histograms=ranges,
        verification=best.verification,
        findings=_findings(run, best),
        timings=dict(run.timings),
        warnings=_warnings(run, best),
        graph=placement(best.model),
        attempts=tuple(Attempt(each.score, each.raised, each.start, each is best, each.speed) for each in trials),
        max_drop=bar.max_drop,
        min_speed=bar.min_speed,
        allocation=allocation,
        tuning=tuned(best.tuned),
        reproduction=reproduction(run, best),
        migrated=record_of(best.model).migrated,
    )


def _warnings(run: Run, best: Trial) -> tuple[str, ...]:
    constant = record_of(best.model).constant
    own = (*((SMOKE,) if run.smoke else ()), *((constant,) if constant else ()))
    return (*own, *otherwise(best.model, run.inputs), *uncast(best.model))


def _by_layer(run: Run, best: Trial) -> tuple[tuple[ReportedLayer, ...], tuple[Histogram, ...]]:
    """The error of every layer on the example inputs, and the values of the worst."""
    data = run.example()
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


def _findings(run: Run, best: Trial) -> tuple[str, ...] | None:
    """What the static rules of the target say; those of its newest line where the file is typed for it."""
    if not has_rules(run.target.name):
        return None
    version = 10 if run.float_dtype in (None, "float32") else 11
    return tuple(map(str, check(best.path, run.target.name, version=version)))


def tuned(found: TuneReport | None) -> Tuned | None:
    """What tuning did, as the report shows it."""
    if found is None:
        return None
    layers = tuple(
        ChosenCodes(row.name, row.kind, row.before, row.after, row.moved, row.step, row.notes) for row in found.layers
    )
    return Tuned(layers, found.left, found.samples, found.seconds)


def _metric(best: Trial, float_score: float | None) -> tuple[Metric, ...]:
    if float_score is None or best.score is None:
        return ()
    if best.is_judged_in_runtime:
        return (Metric("score", float_score, runtime_value=best.score),)
    return (Metric("score", float_score, quantized_value=best.score),)


def reproduction(run: Run, best: Trial) -> Reproduction:
    """The call that makes the kept file again, without a search, and the marks of what went in."""
    found = {name: package_version(name) for name in PACKAGES}
    pinned = [f"{name}=={number}" for name, number in found.items() if number]
    config = best.config.to_dict()
    yours = "model, example_inputs, calibration_data" + (" and kwargs" if run.inputs[0] and run.inputs[1] else "")
    lines = [f"# {yours} are yours", "import scalepoint"]
    options = {"target": repr(run.target.name), **_options(run, best)}
    if hasattr(targets, f"{run.target.name}_target") and run.target.options:
        lines.append("from scalepoint import targets")
        given = ", ".join(f"{name}={value!r}" for name, value in run.target.options.items())
        options["target"] = f"targets.{run.target.name}_target({given})"
    if config:
        written = pformat(config, width=100, sort_dicts=False)
        lines += ["from scalepoint.quantize import QuantConfig", "", f"config = QuantConfig.from_dict(\n{written}\n)"]
        options["config"] = "config"
    said = "".join(f"    {name}={value},\n" for name, value in options.items())
    lines += ["", f"done = scalepoint.deploy(\n    model,\n    example_inputs,\n    calibration_data,\n{said})"]
    marks = {"model": run.model_mark, "calibration data": run.data_mark or "read once, not marked"}
    return Reproduction(
        install=f"pip install scalepoint=={__version__} {' '.join(pinned)}",
        call="\n".join(lines),
        marks={**marks, "example inputs": mark_of_values(run.inputs), "config": mark(config)},
    )


def _options(run: Run, best: Trial) -> dict[str, str]:
    """The keywords of the call that are different from the defaults of deploy, as Python writes them. `threads` and
    `seed` are always shown: the numbers depend on them."""
    known = plain(known_of(run.model))
    given: dict[str, Any] = {
        "accuracy": run.accuracy,
        "max_batches": run.asked_batches,
        "on_nan": None if run.on_nan == "error" else run.on_nan,
        "leave": run.leave,
        "dynamic_axes": run.dynamic_axes,
        "strict": run.strict,
        "float_dtype": run.float_dtype,
        "metadata": {key: value for key, value in run.metadata.items() if known.get(key) != value},
        "smoke": run.smoke,
        "allow_departure": best.verification is not None and not best.verification.holds,
    }
    found = {name: pformat(value, width=100, sort_dicts=False) for name, value in given.items() if value}
    if run.inputs[0] and run.inputs[1]:  # inputs by name alone are a dict of example_inputs
        found["kwargs"] = "kwargs"
    return {**found, "threads": repr(run.threads), "seed": repr(run.seed)}


def environment(target: Target) -> dict[str, Any]:
    """What the numbers depend on."""
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
