"""Calibration: data flows through, stubs watch, and then they know their parameters.

    smooth (a pass of its own, when enabled) -> reset -> observe every batch -> compute_parameters -> enable

Observers stream: memory does not depend on the number of batches. Modes, switches and the caller's batches are as
before afterwards, also when the data raises.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from scalepoint.errors import CalibrationError, NonFiniteError, ScalepointError, ScalepointWarning, UsageError, shown
from scalepoint.graph.modes import evaluating
from scalepoint.quantize.smooth import SmoothQuantObserver, observers_of
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize
from scalepoint.quantize.weighted import QuantizedWeighted

ForwardLoop = Callable[[nn.Module], Any]
LIMIT = 100_000  # batches of an iterator without a length: more are taken for an endless one


def calibrate(
    model: nn.Module,
    forward_loop: ForwardLoop | Iterable[Any],
    *,
    freeze_weights: bool = False,
    max_batches: int | None = None,
    on_unseen: Literal["error", "skip"] = "error",
    on_nan: Literal["error", "skip"] = "error",
    progress: bool | None = None,
) -> nn.Module:
    """Find the ranges of all activations, and switch fake quantization on. Returns the model.

    `forward_loop` is a function that runs data through the model it is given, or the data itself: an iterable of
    batches, each a tensor, a tuple or list of inputs (what comes after the model's own inputs, such as labels, is left
    away), or a dict of inputs by name. on_unseen="skip" leaves a stub that saw nothing as it is, float; on_nan="skip"
    leaves out batches whose inputs hold NaN or infinity, and tensors inside the model that do. The progress bar shows
    on a terminal unless `progress` says otherwise.
    """
    stubs = [module for module in model.modules() if isinstance(module, QuantStub)]
    weights = [module for module in model.modules() if isinstance(module, WeightFakeQuantize)]
    if not stubs and not weights:
        raise UsageError("this model has no quantizers: calibrate what insert_qdq made, not the float model")
    for choice, name in ((on_unseen, "on_unseen"), (on_nan, "on_nan")):
        if choice not in ("error", "skip"):
            raise UsageError(f"{name}={choice!r}: use 'error' or 'skip'")
    smoothing = [observer for observer in observers_of(model) if observer.enabled]
    _check_rereadable(forward_loop, smoothing)
    with evaluating(model), _quantizers_off(stubs, weights):
        run = _Run(model, forward_loop, max_batches, progress)
        run.skips_nan = on_nan == "skip"
        if smoothing:
            _smooth(run, smoothing)
        _observe(run, stubs, on_nan)
        _derive(run, stubs, on_unseen)
    for quantizer in (*stubs, *weights):
        quantizer.enabled = not (isinstance(quantizer, QuantStub) and quantizer.skipped_because)
    if freeze_weights:
        freeze(model)
    return model


def freeze(model: nn.Module) -> None:
    """Make the scales of all weights constants."""
    for module in model.modules():
        if isinstance(module, QuantizedWeighted):
            module.freeze()


class _Run:
    """One pass after another over the same data, counting what reached the model."""

    def __init__(self, model: nn.Module, data: Any, max_batches: int | None, progress: bool | None) -> None:
        self.model, self.data, self.max_batches = model, data, max_batches
        self.calls = 0
        self.is_inside = False
        self.skips_nan = False
        self.skipped: list[int] = []
        wanted = sys.stderr.isatty() if progress is None else progress
        self.console = Console(stderr=True, quiet=not wanted)

    def __call__(self, what: str) -> None:
        self.calls = 0
        self.is_inside = False
        self.skipped.clear()
        handle = self.model.register_forward_pre_hook(self._called)
        done = self.model.register_forward_hook(self._returned)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        try:
            with torch.no_grad(), Progress(*columns, console=self.console, transient=True) as bar:
                self._bar, self._task = bar, bar.add_task(what, total=_length(self.data, self.max_batches))
                if callable(self.data):
                    self.data(self.model)
                else:
                    self._feed()
        except ScalepointError:
            raise
        except Exception as error:
            error.add_note(f"calibration: batch {max(self.calls - 1, 0) if self.is_inside else self.calls}")
            raise
        finally:
            handle.remove()
            done.remove()

    def _called(self, module: nn.Module, inputs: Any) -> None:
        self.calls += 1
        self.is_inside = True
        self._bar.advance(self._task)

    def _returned(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.is_inside = False

    def _feed(self) -> None:
        for index, batch in enumerate(self.data):
            if self.max_batches is not None and index >= self.max_batches:
                break
            if index >= LIMIT and self.max_batches is None:
                raise CalibrationError(f"the data did not end after {LIMIT} batches: pass max_batches=")
            args, kwargs = inputs_of(batch, self.model)
            if self.skips_nan and not _is_finite((args, kwargs)):
                self.skipped.append(index)
                continue
            try:
                self.model(*args, **kwargs)
            except ScalepointError:
                raise
            except Exception as error:
                error.add_note(f"it was {_described(batch)}")
                raise


def _smooth(run: _Run, observers: Sequence[SmoothQuantObserver]) -> None:
    for observer in observers:
        observer.reset()
        observer.on_nan = "skip" if run.skips_nan else "error"
        observer.register_forward_hook()
    try:
        run("smoothing")
    finally:
        for observer in observers:
            observer.remove_hook()
    _check_reached(run, [observer.name for observer in observers])
    for observer in observers:
        observer.compute_smooth_scales()
        observer.enabled = False  # it is in the weights now


def _observe(run: _Run, stubs: Sequence[QuantStub], on_nan: Literal["error", "skip"]) -> None:
    for stub in stubs:
        stub.reset()
        stub.skipped_because = ""
        stub.calculator.on_nan = on_nan
        stub.calibrating = True
    try:
        run("calibrating")
    except NonFiniteError as error:
        error.args = (f"batch {run.calls - 1} of the calibration data: {error.args[0]}",)
        raise
    finally:
        for stub in stubs:
            stub.calibrating = False
    if stubs:
        _check_reached(run, [stub.name for stub in stubs])
    if run.skipped:
        listed = ", ".join(map(str, run.skipped[:5]))
        message = f"{len(run.skipped)} batches hold NaN or infinity and were left out: {listed}"
        warnings.warn(ScalepointWarning(message), stacklevel=3)


def _check_reached(run: _Run, names: Sequence[str]) -> None:
    if run.calls:
        return
    if callable(run.data):
        blind = f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names)
        raise CalibrationError(
            f"forward_loop never called the model it was given, so {blind} saw nothing: it must run the model of its "
            "argument, not the original"
        )
    if run.skipped:
        raise CalibrationError(
            f"all {len(run.skipped)} batches hold NaN or infinity: nothing is left to calibrate with"
        )
    raise CalibrationError("the calibration data is empty: 0 batches. A generator can be read only once")


def _derive(run: _Run, stubs: Sequence[QuantStub], on_unseen: str) -> None:
    unseen = [stub for stub in stubs if not stub.has_observed and not stub.quantizer.is_disabled()]
    if unseen and on_unseen == "error":
        names = ", ".join(f"{stub.name} (read by {', '.join(stub.consumers)})" for stub in unseen[:5])
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        raise CalibrationError(
            f"{len(unseen)} of {len(stubs)} stubs saw nothing in {run.calls} calls: {names}{more}. {_why(unseen)} Give "
            "data that reaches them, or leave them float: on_unseen='skip'"
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


def inputs_of(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model's inputs: labels and other extras that come after them are left away."""
    names, required = _input_names(model)
    if isinstance(batch, Mapping):
        missing = [name for name in required if name not in batch]
        if missing:
            raise CalibrationError(
                f"the batch has {', '.join(map(str, batch))}; the model also needs {', '.join(missing)}"
            )
        return (), {name: _tensor(batch[name]) for name in names if name in batch}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if len(batch) < len(required):
            raise CalibrationError(f"the batch has {len(batch)} inputs, the model takes {', '.join(names)}")
        return tuple(_tensor(value) for value in batch[: len(names)]), {}
    return (_tensor(batch),), {}


