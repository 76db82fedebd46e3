"""deploy: quantize a model for a target, write its file, and verify it in the target's runtime.

    check arguments -> Job                              (no work before every argument is checked)
    Job -> capture once -> trials -> best trial -> report -> Deployment
    trial: quantize -> export -> verify -> evaluate     (stages.py; each is cached, so resume is a cache hit)

This file has the order of the steps and the loop over trials. The steps are in `stages.py`, the output folder in
`workspace.py`, and the choice of the next config in `search.py`. With several ranks, all of them share the data of
calibration and tuning; only rank 0 exports, verifies, evaluates and writes.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from scalepoint import distributed
from scalepoint.budget import Budget
from scalepoint.errors import ScalepointWarning
from scalepoint.formats import find_format
from scalepoint.graph.user_traceback import user_level
from scalepoint.options import DEFAULT_CHOICES, Accuracy, Command, Placement
from scalepoint.pipeline import stages
from scalepoint.pipeline.build_report import build_report
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.describe_output import write_description_files
from scalepoint.pipeline.job import Job, prepare_job
from scalepoint.pipeline.local_placement import describe_prediction, is_measured_here, search_placement
from scalepoint.pipeline.onnx_source import check_source_file
from scalepoint.pipeline.reproduction import write_run_files
from scalepoint.pipeline.result import Deployment, Limits, Trial, TrialPlan, best_trial, drop_models
from scalepoint.pipeline.workspace import DeployWorkspace
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Report
from scalepoint.report.html import HTML_FILE
from scalepoint.results import PrecisionAllocation, PrecisionChange
from scalepoint.runtimes.process import children_reused
from scalepoint.support.cpu import AUTOMATIC_CHOICE_NOTES
from scalepoint.support.progress import Callback, Event, callback_registered, send_event, write_line
from scalepoint.support.torch_state import serialized
from scalepoint.targets import Target
from scalepoint.targets.registry import has_cpu_option
from scalepoint.verification import Status

MAX_SIZE_TRIALS = 3  # files tried for a size budget; each one corrects the estimated size of graph and constants


@serialized
@distributed.participating()
@children_reused()
def deploy(
    model: nn.Module | ExportedProgram | str | Path,
    example_inputs: Any,
    calibration_data: Any,
    *,
    target: str | Target = "onnxruntime",
    config: QuantConfig | Mapping[str, object] | None = None,
    accuracy: Accuracy | None = None,
    output: str | Path | None = None,
    evaluate: Callable[[Any], float] | None = None,
    max_drop: float | None = None,
    min_speed: float | None = None,
    max_trials: int = 6,
    budget: Budget | Mapping[str, float] | str | None = None,
    choices: Sequence[str] = DEFAULT_CHOICES,
    max_batches: int | None = None,
    on_nan: Literal["error", "skip"] = "error",
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None,
    fixed_sizes: bool = False,
    shape: Mapping[str, Sequence[int]] | None = None,
    fixed_inputs: Mapping[str, Any] | None = None,
    requantize: bool = False,
    strict: bool = False,
    allow_departure: bool = False,
    float_dtype: str | None = None,
    cpu: Literal["auto", "vnni", "avx2", "arm"] = "auto",
    placement: Placement | None = None,
    metadata: Mapping[str, Any] | None = None,
    threads: int = 1,
    seed: int = 0,
    smoke: bool = False,
    resume: bool = False,
    force: bool = False,
    progress: bool | None = None,
    callback: Callback | None = None,
    command: Command | None = None,
) -> Deployment:
    """Quantize a model for a target runtime, write the file, and verify it in that runtime.

    The model is not changed. Every argument is checked before any work starts.

    Args:
        model: The trained float model, an ExportedProgram, or the path of an .onnx file. A file is first compared with
            its PyTorch form, and it is the baseline of size and speed.
        example_inputs: One set of inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs. The
            sizes in the file are those of the example, except along the batch axis and `dynamic_axes`. None for an
            .onnx file takes the first batch of the data, or random numbers with the file's shapes.
        calibration_data: Batches of inputs (list, DataLoader, ...), or a function that calls the model it is given. An
            iterator can be read only once; `accuracy`, `max_drop`, `min_speed` and `budget` read the data several
            times. None or [] for weight-only quantization.
        target: Where the file will run; `scalepoint targets` lists the names.
        config: Data types and granularity, globally and per layer. The target's defaults if None.
        accuracy: How much work goes into accuracy. "fast": corrected biases. "balanced": also codes and scales chosen
            in closed form. "best": also gradient steps. Default: "balanced" for weights below 8 bits, else rounding to
            nearest.
        output: The folder to write; "out" by default. It must be empty or new, unless `resume` or `force` is set.
        evaluate: Your metric, `evaluate(run) -> float`, higher is better. `run` is called like the model. It is the
            float model, then the file in its runtime, or the simulation if the target has no runtime.
        max_drop: Largest allowed drop of the metric. Layers get more precision until a file is within it. The cheapest
            such file is written, or the one with the best score if there is none.
        min_speed: Smallest allowed speed relative to the float file, for example 1.5. Layers that are slower in int8
            stay float until a file is fast enough.
        max_trials: Largest number of files that are tried for `max_drop` or `min_speed`.
        budget: Limit of the cost: "size=0.2" of the float file, "bits=4.5" per weight, or "speed=1.8" times the float
            model, estimated by multiply-accumulates. Each layer gets one of `choices`; the output error is minimized.
        choices: Weight formats that `budget` may use.
        max_batches: Use at most this many batches of the calibration data.
        on_nan: What to do with a batch that contains NaN or infinity: "error", or "skip" it.
        kwargs: Keyword inputs of the example, in addition to `example_inputs`.
        leave: Names of submodules that are not captured; the graph calls them as they are, and they stay float.
        dynamic_axes: Input axes whose size may change, as in torch.onnx.export: {"x": {2: "height"}}. None keeps the
            free axes of an .onnx file free if that is possible.
        fixed_sizes: Fix all sizes of the file to those of the example. Otherwise the batch can change at run time,
            which makes small networks a little slower.
        shape: Shapes of inputs of an .onnx file, if it does not fix them: {"x": (1, 3, 640, 640)}.
        fixed_inputs: Values for inputs of an .onnx file that become constants, such as {"rate": 16000}.
        requantize: Accept an .onnx file that is already quantized: its weights are read back as real numbers.
        strict: Raise if a layer with weights stays float although the config did not ask for it.
        allow_departure: Return a file that does not match the simulation, instead of raising.
        float_dtype: Data type of tensors that are not quantized: "float32", "float16" or "bfloat16".
        cpu: The CPU on which the file of an onnxruntime or openvino target will run. "vnni" uses all 8 bits of the
            weights. "avx2" limits them so that CPUs without VNNI do not saturate. "arm" (onnxruntime) uses all 8 bits,
            and every layer that can run in int8 does. "auto" checks this machine.
        placement: How layers are chosen that stay float because int8 is slower. "measured": the runtime times them on
            this machine, which takes up to 3 files; times are kept in the user's cache folder for the next run.
            "predicted": by times of other CPUs that scalepoint ships; the same on every machine. "int8": every layer
            that the target can run is int8. Default: the environment variable SCALEPOINT_PLACEMENT, else "measured".
        metadata: A dict that is stored in the file, for example {"labels": [...]}. Labels and preprocessing of timm and
            transformers models are added automatically.
        threads: Threads of the runtime when the file is verified and timed.
        seed: Seed of all random numbers. The same seed and inputs give the same file.
        smoke: A quick run to find errors: 2 batches, 1 trial, no timing. The numbers mean nothing.
        resume: Continue an interrupted run in `output`; finished stages are reused if their inputs did not change.
        force: Overwrite files of an earlier run in `output`. Files that scalepoint did not write are kept.
        progress: Show progress on stderr; None shows it on a terminal only.
        callback: Called with every progress event.
        command: Set by the command line: what config.yaml and reproduce.py need to repeat the run by a command.

    Returns:
        The deployment: the quantized model, the path of the file, the verification, the scores and the report.

    Raises:
        UsageError: An argument is wrong, or two arguments exclude each other.
        ConfigError: The config is invalid, or does not fit the model.
        CaptureError: The model cannot be captured as a graph.
        TargetError: The target does not support what the config or the model needs.
        VerificationError: The runtime is not installed, cannot run the file, or computes other values than the
            simulation, and `allow_departure` is False. If a file was written, the error has it as `deployment`.

    Example:
        done = scalepoint.deploy(model, batches[0], batches, target="onnxruntime", output="out")
        print(done)
    """
    job = prepare_job(
        model, example_inputs, calibration_data, target=target, config=config, accuracy=accuracy,
        output=str(output or "out"), evaluate=evaluate, max_drop=max_drop, min_speed=min_speed, max_trials=max_trials,
        budget=budget, choices=choices, max_batches=max_batches, on_nan=on_nan, kwargs=kwargs, leave=leave,
        dynamic_axes=dynamic_axes, fixed_sizes=fixed_sizes, shape=shape, fixed_inputs=fixed_inputs,
        requantize=requantize, strict=strict, allow_departure=allow_departure, float_dtype=float_dtype, cpu=cpu,
        placement=placement, metadata=metadata, threads=threads, seed=seed, smoke=smoke, progress=progress,
        command=command,
    )  # fmt: skip
    if isinstance(target, str) and cpu == "auto" and progress is not False:
        _print_cpu_choice(job)
    suffix = find_format(job.target.format).suffix
    workspace = DeployWorkspace(Path(job.options.output), suffix=suffix, is_smoke=smoke, resume=resume, force=force)
    workspace.check({} if job.source_file is None else {"model": job.source_file})
    with (
        seeded(job.options.seed),
        callback_registered(callback),
        workspace.open(),
        callback_registered(workspace.log),
    ):
        if job.source_file is not None:
            check_source_file(job)
        deployment = run_job(StageContext(job=job.for_smoke() if smoke else job, workspace=workspace))
    return deployment if allow_departure else deployment.checked()


def run_job(context: StageContext) -> Deployment:
    """Make trials, choose the best, and write its files and the report into the output folder."""
    stages.check_same_model(context)
    job, workspace = context.job, context.workspace
    limits = Limits(stages.evaluate_float(context), job.options.max_drop, job.options.min_speed)
    if job.options.budget is not None:
        trials, allocation = _search_budget(context, job.options.budget)
    else:
        trials, allocation = _search_limits(context, limits)
    unpublished = best_trial(trials, limits)
    best = stages.publish(context, unpublished)
    trials = [best if trial is unpublished else trial.without_files() for trial in trials]
    with context.timed("reporting"):
        report = distributed.run_on_main(
            "reporting", lambda: _write_report(context, best, trials, limits, allocation), Report
        )
    send_event(Event("file", str(workspace.output / HTML_FILE)))

    def finish() -> None:
        stages.extract_failing_layer(context, best)
        write_run_files(context, best, trials)
        write_description_files(context, best, report)
        workspace.finish()

    distributed.run_on_main("writing the last files", finish)
    return Deployment.from_trials(best, report, trials)


def run_trial(context: StageContext, trials: Sequence[Trial], plan: TrialPlan, *, is_only: bool = False) -> Trial:
    """Make one file and evaluate it. See `make_trial`."""
    return score_trial(context, make_trial(context, trials, plan, is_only=is_only))


def make_trial(context: StageContext, trials: Sequence[Trial], plan: TrialPlan, *, is_only: bool = False) -> Trial:
    """Make one file: quantize, export, verify.

    Args:
        context: The run.
        trials: The earlier trials. Latency is compared with the same float file as in the first trial.
        plan: The config, and the trial that it starts from.
        is_only: Whether no other trial can follow, so that the captured graph need not be copied.
    """
    number = context.count_trial()
    folder = context.workspace.work / f"trial-{number}"
    local_times = plan.local_times or (trials[-1].local_times if trials else None)
    model, tuned = stages.quantize(context, folder, plan.config, is_only_trial=is_only, local_times=local_times)
    path, float_path = stages.export_files(context, folder, model)
    verification = stages.verify_file(context, path, float_path, model, _first_baseline_name(trials))
    return Trial(
        config=plan.config,
        quantized=model,
        file=path,
        float_file=float_path,
        verification=verification,
        score=None,
        precision_changes=plan.precision_changes,
        start=plan.start,
        tuned=tuned,
        chosen=plan.chosen,
        cost=plan.cost,
        local_times=local_times,
        number=number,
    )


def score_trial(context: StageContext, trial: Trial) -> Trial:
    """Evaluate the file of a trial with the user's metric, and send its numbers to the callback and the log."""
    verification = trial.verification
    in_runtime = verification is not None and verification.status == Status.OK and verification.is_run
    score = stages.evaluate_file(context, trial.path, trial.model, in_runtime=in_runtime)
    scored = replace(trial, score=score, is_judged_in_runtime=in_runtime)
    _send_metrics(context, scored)
    return scored


