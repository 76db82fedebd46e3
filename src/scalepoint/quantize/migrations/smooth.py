"""SmoothQuant as a migration: for the norms on which insert_qdq put observers (`quantize/smooth.py`).

s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)        with the settings of `smooth_quant`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalepoint.quantize.migrations.migration import Migration, MigrationContext, MigrationSites
from scalepoint.quantize.quantizers import join_consumer_names
from scalepoint.quantize.record import record_of
from scalepoint.quantize.smooth import (
    SmoothQuantObserver,
    ensure_norm_tensors,
    find_smoothing_observers,
    get_linear_weight,
)


@dataclass
class SmoothedNorm:
    """A norm and the layers that read it."""

    observer: SmoothQuantObserver

    @property
    def name(self) -> str:
        return f"{self.observer.name} -> {join_consumer_names(self.observer.consumers)}"

    def tensors(self) -> list[Tensor]:
        affine = ensure_norm_tensors(self.observer.layer_norm, torch.ones((), dtype=torch.float32))
        weights = [get_linear_weight(linear) for linear in self.observer.downstream_linears]
        return [tensor for tensor in (*affine, *weights) if tensor is not None]


def find_sites(context: MigrationContext) -> MigrationSites:
    observers = [observer for observer in find_smoothing_observers(context.model) if observer.enabled]
    result = MigrationSites([SmoothedNorm(observer) for observer in observers])
    for name, reason in record_of(context.model).unsmoothed.items():
        result.refuse(name, reason)
    return result


def smooth(context: MigrationContext, sites: Sequence[SmoothedNorm]) -> list[str]:
    observers = [site.observer for site in sites]
    for observer in observers:
        observer.reset()
        observer.on_nan = context.on_nan
    context.observe("smoothing", {observer.layer_norm: _make_observer(observer) for observer in observers})
    notes = []
    for observer in observers:
        s = observer.compute_smooth_scales()
        observer.enabled = False  # the scales are in the weights now
        assert s is not None  # noqa: S101  # it has readers
        notes.append(f"alpha {observer.alpha:g}, factors {float(s.min()):.3g} to {float(s.max()):.3g}")
    return notes


def _make_observer(observer: SmoothQuantObserver) -> Callable[[Tensor, Tensor], None]:
    return lambda _, output: observer.observe(output)


SMOOTH = Migration("smooth", find_sites, smooth)
