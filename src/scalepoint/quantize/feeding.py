"""The one way data reaches a model, whoever asks: calibration, smoothing, comparison, sensitivity.

    batches     an iterable; each is a tensor, a tuple or list of inputs, or a dict of inputs by name
    function    called with the model, runs what data it likes through it

Either ends after `max_batches` calls of the model. What comes after the model's own inputs in a batch, such as labels,
is left away. Data is made under the default dtype of the caller, as the caller's own loop would make it.

Several ranks share the data when the caller says how their statistics are merged: batch i goes to rank i modulo the
number of ranks, so every batch runs whole on one of them. A function, and a loader with a DistributedSampler,
give every rank its own part already. Limits and counts are over all ranks, and so are errors.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import (
    BatchNote,
    CalibrationError,
    NonFiniteError,
    ScalepointError,
    TensorError,
    UsageError,
    short_repr,
)
from scalepoint.graph.capture import as_tensor
from scalepoint.graph.example_inputs import check_values, describe_ids_out_of_range
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.support.progress import Phase, phase
from scalepoint.support.torch_state import caller_dtype, library_dtype, serialized

ForwardLoop = Callable[[nn.Module], Any]
Data = ForwardLoop | Iterable[Any]
MAX_BATCHES = 100_000  # batches of an iterator without a length: more are taken for an endless one


@dataclass
class FeedResult:
    """What reached the model."""

    calls: int = 0
    samples: int = 0  # along the first axis of the first tensor
    skipped: list[int] = field(default_factory=list)  # batches with NaN or infinity in their inputs


class _StopFeeding(BaseException):
    """Leaves a user's function once it has called the model often enough; no `except Exception` there holds it up."""


@serialized
def feed_data(
    model: nn.Module,
    data: Data,
    what: str,
    *,
    max_batches: int | None = None,
    skip_nan: bool = False,
    progress: bool | None = None,
    merge: Callable[[], None] | None = None,
    only_first: bool = False,
) -> FeedResult:
    """Run the data through the model, without gradients. An error tells which batch it was; no call at all is one.

    With `merge`, ranks share the data, and it is called once all have seen their part; without, each runs all of it.
    only_first=True runs the first batch alone, to check the data: NaN in its inputs or outputs is a NonFiniteError.
    """
    if merge is None:
        progress = progress if distributed.is_main() else False
        with distributed.single_process():
            return _feed_rank(model, data, what, max_batches, skip_nan, progress, only_first)
    fed = _feed_rank(model, data, what, max_batches, skip_nan, progress, only_first)
    if distributed.world_size() > 1:
        merge()
    return fed


def _feed_rank(
    model: nn.Module,
    data: Data,
    what: str,
    max_batches: int | None,
    skip_nan: bool,
    progress: bool | None,
    only_first: bool,
) -> FeedResult:
    """This rank's part; counted over all."""
    fed = FeedResult()
    with distributed.phase(what) as step:
        check_data(data)
        _check_same_order_on_ranks(data)
        most = 1 if only_first else None if max_batches is None else _count_rank_batches(max_batches)
        total = 1 if only_first else _count_expected_batches(data, max_batches)
        with phase(what, total=total, show=progress) as running:
            inside = _CallCounter(fed, most, running, checks=only_first)
            _feed_with_hooks(model, data, what, inside, max_batches, skip_nan, step)
        step.value = [fed.calls, fed.samples, fed.skipped]
    calls, samples, skipped = zip(*step.values, strict=True)
    fed = FeedResult(sum(calls), sum(samples), sorted(index for each in skipped for index in each))
    _check_model_was_called(fed, data, what)
    return fed


