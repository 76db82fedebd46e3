"""Job: the checked arguments of deploy. `prepare_job` checks every argument before any work starts.

    options.py            type and range of each option
    check_options         options that need or exclude each other
    check_with_target     what the target supports
    build_options         all of these; sweep calls it for every run before the first one starts
    prepare_job           build_options, then metric, data, installed packages, model and example

The command line checks the options before it loads the model.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.export import ExportedProgram

from scalepoint import distributed
from scalepoint.budget import Budget
from scalepoint.errors import (
    CaptureError,
    ConfigError,
    ScalepointWarning,
    UsageError,
    VerificationError,
    did_you_mean,
    short_repr,
)
from scalepoint.formats import find_format
from scalepoint.graph.capture import as_inputs, as_module, check_model, unwrap_model
from scalepoint.graph.dynamic_axes import Axes, check_axes, get_named_inputs
from scalepoint.graph.example_inputs import check_example
from scalepoint.graph.user_traceback import user_level
from scalepoint.options import Command, DeployOptions, Placement
from scalepoint.pipeline.inputs import DataSource, Example
from scalepoint.pipeline.model_metadata import collect_metadata, read_library_metadata
from scalepoint.pipeline.onnx_source import check_no_file_options, is_onnx_file, read_source
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.batches import check_data, drop_extra_inputs
from scalepoint.quantize.config import FLOAT
from scalepoint.quantize.placement import check_formulations
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import describe_missing
from scalepoint.support.cpu import check_threads
from scalepoint.targets import Target, find_target

Evaluate = Callable[[Any], float]
SMOKE_BATCHES = 2  # batches of a smoke run, at most
PLACEMENT_VARIABLE = "SCALEPOINT_PLACEMENT"  # the placement, if the caller does not choose one


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its data, and the options of a run.

    Attributes:
        model: The float model; never changed.
        example: One set of inputs of the model.
        data: Calibration data.
        target: Where the file will run.
        config: `options.quantization` with the defaults of deploy filled in.
        options: All options of the call, as they were given.
        placement: How layers are chosen that stay float for speed: `options.placement`, or its default.
        evaluate: The user's metric; None if there is none.
        metadata: Metadata for the file: what timm or transformers declare for the model, updated by the user's.
        dynamic_axes: `options.dynamic_axes`, checked against the example.
        command: The command line that started the run; None for a call from Python.
        source_file: The .onnx file that the model was read from; None for a PyTorch model.
        may_fix_axes: Whether `dynamic_axes` are those of the file, which become fixed if they cannot stay free.
        is_smoke: Whether this is a quick run that only looks for errors.
        progress: Show progress; None shows it on a terminal only.
    """

    model: nn.Module
    example: Example
    data: DataSource
    target: Target
    config: QuantConfig
    options: DeployOptions
    placement: Placement
    evaluate: Evaluate | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dynamic_axes: Axes = field(default_factory=dict)
    command: Command | None = None
    source_file: Path | None = None
    may_fix_axes: bool = False
    is_smoke: bool = False
    progress: bool | None = None

    @property
    def max_batches(self) -> int | None:
        """Largest number of batches to use; None for all."""
        requested = self.options.max_batches
        return min(requested or SMOKE_BATCHES, SMOKE_BATCHES) if self.is_smoke else requested

    @property
    def max_trials(self) -> int:
        return 1 if self.is_smoke else self.options.max_trials

    def for_smoke(self) -> "Job":
        """Return the quick version of this job: two batches, one trial, no timing. `options` stays the same."""
        smoke = replace(self, is_smoke=True)
        return replace(smoke, data=replace(self.data, max_batches=smoke.max_batches))


