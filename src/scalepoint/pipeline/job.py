"""Job: what a run of deploy has to do. `prepare_job` checks every argument before any work starts."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from scalepoint import distributed
from scalepoint.budget import Budget
from scalepoint.errors import CaptureError, ConfigError, ScalepointWarning, UsageError, VerificationError, short_repr
from scalepoint.formats import check_metadata, find_format
from scalepoint.graph.capture import as_inputs, as_module, check_model, unwrap_model
from scalepoint.graph.dynamic_axes import Axes, check_axes, get_named_inputs, parse_axes
from scalepoint.graph.example_inputs import check_example
from scalepoint.graph.user_traceback import user_level
from scalepoint.options import DeployOptions
from scalepoint.pipeline.accuracy import check_accuracy
from scalepoint.pipeline.inputs import DataSource, Example
from scalepoint.pipeline.model_metadata import read_library_metadata
from scalepoint.quantize import QuantConfig
from scalepoint.quantize.config import FLOAT
from scalepoint.quantize.feeding import check_data, own_inputs
from scalepoint.quantize.placement import check_formulations
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import describe_missing
from scalepoint.support.cpu import check_threads
from scalepoint.support.jsonable import to_jsonable
from scalepoint.targets import Target, find_target

Evaluate = Callable[[Any], float]
SMOKE_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what to make of it, and how well the file must do.

    Attributes:
        model: The float model; never changed.
        example: One set of inputs of the model.
        data: Calibration data.
        target: Where the file will run.
        config: Data types and granularity; `options.quantization` with deploy's defaults filled in.
        options: Everything else that was asked for.
        evaluate: The user's metric; None if there is none.
        metadata: What the file stores: what the model declares about itself, and the user's own.
        dynamic_axes: `options.dynamic_axes`, checked against the example.
        is_smoke: Whether this is a quick run that only looks for errors.
        progress: Show progress; None shows it on a terminal only.
    """

    model: nn.Module
    example: Example
    data: DataSource
    target: Target
    config: QuantConfig
    options: DeployOptions
    evaluate: Evaluate | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dynamic_axes: Axes = field(default_factory=dict)
    is_smoke: bool = False
    progress: bool | None = None

    @property
    def max_batches(self) -> int | None:
        """Batches of the data that are used; None for all."""
        asked = self.options.max_batches
        return min(asked or SMOKE_BATCHES, SMOKE_BATCHES) if self.is_smoke else asked

    @property
    def max_trials(self) -> int:
        return 1 if self.is_smoke else self.options.max_trials

    def for_smoke(self) -> "Job":
        """The quick version of this job: two batches, one trial, no timing. The options stay as they were asked."""
        smoke = replace(self, is_smoke=True)
        return replace(smoke, data=replace(self.data, max_batches=smoke.max_batches))


def prepare_job(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    calibration_data: Any,
    *,
    target: str | Target,
    config: Any,
    evaluate: Evaluate | None,
    kwargs: Mapping[str, Any] | None,
    progress: bool | None,
    smoke: bool,
    values: Mapping[str, Any],
) -> Job:
    """Check every argument of deploy.

    Args:
        model: See deploy, as for the other arguments up to `progress`.
        values: The other options of deploy, by name.
        smoke: Whether the job will be run as `for_smoke`; some options cannot be.
    """
    check_accuracy(values["accuracy"])
    _check_data_and_metric(calibration_data, evaluate, values["max_drop"])
    budget = _build_budget(values["budget"], values["max_drop"], calibration_data)
    if budget is not None:
        from scalepoint.allocation import check_choices  # noqa: PLC0415

        check_choices(values["choices"])
    model, checked_target = _check_model(model), find_target(target, values["cpu"])
    example, axes = _check_example(checked_target, model, as_inputs(example_inputs, kwargs), values["dynamic_axes"])
    _check_min_speed(values, calibration_data, checked_target, smoke=smoke)
    quantization = fill_speed_first(QuantConfig.build(config), strict=values["strict"], has_budget=budget is not None)
    check_formulations(quantization, checked_target)
    checked_target.check_float_dtype(values["float_dtype"])
    check_metadata(values["metadata"])
    checked = {"target": checked_target.name, "budget": budget, "dynamic_axes": axes, "quantization": quantization}
    try:
        options = DeployOptions.model_validate({**values, **checked})
    except ConfigError as error:
        raise UsageError(error.args[0]) from error
    check_threads(options.threads)
    data = DataSource(_check_data_is_needed(calibration_data, quantization), options.max_batches)
    if options.accuracy is not None and not data.is_rereadable:
        raise UsageError(
            f"accuracy={options.accuracy!r} reads the calibration data once more, and there is none, or an iterator "
            "gives it only once: pass a list, a loader or a function"
        )
    metadata = to_jsonable({**read_library_metadata(model), **(values["metadata"] or {})})
    check_metadata(metadata)
    distributed.run_on_main(
        "looking for the runtime",
        lambda: check_installed(checked_target, allow_departure=options.allow_departure),
    )
    return Job(
        model=model,
        example=example,
        data=data,
        target=checked_target,
        config=quantization,
        options=options,
        evaluate=evaluate,
        metadata=metadata,
        dynamic_axes=axes,
        progress=progress,
    )


