"""The stages of a run: quantize, export, verify, evaluate, publish. Each is a function of the context.

All stages except publish are cached (`cache.py`). The cache key has the options that declare the stage in `options.py`,
the fingerprints of the user's objects, package versions, and the files of earlier stages.

    with context.stage(name, doing, inputs) as stage:    inputs() -> name -> fingerprint; called on rank 0 only
        result = stage.load(parse)                       None if stage.must_run: not in the cache, or inputs changed
        if result is None:
            result = ...
            stage.store(result as a dict, files=[...])   written when the block ends without an error

`stage.cached` is the dict before parsing. is_timed=False: the parts of the stage are timed, with `context.timed`.
is_phase=False: the timed step shows its own progress.

Float files (names in `workspace.py`): the float file is our export of the same graph without quantizers. The plain
export is that of torch.onnx.export. The source copy is the file that the user's model was read from, and replaces the
plain export; `context.plain_path` is either. The baseline is the one of them that speed is compared with.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import fx, nn

from scalepoint import distributed
from scalepoint.errors import NonFiniteError, ScalepointWarning, UsageError, VerificationError, short_repr
from scalepoint.formats import ExportRequest, export
from scalepoint.graph.module_state import eval_mode
from scalepoint.options import stage_values
from scalepoint.pipeline.accuracy import choose_tuning
from scalepoint.pipeline.cache import Inputs
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.data_warnings import DroppedInputs, warn_about_other_sizes
from scalepoint.pipeline.fingerprints import fingerprint, fingerprint_code, fingerprint_target
from scalepoint.pipeline.result import Trial
from scalepoint.pipeline.workspace import (
    FAILING_FOLDER,
    FILE_STEM,
    FLOAT_STEM,
    PLAIN_STEM,
    QUANTIZED_FOLDER,
    SOURCE_STEM,
    DeployWorkspace,
)
from scalepoint.quantize import QuantConfig, calibrate, insert_qdq, load, save
from scalepoint.quantize.store import list_model_files
from scalepoint.results import TuneReport
from scalepoint.runtimes import find_runtime
from scalepoint.support.files import compute_digest
from scalepoint.support.progress import Event, send_event
from scalepoint.support.torch_state import caller_dtype
from scalepoint.targets.local_times import LocalTimes
from scalepoint.verification import RuntimeModel, Status, Verification, verify
from scalepoint.verification.benchmarking import write_baseline_file
from scalepoint.verification.inputs import save_inputs
from scalepoint.verification.result import PLAIN_BASELINE
from scalepoint.verification.simulation import build_feeds
from scalepoint.version import __version__

if TYPE_CHECKING:
    from scalepoint.allocation import Widths
    from scalepoint.tuning import TuneConfig

PACKAGE_VERSIONS = {"scalepoint": __version__, "torch": str(torch.__version__)}


def check_same_model(context: StageContext) -> None:
    """Raise RankError if ranks have different weights: each would quantize another model."""
    hint = "load the same weights on every rank, or set the same seed if they are random"
    distributed.check_equal("model", context.model_fingerprint, hint)


def quantize(
    context: StageContext,
    folder: Path,
    config: QuantConfig,
    *,
    is_only_trial: bool,
    local_times: LocalTimes | None = None,
) -> tuple[fx.GraphModule, TuneReport | None]:
    """Insert quantizers, calibrate and tune.

    Args:
        context: The run.
        folder: Folder of the trial.
        config: Config of the trial.
        is_only_trial: Whether no other trial will need the captured graph, so that it need not be copied.
        local_times: Times of layers on this machine, which decide what stays float for speed.
    """
    job, model_folder = context.job, folder / QUANTIZED_FOLDER
    dropped = DroppedInputs(job.model, job.example)
    data = job.data.with_fingerprint(dropped.check_batch)
    name = f"{folder.name} quantized"

    def inputs() -> Inputs:
        fingerprints = quantize_inputs(context, config)
        fingerprints["local times"] = fingerprint(local_times)
        # Only a cached stage needs the fingerprint now. Otherwise it is computed while calibration reads the data.
        if name in context.workspace.cache.stages:
            fingerprints["the calibration data"] = context.fingerprint_data()
        return fingerprints

    with context.stage(name, "quantizing", inputs, is_timed=False) as stage:
        model = stage.load(
            lambda _: load(model_folder, job.model, job.example.args, kwargs=job.example.kwargs, target=job.target)
        )
        # The cached result is {} if the model was not tuned, and None if it could not be loaded.
        tuned = stage.load(TuneReport.from_dict) if model is not None and stage.cached else None
        if model is None:
            model, tuned = _quantize(
                context, config, dropped, data.data, is_only_trial=is_only_trial, local_times=local_times
            )
            context.data_fingerprint = data.fingerprint()
            stage.inputs["the calibration data"] = context.data_fingerprint
            save(model, model_folder)
            stage.store({} if tuned is None else tuned.to_dict(), files=[model_folder / "scalepoint.json"])
    return model, tuned


def _quantize(
    context: StageContext,
    config: QuantConfig,
    dropped: DroppedInputs,
    data: Any,
    *,
    is_only_trial: bool,
    local_times: LocalTimes | None,
) -> tuple[fx.GraphModule, TuneReport | None]:
    job, options = context.job, context.job.options
    captured = context.captured
    with context.timed("capturing", is_phase=False):
        graph = captured.model if is_only_trial else copy_graph(captured.model, config)
        model = insert_qdq(graph, captured.matches, config, strict=options.strict, copy=False, local_times=local_times)
    tuning = choose_tuning(model, options.accuracy, has_data=job.data.is_rereadable)
    # Tuning corrects biases itself, with better statistics.
    correct_bias = tuning is None if config.correct_bias is None else config.correct_bias
    dropped.check_first_batch(job.data.data)
    with context.timed("calibrating", is_phase=False), warn_about_other_sizes(model), dropped.warn_at_end():
        calibrate(
            model,
            data,
            max_batches=job.max_batches,
            on_nan=options.on_nan,
            progress=job.progress,
            freeze_weights=True,
            correct_bias=correct_bias,
        )
    return model, None if tuning is None else tune(context, model, tuning)


def tune(context: StageContext, model: fx.GraphModule, config: "TuneConfig") -> TuneReport:
    """Choose codes, scales and biases from the data."""
    from scalepoint import tuning  # noqa: PLC0415  # most runs do not tune

    job = context.job
    with context.timed("tuning", is_phase=False):
        return tuning.tune(
            model, job.data.data, config, max_batches=job.max_batches, on_nan=job.options.on_nan, progress=job.progress
        )


def copy_graph(model: fx.GraphModule, config: QuantConfig) -> fx.GraphModule:
    """Copy a captured graph. Parameters and buffers are shared unless the config rewrites them (migrations)."""
    shared = [] if config.migrations else [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def measure_precisions(context: StageContext, config: QuantConfig, choices: tuple[str, ...] | None) -> "Widths":
    """Measure the error and cost of every layer at every precision in `choices`.

    With choices=None a layer is measured at its configured precision and at every higher one.
    """
    from scalepoint.allocation import Widths, measure_widths  # noqa: PLC0415  # most runs do not allocate
    from scalepoint.allocation.layer_losses import QUICK_STEPS  # noqa: PLC0415

    job = context.job
    has_data = job.data.is_rereadable

    def inputs() -> Inputs:
        return {
            **quantize_inputs(context, config),
            "choices": fingerprint(choices),
            "the calibration data": job.data.fingerprint() if has_data else "none",
        }

    with context.stage("widths", "measuring widths", inputs, is_timed=False) as stage:
        widths = stage.load(Widths.from_dict)
        if widths is None:
            captured = context.captured
            result = replace(captured, model=copy_graph(captured.model, config))
            steps: tuple[str, ...] | None = None  # without data: rounding to nearest
            if has_data:
                steps = () if job.options.accuracy == "fast" else QUICK_STEPS
            with context.timed("measuring widths", is_phase=False):
                widths = measure_widths(
                    result,
                    config,
                    job.target,
                    choices,
                    job.data.data if has_data else job.example.as_data(),
                    steps=steps,  # a fast substitute for the tuning of the trials
                    max_batches=job.max_batches,
                    on_nan=job.options.on_nan,
                    progress=job.progress,
                )
            stage.store(widths.to_dict())
    return widths


def export_files(context: StageContext, folder: Path, model: fx.GraphModule) -> tuple[Path, Path]:
    """Write the file of a trial, and in the first trial the float file. Returns both paths."""
    path, float_path = context.path(folder, FILE_STEM), context.path(context.workspace.work, FLOAT_STEM)

    def inputs() -> Inputs:
        return export_inputs(context, folder / QUANTIZED_FOLDER)

    with (
        context.workspace.cache.stage("the float model exported", lambda: float_export_inputs(context)) as float_stage,
        context.stage(f"{folder.name} exported", "exporting", inputs) as stage,
    ):
        needs_float = float_stage.must_run and not context.job.is_smoke
        if stage.must_run or needs_float:  # one call writes both, from one graph
            new_float_path = float_path if needs_float else None
            distributed.run_on_main("exporting", lambda: _write_files(context, model, path, new_float_path))
            stage.store(files=context.format.files(path))
            if needs_float:
                float_paths = [float_path, *filter(None, [context.plain_path])]
                float_stage.store(files=[file for path in float_paths for file in context.format.files(path)])
    return path, float_path


def _write_files(context: StageContext, model: fx.GraphModule, path: Path, float_path: Path | None) -> None:
    """Write the quantized file and, unless `float_path` is None, the float files."""
    job = context.job
    export(
        model,
        path,
        job.example.args,
        kwargs=job.example.kwargs,
        float_path=float_path,
        float_dtype=job.options.float_dtype,
        dynamic=not job.options.fixed_sizes,
        metadata=job.metadata,
    )
    if float_path is not None:
        _write_plain_export(context, model, float_path)


def _write_plain_export(context: StageContext, model: fx.GraphModule, float_path: Path) -> None:
    """Write the plain export if speed is measured: it may be faster than our float file.

    If the model was read from a file of the target's format, that file is copied instead.
    """
    job = context.job
    if job.source_file is not None:
        if context.format.suffix == job.source_file.suffix.lower():
            from scalepoint.formats.onnx.save import copy_model  # noqa: PLC0415  # only for a model that is such a file

            copy_model(job.source_file, context.path(context.workspace.work, SOURCE_STEM))
        return
    runtime = None if job.target.runtime is None else find_runtime(job.target.runtime)
    if runtime is None or not runtime.is_installed or runtime.why_no_speed:
        return
    names = tuple(build_feeds(model, job.example))
    request = ExportRequest(job.example, names=names, free_axes=context.format.about(float_path).free_axes)
    write_baseline_file(job.model, context.format, request, context.path(context.workspace.work, PLAIN_STEM))


def verify_file(
    context: StageContext, path: Path, float_path: Path, model: fx.GraphModule, baseline_name: str | None
) -> Verification | None:
    """Run the file in its runtime; None if the target has none.

    Args:
        context: The run.
        path: The file.
        float_path: The float file, for latency.
        model: The simulation.
        baseline_name: Which float file the first trial was compared with, OWN_BASELINE or PLAIN_BASELINE; None for
            the first trial, which chooses the faster file.
    """
    job = context.job
    if job.target.runtime is None:
        return None
    name = f"{path.parent.name} verified"
    with context.stage(
        name, "verifying in the runtime", lambda: verify_inputs(context, path, float_path, baseline_name)
    ) as stage:
        result = stage.load(TypeAdapter(Verification).validate_python)
        if result is None:
            result = distributed.run_on_main(
                "verifying", lambda: _verify(context, path, float_path, model, baseline_name), Verification
            )
            if result.status in (Status.OK, Status.NOT_VERIFIED):  # after an error, a resumed run tries again
                stage.store(vars(result))
    return result


def _verify(
    context: StageContext, path: Path, float_path: Path, model: fx.GraphModule, baseline_name: str | None
) -> Verification:
    job = context.job
    source_copy = context.plain_path if job.source_file is not None else None
    if baseline_name is None and source_copy is not None:
        baseline_name = PLAIN_BASELINE  # `plain_path` is the source copy: the user compares with that file
    fixed_inputs: Mapping[str, torch.Tensor] = getattr(job.model, "fixed_inputs", {}) if job.source_file else {}
    result = verify(
        path,
        model,
        job.example.args,
        kwargs=job.example.kwargs,
        runtime=job.target.runtime,
        float_path=None if job.is_smoke else float_path,
        plain_path=context.plain_path,
        plain_inputs={name: value.numpy() for name, value in fixed_inputs.items()},
        baseline=baseline_name,
        threads=job.options.threads,
        layers=not job.is_smoke,
    )
    if job.options.dynamic_axes and result.latency is not None:  # free sizes were requested: do not report their cost
        result = replace(result, latency=replace(result.latency, fixed_seconds=None))
    if job.is_smoke:  # it writes no float file
        return result
    return replace(result, float_size=context.format.about(source_copy or float_path).size)


def file_sizes(context: StageContext, *paths: Path) -> list[int]:
    """Return the sizes in bytes, including external data."""
    read_info = context.format.about
    return distributed.run_on_main("the sizes", lambda: [read_info(path).size for path in paths], list[int])


def evaluate_float(context: StageContext) -> float | None:
    """Run the user's metric on the float model; None without a metric."""
    if context.job.evaluate is None:
        return None

    def inputs() -> Inputs:
        metric = fingerprint_code(context.job.evaluate)
        return {"the model": context.model_fingerprint, **PACKAGE_VERSIONS, "the metric": metric}

    def run() -> float:
        return _evaluate(context, context.job.model, is_float=True)

    score = _cached_score(context, "the float model evaluated", "evaluating the float model", inputs, run)
    send_event(Event("metric", "float score", value=score))
    return score


