"""Example inputs and calibration data of a run, with their fingerprints.

Example       one set of inputs; the file gets its sizes
DataSource    the user's calibration data: batches, or a function that calls the model
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from scalepoint import distributed
from scalepoint.pipeline.fingerprints import fingerprint, fingerprint_code, fingerprint_tensors
from scalepoint.quantize.batches import Data, count_batches, iterate_batches

FINGERPRINT_BATCHES = 4  # the fingerprint of the data covers this many batches


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
