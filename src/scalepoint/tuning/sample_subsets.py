"""Some samples of a batch are enough for a step: early layers of a net for pictures have many rows in each.

    samples of a step = as many as hold `VALUES_PER_STEP` values of what the piece reads and gives, two at least

Only where a piece computes each sample by itself: this is tried on one batch. A graph with a batch written into it, or
a quantizer whose scale comes from all that it sees, gets whole batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.tuning.piece_evaluation import PieceEvaluator, select_samples
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.rows import hash_to_uniform
from scalepoint.tuning.walk import StreamWalk

VALUES_PER_STEP = 1 << 20
MIN_SAMPLES = 2
RELATIVE_TOLERANCE = 1e-3  # of the largest value: kernels add in another order for another batch
MAX_DIFFERENT_SHARE = 1e-3  # of the values: a code that rounds the other way is a whole step apart


@dataclass(frozen=True)
class SampleSubset:
    """How many samples of a piece a step takes; None: whole batches."""

    walk: StreamWalk
    judge: PieceEvaluator
    count: int | None

    def of(self, index: int, step: int) -> Tensor | None:
        """The samples of a batch, drawn alike on every machine, of those that do not judge; None: all of it."""
        free = self.judge.free(index)
        if self.count is None or len(free) <= self.count:
            return None
        return draw_samples(free, self.walk.first_samples[index], self.count, step)

    def taken(self, values: dict[fx.Node, Any], index: int, chosen: Tensor | None) -> dict[fx.Node, Any]:
        if chosen is None:
            return values
        return {
            node: select_samples(value, self.walk.samples_per_batch[index], chosen) for node, value in values.items()
        }


def draw_samples(places: Tensor, first: int, count: int, step: int) -> Tensor:
    """So many of the samples of a batch at these places, others at each step; `first` is the number of its first."""
    order = hash_to_uniform(first + places, salt=1_000_003 * (step + 1)).argsort()
    return places[order[:count]].sort().values


def choose_subset(walk: StreamWalk, judge: PieceEvaluator, piece: Piece) -> SampleSubset:
    """Of a piece whose inputs are there."""
    index = next((each for each, samples in enumerate(walk.samples_per_batch) if samples > MIN_SAMPLES), None)
    if index is None:
        return SampleSubset(walk, judge, None)
    entries = walk.get_entries(piece, index, noisy=True)
    with torch.no_grad():
        whole = walk.run_piece(piece, entries)
    samples = walk.samples_per_batch[index]
    sizes = [each.numel() // samples for each in (*entries.values(), *whole) if isinstance(each, Tensor)]
    count = max(MIN_SAMPLES, VALUES_PER_STEP // max([1, *sizes]))
    if count >= samples:
        return SampleSubset(walk, judge, None)
    chosen = torch.arange(count)
    return SampleSubset(
        walk, judge, count if _is_sample_by_sample(walk, piece, entries, samples, chosen, whole) else None
    )


def _is_sample_by_sample(
    walk: StreamWalk, piece: Piece, entries: dict[fx.Node, Any], samples: int, chosen: Tensor, whole: Sequence[Any]
) -> bool:
    """Whether some samples alone give what they give among others."""
    try:
        with torch.no_grad():
            found = walk.run_piece(
                piece, {node: select_samples(value, samples, chosen) for node, value in entries.items()}
            )
    except (RuntimeError, ValueError, IndexError):  # a batch is written into the graph
        return False
    pairs = zip(found, (select_samples(value, samples, chosen) for value in whole), strict=True)
    return all(_is_close(one, two) for one, two in pairs)


def _is_close(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(one is two or one == two)
    if one.shape != two.shape or not one.is_floating_point():
        return one.shape == two.shape and bool((one == two).all())
    reach = float(two.abs().amax()) if two.numel() else 0.0
    apart = (one - two).abs()
    return not apart.numel() or float((apart > RELATIVE_TOLERANCE * reach).float().mean()) < MAX_DIFFERENT_SHARE
