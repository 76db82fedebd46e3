"""Calibration: run the data through the model, collect the range of every activation, compute scales and zero points.

    rewrite weights (migrations, smoothing or outlier scaling, each with passes of its own, if requested)
    reset -> observe every batch -> compute_parameters -> enable fake quantization

Observers keep running statistics: memory does not depend on the number of batches. If the data raises an error, modes
and switches of the model are restored.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from torch import fx, nn

from scalepoint import distributed
from scalepoint.errors import CalibrationError, ScalepointWarning, UsageError
from scalepoint.graph.module_state import eval_mode
from scalepoint.graph.user_traceback import user_level
from scalepoint.quantize.batches import Data, check_data, count_batches
from scalepoint.quantize.bias_correction import BiasCorrection, remove_bias_correction
from scalepoint.quantize.constant_data import ConstantDataCheck
from scalepoint.quantize.feeding import FeedResult, feed_data, is_split_across_ranks, was_created_in_inference_mode
from scalepoint.quantize.merge_ranks import merge_ranges, merge_smoothing, set_batch_recording
from scalepoint.quantize.outlier_scaling import ChannelFactors, find_unset_factors, scale_outlier_channels
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize, join_consumer_names
from scalepoint.quantize.record import has_record, is_float_for_speed, record_of, update_record
from scalepoint.quantize.smooth import SmoothQuantObserver, find_smoothing_observers
from scalepoint.support.torch_state import serialized

OnNan = Literal["error", "skip"]
MAX_LISTED = 5  # names and batch numbers in a message


@serialized
@distributed.participating()
def calibrate(
    model: nn.Module,
    forward_loop: Data,
    *,
    freeze_weights: bool = False,
    max_batches: int | None = None,
    on_unseen: Literal["error", "skip"] = "error",
    on_nan: OnNan = "error",
    progress: bool | None = None,
    correct_bias: bool | None = None,
) -> nn.Module:
    """Run calibration data through a model, set the ranges of its activations and switch fake quantization on.

    Args:
        model: A model that `insert_qdq` returned. It is changed in place.
        forward_loop: The data: an iterable of batches, each a tensor, a tuple or list of inputs (extra entries such as
            labels are ignored) or a dict of inputs by name. Or a function that gets the model and runs data through it.
        freeze_weights: Make the scales of the weights constants as well.
        max_batches: Stop after this many batches.
        on_unseen: What to do with a quantizer that no data reached: raise an error, or leave its tensor float ("skip").
        on_nan: What to do with batches, and tensors inside the model, that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.
        correct_bias: Add to the biases what rounding the weights changes in the means of the outputs, measured in the
            same pass. None follows the config (True by default) and applies to frozen weights only. False removes the
            correction of an earlier calibration.

    Returns:
        The same model.

    Raises:
        NotObservedError: No data reached a quantizer, and `on_unseen` is "error".
    """
    stubs = [module for module in model.modules() if isinstance(module, QuantStub)]
    weights = [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]
    if not stubs and not weights:
        if is_float_for_speed(model):
            return model
        raise UsageError("this model has no quantizers: pass the model that insert_qdq returned, not the float model")
    _check_choices(on_unseen=on_unseen, on_nan=on_nan)
    corrects_bias = _should_correct_bias(model, correct_bias, freeze_weights)
    smoothing = [observer for observer in find_smoothing_observers(model) if observer.enabled]
    migrations = _get_pending_migrations(model)
    check_data(forward_loop, passes=2 if smoothing or migrations else 1)
    if migrations:
        _check_same_data_on_ranks(forward_loop, migrations)
    run = partial(feed_data, model, forward_loop, max_batches=max_batches, skip_nan=on_nan == "skip", progress=progress)
    factors = _find_unset_factors(model, forward_loop)
    with eval_mode(model), _quantizers_disabled(stubs, weights):
        if factors:  # insert_qdq adds them only to models without migrations and smoothing
            update_record(model, migrated=scale_outlier_channels(factors, run))
        elif migrations:
            _migrate(model, run, max_batches, migrations, on_nan)
        elif smoothing:
            _smooth(run, smoothing, on_nan)
        if factors or migrations or smoothing:
            for weight in weights:
                weight.unfreeze()  # an earlier calibration computed its scale from the old weight
        bias_correction = BiasCorrection(model) if stubs and corrects_bias else None
        if stubs:
            constant_data = ConstantDataCheck(model, stubs)
            with constant_data.observing():
                fed = _observe_data(run, stubs, bias_correction, on_nan, on_unseen)
            constant = _warn_about_constant_data(constant_data)
            update_record(model, calibrated=(fed.calls, fed.samples), constant=constant)
        elif _should_check_data(model, forward_loop):
            run("checking the data", only_first=True)
    for stub in stubs:
        stub.enabled = not stub.skip_reason
    for weight in weights:
        weight.enabled = True
    if freeze_weights:
        freeze(model)
    if bias_correction is not None:
        bias_correction.correct()
    elif correct_bias is False:
        remove_bias_correction(model)
    return model


@serialized
def freeze(model: nn.Module) -> None:
    """Make the scales of all weights constants.

    Args:
        model: A calibrated model.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.freeze()


