"""Runs data through a model, for calibration, smoothing, comparison, sensitivity and tuning.

    batches     an iterable; see batches.py
    function    called with the model; it runs data of its choice through the model

Both end after `max_batches` calls of the model.

If the caller passes `merge`, ranks share the data: batch i goes to rank i modulo the number of ranks. A function, and a
loader with a DistributedSampler, already give each rank its own part. Limits, counts and errors are over all ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import BatchNote, CalibrationError, NonFiniteError, ScalepointError, TensorError, UsageError
from scalepoint.graph.example_inputs import describe_ids_out_of_range
from scalepoint.quantize.batches import (
    Data,
    check_data,
    count_batches,
    describe_batch,
    describe_captured_inputs,
    differs_from_capture,
    iterate_batches,
    to_model_inputs,
)
from scalepoint.support.progress import RunningPhase, phase
from scalepoint.support.torch_state import caller_dtype, library_dtype, serialized

MAX_BATCHES = 100_000  # an iterator that yields more batches counts as endless
NAN_HINT = "The model was not changed. Fix the data or the model, or skip such batches with on_nan='skip'"


@dataclass
class FeedResult:
    """Counts of what ran through the model."""

    calls: int = 0
    samples: int = 0  # size of the first axis of the first tensor, summed over the calls
    skipped: list[int] = field(default_factory=list)  # indices of batches with NaN or infinity in their inputs


class _StopFeeding(BaseException):
    """Raised inside the user's function to stop it after `max_batches` calls.

    A BaseException, so that `except Exception` in that function does not catch it.
    """


@serialized
def feed_data(
    model: nn.Module,
    data: Data,
    activity: str,
    *,
    max_batches: int | None = None,
    skip_nan: bool = False,
    progress: bool | None = None,
    merge: Callable[[], None] | None = None,
    only_first: bool = False,
) -> FeedResult:
    """Run the data through the model, without gradients.

    Args:
        model: The model to call.
        data: Batches, or a function that gets the model.
        activity: Purpose of the run, such as "calibrating". Appears in the progress bar and in errors.
        max_batches: Stop after this many batches.
        skip_nan: Skip batches that contain NaN or infinity.
        progress: Show a progress bar. None shows it on a terminal only.
        merge: Called on every rank after each has run its part of the data. Without it every rank runs all data.
        only_first: Run the first batch only, to check the data. NaN in its inputs or outputs is a NonFiniteError.

    Returns:
        Counts over all ranks.

    Raises:
        CalibrationError: The data is empty, or a batch does not fit the model. Errors name the batch.
    """
    feed_rank = partial(
        _feed_rank, model, data, activity, max_batches=max_batches, skip_nan=skip_nan, only_first=only_first
    )
    if merge is None:
        progress = progress if distributed.is_main() else False
        with distributed.single_process():
            return feed_rank(progress=progress)
    result = feed_rank(progress=progress)
    if distributed.world_size() > 1:
        merge()
    return result


def _feed_rank(
    model: nn.Module,
    data: Data,
    activity: str,
    *,
    max_batches: int | None,
    skip_nan: bool,
    progress: bool | None,
    only_first: bool,
) -> FeedResult:
    """Run this rank's part of the data; return counts over all ranks."""
    result = FeedResult()
    with distributed.phase(activity) as step:
        check_data(data)
        _check_same_order_on_ranks(data)
        max_calls = None if max_batches is None else _count_rank_batches(max_batches)
        expected_calls = _count_expected_batches(data, max_batches)
        if only_first:
            max_calls = expected_calls = 1
        with phase(activity, total=expected_calls, show=progress) as progress_phase:
            counter = _CallCounter(result, max_calls, progress_phase, rejects_nan=only_first)
            _feed_with_hooks(model, data, activity, counter, max_batches, skip_nan, step)
        step.value = [result.calls, result.samples, result.skipped]
    total = FeedResult()
    for calls, samples, skipped in step.values:  # of every rank
        total.calls += calls
        total.samples += samples
        total.skipped += skipped
    total.skipped.sort()
    _check_model_was_called(total, data, activity)
    return total


