"""Ranges of activations: both ends shrink to where rounding and clipping together cost the layers that read them least.

    cost = sum over channels c of  |W_c|^2  E (fq(x_c) - x_c)^2          W_c what multiplies channel c in the readers

Below 8 bits the best range is taken. At 8 bits min-max is the safe one (rare large values may carry the signal):
another is tried, and taken only when the piece ends clearly nearer to the float net on held-out samples.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import product

import torch
from torch import Tensor, fx

from scalepoint import distributed
from scalepoint.numerics import QParams
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.tuning.rows import get_geometry, hash_to_uniform
from scalepoint.tuning.steps.registry import register
from scalepoint.tuning.walk import StreamWalk

SHRINKAGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3)
MAX_SAMPLED_VALUES = 400_000  # that are looked at, of all batches
MAX_COST_RATIO = 0.98  # a cost must fall below this share of the present one


@register("ranges", over="stub")
def ranges(walk: StreamWalk, node: fx.Node, stub: QuantStub) -> QParams | None:
    """The range of least cost; None where the present one is."""
    seen = _sample_values(walk, node, _channel_importance(walk, node))
    if seen is None:
        return None
    values, weights = seen
    present = QParams(stub.scale.detach().clone(), stub.zero_point.detach().clone(), None)
    best, least = None, MAX_COST_RATIO * _cost(stub, values, weights, present)
    for tried in _candidates(stub):
        cost = _cost(stub, values, weights, tried)
        if cost < least:
            best, least = tried, cost
    return best


def _candidates(stub: QuantStub) -> Iterator[QParams]:
    spec, scale, zero = stub.spec, float(stub.scale), float(stub.zero_point)
    low, high = (spec.quant_min - zero) * scale, (spec.quant_max - zero) * scale
    if stub.quantizer.grid.is_symmetric or low >= 0 or high <= 0:
        for share in SHRINKAGES[1:]:
            yield QParams(stub.scale * share, stub.zero_point.clone(), None)
        return
    for first, second in product(SHRINKAGES, SHRINKAGES):
        if first == second == 1.0:
            continue
        step = (high * second - low * first) / (spec.quant_max - spec.quant_min)
        place = min(max(round(spec.quant_min - low * first / step), spec.quant_min), spec.quant_max)
        yield QParams(torch.full_like(stub.scale, step), torch.full_like(stub.zero_point, place), None)


def _cost(stub: QuantStub, values: Tensor, weights: Tensor, qparams: QParams) -> float:
    found = stub.quantizer.fake_quantize(values, *qparams)
    return float(((found - values).square() * weights).sum(dtype=torch.float64))


def _channel_importance(walk: StreamWalk, node: fx.Node) -> dict[int, Tensor]:
    """The weight of every channel, by the axis that the readers multiply; empty if no layer reads the value itself.

    Axes are counted from the end: a linear layer multiplies the last one, a convolution the one before its positions.
    """
    totals: dict[int, Tensor] = {}
    for user in node.users:
        found = walk.get_layer(user)
        if found is None or walk.find_source(user, found[1]) is None or len(user.all_input_nodes) > 1:
            continue
        layer = found[1]
        geometry = get_geometry(layer)
        if geometry is None or geometry.kind == "conv_transpose":
            continue
        weight = layer.to_output_first(layer.fold_norm()[0]).detach().to(torch.float32)
        by_group = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, weight.shape[1], -1)
        own = by_group.square().sum((1, 3)).reshape(-1)
        axis = -1 if geometry.kind == "linear" else 1 - weight.ndim
        totals[axis] = totals[axis] + own if axis in totals else own
    return totals


def _sample_values(walk: StreamWalk, node: fx.Node, importance: dict[int, Tensor]) -> tuple[Tensor, Tensor] | None:
    """A sample of the values that reach the quantizer in the quantized stream, and what each counts."""
    source = node.all_input_nodes[0]
    sizes = [walk.get_value(source, index, noisy=True).numel() for index in range(walk.batch_count)]
    befores, total = distributed.batch_offsets(distributed.gather_values("values", sizes))
    share = min(1.0, MAX_SAMPLED_VALUES / max(total, 1))
    values, weights = [torch.empty(0, dtype=torch.float32)], [torch.empty(0, dtype=torch.float32)]
    for index, before in enumerate(befores):
        tensor = walk.get_value(source, index, noisy=True)
        flat = tensor.detach().to(torch.float32)
        fitting = [
            own.view(-1, *(1 for _ in range(-axis - 1)))
            for axis, own in importance.items()
            if flat.ndim >= max(2, -axis) and flat.shape[axis] == len(own)
        ]
        counts = reduce(torch.add, fitting) if fitting else torch.ones((), dtype=torch.float32)
        numbers = torch.arange(before, before + flat.numel())
        chosen = hash_to_uniform(numbers) < share if share < 1 else torch.ones(flat.numel(), dtype=torch.bool)
        values.append(flat.reshape(-1)[chosen])
        weights.append(counts.expand(flat.shape).reshape(-1)[chosen])
    parts = distributed.gather_tensors({"values": torch.cat(values), "weights": torch.cat(weights)}, "values")
    found, counted = (torch.cat([part[name] for part in parts]) for name in ("values", "weights"))
    return (found, counted) if len(found) and bool(found.isfinite().all()) else None
