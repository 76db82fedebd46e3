"""The whole road in one call: a float model in, the file that its target runs out, with the proof beside it.

    transform -> insert Q/DQ -> calibrate -> tune -> export -> verify in the runtime -> evaluate -> report

Each step is a public function of its own; this file calls them in order. Around each stands a stage of the journal, so
that a run that did not end goes on where it was (`journal.py`); `run.py` holds what the steps share. Several ranks
share the data of calibration and tuning; the first alone exports, verifies, evaluates and writes, and tells the others.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import fx, nn
from torch.export import ExportedProgram

from scalepoint import ranks
from scalepoint.allocation import Budget, check_choices
from scalepoint.deployment.accuracy import Accuracy, check_accuracy, tuning_for
from scalepoint.deployment.allocating import CHOICES, allocated, corrected, widths_of
from scalepoint.deployment.dropped import DroppedInputs
from scalepoint.deployment.journal import Journal, check_output
from scalepoint.deployment.keeping import LOG, NAMES, Log, keep, keep_failing, seeded
from scalepoint.deployment.known import known_of
from scalepoint.deployment.marks import Watched
from scalepoint.deployment.pacing import check_pace, next_float
from scalepoint.deployment.raising import next_step, start_of, unraised
from scalepoint.deployment.ranges import RANGES, other_ranges
from scalepoint.deployment.reporting import make_report
from scalepoint.deployment.result import Deployment
from scalepoint.deployment.run import FILE, FLOAT_FILE, MODEL, PLAIN_FILE, Run
from scalepoint.deployment.scoring import judged, runs_in_runtime
from scalepoint.deployment.settings import check_options, with_speed
from scalepoint.deployment.sizes import telling_of_sizes
from scalepoint.deployment.trials import Bar, Step, Trial, best_of, closed, slimmed
from scalepoint.errors import CaptureError, ScalepointWarning, UsageError, VerificationError, shown
from scalepoint.files import sweep as sweep_files
from scalepoint.files import sweep_temporary
from scalepoint.formats import Writing, check_metadata, export, find_format
from scalepoint.graph.blame import user_level
from scalepoint.graph.capture import as_inputs, as_module, check_model, unwrapped
from scalepoint.graph.example import check_example
from scalepoint.graph.free import Axes, axes_of, checked_axes, named_inputs
from scalepoint.output_folder import LIST, WrittenFiles
from scalepoint.plain import plain
from scalepoint.progress import Callback, Event, listening, say, tell
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq, load, save
from scalepoint.quantize.config import FLOAT
from scalepoint.quantize.feeding import check_data, own_inputs
from scalepoint.quantize.placement import check_formulations
from scalepoint.report import Allocated, Raised, Report, write
from scalepoint.report.folder import HTML_FILE, JSON_FILE
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import missing
from scalepoint.targets import Target, find_target
from scalepoint.targets.cpu import AUTOMATIC
from scalepoint.targets.registry import has_cpu_option
from scalepoint.transformation import transform
from scalepoint.tuning import TuneReport, tune
from scalepoint.turns import in_turn
from scalepoint.verification import Status, Verification, verify
from scalepoint.verification.simulation import feeds_of
from scalepoint.verification.timing import write_plain_file

SIZES = 3  # files that are tried for a budget of size


@in_turn
@ranks.together()
def deploy(
    model: nn.Module | ExportedProgram,
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
    choices: Sequence[str] = CHOICES,
    max_batches: int | None = None,
    on_nan: Literal["error", "skip"] = "error",
    kwargs: Mapping[str, Any] | None = None,
    leave: Sequence[str] = (),
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None,
    strict: bool = False,
    allow_departure: bool = False,
    float_dtype: str | None = None,
    cpu: Literal["auto", "vnni", "avx2"] = "auto",
    metadata: Mapping[str, Any] | None = None,
    threads: int = 1,
    seed: int = 0,
    smoke: bool = False,
    resume: bool = False,
    force: bool = False,
    progress: bool | None = None,
    callback: Callback | None = None,
) -> Deployment:
    """Quantize a model for a target, write the file into the folder `output`, and prove that it runs as it should.

    `accuracy` ("fast", "balanced", "best") chooses biases, or codes and scales too, or these by gradients too;
    weights of fewer than 8 bits get "balanced" unless told. `evaluate(run)` is your metric, higher is better;
    `run` is called as the model is. With `max_drop`, more precision goes where it removes most error for its cost,
    until the score is at most that much below the float model's, then less again; of `max_trials` files at most the
    cheapest that holds is kept, or the best. With `min_speed`, layers that lose time in the runtime go to float, until
    a file is so many times as fast as the float one. `budget` (size=0.2 of the float file, bits=4.5 a weight,
    speed=1.8 times the float model by MACs) gives every layer one of the `choices`, so that the output loses least.
    `dynamic_axes` names axes that take other sizes, {"x": {2: "height"}}. allow_departure=True takes a file that
    departs, on_nan="skip" leaves batches with NaN out, `float_dtype` types what stays float, `metadata` is kept in the
    file. `cpu` is the CPU that onnxruntime and openvino files are for: "vnni" uses all 8 bits of the weights, "avx2" is
    exact without VNNI too, "auto" looks at this machine. smoke=True is fast, resume=True goes on, force=True
    overwrites; one `seed`, one file; `callback(event)` hears.
    """
    options = {"max_drop": max_drop, "min_speed": min_speed, "max_trials": max_trials, "max_batches": max_batches}
    _check(calibration_data, evaluate, accuracy, {**options, "on_nan": on_nan, "leave": leave, "threads": threads})
    wished = _checked_budget(budget, choices, max_drop, calibration_data)
    model, found, folder = _checked_model(model), find_target(target, cpu), Path(output or "out")
    inputs, axes = _checked_inputs(found, model, as_inputs(example_inputs, kwargs), dynamic_axes)
    check_pace(min_speed, calibration_data, found, others=(max_drop, budget), smoke=smoke)
    wanted = with_speed(QuantConfig.build(config), is_strict=strict, has_budget=wished is not None)
    check_formulations(wanted, found)
    calibration_data = _checked_data(calibration_data, wanted)
    said = _checked_file(found, float_dtype, model, metadata)
    ranks.told("looking for the runtime", lambda: check_installed(found, allow_departure=allow_departure))
    if isinstance(target, str) and cpu == "auto" and progress is not False:
        _say_cpu(found, wanted)
    with seeded(seed), listening(callback), _opened(folder, found, resume=resume, force=force) as journal:
        run = Run(model=model, inputs=inputs, data=calibration_data, target=found, journal=journal, evaluate=evaluate,
            leave=tuple(leave), dynamic_axes=axes, strict=strict, threads=threads, max_batches=max_batches,
            on_nan=on_nan, float_dtype=float_dtype, smoke=smoke, progress=progress, accuracy=accuracy, seed=seed,
            metadata=said)  # fmt: skip
        done = _made(run, wanted, (max_drop, min_speed), max_trials, wished, tuple(choices))
    return done if allow_departure else done.checked()


def check_installed(target: Target, *, allow_departure: bool) -> None:
    """Refuse a target whose file cannot be written or verified here, before any work."""
    find_format(target.format).check_installed()
    check_runtime_installed(target, allow_departure=allow_departure)


def check_runtime_installed(target: Target, *, allow_departure: bool) -> None:
    """Refuse a target whose runtime is not installed; with allow_departure=True only warn."""
    runtime = None if target.runtime is None else find_runtime(target.runtime)
    if runtime is None or runtime.is_here:
        return
    why = missing(runtime).message
    if not allow_departure:
        raise VerificationError(
            f"target {target.name!r} is verified in its runtime, and {why}. allow_departure=True (--allow-departure) "
            "writes the file without"
        )
    warnings.warn(ScalepointWarning(f"{why}. The file will not be verified"), stacklevel=user_level())


def _say_cpu(target: Target, config: QuantConfig) -> None:
    """Print which CPUs the file is for. With float activations no product saturates, and it makes no difference."""
    if has_cpu_option(target) and config.activation != FLOAT:
        say(AUTOMATIC[str(target.options["cpu"])])


def _checked_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """The model itself, with shapes and values."""
    model = as_module(model) if isinstance(model, ExportedProgram) else unwrapped(model)
    check_model(model)
    hollow = [name for name, value in model.named_parameters() if value.is_meta]
    if hollow:
        raise CaptureError(f"{hollow[0]} is on the meta device, without values: load the weights first")
    return model


def _checked_file(
    target: Target, float_dtype: str | None, model: nn.Module, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the file will say: what the model knows of itself, and over it what is given."""
    target.check_float_dtype(float_dtype)
    check_metadata(metadata)
    said: dict[str, Any] = plain({**known_of(model), **(metadata or {})})
    check_metadata(said)
    return said