def evaluate_file(context: StageContext, path: Path, model: fx.GraphModule, *, in_runtime: bool) -> float | None:
    """Run the user's metric on a file in its runtime, or on the simulation; None without a metric."""
    job = context.job
    if job.evaluate is None:
        return None

    def inputs() -> Inputs:
        return {"the file": compute_digest(path), "the metric": fingerprint_code(job.evaluate)}

    def run() -> float:
        runner: AbstractContextManager[Any] = nullcontext(model)
        if in_runtime and job.target.runtime is not None:
            threads = job.options.threads
            runner = RuntimeModel(path, job.model, job.example, runtime=job.target.runtime, threads=threads)
        with runner as callable_model:
            return _evaluate(context, callable_model, is_float=False)

    return _cached_score(context, f"{path.parent.name} evaluated", "evaluating the file", inputs, run)


def _cached_score(
    context: StageContext, name: str, doing: str, inputs: Callable[[], Inputs], run: Callable[[], float]
) -> float:
    with context.stage(name, doing, inputs) as stage:
        score = stage.load(lambda saved: float(saved["score"]))
        if score is None:
            score = distributed.run_on_main(doing, run, float)
            stage.store({"score": score})
    return score


def _evaluate(context: StageContext, model: Any, *, is_float: bool) -> float:
    assert context.job.evaluate is not None  # noqa: S101  # the callers return early
    with eval_mode(model) if isinstance(model, nn.Module) else nullcontext(), torch.no_grad(), caller_dtype():
        return to_score(context.job.evaluate(model), is_float=is_float)