def _first_baseline_name(trials: Sequence[Trial]) -> str | None:
    """Return which float file the first timed trial was compared with; None if no trial was timed."""
    latencies = [trial.verification.latency for trial in trials if trial.verification is not None]
    return next((latency.baseline for latency in latencies if latency is not None), None)


def _search_limits(context: StageContext, limits: Limits) -> tuple[list[Trial], PrecisionAllocation | None]:
    """Make trials until one is within the limits and no cheaper one can be; one trial if there are no limits."""
    job = context.job
    has_limits = limits.max_drop is not None or limits.min_speed is not None
    if is_measured_here(job):
        placements = search_placement(context, partial(make_trial, context))
        # The search for limits starts from the fastest placement. Only that one is evaluated.
        trials = [*(() if has_limits else placements[:-1]), score_trial(context, placements[-1])]
    else:
        if job.progress is not False and (line := describe_prediction(job)):
            write_line(line)
        trials = [run_trial(context, [], TrialPlan(job.config), is_only=not has_limits or job.max_trials == 1)]
    if limits.min_speed is not None:  # excludes max_drop
        return _search_speed(context, limits, trials), None
    if limits.max_drop is not None:
        return _search_accuracy(context, limits, trials)
    return trials, None


def _search_speed(context: StageContext, limits: Limits, trials: list[Trial]) -> list[Trial]:
    """Leave slow layers in float until a file has `min_speed`."""
    from scalepoint.pipeline import search  # noqa: PLC0415  # imports allocation, which most runs do not need

    while len(trials) < context.job.max_trials and not limits.allows_speed(trials[-1].verification):
        if (plan := search.next_for_speed(trials)) is None:
            break
        trials = [*drop_models(trials, limits), run_trial(context, trials, plan)]
    return trials


