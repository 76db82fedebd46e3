"""What a format can store: which weights as codes, and scales near those that were found."""

from collections.abc import Callable
from functools import partial

import torch

from scalepoint.checkpoints.packed import outer_of
from scalepoint.checkpoints.skeleton import Weights
from scalepoint.formats.checkpoint import Snap, SnapMinima
from scalepoint.language.settings import Asked
from scalepoint.numerics import E4M3, QParams
from scalepoint.patterns import Fused
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.spec import QuantizationSpec
from scalepoint.transformation import TransformationResult


def not_held(job: Asked, plan: TransformationResult, weights: Weights) -> list[str]:
    """Layers whose weights the format has only as floats, such as routers of experts."""
    found = []
    for match in plan.matches:
        fused = plan.model.get_submodule(match.fused) if match.apply and match.fused else None
        weight = fused.weight if isinstance(fused, Fused) else None
        name = None if weight is None else weights.names.get(weight.data_ptr())
        if name is not None and not job.format.holds(job.source, name):
            found.append(match.name)
    return found


def as_stored(job: Asked, layer: QuantizedWeighted, weights: Weights) -> Callable[[QParams], QParams] | None:
    """How the parameters of a layer's codes are moved to what the format stores; None where it takes any."""
    quant, form = layer.weight_quant, job.format
    if quant.quantizer.grid.format.is_float:  # their scales are of the type that their format says
        return _two_level if quant.spec.scale_dtype == E4M3 else None
    dtype = form.scale_dtype or job.source.tensors[weights.name_of(layer.weight)].dtype
    if quant.spec.qformulation == "minval" and form.snap_minima is not None:
        return partial(_with_minima, form.snap_minima, quant.spec, layer.canonical(layer.weight).shape[1])
    if form.snap is not None:
        return partial(_snapped, form.snap, quant.spec, layer.canonical(layer.weight).shape[1], dtype)
    return None if dtype == torch.float32 else partial(_rounded, dtype)


def _two_level(qparams: QParams) -> QParams:
    """Block scales as float8_e4m3fn times a power of two: loaders divide by its reciprocal, which is exact then."""
    outer = outer_of(qparams.scale)
    inner = (qparams.scale / outer).clamp(min=torch.finfo(E4M3).smallest_normal / 8).to(E4M3)
    return qparams._replace(scale=inner.to(torch.float32) * outer)


def _rounded(dtype: torch.dtype, qparams: QParams) -> QParams:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return qparams._replace(scale=qparams.scale.clamp(least, info.max).to(dtype).to(torch.float32))


def _with_minima(snap: SnapMinima, spec: QuantizationSpec, columns: int, qparams: QParams) -> QParams:
    """Scales and minima of blocks, or of rows, as the format has them."""
    scale, least = qparams.scale, qparams.minval
    if least is None:
        return qparams
    rows = scale.shape[0] if scale.ndim else 1
    found = snap(spec, columns, scale.reshape(rows, -1), least.reshape(rows, -1))
    return qparams._replace(scale=found[0].reshape(scale.shape), minval=found[1].reshape(least.shape))


def _snapped(snap: Snap, spec: QuantizationSpec, columns: int, dtype: torch.dtype, qparams: QParams) -> QParams:
    """Scales of blocks where the format has them; others, of a row or of all, as its type of numbers."""
    if qparams.scale.ndim != 2:
        return _rounded(dtype, qparams)
    return qparams._replace(scale=snap(spec, columns, qparams.scale))