def to_score(value: Any, *, is_float: bool) -> float:
    """Convert the value that a metric returned to a float.

    NaN for the float model is an error, because all files are compared with it. NaN for a file is a warning, and the
    file is ranked last.
    """
    try:
        score = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements raises RuntimeError
        raise UsageError(
            f"evaluate returned {short_repr(value)}: it must return one number, higher is better"
        ) from error
    if math.isnan(score) and is_float:
        raise NonFiniteError(
            "evaluate returned NaN for the float model, so files cannot be compared with it: check for an empty data "
            "set, a division by zero or NaN in the model's output"
        )
    if math.isnan(score):
        warnings.warn(
            ScalepointWarning(
                "evaluate returned NaN for the quantized file, but a number for the float model: the output contains "
                "NaN, or the metric divides by zero. The file is ranked last"
            ),
            stacklevel=2,
        )
    return score


def publish(context: StageContext, best: Trial) -> Trial:
    """Copy the files of the best trial into the output folder. Returns the trial with its new paths."""
    job, workspace = context.job, context.workspace
    path = context.path(workspace.output, FILE_STEM)
    float_path = None if job.is_smoke else context.path(workspace.output, FLOAT_STEM)
    verification = best.verification and replace(best.verification, path=str(path))
    published = replace(best, file=path, float_file=float_path, verification=verification)
    if not distributed.is_main():
        return published
    latency = None if verification is None else verification.latency
    # Our float file is always published, and the plain file only if the reported speed is relative to it.
    is_plain_baseline = latency is not None and latency.baseline == PLAIN_BASELINE
    float_paths = [] if job.is_smoke else [best.float_file, context.plain_path if is_plain_baseline else None]
    paths = [path for path in (*float_paths, best.path) if path is not None]
    sources = [file for path in paths for file in context.format.files(path)]
    if latency is not None:  # with these inputs the speed can be measured again
        sources.append(save_inputs(workspace.work, build_feeds(best.model, job.example)))
    workspace.copy(sources)
    # with_graph=None stores the graph as data if that is possible; then load needs no float model.
    workspace.write_folder(QUANTIZED_FOLDER, lambda folder: list_model_files(save(best.model, folder, with_graph=None)))
    return published