def _input_names(model: nn.Module) -> tuple[list[str], list[str]]:
    if isinstance(model, fx.GraphModule):
        signature = inspect.signature(model.forward)
    else:
        signature = inspect.signature(type(model).forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [each for name, each in signature.parameters.items() if each.kind in kinds and name != "self"]
    return [each.name for each in found], [each.name for each in found if each.default is inspect.Parameter.empty]


def _is_finite(inputs: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Tensor | int | float | bool | type(None) | list | tuple | Mapping):
        return value
    raise CalibrationError(f"a batch holds tensors or arrays, not {shown(value)}")


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor | np.ndarray):
        return f"{tuple(batch.shape)} {batch.dtype}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_described(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(_described, batch)) + ")"
    return shown(batch)


def _length(data: Any, max_batches: int | None) -> int | None:
    try:
        length = None if callable(data) else len(data)
    except TypeError:
        length = None
    return max_batches if length is None else length if max_batches is None else min(length, max_batches)


def _check_rereadable(data: Any, smoothing: Sequence[Any]) -> None:
    if not callable(data) and not isinstance(data, Iterable):
        raise UsageError(f"calibration takes a function or an iterable of batches, not {shown(data)}")
    if isinstance(data, Tensor | Mapping | str | bytes):
        raise UsageError(f"calibration takes an iterable of batches, not {type(data).__name__}: wrap it in a list")
    if smoothing and isinstance(data, Iterator):
        raise UsageError(
            "smoothing reads the data twice, an iterator gives it once: pass a list, a loader or a function"
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
