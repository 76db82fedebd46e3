"""How far a piece of the quantized net is from the float net where it ends, on held-out samples.

    error = mean over the exits of  |noisy - exact|^2 / |exact - mean|^2      or, where a norm reads an exit,
            mean over its rows of   |noisy - exact|^2 / |exact|^2

A layer's own error is no guarantee: what counts is what the rest of the net gets to see.
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
    """Of the pieces of one walk."""

    walk: StreamWalk
    collector: RowCollector

    def now(self, piece: Piece) -> float:
        """Of what the walk has put away."""
        exits = self._exits(piece)
        return self._error(piece, lambda index: [self.walk.get_value(node, index, noisy=True) for node in exits])

    def tried(self, piece: Piece) -> float:
        """Of the piece as its modules are now; nothing is put away."""
        chosen = [node in self._exits(piece) for node in piece.exits]

        def run(index: int) -> list[Any]:
            found = self.walk.run_piece(piece, self.walk.get_entries(piece, index, noisy=True))
            return [value for value, is_chosen in zip(found, chosen, strict=True) if is_chosen]

        return self._error(piece, run)

    def _exits(self, piece: Piece) -> list[fx.Node]:
        return [node for node in piece.exits if node not in self.walk.same_nodes and self.walk.has_value(node)]

    def _error(self, piece: Piece, noisy: Callable[[int], Sequence[Any]]) -> float:
        exits = self._exits(piece)
        sums = [_ExitErrorSums(feeds_norm(self.walk, node)) for node in exits]
        with torch.no_grad():
            for index in range(self.walk.batch_count):
                if not self._judges(index):
                    continue
                for total, node, found in zip(sums, exits, noisy(index), strict=True):
                    exact = self.walk.get_value(node, index, noisy=False)
                    if isinstance(exact, Tensor) and exact.is_floating_point():
                        total.add(self.part(exact, index, held=True), self.part(found, index, held=True))
        parts = distributed.gather_values("judging", [[each.count, each.apart, each.energy, each.sum] for each in sums])
        for index, each in enumerate(sums):
            each.count, each.apart, each.energy, each.sum = map(sum, zip(*(part[index] for part in parts), strict=True))
        errors = [each.error() for each in sums if each.count]
        return sum(errors) / len(errors) if errors else 0.0

    @cached_property
    def _masks(self) -> list[Tensor] | None:
        """Which samples of every batch judge; None where none can be told from the others."""
        if self.walk.sample_count < MIN_SAMPLES_TO_SPLIT:
            return None
        held = self.collector.is_held(torch.arange(self.walk.sample_count))
        places = zip(self.walk.first_samples, self.walk.samples_per_batch, strict=True)
        return [held[first : first + count] for first, count in places] if bool(held.any()) else None

    def _judges(self, index: int) -> bool:
        """Whether a batch has samples that judge."""
        return self._masks is None or bool(self._masks[index].any())

    def part(self, value: Tensor, index: int, *, held: bool) -> Tensor:
        """The held-out samples of a batch, or the others; all of a tensor that has no samples, or of few."""
        if self._masks is None:
            return value
        mask = self._masks[index] == held
        return value if bool(mask.all()) else select_samples(value, self.walk.samples_per_batch[index], mask)

    def free(self, index: int) -> Tensor:
        """The places of the samples of a batch that do not judge; of few samples all of them."""
        if self._masks is None:
            return torch.arange(self.walk.samples_per_batch[index])
        return (~self._masks[index]).nonzero().flatten()


def select_samples(value: Any, samples: int, chosen: Tensor) -> Any:
    """Some samples of a batch, by a mask or their places; what has no samples is as it was."""
    if not isinstance(value, Tensor) or value.ndim == 0 or not samples or value.shape[0] % samples:
        return value
    return value.reshape(samples, -1, *value.shape[1:])[chosen].flatten(0, 1)


class _ExitErrorSums:
    """Of one exit, while batches are added up."""

    def __init__(self, by_row: bool) -> None:
        self.by_row, self.count = by_row, 0
        self.apart = self.energy = self.sum = 0.0

    def add(self, exact: Tensor, found: Tensor) -> None:
        if exact.shape != found.shape:  # rows that the data picks need not be the same in both streams
            return
        if self.by_row:
            root = row_weights(exact).sqrt_()
            exact, found = exact * root, found * root
        self.apart += float((exact - found).square_().sum(dtype=torch.float64))
        self.energy += float(exact.square().sum(dtype=torch.float64))
        self.sum += 0.0 if self.by_row else float(exact.sum(dtype=torch.float64))
        self.count += exact.numel()

    def error(self) -> float:
        return self.apart / max(self.energy - self.sum**2 / self.count, 1e-30)