def extract_failing_layer(context: StageContext, best: Trial) -> None:
    """If the file does not match, write the first failing layer as a separate file with a script, to failing/."""
    verification, job = best.verification, context.job
    if verification is None or verification.holds or verification.status != Status.OK:
        return
    if verification.runtime != "onnxruntime":
        return
    with suppress(VerificationError):  # the file does not run, so there are no layers to compare
        example = job.example
        if script := write_failing_layer(context.workspace, best.path, best.model, example.args, example.kwargs):
            send_event(Event("file", str(script)))


def write_failing_layer(
    workspace: DeployWorkspace, path: Path, model: fx.GraphModule, args: Any, kwargs: Mapping[str, Any] | None = None
) -> Path | None:
    """Write the first layer that departs from the simulation by itself to failing/.

    Returns the script that runs it; None if no layer fails.
    """
    from scalepoint.verification.extraction import EXTRACTED_FILES, extract_failing  # noqa: PLC0415  # rarely needed

    def write(folder: Path) -> list[Path]:
        is_written = extract_failing(path, model, args, folder, kwargs=kwargs, force=True) is not None
        return [folder / name for name in EXTRACTED_FILES] if is_written else []

    paths = workspace.write_folder(FAILING_FOLDER, write)
    return paths[-1] if paths else None