def _feed_with_hooks(
    model: nn.Module,
    data: Data,
    activity: str,
    counter: "_CallCounter",
    max_batches: int | None,
    skip_nan: bool,
    step: distributed.Phase,
) -> None:
    handles = [
        model.register_forward_pre_hook(counter.before_call, with_kwargs=True),
        model.register_forward_hook(counter.after_success),
        model.register_forward_hook(counter.after_call, always_call=True),  # also after an error
    ]
    try:
        with torch.inference_mode(was_created_in_inference_mode(model)), torch.no_grad():
            if callable(data):
                with caller_dtype():
                    data(model)
            else:
                _feed_batches(model, data, counter, max_batches, skip_nan)
    except _StopFeeding:
        pass
    except Exception as error:
        step.position = counter.batch
        if isinstance(error, NonFiniteError):
            error.args = (f"batch {counter.batch} of the data: {counter.describe_nan_origin()}{error.args[0]}",)
        elif not isinstance(error, ScalepointError):
            if message := describe_ids_out_of_range(error, model, counter.inputs):
                raise CalibrationError(f"batch {counter.batch} of the data: {message}") from error
            error.add_note(BatchNote(f"{activity}: batch {counter.batch}"))
        raise
    finally:
        for handle in handles:
            handle.remove()


def _feed_batches(
    model: nn.Module, data: Iterable[Any], counter: "_CallCounter", max_batches: int | None, skip_nan: bool
) -> None:
    batches = iterate_batches(_select_rank_batches(data))
    limit = MAX_BATCHES if max_batches is None else max_batches
    for index in distributed.shard(range(limit + distributed.world_size())):
        counter.batch_index = index
        if (index >= limit and max_batches is not None) or counter.is_finished:
            return  # return before next(): a batch over the limit must not be read
        try:
            batch = next(batches)
        except StopIteration:
            return
        if index >= MAX_BATCHES:
            raise CalibrationError(f"the data did not end after {MAX_BATCHES} batches: pass max_batches=")
        try:
            args, kwargs = to_model_inputs(batch, model)
        except TensorError as error:
            raise TensorError(f"batch {index} of the data: {error.args[0]}") from error
        if skip_nan and not _is_finite((args, kwargs)):
            counter.result.skipped.append(index)
            continue
        try:
            model(*args, **kwargs)
        except ScalepointError:
            raise
        except Exception as error:
            description = f"it was {describe_batch(batch)}{describe_captured_inputs(model)}"
            if not differs_from_capture(model, args, kwargs):
                error.add_note(BatchNote(description))
                raise
            cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise CalibrationError(
                f"batch {index} of the data is unlike the example: {description}. {cause.rstrip('. ')}. Pass batches "
                "with the sizes and dtypes of the example"
            ) from error


def _count_expected_batches(data: Data, max_batches: int | None) -> int | None:
    """Return how many batches this rank will run; None if unknown."""
    max_rank_batches = None if max_batches is None else _count_rank_batches(max_batches)
    if is_split_across_ranks(data):
        return count_batches(data, max_rank_batches)
    length = count_batches(data, max_batches)
    return None if length is None else _count_rank_batches(length)


def _count_rank_batches(count: int) -> int:
    """Return how many of `count` batches this rank runs."""
    return len(distributed.shard(range(count)))


def _select_rank_batches(data: Iterable[Any]) -> Iterable[Any]:
    """Return the batches of this rank: all of data that is split already, otherwise every n-th."""
    size = distributed.world_size()
    if size == 1 or is_split_across_ranks(data):
        return data
    if isinstance(data, Sequence):
        return (data[index] for index in distributed.shard(range(len(data))))
    return islice(data, distributed.rank(), None, size)


def is_split_across_ranks(data: Any) -> bool:
    """Return whether there are several ranks and the data gives each its own part already."""
    if distributed.world_size() == 1:
        return False
    return callable(data) or any(isinstance(sampler, DistributedSampler) for sampler in _get_samplers(data))


