"""Calibration: data flows through, stubs watch, and then they know their parameters.

    migrate or smooth (passes of their own, when asked for)
    reset -> observe every batch -> compute_parameters -> enable

Observers stream: memory does not depend on the number of batches. Modes, switches and the caller's batches are as
before afterwards, also when the data raises.
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
from scalepoint.quantize.bias_correction import BiasCorrection, remove_bias_correction
from scalepoint.quantize.constant_data import ConstantDataCheck
from scalepoint.quantize.feeding import (
    Data,
    FeedResult,
    check_data,
    count_batches,
    feed_data,
    is_split_across_ranks,
    was_created_in_inference_mode,
)
from scalepoint.quantize.merge_ranks import merge_ranges, merge_smoothing, set_batch_recording
from scalepoint.quantize.outlier_scaling import ChannelFactors, find_unset_factors, scale_outlier_channels
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub, WeightFakeQuantize, join_consumer_names
from scalepoint.quantize.record import has_record, record_of, update_record
from scalepoint.quantize.smooth import SmoothQuantObserver, find_smoothing_observers
from scalepoint.support.torch_state import serialized

OnNan = Literal["error", "skip"]


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
        raise UsageError("this model has no quantizers: calibrate what insert_qdq made, not the float model")
    for choice, name in ((on_unseen, "on_unseen"), (on_nan, "on_nan")):
        if choice not in ("error", "skip"):
            raise UsageError(f"{name}={choice!r}: use 'error' or 'skip'")
    corrects = _should_correct_bias(model, correct_bias, freeze_weights)
    smoothing = [observer for observer in find_smoothing_observers(model) if observer.enabled]
    names = _get_pending_migrations(model)
    check_data(forward_loop, passes=2 if smoothing or names else 1)
    if names and is_split_across_ranks(forward_loop):
        raise UsageError(
            f"migrations ({', '.join(names)}) look at the same data on every rank, this function or loader gives each "
            "its own: pass a list, or a loader without a DistributedSampler"
        )
    run = partial(feed_data, model, forward_loop, max_batches=max_batches, skip_nan=on_nan == "skip", progress=progress)
    factors = _find_unset_factors(model, forward_loop)
    with eval_mode(model), _quantizers_disabled(stubs, weights):
        if names or smoothing or factors:
            _rewrite_weights(model, run, max_batches, names, smoothing, factors, on_nan)
            for weight in weights:
                weight.unfreeze()  # it is another weight now
        means = BiasCorrection(model) if stubs and corrects else None
        if stubs:
            constant = ConstantDataCheck(model, stubs)
            with constant.observing():
                fed = _observe_data(run, stubs, means, on_nan, on_unseen)
            update_record(model, calibrated=(fed.calls, fed.samples), constant=_warn_constant_data(constant.warning()))
        elif _should_check_data(model, forward_loop):
            run("checking the data", only_first=True)
    _enable_quantizers(stubs, weights)
    if freeze_weights:
        freeze(model)
    _update_bias_correction(model, means, correct_bias)
    return model


def _warn_constant_data(message: str) -> str:
    if message:
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
    return message


def _should_check_data(model: nn.Module, data: Data) -> bool:
    """Whether data that calibrates nothing is run all the same: only weights quantized on request need none."""
    rows = record_of(model).coverage.operations if has_record(model) else ()
    return count_batches(data) != 0 or any(row.is_for_speed for row in rows)


def _update_bias_correction(model: nn.Module, means: BiasCorrection | None, given: bool | None) -> None:
    if means is not None:
        means.correct()
    elif given is False:
        remove_bias_correction(model)


def _enable_quantizers(stubs: Sequence[QuantStub], weights: Sequence[WeightFakeQuantize]) -> None:
    for stub in stubs:
        stub.enabled = not stub.skip_reason
    for weight in weights:
        weight.enabled = True


@serialized
def freeze(model: nn.Module) -> None:
    """Make the scales of all weights constants.

    Args:
        model: A calibrated model.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.freeze()


def _should_correct_bias(model: nn.Module, given: bool | None, is_frozen: bool) -> bool:
    """Weights that go on moving have no rounding to correct."""
    if given and not is_frozen:
        raise UsageError("correct_bias=True needs weights that no longer move: pass freeze_weights=True with it")
    said = given
    if said is None and has_record(model):
        said = record_of(model).config.correct_bias is not False
    return bool(said) and is_frozen


