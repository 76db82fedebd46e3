"""Example inputs and calibration data of a run.

Example                   one set of inputs; the file gets its sizes
DataSource                the user's calibration data: whether it can be read again, and its fingerprint
DroppedInputs             warns about inputs in the data that the example does not have
warn_about_other_sizes    warns about sizes in the data that the file will not accept
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.compat.torch_names import pytree
from scalepoint.errors import ScalepointWarning
from scalepoint.graph.dynamic_axes import is_dynamic
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.graph.origin import get_origin
from scalepoint.graph.user_traceback import user_level
from scalepoint.pipeline.fingerprints import fingerprint, fingerprint_code, fingerprint_tensors
from scalepoint.quantize.batches import Data, count_batches, get_input_names, iterate_batches

FINGERPRINT_BATCHES = 4  # the fingerprint of the data covers this many batches
InputAxis = tuple[str, int]  # name of an input, and one of its axes


class Example(NamedTuple):
    """One set of inputs of the model, positional and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def as_data(self) -> Data:
        """Return the example as calibration data of one batch.

        A batch is a tuple or a dict. An example with positional and keyword inputs becomes a function that calls the
        model.
        """
        if self.args and self.kwargs:
            return lambda model: model(*self.args, **self.kwargs)
        return [self.kwargs or tuple(self.args)]

    def fingerprint(self) -> str:
        return fingerprint_tensors(tuple(self))


@dataclass(frozen=True)
class DataSource:
    """Calibration data: batches, or a function that calls the model.

    Attributes:
        data: The argument of the user; [] if there is no data because a weight-only config needs none.
        max_batches: At most this many batches are used; all if None.
    """

    data: Any
    max_batches: int | None = None

    @cached_property
    def is_rereadable(self) -> bool:
        """Whether there are batches, and they can be read more than once. An iterator can be read only once."""
        return not isinstance(self.data, Iterator) and count_batches(self.data) != 0

    @property
    def _is_batches(self) -> bool:
        is_iterable = isinstance(self.data, Iterable) and not isinstance(self.data, Tensor | Mapping | str | bytes)
        return is_iterable and not callable(self.data)

    def fingerprint(self) -> str | None:
        """Return the digest of the first batches or of a function's code; None for an iterator, which is not read."""
        if not self._is_batches:
            return fingerprint_code(self.data) if callable(self.data) else None
        if isinstance(self.data, Iterator):
            return None
        batches = _FingerprintingBatches(self.data, self._fingerprint_batches)
        for _ in islice(iterate_batches(batches), self._fingerprint_batches):
            pass
        return batches.fingerprint

    @property
    def _fingerprint_batches(self) -> int:
        return FINGERPRINT_BATCHES if self.max_batches is None else min(FINGERPRINT_BATCHES, self.max_batches)

    def with_fingerprint(self, on_batch: Callable[[Any], None]) -> "FingerprintedData":
        """Return data that calls `on_batch` with each batch, and computes its fingerprint while it is read."""
        return FingerprintedData(self, on_batch)


class FingerprintedData:
    """Data whose fingerprint is computed while calibration reads it.

    A second pass could read other batches (random augmentation), which would have another fingerprint.
    """

    def __init__(self, source: DataSource, on_batch: Callable[[Any], None]) -> None:
        self._source = source
        self._batches: _FingerprintingBatches | None = None
        self.data: Any = source.data
        if source._is_batches and isinstance(source.data, Iterator):
            self.data = _call_for_batches(source.data, on_batch)
        elif source._is_batches:
            self.data = self._batches = _FingerprintingBatches(source.data, source._fingerprint_batches, on_batch)

    def fingerprint(self) -> str | None:
        """Return the fingerprint, after the data was read. If each of several ranks read a part, read it again."""
        if self._batches is not None and self._batches.is_complete and distributed.world_size() == 1:
            return self._batches.fingerprint
        return self._source.fingerprint()


def _call_for_batches(batches: Iterator[Any], on_batch: Callable[[Any], None]) -> Iterator[Any]:
    for batch in batches:
        on_batch(batch)
        yield batch


@dataclass
class _FingerprintingBatches:
    """Iterates over batches and computes the fingerprint of the first `count` of them.

    Attributes:
        batches: The user's batches.
        count: Number of batches that the fingerprint covers.
        on_batch: Called with each batch.
        fingerprint: The fingerprint of the batches that were read so far.
        is_complete: Whether all `count` batches were read.
    """

    batches: Any
    count: int
    on_batch: Callable[[Any], None] | None = None
    fingerprint: str | None = None
    is_complete: bool = False

    def __iter__(self) -> Iterator[Any]:
        digests: list[str] = []
        for batch in self.batches:
            if self.on_batch is not None:
                self.on_batch(batch)
            if len(digests) < self.count:
                digests.append(fingerprint_tensors(batch))
                self.fingerprint = fingerprint(digests, self._length())
                self.is_complete = len(digests) == self.count
            yield batch
        self.is_complete = True

    def __len__(self) -> int:
        return len(self.batches)

    def _length(self) -> int | None:
        try:
            return len(self.batches)
        except TypeError:
            return None