def _search_accuracy(
    context: StageContext, limits: Limits, trials: list[Trial]
) -> tuple[list[Trial], PrecisionAllocation | None]:
    """Try other activation ranges, which cost nothing at run time, then more precision, for `max_drop`."""
    from scalepoint.pipeline import search  # noqa: PLC0415  # imports allocation, which most runs do not need

    max_trials = context.job.max_trials
    if len(trials) == max_trials or limits.allows_score(trials[0].score):
        return trials, None
    config = trials[0].config  # with the placement that was measured
    other_config = search.use_other_ranges(config, context.job.target)
    if other_config != config:
        change = PrecisionChange("", search.OTHER_RANGES_TEXT)
        trials = drop_models([*trials, run_trial(context, trials, TrialPlan(other_config, (change,), 0))], limits)
    if len(trials) == max_trials or limits.allows_score(trials[-1].score):
        return trials, None
    widths = stages.measure_precisions(context, trials[search.find_start(trials)].config, None)
    while len(trials) < max_trials:
        is_last = len(trials) + 1 == max_trials
        if (plan := search.next_for_accuracy(trials, widths, limits, is_last=is_last)) is None:
            break
        trials = drop_models([*trials, run_trial(context, trials, plan)], limits)
    chosen = best_trial(trials, limits).chosen or search.as_configured(widths)
    return trials, widths.describe_allocation(chosen, "cost")


