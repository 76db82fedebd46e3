"""Example inputs and calibration data of a run.

Example      one set of inputs; the sizes of the file are taken from it
DataSource   what the user passed as calibration data, with the facts that the pipeline asks for: whether it can be
             read again, its fingerprint, and batches that do not fit the file (`watch_batches`)
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
from scalepoint.quantize.feeding import Data, batches_of, input_names, length_of

FINGERPRINT_BATCHES = 4  # batches that the fingerprint of the data is made of
InputAxis = tuple[str, int]  # name of an input, and one of its axes


class Example(NamedTuple):
    """One set of inputs of the model, positional and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def as_data(self) -> Data:
        """The example as calibration data of one batch.

        A batch is a tuple or a dict. An example with both kinds of inputs becomes a function that calls the model.
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
        data: What the user passed; [] where a weight-only config needs none.
        max_batches: Only so many batches are used; all if None.
    """

    data: Any
    max_batches: int | None = None

    @cached_property
    def is_rereadable(self) -> bool:
        """Whether there are batches, and they can be read more than once. An iterator gives them once."""
        return not isinstance(self.data, Iterator) and length_of(self.data) != 0

    @property
    def _is_batches(self) -> bool:
        is_iterable = isinstance(self.data, Iterable) and not isinstance(self.data, Tensor | Mapping | str | bytes)
        return is_iterable and not callable(self.data)

    def fingerprint(self) -> str | None:
        """Digest of the first batches, or of a function's code; None for an iterator, which must not be consumed."""
        if not self._is_batches:
            return fingerprint_code(self.data) if callable(self.data) else None
        if isinstance(self.data, Iterator):
            return None
        recorder = _FingerprintingBatches(self.data, self._first_batches)
        for _ in islice(batches_of(recorder), self._first_batches):
            pass
        return recorder.fingerprint

    @property
    def _first_batches(self) -> int:
        return FINGERPRINT_BATCHES if self.max_batches is None else min(FINGERPRINT_BATCHES, self.max_batches)

    def with_fingerprint(self, look: Callable[[Any], None]) -> "RecordedData":
        """The data, calling `look` with each batch and taking its fingerprint while it is read."""
        return RecordedData(self, look)


class RecordedData:
    """Data on its way to the model. Reading random batches twice would give another fingerprint, so it is taken
    while calibration reads them."""

    def __init__(self, source: DataSource, look: Callable[[Any], None]) -> None:
        self._source = source
        self._recorder: _FingerprintingBatches | None = None
        self.data: Any = source.data
        if source._is_batches and isinstance(source.data, Iterator):
            self.data = _call_with_each(source.data, look)
        elif source._is_batches:
            self.data = self._recorder = _FingerprintingBatches(source.data, source._first_batches, look)

    def fingerprint(self) -> str | None:
        """After the data was read. With several ranks, each reads only a part: then the batches are read again."""
        if self._recorder is not None and self._recorder.is_complete and distributed.world_size() == 1:
            return self._recorder.fingerprint
        return self._source.fingerprint()


def _call_with_each(batches: Iterator[Any], look: Callable[[Any], None]) -> Iterator[Any]:
    for batch in batches:
        look(batch)
        yield batch