def quantize_inputs(context: StageContext, config: QuantConfig) -> Inputs:
    """Return the fingerprints of all inputs of the quantized model except the data."""
    job = context.job
    values = {**stage_values(job.options, "quantize"), "max_batches": job.max_batches, "dynamic_axes": job.dynamic_axes}
    return {
        **PACKAGE_VERSIONS,
        "the model": context.model_fingerprint,
        "the example inputs": job.example.fingerprint(),
        "the target": fingerprint_target(job.target),
        "the config": fingerprint(config.to_dict()),
        **{name: fingerprint(value) for name, value in values.items()},
    }


def export_inputs(context: StageContext, quantized: Path) -> Inputs:
    """Return the fingerprints of all inputs of the exported file."""
    return {
        "the quantized model": compute_digest(quantized / "scalepoint.json"),
        "metadata": fingerprint(context.job.metadata),
        **{name: fingerprint(value) for name, value in stage_values(context.job.options, "export").items()},
        **_common_export_inputs(context),
    }


def float_export_inputs(context: StageContext) -> Inputs:
    """Return the fingerprints of all inputs of the float file."""
    job = context.job
    values = {**stage_values(job.options, "export float"), "dynamic_axes": job.dynamic_axes}
    return {
        "the model": context.model_fingerprint,
        **{name: fingerprint(value) for name, value in values.items()},
        **_common_export_inputs(context),
    }


def _common_export_inputs(context: StageContext) -> Inputs:
    return {
        "the example inputs": context.job.example.fingerprint(),
        "the target": fingerprint_target(context.job.target),
        **PACKAGE_VERSIONS,
        **{name: package_version(name) for name in ("onnx", "onnxscript")},
    }


def verify_inputs(context: StageContext, path: Path, float_path: Path, baseline_name: str | None) -> Inputs:
    """Return the fingerprints of all inputs of a verification."""
    job = context.job
    plain_path, runtime = context.plain_path, str(job.target.runtime)
    return {
        "the file": compute_digest(path),
        "the float file": "none" if job.is_smoke else compute_digest(float_path),
        "the plain export": compute_digest(plain_path) if plain_path else "none",
        "the baseline": str(baseline_name),
        "the example inputs": job.example.fingerprint(),
        **{name: fingerprint(value) for name, value in stage_values(job.options, "verify").items()},
        "smoke": str(job.is_smoke),
        "scalepoint": PACKAGE_VERSIONS["scalepoint"],
        runtime: package_version(find_runtime(runtime).package),
    }


def package_version(package: str) -> str | None:
    """Return the installed version of a package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