def _check_choices(**choices: str) -> None:
    for name, value in choices.items():
        if value not in ("error", "skip"):
            raise UsageError(f"{name} must be 'error' or 'skip', got {value!r}")


def _should_correct_bias(model: nn.Module, correct_bias: bool | None, is_frozen: bool) -> bool:
    """Return whether to correct biases. Weights that are not frozen can still change, and their rounding error too."""
    if correct_bias and not is_frozen:
        raise UsageError("correct_bias=True can only be used with frozen weights: pass freeze_weights=True as well")
    if correct_bias is None and has_record(model):
        correct_bias = record_of(model).config.correct_bias is not False
    return bool(correct_bias) and is_frozen


def _get_pending_migrations(model: nn.Module) -> Sequence[str]:
    """Return the names of migrations to run. `smooth_quant=` alone is not one: it has a faster path with one pass."""
    record = record_of(model) if has_record(model) else None
    if record is None or not record.config.migrate or record.migrated:
        return ()
    return record.config.migrations


def _check_same_data_on_ranks(data: Data, migrations: Sequence[str]) -> None:
    if is_split_across_ranks(data):
        raise UsageError(
            f"migrations ({', '.join(migrations)}) need the same data on every rank, but this function or loader gives "
            "each rank its own part: pass a list, or a loader without a DistributedSampler"
        )


def _find_unset_factors(model: nn.Module, data: Data) -> Sequence[ChannelFactors]:
    """Return the outlier factors to compute.

    They need a pass over the data of their own, which an iterator does not allow, and rows of all batches, which are
    not gathered from several ranks.
    """
    if isinstance(data, Iterator) or distributed.world_size() > 1:
        return []
    return find_unset_factors(model)


@contextmanager
def _quantizers_disabled(stubs: Sequence[QuantStub], weights: Sequence[WeightFakeQuantize]) -> Iterator[None]:
    """Disable all quantizers, so that ranges are those of the float model, and restore their switches afterwards."""
    was_enabled = [(quantizer, quantizer.enabled) for quantizer in (*stubs, *weights)]
    for quantizer, _ in was_enabled:
        quantizer.enabled = False
    try:
        yield
    finally:
        for quantizer, enabled in was_enabled:
            quantizer.enabled = enabled


def _migrate(
    model: nn.Module, run: Callable[..., FeedResult], max_batches: int | None, names: Sequence[str], on_nan: OnNan
) -> None:
    from scalepoint.quantize.migrations import (  # noqa: PLC0415
        MAX_PROBE_BATCHES,
        MIGRATIONS,
        MigrationContext,
        collect_probes,
        migrate,
    )

    assert isinstance(model, fx.GraphModule)  # noqa: S101  # it has a record
    probe_batches = MAX_PROBE_BATCHES if max_batches is None else min(MAX_PROBE_BATCHES, max_batches)
    with torch.inference_mode(was_created_in_inference_mode(model)), torch.no_grad():
        probes = collect_probes(model, partial(run, max_batches=probe_batches))
        context = MigrationContext(model, run, probes, on_nan)
        update_record(model, migrated=migrate(context, [MIGRATIONS.find(name) for name in names]))


