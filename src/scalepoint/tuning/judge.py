"""How far a piece of the quantized net is from the float net where it ends, on held-out samples.

    error = mean over the exits of  |noisy - exact|^2 / |exact - mean|^2

A layer's own error is no guarantee: what counts is what the rest of the net gets to see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from scalepoint.tuning.collect import FEW_SAMPLES, Collector
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.walk import Walk


@dataclass
class Judge:
    """Of the pieces of one walk."""

    walk: Walk
    collector: Collector

    def now(self, piece: Piece) -> float:
        """Of what the walk has put away."""
        exits = self._exits(piece)
        return self._error(piece, lambda index: [self.walk.value(node, index, noisy=True) for node in exits])

    def tried(self, piece: Piece) -> float:
        """Of the piece as its modules are now; nothing is put away."""
        chosen = [node in self._exits(piece) for node in piece.exits]

        def run(index: int) -> list[Any]:
            found = self.walk.run(piece, self.walk.entries(piece, index, noisy=True))
            return [value for value, is_chosen in zip(found, chosen, strict=True) if is_chosen]

        return self._error(piece, run)

    def _exits(self, piece: Piece) -> list[fx.Node]:
        return [node for node in piece.exits if node not in self.walk.same and self.walk.has(node)]

    def _error(self, piece: Piece, noisy: Callable[[int], Sequence[Any]]) -> float:
        exits = self._exits(piece)
        apart, energy, sums = ([0.0] * len(exits) for _ in range(3))
        counts = [0] * len(exits)
        with torch.no_grad():
            for index in range(self.walk.count):
                for place, (node, found) in enumerate(zip(exits, noisy(index), strict=True)):
                    exact = self.walk.value(node, index, noisy=False)
                    if not isinstance(exact, Tensor) or not exact.is_floating_point():
                        continue
                    rows, other = (self.part(value, index, held=True).double() for value in (exact, found))
                    apart[place] += float((rows - other).square().sum())
                    energy[place] += float(rows.square().sum())
                    sums[place] += float(rows.sum())
                    counts[place] += rows.numel()
        wholes = [e - s * s / n for e, s, n in zip(energy, sums, counts, strict=True) if n]
        errors = [
            a / max(w, 1e-30) for a, w in zip((a for a, n in zip(apart, counts, strict=True) if n), wholes, strict=True)
        ]
        return sum(errors) / len(errors) if errors else 0.0

    def part(self, value: Tensor, index: int, *, held: bool) -> Tensor:
        """The held-out samples of a batch, or the others; all of a tensor that has no samples, or of few."""
        samples = self.walk.samples[index]
        if value.ndim == 0 or sum(self.walk.samples) < FEW_SAMPLES or not samples or value.shape[0] % samples:
            return value
        first = sum(self.walk.samples[:index])
        mask = self.collector.is_held(torch.arange(first, first + samples)) == held
        return value.reshape(samples, -1)[mask]