def prepare_job(
    model: nn.Module | ExportedProgram | str | Path,
    example_inputs: Any,
    calibration_data: Any,
    *,
    target: str | Target,
    config: Any,
    evaluate: Evaluate | None,
    kwargs: Mapping[str, Any] | None,
    progress: bool | None,
    smoke: bool,
    command: Command | None,
    **values: Any,
) -> Job:
    """Check every argument of deploy.

    Args:
        model, example_inputs, calibration_data, target, config, evaluate, kwargs, progress, command: See deploy.
        smoke: Whether the job will be run as `for_smoke`, which some options exclude.
        **values: The options of deploy that `DeployOptions` checks.
    """
    options, checked_target = build_options(target, config, values, has_metric=evaluate is not None, smoke=smoke)
    quantization, placement = choose_placement(options)
    check_metric(evaluate)
    data = DataSource(_check_data(calibration_data, options), options.max_batches)
    if options.accuracy is not None and not data.is_rereadable:
        raise UsageError(
            f"accuracy={options.accuracy!r} reads the calibration data a second time, which is not possible without "
            "data or with an iterator: pass a list, a DataLoader or a function"
        )
    distributed.run_on_main(
        "looking for the runtime", lambda: check_installed(checked_target, allow_departure=options.allow_departure)
    )
    source, may_fix_axes = None, False
    dynamic_axes: Axes | None = options.dynamic_axes
    if is_onnx_file(model):
        source = read_source(Path(str(model)), example_inputs, kwargs, calibration_data, options, progress)
        model, example_inputs = source.model, source.example
        may_fix_axes = dynamic_axes is None and not options.fixed_sizes and not checked_target.fixed_shapes_reason
        if may_fix_axes:
            dynamic_axes = source.free_axes
    else:
        check_no_file_options(options)
    model = _check_model(model)  # type: ignore[arg-type]  # a path that is not an .onnx file is refused there
    example, axes = _check_example(model, as_inputs(example_inputs, kwargs), dynamic_axes)
    own_metadata = read_library_metadata(model) if source is None else source.metadata
    metadata = collect_metadata(own_metadata, options.metadata)
    return Job(
        model=model,
        example=example,
        data=data,
        target=checked_target,
        config=quantization,
        options=options,
        placement=placement,
        evaluate=evaluate,
        metadata=metadata,
        dynamic_axes=axes,
        command=command,
        source_file=None if source is None else source.path,
        may_fix_axes=may_fix_axes,
        progress=progress,
    )


def build_options(
    target: str | Target, config: Any, values: Mapping[str, Any], *, has_metric: bool, smoke: bool
) -> tuple[DeployOptions, Target]:
    """Check the options of deploy, without model and data.

    Args:
        target, config, smoke: See deploy.
        values: The other options of deploy, by name. Missing ones have their default.
        has_metric: Whether `evaluate` is given.

    Returns:
        The options and the target.
    """
    checked_target = find_model_target(target, values.get("cpu", "auto"))
    converted = {"target": checked_target.name, "quantization": QuantConfig.build(config)}
    if values.get("budget") is not None:
        converted["budget"] = Budget.build(values["budget"])
    try:
        options = DeployOptions.model_validate({**values, **converted})
    except ConfigError as error:
        raise UsageError(error.args[0]) from error
    check_options(options, has_metric=has_metric, smoke=smoke)
    check_with_target(options, checked_target)
    return options, checked_target


def check_metric(evaluate: object) -> None:
    """Raise UsageError for a metric that is not a function."""
    if evaluate is not None and not callable(evaluate):
        raise UsageError(
            f"evaluate= must be a function that takes the model and returns a number, got {short_repr(evaluate)}"
        )


def find_model_target(target: str | Target, cpu: str) -> Target:
    """Return the target of a model; targets for checkpoints of language models are refused."""
    known = find_target(target, cpu)
    if known.is_language:
        raise UsageError(
            f"target {known.name!r} is for checkpoints of language models: pass the folder of a checkpoint to "
            "deploy_checkpoint, or as the model on the command line"
        )
    return known


def check_options(options: DeployOptions, *, has_metric: bool, smoke: bool) -> None:
    """Check options that need or exclude each other. The type of each option is declared in options.py."""
    check_threads(options.threads)
    choose_placement(options)
    if options.max_drop is not None and not has_metric:
        raise UsageError("max_drop= needs evaluate= (--evaluate), the metric that may drop by at most max_drop")
    if options.max_drop is not None and options.budget is not None:
        raise UsageError(
            "budget= and max_drop= exclude each other: budget= fixes size or speed, max_drop= fixes accuracy. Pass one "
            "of them"
        )
    if options.fixed_sizes and options.dynamic_axes:
        raise UsageError("fixed_sizes= cannot be used with dynamic_axes=: one fixes all sizes, the other frees some")
    if options.min_speed is None:
        return
    if options.max_drop is not None or options.budget is not None:
        raise UsageError(
            "min_speed= cannot be used with max_drop= or budget=: it chooses layers by their time, the others by their "
            "error. Pass one of them"
        )
    if smoke:
        raise UsageError("min_speed= cannot be used with smoke=True: a smoke run measures no time")


