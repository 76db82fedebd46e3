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
from scalepoint.quantize.constant_data import ConstantData
from scalepoint.quantize.feeding import Data, Fed, check_data, feed, is_of_inference, is_split, length_of
from scalepoint.quantize.means import Means, take_back
from scalepoint.quantize.outliers import Factors, even_out, open_factors
from scalepoint.quantize.record import amend_record, has_record, record_of
from scalepoint.quantize.shared import merge_smoothing, merge_stubs, record
from scalepoint.quantize.smooth import SmoothQuantObserver, observers_of
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize, reader_names
from scalepoint.quantize.weighted import QuantizedWeighted
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
    corrects = _corrects(model, correct_bias, freeze_weights)
    smoothing = [observer for observer in observers_of(model) if observer.enabled]
    names = _migrations(model)
    check_data(forward_loop, passes=2 if smoothing or names else 1)
    if names and is_split(forward_loop):
        raise UsageError(
            f"migrations ({', '.join(names)}) look at the same data on every rank, this function or loader gives each "
            "its own: pass a list, or a loader without a DistributedSampler"
        )
    run = partial(feed, model, forward_loop, max_batches=max_batches, skip_nan=on_nan == "skip", progress=progress)
    factors = _factors(model, forward_loop)
    with eval_mode(model), _quantizers_off(stubs, weights):
        if names or smoothing or factors:
            _rewrite(model, run, max_batches, names, smoothing, factors, on_nan)
            for weight in weights:
                weight.unfreeze()  # it is another weight now
        means = Means(model) if stubs and corrects else None
        if stubs:
            constant = ConstantData(model, stubs)
            with constant.watching():
                fed = _observe(run, stubs, means, on_nan, on_unseen)
            amend_record(model, calibrated=(fed.calls, fed.samples), constant=_warned(constant.warning()))
        elif _needs_check(model, forward_loop):
            run("checking the data", only_first=True)
    _switch_on(stubs, weights)
    if freeze_weights:
        freeze(model)
    _correct(model, means, correct_bias)
    return model


def _warned(message: str) -> str:
    if message:
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
    return message


def _needs_check(model: nn.Module, data: Data) -> bool:
    """Whether data that calibrates nothing is run all the same: only weights quantized on request need none."""
    rows = record_of(model).coverage.operations if has_record(model) else ()
    return length_of(data) != 0 or any(row.is_for_speed for row in rows)


def _correct(model: nn.Module, means: Means | None, given: bool | None) -> None:
    if means is not None:
        means.correct()
    elif given is False:
        take_back(model)


def _switch_on(stubs: Sequence[QuantStub], weights: Sequence[WeightFakeQuantize]) -> None:
    for stub in stubs:
        stub.enabled = not stub.skipped_because
    for weight in weights:
        weight.enabled = True


@serialized
def freeze(model: nn.Module) -> None:
    """Make the scales of all weights constants.

    Args:
        model: A calibrated model.
    """
    for module in model.modules():
        if isinstance(module, QuantizedWeighted):
            module.freeze()


def _corrects(model: nn.Module, given: bool | None, is_frozen: bool) -> bool:
    """Weights that go on moving have no rounding to correct."""
    if given and not is_frozen:
        raise UsageError("correct_bias=True needs weights that no longer move: pass freeze_weights=True with it")
    said = given
    if said is None and has_record(model):
        said = record_of(model).config.correct_bias is not False
    return bool(said) and is_frozen


def _migrations(model: nn.Module) -> Sequence[str]:
    """What is still to be migrated; smooth_quant alone has a way of its own, with one pass."""
    record = record_of(model) if has_record(model) else None
    return record.config.migrations if record is not None and record.config.migrate and not record.migrated else ()


def _factors(model: nn.Module, data: Data) -> Sequence[Factors]:
    """Factors to be found; data that is read once has no pass for them, and ranks do not share rows."""
    return [] if isinstance(data, Iterator) or distributed.world_size() > 1 else open_factors(model)


