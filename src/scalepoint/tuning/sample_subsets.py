"""Chooses some samples of a batch for one gradient step, because a whole batch may take long in early layers of a CNN.

    samples per step = VALUES_PER_STEP / values per sample in the largest entry or exit of the piece, at least two

This needs a piece that computes each sample by itself, which is tried on one batch. Whole batches are used for a graph
with a constant batch size, and for a quantizer whose scale depends on the whole batch.
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
RELATIVE_TOLERANCE = 1e-3  # of the largest value: for another batch size kernels add in another order
MAX_DIFFERENT_SHARE = 1e-3  # of the values: if a code rounds the other way, the value differs by a whole step


@dataclass(frozen=True)
class SampleSubset:
    """How many samples of a batch each step uses; whole batches if `count` is None."""

    walk: StreamWalk
    evaluator: PieceEvaluator
    count: int | None

    def draw(self, index: int, step: int) -> Tensor | None:
        """Return the positions of the fitted samples that a step uses; None to run the whole batch."""
        positions = self.evaluator.fitted_samples(index)
        if self.count is None or len(positions) <= self.count:
            return None
        return draw_samples(positions, self.walk.first_samples[index], self.count, step)

    def select(self, values: dict[fx.Node, Any], index: int, positions: Tensor | None) -> dict[fx.Node, Any]:
        """Return the values of these samples only."""
        if positions is None:
            return values
        samples = self.walk.samples_per_batch[index]
        return {node: select_samples(value, samples, positions) for node, value in values.items()}


def draw_samples(positions: Tensor, first: int, count: int, step: int) -> Tensor:
    """Choose samples by a hash, so that each step gets different ones, and every machine the same.

    Args:
        positions: Positions in the batch to choose from.
        first: Number of the batch's first sample, counted over all batches.
        count: Number of samples to choose.
        step: Number of the step.
    """
    order = hash_to_uniform(first + positions, salt=1_000_003 * (step + 1)).argsort()
    return positions[order[:count]].sort().values


def choose_subset(walk: StreamWalk, evaluator: PieceEvaluator, piece: Piece) -> SampleSubset:
    """Choose how many samples per step a piece needs. The values of its entries must be stored."""
    whole_batches = SampleSubset(walk, evaluator, None)
    index = next((index for index, samples in enumerate(walk.samples_per_batch) if samples > MIN_SAMPLES), None)
    if index is None:
        return whole_batches
    entries = walk.get_entries(piece, index, noisy=True)
    with torch.no_grad():
        outputs = walk.run_piece(piece, entries)
    samples = walk.samples_per_batch[index]
    sizes = [value.numel() // samples for value in (*entries.values(), *outputs) if isinstance(value, Tensor)]
    count = max(MIN_SAMPLES, VALUES_PER_STEP // max([1, *sizes]))
    if count >= samples or not _is_sample_by_sample(walk, piece, entries, samples, torch.arange(count), outputs):
        return whole_batches
    return SampleSubset(walk, evaluator, count)


def _is_sample_by_sample(
    walk: StreamWalk,
    piece: Piece,
    entries: dict[fx.Node, Any],
    samples: int,
    positions: Tensor,
    batch_outputs: Sequence[Any],
) -> bool:
    """Whether some samples give the same outputs alone as within their batch."""
    selected = {node: select_samples(value, samples, positions) for node, value in entries.items()}
    try:
        with torch.no_grad():
            outputs = walk.run_piece(piece, selected)
    except (RuntimeError, ValueError, IndexError):  # the graph has a constant batch size
        return False
    expected = (select_samples(value, samples, positions) for value in batch_outputs)
    return all(_is_close(value, reference) for value, reference in zip(outputs, expected, strict=True))


def _is_close(value: Any, reference: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(reference, Tensor):
        return bool(value is reference or value == reference)
    if value.shape != reference.shape or not value.is_floating_point():
        return value.shape == reference.shape and bool((value == reference).all())
    largest = float(reference.abs().amax()) if reference.numel() else 0.0
    difference = (value - reference).abs()
    is_different = difference > RELATIVE_TOLERANCE * largest
    return not difference.numel() or float(is_different.float().mean()) < MAX_DIFFERENT_SHARE