@dataclass
class _FingerprintingBatches:
    """Batches, and the fingerprint of the first few that were read."""

    batches: Any
    first: int
    look: Callable[[Any], None] | None = None
    fingerprint: str | None = None
    is_complete: bool = False  # whether all batches that the fingerprint is made of were read

    def __iter__(self) -> Iterator[Any]:
        digests: list[str] = []
        for batch in self.batches:
            if self.look is not None:
                self.look(batch)
            if len(digests) < self.first:
                digests.append(fingerprint_tensors(batch))
                self.fingerprint = fingerprint(digests, self._length())
                self.is_complete = len(digests) == self.first
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
    """Collects the inputs of `forward` that the data has and the example lacks: the file will not have them."""

    model: nn.Module
    example: Example
    dropped: dict[str, None] = field(default_factory=dict)  # names, in the order of their appearance

    def __post_init__(self) -> None:
        self._names = input_names(self.model)[0]
        self._in_example = self._bound_names()

    def look(self, batch: Any) -> None:
        for name, value in self._by_name(batch).items():
            if name not in self._in_example and value is not None:
                self.dropped[name] = None

    def look_at_first(self, data: Any) -> None:
        """Look at the first batch, for models that need no calibration and so read no data."""
        if isinstance(data, Iterable) and not callable(data) and not isinstance(data, Iterator):
            for batch in islice(batches_of(data), 1):
                self.look(batch)

    def _bound_names(self) -> set[str]:
        try:
            bound = inspect.signature(self.model.forward).bind(*self.example.args, **self.example.kwargs)
        except TypeError:  # the example does not fit forward; capture says how
            return set(self._names)
        return {name for name, value in bound.arguments.items() if value is not None}

    def _by_name(self, batch: Any) -> dict[str, Any]:
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self._names if name in batch}
        if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
            named = dict(zip(self._names, batch, strict=False))
            return {name: value for name, value in named.items() if not _looks_like_labels(value)}
        return {}

    @contextmanager
    def warn_at_end(self) -> Iterator[None]:
        """Warn at the end of the block, once for all batches."""
        yield
        if self.dropped:
            names = ", ".join(map(repr, self.dropped))
            message = (
                f"the data has inputs of the model that the example does not: {names}. They are left out of "
                "calibration, and the file has no such inputs: to keep them, give them in example_inputs= too (the "
                "first batch of the data is an example that has all)"
            )
            warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _looks_like_labels(value: Any) -> bool:
    """Whether a value without a name looks like class labels after the inputs: one whole number per sample."""
    integers = (torch.int64, torch.int32)
    return isinstance(value, int) or (isinstance(value, Tensor) and value.ndim < 2 and value.dtype in integers)


@contextmanager
def warn_about_other_sizes(model: fx.GraphModule) -> Iterator[None]:
    """Warn at the end of the block if a batch had a size that the file will not take.

    Axes of the file are fixed to the example's sizes, except the dynamic ones.
    """
    fixed = _fixed_sizes(model)
    others: dict[InputAxis, set[int]] = {}

    def look(module: Any, args: Any, kwargs: Any) -> None:
        for name, value in _tensors_by_input(model, args, kwargs).items():
            for axis, size in enumerate(value.shape):
                if fixed.get((name, axis), size) != size:
                    others.setdefault((name, axis), set()).add(size)

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    except Exception as error:  # other sizes are the most frequent cause
        if others:
            hint = _dynamic_axes_hint(model, others)
            error.add_note(f"the graph is fixed to the example's sizes: let others be free: {hint}")
        raise
    finally:
        handle.remove()
    if others:
        sizes = "; ".join(
            f"{name!r} has {_first_three(sizes)} on axis {axis}, {fixed[name, axis]} in the example"
            for (name, axis), sizes in sorted(others.items())
        )
        message = (
            f"the data has sizes that the file will not take: {sizes}. It is calibrated with all of them, but fixed to "
            "the example's: pad or resize to it, deploy once for each size, or let them be free: "
            f"{_dynamic_axes_hint(model, others)}"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _dynamic_axes_hint(model: fx.GraphModule, others: Iterable[InputAxis]) -> str:
    """The option that would make these axes dynamic, in addition to those that are."""
    axes: dict[str, dict[int, str]] = {name: dict(own) for name, own in get_origin(model).axes.items()}
    for name, axis in sorted(others):
        axes.setdefault(name, {})[axis] = f"{name}_{axis}"
    return f"dynamic_axes={axes}"


def _fixed_sizes(model: fx.GraphModule) -> dict[InputAxis, int]:
    inputs = [(str(node.target), get_fake_tensor(node)) for node in model.graph.find_nodes(op="placeholder")]
    sizes = [(name, axis, size) for name, value in inputs if value is not None for axis, size in enumerate(value.shape)]
    return {(name, axis): int(size) for name, axis, size in sizes if axis and not is_dynamic(size)}


def _tensors_by_input(model: fx.GraphModule, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Tensors by the name of their graph input; what is nested in a keyword is left out."""
    names = [str(node.target) for node in model.graph.find_nodes(op="placeholder")]
    values = {**dict(zip(names, pytree.tree_leaves(args), strict=False)), **kwargs}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _first_three(sizes: set[int]) -> str:
    ordered = sorted(sizes)
    return ", ".join(map(str, ordered[:3])) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