def _get_samplers(data: Any) -> list[Any]:
    batches = getattr(data, "batches", None)  # data that is fingerprinted while it is read wraps a loader
    loader = batches if isinstance(batches, DataLoader) else data
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    return [*samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]


def _check_same_order_on_ranks(data: Any) -> None:
    if distributed.world_size() > 1 and any(type(sampler) is RandomSampler for sampler in _get_samplers(data)):
        raise UsageError(
            "this loader shuffles, so every rank reads the batches in a different order, and their shares would "
            "overlap: use a DistributedSampler, or shuffle=False"
        )


def _check_model_was_called(result: FeedResult, data: Data, activity: str) -> None:
    if result.calls:
        return
    if callable(data):
        raise CalibrationError(
            f"{activity}: the function never called the model: it must call the model that it gets as its argument, "
            "not the original"
        )
    if result.skipped:
        raise CalibrationError(f"{activity}: all {len(result.skipped)} batches contain NaN or infinity")
    raise CalibrationError(f"{activity}: the data is empty: 0 batches. A generator can be read only once")


class _CallCounter:
    """Hooks that count the calls of a model, and remember the inputs of the call that runs.

    With `rejects_nan`, NaN in the inputs or outputs of a call is an error.
    """

    def __init__(
        self, result: FeedResult, max_calls: int | None, progress: RunningPhase, *, rejects_nan: bool = False
    ) -> None:
        self.result = result
        self.max_calls = max_calls
        self.progress = progress
        self.rejects_nan = rejects_nan
        self.is_inside = False
        self.batch_index: int | None = None  # over all ranks; None if the data is a function
        self.inputs: Any = ()
        self._dtype_context = ExitStack()  # a user's function runs under the caller's default dtype, the model does not

    @property
    def batch(self) -> int:
        """Index of the current batch over all ranks."""
        if self.batch_index is not None:
            return self.batch_index
        own_index = max(self.result.calls - 1, 0) if self.is_inside else self.result.calls
        return own_index * distributed.world_size() + distributed.rank()

    @property
    def is_finished(self) -> bool:
        return self.max_calls is not None and self.result.calls >= self.max_calls

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_finished:
            raise _StopFeeding
        self.result.calls += 1
        self.result.samples += _count_samples((args, kwargs))
        self.is_inside, self.inputs = True, (args, kwargs)
        if self.rejects_nan:
            _check_no_nan(self.inputs)
        self._dtype_context.enter_context(library_dtype())

    def after_call(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._dtype_context.close()

    def after_success(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.rejects_nan:
            _check_no_nan(output)
        self.is_inside, self.inputs = False, ()
        self.progress.advance()

    def describe_nan_origin(self) -> str:
        """Say whether NaN or infinity is already in the inputs, or is computed by the model."""
        if not self.is_inside:
            return ""
        tensors = _get_float_tensors(self.inputs)
        count = sum(int(torch.isfinite(tensor).logical_not().sum()) for tensor in tensors)
        if not count:
            return "its inputs are finite, but the model computes NaN or infinity from them. "
        return f"{count:,} of the {sum(tensor.numel() for tensor in tensors):,} values of its inputs are not finite. "


def _count_samples(inputs: Any) -> int:
    """Return the batch size: the size of the first axis of the first tensor. A scalar counts as one sample."""
    first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    return 1 if first is None or not first.ndim else first.shape[0]


def _get_float_tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(inputs: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _get_float_tensors(inputs))


def _check_no_nan(values: Any) -> None:
    """Raise NonFiniteError if a tensor contains NaN. Infinity is allowed: masks contain it."""
    if any(bool(tensor.isnan().any()) for tensor in _get_float_tensors(values)):
        raise NonFiniteError(NAN_HINT)


def was_created_in_inference_mode(model: nn.Module) -> bool:
    """Return whether the model has inference tensors. They can be written in inference mode only."""
    return any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
