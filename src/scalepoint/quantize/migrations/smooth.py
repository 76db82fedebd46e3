"""SmoothQuant as one of the migrations: the norms that insert_qdq put observers on (`quantize/smooth.py`).

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
    find_smoothing_observers,
    get_linear_weight,
    get_norm_tensors,
)


@dataclass
class SmoothedNorm:
    observer: SmoothQuantObserver

    @property
    def name(self) -> str:
        return f"{self.observer.name} -> {join_consumer_names(self.observer.consumers)}"

    def tensors(self) -> list[Tensor]:
        affine = get_norm_tensors(self.observer.layer_norm, torch.ones((), dtype=torch.float32))
        weights = [get_linear_weight(linear) for linear in self.observer.downstream_linears]
        return [each for each in (affine.weight, affine.bias, *weights) if each is not None]


def find_sites(scene: MigrationContext) -> MigrationSites:
    found = MigrationSites([SmoothedNorm(each) for each in find_smoothing_observers(scene.model) if each.enabled])
    for name, why in record_of(scene.model).unsmoothed.items():
        found.refuse(name, why)
    return found


def smooth(scene: MigrationContext, sites: Sequence[SmoothedNorm]) -> list[str]:
    observers = [site.observer for site in sites]
    for observer in observers:
        observer.reset()
        observer.on_nan = scene.on_nan
    scene.watch("smoothing", {each.layer_norm: _make_observer(each) for each in observers})
    notes = []
    for observer in observers:
        s = observer.compute_smooth_scales()
        observer.enabled = False  # it is in the weights now
        assert s is not None  # noqa: S101  # it has readers
        notes.append(f"alpha {observer.alpha:g}, factors {float(s.min()):.3g} to {float(s.max()):.3g}")
    return notes


def _make_observer(observer: SmoothQuantObserver) -> Callable[[Tensor, Tensor], None]:
    return lambda _, output: observer.observe(output)


SMOOTH = Migration("smooth", find_sites, smooth)