def _checked_inputs(
    target: Target, model: nn.Module, given: tuple[Any, Any], dynamic_axes: object
) -> tuple[tuple[Any, Any], Axes]:
    """The example as the model takes it, and which of its axes are free by name."""
    inputs, axes = own_inputs(model, *given), axes_of(dynamic_axes)
    check_example(model, inputs)
    target.check_free_sizes(axes)
    return inputs, checked_axes(axes, named_inputs(model, *inputs)) if axes else axes


@contextmanager
def _opened(folder: Path, target: Target, *, resume: bool, force: bool) -> Iterator[Journal]:
    """The journal, with the log of the run in it, where the folder may be written to."""
    suffix = find_format(target.format).suffix
    names = (*NAMES, *(f"{name}{suffix}" for name in (FILE, FLOAT_FILE, PLAIN_FILE)))
    ranks.told("looking at the output", lambda: check_output(folder, force=force, resume=resume, names=names))
    with Journal.opened(folder, resume=resume) as journal, listening(Log(journal.folder / LOG)):
        if ranks.is_main():
            sweep_files(folder, (LIST, *names))
            sweep_temporary()
        yield journal


def _made(
    run: Run,
    config: QuantConfig,
    limits: tuple[float | None, float | None],
    most: int,
    budget: Budget | None,
    choices: Sequence[str],
) -> Deployment:
    """The files of the best trial in the output folder, with the report beside them."""
    folder = run.journal.folder.parent
    bar = Bar(judged(run, run.model), *limits)
    if budget is not None:
        trials, allocation = _budgeted(run, config, budget, choices)
    else:
        trials, allocation = _search(run, config, bar, 1 if run.smoke else most)
    chosen = best_of(trials, bar)
    best = run.place(chosen, folder)
    trials = [best if trial is chosen else closed(trial) for trial in trials]
    with run.timed("reporting"):
        report = _written(lambda: make_report(run, best, trials, bar, allocation), folder)
    tell(Event("file", str(folder / HTML_FILE)))
    if ranks.is_main():
        with ranks.alone():
            keep_failing(run, best)
        keep(run, config, limits, most, budget, choices)
        _record(run, folder)
    return Deployment.of(best, report, bar.float_score, trials)


