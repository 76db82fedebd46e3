"""Error of a piece of the quantized model at its exits, against the float model, on held-out samples.

    error = mean over the exits of  |noisy - exact|^2 / |exact - mean|^2      or, where a norm reads an exit,
            mean over its rows of   |noisy - exact|^2 / |exact|^2

The exits are the nodes that the rest of the model reads. A smaller error of the single layers inside does not guarantee
a smaller one there. "noisy" is the quantized stream, "exact" the float stream (see walk.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.tuning.collect import MIN_SAMPLES_TO_SPLIT, RowCollector
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.row_weights import feeds_norm, row_weights
from scalepoint.tuning.walk import StreamWalk


@dataclass
class PieceEvaluator:
    """Measures the error of the pieces of one walk."""

    walk: StreamWalk
    collector: RowCollector

    def stored_error(self, piece: Piece) -> float:
        """Return the error of the stored values of the exits."""
        exits = self._compared_exits(piece)
        return self._mean_error(exits, lambda index: [self.walk.get_value(node, index, noisy=True) for node in exits])

    def error_if_rerun(self, piece: Piece) -> float:
        """Return the error with the modules as they are now. The piece runs again; nothing is stored."""
        exits = self._compared_exits(piece)

        def rerun(index: int) -> list[Any]:
            values = self.walk.run_piece(piece, self.walk.get_entries(piece, index, noisy=True))
            by_exit = dict(zip(piece.exits, values, strict=True))
            return [by_exit[node] for node in exits]

        return self._mean_error(exits, rerun)

    def _compared_exits(self, piece: Piece) -> list[fx.Node]:
        return [node for node in piece.exits if node not in self.walk.same_nodes and self.walk.has_value(node)]

    def _mean_error(self, exits: Sequence[fx.Node], exit_values: Callable[[int], Sequence[Any]]) -> float:
        """Return the mean error over the exits. `exit_values` returns their quantized values in a batch."""
        sums = [_ExitErrorSums(feeds_norm(self.walk, node)) for node in exits]
        with torch.no_grad():
            for index in filter(self._has_holdout, range(self.walk.batch_count)):
                for exit_sums, node, noisy in zip(sums, exits, exit_values(index), strict=True):
                    exact = self.walk.get_value(node, index, noisy=False)
                    if isinstance(exact, Tensor) and exact.is_floating_point():
                        exact_part = self.select_part(exact, index, is_holdout=True)
                        exit_sums.add(exact_part, self.select_part(noisy, index, is_holdout=True))
        sums_by_rank = distributed.gather_values("comparing pieces", [exit_sums.values() for exit_sums in sums])
        for exit_sums, values_by_rank in zip(sums, zip(*sums_by_rank, strict=True), strict=True):
            exit_sums.merge(values_by_rank)
        errors = [exit_sums.error() for exit_sums in sums if exit_sums.count]
        return sum(errors) / len(errors) if errors else 0.0

    @cached_property
    def _holdout_masks(self) -> list[Tensor] | None:
        """Which samples of every batch are held out; None if there are too few samples to hold any out."""
        if self.walk.sample_count < MIN_SAMPLES_TO_SPLIT:
            return None
        mask = self.collector.is_held_out(torch.arange(self.walk.sample_count))
        if not bool(mask.any()):
            return None
        batches = zip(self.walk.first_samples, self.walk.samples_per_batch, strict=True)
        return [mask[first : first + count] for first, count in batches]

    def _has_holdout(self, index: int) -> bool:
        """Whether a batch has samples to measure: held-out ones, or all samples if none are held out."""
        return self._holdout_masks is None or bool(self._holdout_masks[index].any())

    def select_part(self, value: Tensor, index: int, *, is_holdout: bool) -> Tensor:
        """Return the held-out samples of a batch, or its other samples; the whole value if it cannot be split."""
        if self._holdout_masks is None:
            return value
        mask = self._holdout_masks[index] == is_holdout
        return value if bool(mask.all()) else select_samples(value, self.walk.samples_per_batch[index], mask)

    def fitted_samples(self, index: int) -> Tensor:
        """Return the positions of the samples of a batch that are not held out."""
        if self._holdout_masks is None:
            return torch.arange(self.walk.samples_per_batch[index])
        return (~self._holdout_masks[index]).nonzero().flatten()


def select_samples(value: Any, samples: int, selection: Tensor) -> Any:
    """Select samples of a batch by a mask or positions. A value without a batch axis stays as it is.

    The first axis may be a multiple of the batch, such as batch * heads.
    """
    if not isinstance(value, Tensor) or value.ndim == 0 or not samples or value.shape[0] % samples:
        return value
    return value.reshape(samples, -1, *value.shape[1:])[selection].flatten(0, 1)


class _ExitErrorSums:
    """Sums over the batches for the error of one exit, which is relative to each row if a norm reads the exit."""

    def __init__(self, is_by_row: bool) -> None:
        self.is_by_row, self.count = is_by_row, 0
        self.squared_error = self.energy = self.total = 0.0

    def add(self, exact: Tensor, noisy: Tensor) -> None:
        if exact.shape != noisy.shape:  # rows that the data selects may differ between the streams
            return
        if self.is_by_row:
            root = row_weights(exact).sqrt_()
            exact, noisy = exact * root, noisy * root
        self.squared_error += float((exact - noisy).square_().sum(dtype=torch.float64))
        self.energy += float(exact.square().sum(dtype=torch.float64))
        self.total += 0.0 if self.is_by_row else float(exact.sum(dtype=torch.float64))
        self.count += exact.numel()

    def values(self) -> list[float]:
        return [self.count, self.squared_error, self.energy, self.total]

    def merge(self, values_by_rank: Sequence[Sequence[float]]) -> None:
        """Replace the sums of this rank by the sums over all ranks."""
        totals = [sum(values) for values in zip(*values_by_rank, strict=True)]
        self.count, self.squared_error, self.energy, self.total = int(totals[0]), *totals[1:]

    def error(self) -> float:
        # By row `total` is 0, so this is the energy |exact|^2.
        variance = self.energy - self.total**2 / self.count
        return self.squared_error / max(variance, 1e-30)