def check_with_target(options: DeployOptions, target: Target) -> None:
    """Check that the target supports what the options ask for."""
    target.check_float_dtype(options.float_dtype)
    target.check_free_sizes(options.dynamic_axes)
    check_formulations(options.quantization, target)
    if options.min_speed is not None and (target.runtime is None or not find_runtime(target.runtime).profiles):
        raise UsageError(
            f"min_speed= cannot be used with target {target.name!r}: it has no runtime with a profiler, which measures "
            "the time of each layer"
        )


def choose_placement(options: DeployOptions) -> tuple[QuantConfig, Placement]:
    """Return the config with `speed_first` filled in, and the placement.

    Without a choice of the user, every layer is int8 with `strict`, which asks for that, and with a budget, which
    chooses each precision.
    """
    config, placement = options.quantization, options.placement
    needs_int8 = options.strict or options.budget is not None
    if placement is None:
        wants_speed = config.speed_first if config.speed_first is not None else not needs_int8
        placement = _default_placement() if wants_speed else "int8"
    elif placement != "int8" and (needs_int8 or config.speed_first is False):
        option = "budget=" if needs_int8 else "speed_first=False"
        if options.strict:
            option = "strict=True"
        raise UsageError(f"placement={placement!r} cannot be used with {option}: it leaves layers float for speed")
    is_speed_first = placement != "int8" if config.speed_first is None else config.speed_first
    return config.model_copy(update={"speed_first": is_speed_first}), placement


def _default_placement() -> Placement:
    value = os.environ.get(PLACEMENT_VARIABLE) or "measured"
    if value not in get_args(Placement):
        raise UsageError(f"{PLACEMENT_VARIABLE}={short_repr(value)}: {did_you_mean(value, get_args(Placement))}")
    return value  # type: ignore[return-value]  # checked


def check_installed(target: Target, *, allow_departure: bool) -> None:
    """Raise an error if the packages that write or verify the target's file are not installed."""
    find_format(target.format).check_installed()
    check_runtime_installed(target, allow_departure=allow_departure)


def check_runtime_installed(target: Target, *, allow_departure: bool) -> None:
    """Raise VerificationError if the target's runtime is not installed; with allow_departure=True only warn."""
    runtime = None if target.runtime is None else find_runtime(target.runtime)
    if runtime is None or runtime.is_installed:
        return
    reason = describe_missing(runtime).message
    if not allow_departure:
        raise VerificationError(
            f"target {target.name!r} is verified in its runtime, and {reason}. To write the file without verification, "
            "pass allow_departure=True (--allow-departure)"
        )
    warnings.warn(ScalepointWarning(f"{reason}. The file will not be verified"), stacklevel=user_level())


def _check_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """Return the model as a module; it must have parameters with values."""
    model = as_module(model) if isinstance(model, ExportedProgram) else unwrap_model(model)
    check_model(model)
    on_meta = [name for name, value in model.named_parameters() if value.is_meta]
    if on_meta:
        raise CaptureError(f"{on_meta[0]} is on the meta device and has no values: load the weights first")
    return model


def _check_example(model: nn.Module, inputs: tuple[Any, Any], dynamic_axes: Axes | None) -> tuple[Example, Axes]:
    """Return the example without inputs that the model does not have, and the dynamic axes of these inputs."""
    example = Example(*drop_extra_inputs(model, *inputs))
    check_example(model, example)
    return example, check_axes(dynamic_axes, get_named_inputs(model, *example)) if dynamic_axes else {}


def _check_data(data: Any, options: DeployOptions) -> Any:
    """Return the data, or [] for None, which is allowed only if activations stay float."""
    if data is None:
        if options.quantization.activation != FLOAT:
            raise UsageError(
                "calibration_data=None: pass batches of typical inputs. Only weight-only configs need no data, such as "
                "QuantConfig.weight_only('int4')"
            )
        return []
    check_data(data)
    for name in ("max_drop", "min_speed", "budget"):
        if getattr(options, name) is not None and isinstance(data, Iterator):
            raise UsageError(f"{name}= reads the data several times, an iterator only once: pass a list or a function")
    return data