def _record(run: Run, folder: Path) -> None:
    """Record the files of this run, and delete files of an earlier run that this run did not write again."""
    files = [*run.written, folder / JSON_FILE, folder / HTML_FILE]
    written = WrittenFiles(folder)
    written.remove_all_but(written.add(files))


def _search(run: Run, config: QuantConfig, bar: Bar, most: int) -> tuple[list[Trial], Allocated | None]:
    """File after file, until none that costs less would hold; without `max_drop` or `min_speed` that is the first."""
    trials, widths = [_attempt(run, 0, Step(config))], None
    while len(trials) < most and not bar.is_fast(trials[-1].speed) and (step := next_float(trials)) is not None:
        trials = [*slimmed(trials, bar), _attempt(run, len(trials), step)]
    ranges = other_ranges(config, run.target)
    if len(trials) < most and not bar.holds(trials[0].score) and ranges != config:
        trials = slimmed([*trials, _attempt(run, 1, Step(ranges, (Raised("", RANGES),), 0))], bar)
    if len(trials) < most and not any(bar.holds(trial.score) for trial in trials):
        widths = widths_of(run, trials[start_of(trials)].config, None)
    while widths is not None and len(trials) < most:
        step = next_step(trials, widths, bar, is_last=len(trials) + 1 == most)
        if step is None:
            break
        trials = slimmed([*trials, _attempt(run, len(trials), step)], bar)
    kept = best_of(trials, bar).chosen
    return trials, None if widths is None else allocated(widths, kept or unraised(widths), "cost")


