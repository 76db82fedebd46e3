"""What a format can store: which weights as codes, and scales near those that were found."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

import torch

from scalepoint.checkpoints import Source
from scalepoint.checkpoints.skeleton import Weights
from scalepoint.formats.checkpoint import CheckpointFormat, Snap
from scalepoint.language.settings import Asked
from scalepoint.numerics import QParams
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import QuantizationSpec


def not_held(source: Source, form: CheckpointFormat, layers: Collection[str], names: Iterable[str]) -> list[str]:
    """Layers whose weights the format has only as floats."""
    given = {name.removesuffix(".weight"): name for name in names}
    return [layer for layer in layers if layer in given and not form.holds(source, given[layer])]


def as_stored(job: Asked, layer: QuantizedWeighted, weights: Weights) -> Callable[[QParams], QParams] | None:
    """How the parameters of a layer's codes are moved to what the format stores; None where it takes any."""
    quant, form = layer.weight_quant, job.format
    if quant.quantizer.grid.format.is_float:  # their scales are of the type that their format says
        return None
    dtype = form.scale_dtype or job.source.tensors[weights.name_of(layer.weight)].dtype
    if form.snap is not None:
        return partial(_snapped, form.snap, quant.spec, layer.canonical(layer.weight).shape[1], dtype)
    return None if dtype == torch.float32 else partial(_rounded, dtype)


def _rounded(dtype: torch.dtype, qparams: QParams) -> QParams:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return qparams._replace(scale=qparams.scale.clamp(least, info.max).to(dtype).to(torch.float32))


def _snapped(snap: Snap, spec: QuantizationSpec, columns: int, dtype: torch.dtype, qparams: QParams) -> QParams:
    """Scales of blocks where the format has them; others, of a row or of all, as its type of numbers."""
    if qparams.scale.ndim != 2 or spec.qformulation != "zp":
        return _rounded(dtype, qparams)
    return qparams._replace(scale=snap(spec, columns, qparams.scale))