def fill_speed_first(config: QuantConfig, *, strict: bool, has_budget: bool) -> QuantConfig:
    """Fill in `speed_first`: layers that int8 makes slower stay float, unless the user wants all of them quantized
    (strict) or a budget decides what every layer gets."""
    if config.speed_first is not None:
        return config
    return config.model_copy(update={"speed_first": not strict and not has_budget})


def check_installed(target: Target, *, allow_departure: bool) -> None:
    """Refuse a target whose file cannot be written or verified here, before any work."""
    find_format(target.format).check_installed()
    check_runtime_installed(target, allow_departure=allow_departure)


def check_runtime_installed(target: Target, *, allow_departure: bool) -> None:
    """Refuse a target whose runtime is not installed; with allow_departure=True only warn."""
    runtime = None if target.runtime is None else find_runtime(target.runtime)
    if runtime is None or runtime.is_installed:
        return
    why = describe_missing(runtime).message
    if not allow_departure:
        raise VerificationError(
            f"target {target.name!r} is verified in its runtime, and {why}. allow_departure=True (--allow-departure) "
            "writes the file without"
        )
    warnings.warn(ScalepointWarning(f"{why}. The file will not be verified"), stacklevel=user_level())


def _check_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """The module itself; it must have shapes and values."""
    model = as_module(model) if isinstance(model, ExportedProgram) else unwrap_model(model)
    check_model(model)
    on_meta = [name for name, value in model.named_parameters() if value.is_meta]
    if on_meta:
        raise CaptureError(f"{on_meta[0]} is on the meta device, without values: load the weights first")
    return model


def _check_example(
    target: Target, model: nn.Module, inputs: tuple[Any, Any], dynamic_axes: object
) -> tuple[Example, Axes]:
    """The example as the model takes it, and its dynamic axes."""
    example, axes = Example(*own_inputs(model, *inputs)), parse_axes(dynamic_axes)
    check_example(model, example)
    target.check_free_sizes(axes)
    return example, check_axes(axes, get_named_inputs(model, *example)) if axes else axes


def _check_data_and_metric(data: Any, evaluate: Any, max_drop: float | None) -> None:
    if data is not None:
        check_data(data)
    if evaluate is not None and not callable(evaluate):
        raise UsageError(f"evaluate= is a function of the model that gives a number, not {short_repr(evaluate)}")
    if max_drop is not None and evaluate is None:
        raise UsageError("max_drop= needs evaluate=: the metric that must not drop")
    if max_drop is not None and isinstance(data, Iterator):
        raise UsageError(
            "max_drop= calibrates several times, an iterator gives its data once: pass a list or a function"
        )


def _check_data_is_needed(data: Any, config: QuantConfig) -> Any:
    """Refuse None unless activations stay float: then no data is needed."""
    if data is not None:
        return data
    if config.activation != FLOAT:
        raise UsageError(
            "calibration_data=None: give batches like those that the model will meet. Only weight-only configs need no "
            "data, such as QuantConfig.weight_only('int4')"
        )
    return []


def _build_budget(budget: Any, max_drop: float | None, data: Any) -> Budget | None:
    if budget is None:
        return None
    if max_drop is not None:
        raise UsageError("budget= says how small or fast, max_drop= how accurate: give one of them")
    if isinstance(data, Iterator):
        raise UsageError("budget= reads the data several times, an iterator gives it once: pass a list or a function")
    return Budget.build(budget)


def _check_min_speed(values: Mapping[str, Any], data: Any, target: Target, *, smoke: bool) -> None:
    min_speed = values["min_speed"]
    if min_speed is None:
        return
    if values["max_drop"] is not None or values["budget"] is not None:
        raise UsageError(
            "min_speed= makes float what loses time, max_drop= and budget= choose by error: give one of them"
        )
    if isinstance(data, Iterator):
        raise UsageError(
            "min_speed= calibrates several times, an iterator gives its data once: pass a list or a function"
        )
    if smoke:
        raise UsageError("min_speed= is measured in the runtime, and smoke=True times nothing")
    if target.runtime is None or not find_runtime(target.runtime).profiles:
        raise UsageError(
            f"min_speed= is measured in the runtime, and {target.name} has no runtime here that tells the time of its "
            "nodes"
        )