def _budgeted(
    run: Run, config: QuantConfig, budget: Budget, choices: Sequence[str]
) -> tuple[list[Trial], Allocated | None]:
    """The best within the budget. Of a size the file counts: one that is too large tells what else it holds."""
    widths = widths_of(run, config, choices)
    for number in range(SIZES):
        chosen = widths.within(budget)
        trial = _attempt(run, number, Step(widths.config(config, chosen.chosen), chosen=chosen.chosen))
        if budget.unit != "size" or run.smoke or trial.float_file is None:
            break
        size, whole = _sizes(run, trial.path, trial.float_file)
        widths = corrected(widths, chosen, size, whole)
        if size <= budget.limit * whole:
            break
    else:
        message = (
            f"budget: {budget.limit:g} of the float file's size is missed. The last of {SIZES} files has "
            f"{size / whole:.3g} of it and is kept; {widths.rest_size / whole:.3g} are no weights. Allow more, or "
            "fewer bits in choices="
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
    return [trial], allocated(widths, chosen.chosen, budget.unit, budget)


def _attempt(run: Run, number: int, step: Step) -> Trial:
    """One file: quantized, exported, verified, evaluated."""
    folder = run.journal.folder / f"trial-{number}"
    model, tuned = _quantized(run, folder, step.config)
    path, float_path = _exported(run, folder, model)
    found = _verified(run, path, float_path, model)
    in_runtime = runs_in_runtime(found)
    score = judged(run, model, path, in_runtime=in_runtime)
    _tell(run, number, path, found, score)
    told = (step.raised, step.start, tuned, step.chosen, step.cost)
    return Trial(step.config, model, path, float_path, found, score, in_runtime, *told)


def _tell(run: Run, number: int, path: Path, found: Verification | None, score: float | None) -> None:
    """The numbers of a trial, to who listens."""
    latency = None if found is None else found.latency
    numbers = {
        "score": score,
        "size": float(run.format.about(path).size),
        "speed": None if latency is None else latency.ratio,
        "agreement": None if found is None or found.status != Status.OK else found.sqnr,
    }
    for name, value in numbers.items():
        if value is not None:
            tell(Event("metric", name, done=number, value=value))


def _quantized(run: Run, folder: Path, config: QuantConfig) -> tuple[fx.GraphModule, TuneReport | None]:
    args, kwargs = run.inputs
    dropped = DroppedInputs(run.model, run.inputs)
    name, place, data = f"{folder.name} quantized", folder / MODEL, Watched(run.data, dropped.look, run.max_batches)
    marks = run.marks_of_quantizing(config)
    if run.journal.has(name):
        marks["the calibration data"] = run.data_mark = data.mark_now()
    with run.stage(name, "quantizing", marks, is_timed=False) as stage:
        model = stage.reuse(lambda _: load(place, run.model, args, kwargs=kwargs, target=run.target))
        tuned = stage.reuse(TuneReport.from_dict) if model is not None and stage.saved else None
        if model is None:
            with run.timed("capturing"):
                result = transform(
                    run.model, args, target=run.target, kwargs=kwargs, leave=run.leave, dynamic_axes=run.dynamic_axes
                )
                if run.format.check is not None:
                    run.format.check(result.model, Writing(run.inputs, run.target))
                model = insert_qdq(result.model, result.matches, config, strict=run.strict, copy=False)
            how = tuning_for(model, run.accuracy, has_data=run.has_data)
            corrects = how is None if config.correct_bias is None else config.correct_bias  # else tuning does it
            dropped.look_at_first(run.data)
            with run.timed("calibrating", is_phase=False), telling_of_sizes(model), dropped.warned_about():
                calibrate(
                    model, data.data, max_batches=run.max_batches, on_nan=run.on_nan, progress=run.progress,
                    freeze_weights=True, correct_bias=corrects,
                )  # fmt: skip
            stage.marks["the calibration data"] = run.data_mark = data.mark if ranks.size() == 1 else data.mark_now()
            if how is not None:
                with run.timed("tuning", is_phase=False):
                    tuned = tune(
                        model, run.data, how, max_batches=run.max_batches, on_nan=run.on_nan, progress=run.progress
                    )
            if ranks.is_main():
                save(model, place)
            stage.keep({} if tuned is None else tuned.to_dict(), files=[place / "scalepoint.json"])
    return model, tuned


def _exported(run: Run, folder: Path, model: fx.GraphModule) -> tuple[Path, Path]:
    """The file, and once for all trials the float one."""
    args, kwargs = run.inputs
    path, float_path = run.file(folder, FILE), run.file(run.journal.folder, FLOAT_FILE)
    own, base = run.marks_of_exporting(folder / MODEL), run.marks_of_exporting(None)
    with (
        run.journal.stage("the float model exported", base) as float_stage,
        run.stage(f"{folder.name} exported", "exporting", own) as stage,
    ):
        needs_float = float_stage.is_due and not run.smoke
        if stage.is_due or needs_float:
            also = float_path if needs_float else None
            if ranks.is_main():
                with ranks.alone():
                    export(
                        model, path, args, kwargs=kwargs, float_path=also, float_dtype=run.float_dtype,
                        metadata=run.metadata,
                    )  # fmt: skip
                    if also:
                        _export_plain(run, model)
            stage.keep(files=run.format.files(path))
            if also:
                floats = [also, *filter(None, [run.plain_path])]
                float_stage.keep(files=[file for each in floats for file in run.format.files(each)])
    return path, float_path


def _export_plain(run: Run, model: fx.GraphModule) -> None:
    """Write the float model by torch.onnx.export if speed will be measured: it may be faster than our float file."""
    runtime = None if run.target.runtime is None else find_runtime(run.target.runtime)
    if runtime is not None and runtime.is_here and not runtime.why_not_run:
        writing = Writing(run.inputs, names=tuple(feeds_of(model, run.inputs)))
        write_plain_file(run.model, run.format, writing, run.file(run.journal.folder, PLAIN_FILE))


def _verified(run: Run, path: Path, float_path: Path, model: fx.GraphModule) -> Verification | None:
    args, kwargs = run.inputs
    if run.target.runtime is None:
        return None
    marks = run.marks_of_verifying(path, float_path)
    with run.stage(f"{path.parent.name} verified", "verifying in the runtime", marks) as stage:
        found = stage.reuse(TypeAdapter(Verification).validate_python)
        if found is None:
            timed = None if run.smoke else float_path
            found = _told(lambda: verify(
                path, model, args, kwargs=kwargs, runtime=run.target.runtime, float_path=timed,
                plain_path=run.plain_path, baseline=run.baseline, threads=run.threads, layers=not run.smoke,
            ))  # fmt: skip
            found = found if run.smoke else replace(found, float_size=_sizes(run, float_path)[0])
            if found.status in (Status.OK, Status.NOT_VERIFIED):  # what went wrong is tried again
                stage.keep(vars(found))
    if run.baseline is None and found.latency is not None:
        run.baseline = found.latency.baseline
    return found


def _sizes(run: Run, *paths: Path) -> list[int]:
    found: list[int] = ranks.told("the sizes", lambda: [run.format.about(each).size for each in paths])
    return found


def _told(make: Callable[[], Verification]) -> Verification:
    """What the first rank finds, which alone has the runtime running."""
    if ranks.size() == 1:
        return make()
    return TypeAdapter(Verification).validate_python(ranks.told("verifying", lambda: plain(vars(make()))))


def _written(make: Callable[[], Report], folder: Path) -> Report:
    """The report that the first rank makes and writes."""
    if ranks.size() == 1:
        report = make()
        write(report, folder)
        return report

    def written() -> Any:
        write(report := make(), folder)
        return report.to_dict()

    return Report.from_dict(ranks.told("reporting", written))


def _check(data: Any, evaluate: Any, accuracy: str | None, options: Mapping[str, Any]) -> None:
    check_accuracy(accuracy)
    check_options(options)
    max_drop = options["max_drop"]
    if data is not None:
        check_data(data)
    if evaluate is not None and not callable(evaluate):
        raise UsageError(f"evaluate= is a function of the model that gives a number, not {shown(evaluate)}")
    if max_drop is not None and evaluate is None:
        raise UsageError("max_drop= needs evaluate=: the metric that must not drop")
    if max_drop is not None and isinstance(data, Iterator):
        raise UsageError(
            "max_drop= calibrates several times, an iterator gives its data once: pass a list or a function"
        )


def _checked_data(data: Any, config: QuantConfig) -> Any:
    """Refuse calibration_data=None unless activations stay float; then no data is needed."""
    if data is not None:
        return data
    if config.activation != "float":
        raise UsageError(
            "calibration_data=None: give batches like those that the model will meet. Only weight-only configs need no "
            "data, such as QuantConfig.weight_only('int4')"
        )
    return []


def _checked_budget(budget: Any, choices: Sequence[str], max_drop: float | None, data: Any) -> Budget | None:
    if budget is None:
        return None
    if max_drop is not None:
        raise UsageError("budget= says how small or fast, max_drop= how accurate: give one of them")
    if isinstance(data, Iterator):
        raise UsageError("budget= reads the data several times, an iterator gives it once: pass a list or a function")
    check_choices(choices)
    return Budget.build(budget)