def _get_pending_migrations(model: nn.Module) -> Sequence[str]:
    """What is still to be migrated; smooth_quant alone has a way of its own, with one pass."""
    record = record_of(model) if has_record(model) else None
    return record.config.migrations if record is not None and record.config.migrate and not record.migrated else ()


def _find_unset_factors(model: nn.Module, data: Data) -> Sequence[ChannelFactors]:
    """Factors to be found; data that is read once has no pass for them, and ranks do not share rows."""
    return [] if isinstance(data, Iterator) or distributed.world_size() > 1 else find_unset_factors(model)


def _rewrite_weights(
    model: nn.Module,
    run: Callable[..., FeedResult],
    max_batches: int | None,
    names: Sequence[str],
    smoothing: Sequence[SmoothQuantObserver],
    factors: Sequence[ChannelFactors],
    on_nan: OnNan,
) -> None:
    if factors:  # then nothing else was asked for
        update_record(model, migrated=scale_outlier_channels(factors, run))
        return
    if not names:
        _smooth(run, smoothing, on_nan)
        return
    from scalepoint.quantize.migrations import MAX_PROBE_BATCHES, MIGRATIONS, MigrationContext, collect_probes, migrate  # noqa: PLC0415

    assert isinstance(model, fx.GraphModule)  # noqa: S101  # it has a record
    few = MAX_PROBE_BATCHES if max_batches is None else min(MAX_PROBE_BATCHES, max_batches)
    with torch.inference_mode(was_created_in_inference_mode(model)), torch.no_grad():
        scene = MigrationContext(model, run, collect_probes(model, partial(run, max_batches=few)), on_nan)
        update_record(model, migrated=migrate(scene, [MIGRATIONS.find(name) for name in names]))


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
        observer.enabled = False  # it is in the weights now


def _observe_data(
    run: Callable[..., FeedResult],
    stubs: Sequence[QuantStub],
    means: BiasCorrection | None,
    on_nan: OnNan,
    on_unseen: str,
) -> FeedResult:
    for stub in stubs:
        stub.reset()
        stub.skip_reason = ""
        stub.calculator.on_nan = on_nan
        stub.calibrating = True
    set_batch_recording(stubs, True)

    def merge() -> None:
        merge_ranges(stubs)
        if means is not None:
            means.merge()

    try:
        with means or nullcontext():
            fed = run("calibrating", merge=merge)
    finally:
        set_batch_recording(stubs, False)
        for stub in stubs:
            stub.calibrating = False
    if fed.skipped:
        listed = ", ".join(map(str, fed.skipped[:5]))
        message = f"{len(fed.skipped)} batches hold NaN or infinity and were left out: {listed}"
        warnings.warn(ScalepointWarning(message), stacklevel=3)
    _compute_parameters(fed.calls, stubs, on_unseen)
    return fed


def _compute_parameters(calls: int, stubs: Sequence[QuantStub], on_unseen: str) -> None:
    unseen = [stub for stub in stubs if not stub.has_observed and not stub.quantizer.is_disabled()]
    if unseen and on_unseen == "error":
        names = ", ".join(f"{stub.name} (read by {join_consumer_names(stub.consumers)})" for stub in unseen[:5])
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        raise CalibrationError(
            f"{len(unseen)} of {len(stubs)} quantizers observed nothing in {calls} calls: {names}{more}. "
            f"{_explain_unseen(unseen)} Give data that reaches them, leave their layers float in the config, or pass "
            "on_unseen='skip' to calibrate()"
        )
    for stub in stubs:
        if stub in unseen:
            stub.skip_reason = "calibration did not reach it"
        else:
            stub.compute_parameters()


def _explain_unseen(unseen: Sequence[QuantStub]) -> str:
    reasons = {stub.quantizer.reason for stub in unseen if stub.quantizer.reason}
    skipped = sum(int(stub.calculator.skipped_batches) for stub in unseen)
    if skipped:
        return f"{skipped} batches held NaN or infinity."
    return (
        f"What came was nothing to observe: {'; '.join(sorted(reasons))}." if reasons else "No batch took that branch."
    )


@contextmanager
def _quantizers_disabled(stubs: Sequence[QuantStub], weights: Sequence[WeightFakeQuantize]) -> Iterator[None]:
    """Ranges are those of the float model; when something fails, the switches are as before."""
    before = [(each, each.enabled) for each in (*stubs, *weights)]
    for each, _ in before:
        each.enabled = False
    try:
        yield
    finally:
        for each, was in before:
            each.enabled = was