def _rewrite(
    model: nn.Module,
    run: Callable[..., Fed],
    max_batches: int | None,
    names: Sequence[str],
    smoothing: Sequence[SmoothQuantObserver],
    factors: Sequence[Factors],
    on_nan: OnNan,
) -> None:
    if factors:  # then nothing else was asked for
        amend_record(model, migrated=even_out(factors, run))
        return
    if not names:
        _smooth(run, smoothing, on_nan)
        return
    from scalepoint.quantize.migrations import MAX_PROBE_BATCHES, MIGRATIONS, MigrationContext, collect_probes, migrate  # noqa: PLC0415

    assert isinstance(model, fx.GraphModule)  # noqa: S101  # it has a record
    few = MAX_PROBE_BATCHES if max_batches is None else min(MAX_PROBE_BATCHES, max_batches)
    with torch.inference_mode(is_of_inference(model)), torch.no_grad():
        scene = MigrationContext(model, run, collect_probes(model, partial(run, max_batches=few)), on_nan)
        amend_record(model, migrated=migrate(scene, [MIGRATIONS.find(name) for name in names]))


def _smooth(run: Callable[..., Fed], observers: Sequence[SmoothQuantObserver], on_nan: OnNan) -> None:
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


def _observe(
    run: Callable[..., Fed], stubs: Sequence[QuantStub], means: Means | None, on_nan: OnNan, on_unseen: str
) -> Fed:
    for stub in stubs:
        stub.reset()
        stub.skipped_because = ""
        stub.calculator.on_nan = on_nan
        stub.calibrating = True
    record(stubs, True)

    def merge() -> None:
        merge_stubs(stubs)
        if means is not None:
            means.merge()

    try:
        with means or nullcontext():
            fed = run("calibrating", merge=merge)
    finally:
        record(stubs, False)
        for stub in stubs:
            stub.calibrating = False
    if fed.skipped:
        listed = ", ".join(map(str, fed.skipped[:5]))
        message = f"{len(fed.skipped)} batches hold NaN or infinity and were left out: {listed}"
        warnings.warn(ScalepointWarning(message), stacklevel=3)
    _derive(fed.calls, stubs, on_unseen)
    return fed


def _derive(calls: int, stubs: Sequence[QuantStub], on_unseen: str) -> None:
    unseen = [stub for stub in stubs if not stub.has_observed and not stub.quantizer.is_disabled()]
    if unseen and on_unseen == "error":
        names = ", ".join(f"{stub.name} (read by {reader_names(stub.consumers)})" for stub in unseen[:5])
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        raise CalibrationError(
            f"{len(unseen)} of {len(stubs)} stubs saw nothing in {calls} calls: {names}{more}. {_why(unseen)} Give "
            "data that reaches them, or leave their layers float in the config; calibrate(on_unseen='skip') does that "
            "too"
        )
    for stub in stubs:
        if stub in unseen:
            stub.skipped_because = "calibration did not reach it"
        else:
            stub.compute_parameters()


def _why(unseen: Sequence[QuantStub]) -> str:
    reasons = {stub.quantizer.reason for stub in unseen if stub.quantizer.reason}
    skipped = sum(int(stub.calculator.skipped_batches) for stub in unseen)
    if skipped:
        return f"{skipped} batches held NaN or infinity."
    return (
        f"What came was nothing to observe: {'; '.join(sorted(reasons))}." if reasons else "No batch took that branch."
    )


@contextmanager
def _quantizers_off(stubs: Sequence[QuantStub], weights: Sequence[WeightFakeQuantize]) -> Iterator[None]:
    """Ranges are those of the float model; when something fails, the switches are as before."""
    before = [(each, each.enabled) for each in (*stubs, *weights)]
    for each, _ in before:
        each.enabled = False
    try:
        yield
    finally:
        for each, was in before:
            each.enabled = was