def _feed_with_hooks(
    model: nn.Module,
    data: Data,
    what: str,
    inside: "_CallCounter",
    max_batches: int | None,
    skip_nan: bool,
    step: distributed.Phase,
) -> None:
    entered = model.register_forward_pre_hook(inside.before_call, with_kwargs=True)
    handles = [entered, model.register_forward_hook(inside.left)]
    handles.append(model.register_forward_hook(inside.ended, always_call=True))  # also after an error
    try:
        with torch.inference_mode(was_created_in_inference_mode(model)), torch.no_grad():
            if callable(data):
                with caller_dtype():
                    data(model)
            else:
                _feed_batches(model, data, inside, max_batches, skip_nan)
    except _StopFeeding:
        pass
    except NonFiniteError as error:
        step.position = inside.batch
        error.args = (f"batch {inside.batch} of the data: {inside.describe_nan_origin()}{error.args[0]}",)
        raise
    except ScalepointError:
        step.position = inside.batch
        raise
    except Exception as error:
        step.position = inside.batch
        if message := describe_ids_out_of_range(error, model, inside.given):
            raise CalibrationError(f"batch {inside.batch} of the data: {message}") from error
        error.add_note(BatchNote(f"{what}: batch {inside.batch}"))
        raise
    finally:
        for handle in handles:
            handle.remove()


def _count_expected_batches(data: Data, max_batches: int | None) -> int | None:
    """How many batches this rank will see."""
    most = None if max_batches is None else _count_rank_batches(max_batches)
    if is_split_across_ranks(data):
        return count_batches(data, most)
    length = count_batches(data)
    return most if length is None else _count_rank_batches(length if max_batches is None else min(length, max_batches))


def _count_rank_batches(count: int) -> int:
    """How many of so many batches come to this rank."""
    return len(distributed.shard(range(count)))


def was_created_in_inference_mode(model: nn.Module) -> bool:
    """Whether the model was made in inference mode: only there can its state be written."""
    return any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