@dataclass
class DroppedInputs:
    """Collects inputs of `forward` that the data has and the example does not have: the file will not have them."""

    model: nn.Module
    example: Example
    dropped: dict[str, None] = field(default_factory=dict)  # names, in the order of their appearance

    def __post_init__(self) -> None:
        self._names = get_input_names(self.model)[0]
        self._in_example = self._example_names()

    def check_batch(self, batch: Any) -> None:
        for name, value in self._values_by_name(batch).items():
            if name not in self._in_example and value is not None:
                self.dropped[name] = None

    def check_first_batch(self, data: Any) -> None:
        """Check the first batch, for models that need no calibration and so read no data."""
        if isinstance(data, Iterable) and not callable(data) and not isinstance(data, Iterator):
            for batch in islice(iterate_batches(data), 1):
                self.check_batch(batch)

    def _example_names(self) -> set[str]:
        try:
            bound = inspect.signature(self.model.forward).bind(*self.example.args, **self.example.kwargs)
        except TypeError:  # the example does not fit forward; capture raises the error
            return set(self._names)
        return {name for name, value in bound.arguments.items() if value is not None}

    def _values_by_name(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self._names if name in batch}
        if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):  # a namedtuple is a single input
            values = dict(zip(self._names, batch, strict=False))
            return {name: value for name, value in values.items() if not _looks_like_labels(value)}
        return {}

    @contextmanager
    def warn_at_end(self) -> Iterator[None]:
        """Warn at the end of the block, once for all batches."""
        yield
        if self.dropped:
            names = ", ".join(map(repr, self.dropped))
            message = (
                f"the data has inputs of the model that the example does not have: {names}. They are dropped from "
                "calibration and from the file: to keep them, pass them in example_inputs= too (for example the first "
                "batch of the data)"
            )
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _looks_like_labels(value: Any) -> bool:
    """Whether a value without a name looks like class labels after the inputs: one whole number per sample."""
    integers = (torch.int64, torch.int32)
    return isinstance(value, int) or (isinstance(value, Tensor) and value.ndim < 2 and value.dtype in integers)


@contextmanager
def warn_about_other_sizes(model: fx.GraphModule) -> Iterator[None]:
    """Warn at the end of the block if a batch had a size that the file will not accept.

    Axes of the file are fixed to the example's sizes, except the dynamic ones.
    """
    fixed_sizes = _fixed_sizes(model)
    other_sizes: dict[InputAxis, set[int]] = {}

    def record_sizes(module: Any, args: Any, kwargs: Any) -> None:
        for name, value in _tensors_by_input(model, args, kwargs).items():
            for axis, size in enumerate(value.shape):
                if fixed_sizes.get((name, axis), size) != size:
                    other_sizes.setdefault((name, axis), set()).add(size)

    handle = model.register_forward_pre_hook(record_sizes, with_kwargs=True)
    try:
        yield
    except Exception as error:
        if other_sizes:  # the most frequent cause of errors in a captured graph
            hint = _dynamic_axes_hint(model, other_sizes)
            error.add_note(f"the graph is fixed to the example's sizes: make the other sizes dynamic: {hint}")
        raise
    finally:
        handle.remove()
    if other_sizes:
        listed = "; ".join(
            f"{name!r} has {_first_three(sizes)} on axis {axis}, {fixed_sizes[name, axis]} in the example"
            for (name, axis), sizes in sorted(other_sizes.items())
        )
        message = (
            f"the data has sizes that the file will not accept: {listed}. All of them are used for calibration, but "
            "the file is fixed to the example's sizes: pad or resize the inputs, deploy once for each size, or make "
            f"them dynamic: {_dynamic_axes_hint(model, other_sizes)}"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _dynamic_axes_hint(model: fx.GraphModule, new_axes: Iterable[InputAxis]) -> str:
    """Return the option that makes these axes dynamic, in addition to those that already are."""
    axes: dict[str, dict[int, str]] = {name: dict(names) for name, names in get_origin(model).axes.items()}
    for name, axis in sorted(new_axes):
        axes.setdefault(name, {})[axis] = f"{name}_{axis}"
    return f"dynamic_axes={axes}"


def _fixed_sizes(model: fx.GraphModule) -> dict[InputAxis, int]:
    """Return the sizes of the file's inputs that are constants, without those of axis 0, the batch."""
    fixed_sizes: dict[InputAxis, int] = {}
    for node in model.graph.find_nodes(op="placeholder"):
        value = get_fake_tensor(node)
        for axis, size in enumerate(() if value is None else value.shape):
            if axis and not is_dynamic(size):
                fixed_sizes[str(node.target), axis] = int(size)
    return fixed_sizes


def _tensors_by_input(model: fx.GraphModule, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return tensors by the name of their graph input. Tensors nested in a keyword input are omitted."""
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    values = {**dict(zip(names, pytree.tree_leaves(args), strict=False)), **kwargs}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _first_three(sizes: set[int]) -> str:
    ordered = sorted(sizes)
    text = ", ".join(map(str, ordered[:3]))
    return f"{text} and {len(ordered) - 3} more" if len(ordered) > 3 else text