def _search_budget(context: StageContext, budget: Budget) -> tuple[list[Trial], PrecisionAllocation | None]:
    """Make the most accurate file within the budget.

    A size budget counts the whole file, and the size of graph and constants is known only after the export. If the
    file is too large, the next trial has fewer bits for weights.
    """
    job = context.job
    widths = stages.measure_precisions(context, job.config, job.options.choices)
    checks_size = budget.unit == "size" and not job.is_smoke
    trials: list[Trial] = []
    for _ in range(MAX_SIZE_TRIALS):
        allocation = widths.find_best(budget)
        plan = TrialPlan(widths.with_overrides(job.config, allocation.chosen), chosen=allocation.chosen)
        trials = [
            *(trial.without_model() for trial in trials),
            run_trial(context, trials, plan, is_only=not checks_size),
        ]
        float_path = trials[-1].float_file
        if not checks_size or float_path is None:
            break
        size, float_size = stages.file_sizes(context, trials[-1].path, float_path)
        widths = replace(widths, float_size=float(float_size), rest_size=size - allocation.cost)
        if size <= budget.limit * float_size:
            break
    else:
        message = (
            f"budget: the file is {size / float_size:.3g} of the float file's size, more than the requested "
            f"{budget.limit:g}. It is the last of {MAX_SIZE_TRIALS} that were tried, and is written anyway; "
            f"{widths.rest_size / float_size:.3g} of it is not weights. Allow more, or add types with fewer bits to "
            "choices="
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
    return trials[-1:], widths.describe_allocation(allocation.chosen, budget.unit, budget.limit)


def _send_metrics(context: StageContext, trial: Trial) -> None:
    """Send the numbers of a trial to the callback and the log."""
    verification = trial.verification
    numbers = {
        "score": trial.score,
        "size": float(context.format.about(trial.path).size),
        "speed": trial.speed,
        "agreement": verification.sqnr if verification is not None and verification.status == Status.OK else None,
    }
    for name, value in numbers.items():
        if value is not None:
            send_event(Event("metric", name, done=trial.number, value=value))


def _write_report(
    context: StageContext, best: Trial, trials: Sequence[Trial], limits: Limits, allocation: PrecisionAllocation | None
) -> Report:
    report = build_report(context, best, trials, limits, allocation)
    context.workspace.write_report(report)
    return report


def _print_cpu_choice(job: Job) -> None:
    """Print which CPUs the file is for, if the user did not choose. With float activations nothing can saturate."""
    if has_cpu_option(job.target) and job.config.activation != FLOAT:
        write_line(AUTOMATIC_CHOICE_NOTES[str(job.target.options["cpu"])])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch and Python inside the block; restore their state after it."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