class _CallCounter:
    """Counts the calls of a model; with `checks`, NaN in the inputs or outputs of a call is an error."""

    def __init__(self, fed: FeedResult, most: int | None, running: Phase, *, checks: bool = False) -> None:
        self.fed, self.most, self.running, self.checks = fed, most, running, checks
        self.is_inside = False
        self.number: int | None = None  # of the batch, where the data is batches
        self.given: Any = ()  # the inputs of the call that runs
        self.settings = ExitStack()  # under which the model runs inside a function for data

    @property
    def batch(self) -> int:
        """Which one it is, over all ranks."""
        if self.number is not None:
            return self.number
        own = max(self.fed.calls - 1, 0) if self.is_inside else self.fed.calls
        return own * distributed.world_size() + distributed.rank()

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.most is not None and self.fed.calls >= self.most:
            raise _StopFeeding
        self.fed.calls += 1
        self.fed.samples += _count_samples((args, kwargs))
        self.is_inside, self.given = True, (args, kwargs)
        if self.checks:
            _check_no_nan(self.given)
        self.settings.enter_context(library_dtype())

    def ended(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.settings.close()

    def left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.checks:
            _check_no_nan(output)
        self.is_inside, self.given = False, ()
        self.running.advance()

    def describe_nan_origin(self) -> str:
        """Where NaN or infinity first was: in the data, or in what the model made of it."""
        if not self.is_inside:
            return ""
        floats = _get_float_tensors(self.given)
        bad = sum(int(torch.isfinite(each).logical_not().sum()) for each in floats)
        if not bad:
            return "its inputs are finite, and what the model makes of them is not. "
        return f"{bad:,} of the {sum(each.numel() for each in floats):,} values of its inputs are not finite. "


def _feed_batches(
    model: nn.Module, data: Iterable[Any], inside: _CallCounter, max_batches: int | None, skip_nan: bool
) -> None:
    batches, last = iterate_batches(_select_rank_batches(data)), MAX_BATCHES if max_batches is None else max_batches
    fed = inside.fed
    for index in distributed.shard(range(last + distributed.world_size())):
        inside.number = index
        if (index >= last and max_batches is not None) or (inside.most is not None and fed.calls >= inside.most):
            return  # one more than is asked for is never made
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
            fed.skipped.append(index)
            continue
        try:
            model(*args, **kwargs)
        except ScalepointError:
            raise
        except Exception as error:
            said = f"it was {_describe_batch(batch)}{_describe_captured_inputs(model)}"
            if _differs_from_capture(model, args, kwargs):
                why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                raise CalibrationError(
                    f"batch {index} of the data is unlike the example: {said}. {why.rstrip('. ')}. Give batches of the "
                    "example's sizes and types"
                ) from error
            error.add_note(BatchNote(said))
            raise


def iterate_batches(data: Iterable[Any]) -> Iterator[Any]:
    """The batches, each made under the default dtype of the caller."""
    with caller_dtype():
        batches = iter(data)
    while True:
        with caller_dtype():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _select_rank_batches(data: Iterable[Any]) -> Iterable[Any]:
    """The batches of this rank: those that were split for it, or every n-th."""
    size = distributed.world_size()
    if size == 1 or is_split_across_ranks(data):
        return data
    if isinstance(data, Sequence):
        return (data[index] for index in distributed.shard(range(len(data))))
    return islice(data, distributed.rank(), None, size)


def is_split_across_ranks(data: Any) -> bool:
    """Whether there are several ranks, and each has its own part of the data already."""
    if distributed.world_size() == 1:
        return False
    samplers = _get_samplers(data)
    return callable(data) or any(isinstance(each, DistributedSampler) for each in samplers)


def _get_samplers(data: Any) -> list[Any]:
    batches = getattr(data, "batches", None)  # data that is watched on its way
    loader = batches if isinstance(batches, DataLoader) else data
    found = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    return [*found, *(getattr(each, "sampler", None) for each in found)]


def _check_same_order_on_ranks(data: Any) -> None:
    if distributed.world_size() > 1 and any(type(each) is RandomSampler for each in _get_samplers(data)):
        raise UsageError(
            "this loader shuffles, so every rank reads the batches in another order and what they share is not the "
            "data: use a DistributedSampler, or shuffle=False"
        )


def _check_model_was_called(fed: FeedResult, data: Data, what: str) -> None:
    if fed.calls:
        return
    if callable(data):
        raise CalibrationError(
            f"{what}: the function never called the model it was given, so nothing was seen: it must run the model of "
            "its argument, not the original"
        )
    if fed.skipped:
        raise CalibrationError(f"{what}: all {len(fed.skipped)} batches hold NaN or infinity: nothing is left of them")
    raise CalibrationError(f"{what}: the data is empty: 0 batches. A generator can be read only once")


def check_data(data: Any, *, passes: int = 1) -> None:
    """Refuse what is no data, and what can be read only once where it has to be read more often."""
    if isinstance(data, Tensor | Mapping):
        raise UsageError(
            f"the data is an iterable of batches or a function, not {type(data).__name__}: wrap it in a list"
        )
    if isinstance(data, str | bytes) or (not callable(data) and not isinstance(data, Iterable)):
        way_out = ": wrap it in a DataLoader" if isinstance(data, Dataset) else ""
        raise UsageError(f"the data is an iterable of batches or a function, not {short_repr(data)}{way_out}")
    if callable(data) and not _accepts_one_argument(data):
        raise UsageError(
            f"{short_repr(data)} cannot be called with the model: a function for data runs batches through the model "
            "that "
            "it is given; of one that makes batches give what it makes, list(function())"
        )
    if passes > 1 and isinstance(data, Iterator):
        raise UsageError(
            "the data is read more than once, an iterator gives it once: pass a list, a loader or a function"
        )


def _accepts_one_argument(function: Any) -> bool:
    """Whether it can be called with one argument, as far as it says."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def read_first_inputs(model: nn.Module, data: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the first batch."""
    for batch in iterate_batches(data):
        return to_model_inputs(batch, model)
    raise CalibrationError("the data is empty: 0 batches")


def to_model_inputs(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model's inputs: labels and other extras that come after them are left away."""
    names, required = get_input_names(model)
    if isinstance(batch, Mapping):
        missing = [name for name in required if name not in batch]
        if missing:
            raise CalibrationError(
                f"the batch has {', '.join(map(str, batch))}; the model also needs {', '.join(missing)}"
            )
        return (), {name: _to_tensor(batch[name]) for name in names if name in batch}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        if len(batch) < len(required):
            raise CalibrationError(f"the batch has {len(batch)} inputs, the model takes {', '.join(names)}")
        return tuple(_to_tensor(value) for value in batch[: len(names)]), {}
    return (_to_tensor(batch),), {}


def drop_extra_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs without what comes after the model's own: a whole batch of a loader may be given as the example."""
    own = inspect.signature(type(model).forward).parameters.values()
    most = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in own) - 1  # without self
    is_open = any(each.kind == each.VAR_POSITIONAL for each in own)
    return (args if is_open else args[: max(most, 1)]), kwargs


def get_input_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The parameters of forward that are inputs by name, and those of them that have no default."""
    if isinstance(model, fx.GraphModule):
        signature = inspect.signature(model.forward)
    else:
        signature = inspect.signature(MethodType(type(model).forward, model))  # without self, whatever its name
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [each for each in signature.parameters.values() if each.kind in kinds]
    return [each.name for each in found], [each.name for each in found if each.default is inspect.Parameter.empty]


def _count_samples(inputs: Any) -> int:
    """How many there are in a batch; what has no axis is one."""
    first = next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    return 1 if first is None or not first.ndim else first.shape[0]


def _get_float_tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_finite(inputs: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _get_float_tensors(inputs))


def _check_no_nan(values: Any) -> None:
    """Infinity is allowed here: masks contain it."""
    if any(bool(tensor.isnan().any()) for tensor in _get_float_tensors(values)):
        raise NonFiniteError(
            "Nothing was changed. Mend the data or the model, or leave such batches out: on_nan='skip'"
        )


def _to_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | Tensor):
        tensor = as_tensor(value)
        check_values(tensor)
        return tensor
    if isinstance(value, int | float | bool | type(None) | list | tuple | Mapping):
        return value
    raise CalibrationError(f"a batch holds tensors or arrays, not {short_repr(value)}")


def _describe_captured_inputs(model: nn.Module) -> str:
    """What a captured model takes; * is an axis that is free."""
    places = model.graph.find_nodes(op="placeholder") if isinstance(model, fx.GraphModule) else []
    found = [(node.name, get_fake_tensor(node)) for node in places]
    told = [f"{name} {_format_shape(value)} {value.dtype}" for name, value in found if value is not None]
    return f"; the model was captured with {', '.join(told)}" if told else ""


def _differs_from_capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor has another type, number of axes or fixed extent than that which the model was captured with."""
    places = model.graph.find_nodes(op="placeholder") if isinstance(model, fx.GraphModule) else []
    wanted = {str(node.target): value for node in places if (value := get_fake_tensor(node)) is not None}
    named = {**dict(zip(wanted, args, strict=False)), **kwargs}
    pairs = [(named[name], value) for name, value in wanted.items() if isinstance(named.get(name), Tensor)]
    return any(
        given.dtype != value.dtype
        or given.ndim != value.ndim
        or any(is_concrete_int(size) and size != own for own, size in zip(given.shape, value.shape, strict=True))
        for given, value in pairs
    )


def _format_shape(value: Tensor) -> str:
    sizes = ["*" if isinstance(each, torch.SymInt) and not is_concrete_int(each) else str(each) for each in value.shape]
    return f"({', '.join(sizes)})"


def _describe_batch(batch: Any) -> str:
    if isinstance(batch, Tensor | np.ndarray):
        return f"{tuple(batch.shape)} {batch.dtype}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {_describe_batch(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(map(_describe_batch, batch)) + ")"
    return short_repr(batch)


def count_batches(data: Any, max_batches: int | None = None) -> int | None:
    """How many batches there are; None where that shows only when they are read."""
    try:
        length = None if callable(data) else len(data)
    except TypeError:
        length = None
    return max_batches if length is None else length if max_batches is None else min(length, max_batches)