def _smooth(run: Callable[..., FeedResult], observers: Sequence[SmoothQuantObserver], on_nan: OnNan) -> None:
    for observer in observers:
        observer.reset()
        observer.on_nan = on_nan
        observer.register_forward_hook()
    try:
        run("smoothing", merge=lambda: merge_smoothing(observers))
    finally:
        for observer in observers:
            observer.remove_hook()
    for observer in observers:
        observer.compute_smooth_scales()
        observer.enabled = False  # the scales are part of the weights now


def _observe_data(
    run: Callable[..., FeedResult],
    stubs: Sequence[QuantStub],
    bias_correction: BiasCorrection | None,
    on_nan: OnNan,
    on_unseen: str,
) -> FeedResult:
    for stub in stubs:
        stub.reset()
        stub.skip_reason = ""
        stub.calculator.on_nan = on_nan
        stub.calibrating = True
    set_batch_recording(stubs, enabled=True)

    def merge() -> None:
        merge_ranges(stubs)
        if bias_correction is not None:
            bias_correction.merge()

    try:
        with bias_correction or nullcontext():
            fed = run("calibrating", merge=merge)
    finally:
        set_batch_recording(stubs, enabled=False)
        for stub in stubs:
            stub.calibrating = False
    if fed.skipped:
        first_skipped = ", ".join(map(str, fed.skipped[:MAX_LISTED]))
        message = f"{len(fed.skipped)} batches contain NaN or infinity and were skipped: {first_skipped}"
        warnings.warn(ScalepointWarning(message), stacklevel=3)
    _compute_parameters(fed.calls, stubs, on_unseen)
    return fed


def _compute_parameters(calls: int, stubs: Sequence[QuantStub], on_unseen: str) -> None:
    unseen = [stub for stub in stubs if not stub.has_observed and not stub.quantizer.is_disabled()]
    if unseen and on_unseen == "error":
        readers = (f"{stub.name} (read by {join_consumer_names(stub.consumers)})" for stub in unseen[:MAX_LISTED])
        names = ", ".join(readers)
        more = f" and {len(unseen) - MAX_LISTED} more" if len(unseen) > MAX_LISTED else ""
        raise CalibrationError(
            f"{len(unseen)} of {len(stubs)} quantizers observed nothing in {calls} calls: {names}{more}. "
            f"{_explain_unseen(unseen)} Pass data that reaches them, leave their layers float in the config, or use "
            "calibrate(on_unseen='skip')"
        )
    for stub in stubs:
        if stub in unseen:
            stub.skip_reason = "calibration did not reach it"
        else:
            stub.compute_parameters()


def _explain_unseen(unseen: Sequence[QuantStub]) -> str:
    skipped_batches = sum(int(stub.calculator.skipped_batches) for stub in unseen)
    if skipped_batches:
        return f"{skipped_batches} batches contained NaN or infinity."
    reasons = {stub.quantizer.reason for stub in unseen if stub.quantizer.reason}
    if reasons:
        return f"They got values that cannot be observed: {'; '.join(sorted(reasons))}."
    return "No batch reached that branch of the model."


def _warn_about_constant_data(constant_data: ConstantDataCheck) -> str:
    message = constant_data.make_warning()
    if message:
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
    return message


def _should_check_data(model: nn.Module, data: Data) -> bool:
    """Return whether to run the first batch of data although no activation needs it.

    Empty data is allowed if only weights are quantized because the user asked for that.
    """
    rows = record_of(model).coverage.operations if has_record(model) else ()
    return count_batches(data) != 0 or any(row.is_for_speed for row in rows)
