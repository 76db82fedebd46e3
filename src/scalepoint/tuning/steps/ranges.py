"""Ranges of activations: both ends shrink to where rounding and clipping together cost the reading layers least.

    cost = sum over channels c of  |W_c|^2  E (fq(x_c) - x_c)^2          W_c the weights of the readers for channel c

This step proposes the range with the least cost. `tune` applies it to quantizers of less than 8 bits. With 8 bits
min-max is safer, because rare large values may carry the signal: there `tune` tries the proposal, and keeps it only if
it makes the piece clearly better on held-out samples.
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
MAX_SAMPLED_VALUES = 400_000  # of all batches together
MAX_COST_RATIO = 0.98  # a range is proposed only if its cost is below this share of the present one


@register("ranges", over="stub")
def ranges(walk: StreamWalk, node: fx.Node, stub: QuantStub) -> QParams | None:
    """Propose the range with the least cost; None if the present one is best."""
    sample = _sample_values(walk, node, _channel_importance(walk, node))
    if sample is None:
        return None
    values, weights = sample
    # No minval: the step runs only for quantizers with a zero point.
    present = QParams(stub.scale.detach().clone(), stub.zero_point.detach().clone())
    best, best_cost = None, MAX_COST_RATIO * _cost(stub, values, weights, present)
    for candidate in _candidates(stub):
        cost = _cost(stub, values, weights, candidate)
        if cost < best_cost:
            best, best_cost = candidate, cost
    return best


def _candidates(stub: QuantStub) -> Iterator[QParams]:
    """Yield smaller ranges. Both ends of an asymmetric range that includes zero shrink independently."""
    spec, scale, zero_point = stub.spec, float(stub.scale), float(stub.zero_point)
    low, high = (spec.quant_min - zero_point) * scale, (spec.quant_max - zero_point) * scale
    if stub.quantizer.grid.is_symmetric or low >= 0 or high <= 0:
        for share in SHRINKAGES[1:]:
            yield QParams(stub.scale * share, stub.zero_point.clone())
        return
    for low_share, high_share in product(SHRINKAGES, SHRINKAGES):
        if low_share == high_share == 1.0:
            continue
        step = (high * high_share - low * low_share) / (spec.quant_max - spec.quant_min)
        rounded = round(spec.quant_min - low * low_share / step)
        new_zero_point = min(max(rounded, spec.quant_min), spec.quant_max)
        yield QParams(torch.full_like(stub.scale, step), torch.full_like(stub.zero_point, new_zero_point))


def _cost(stub: QuantStub, values: Tensor, weights: Tensor, qparams: QParams) -> float:
    quantized = stub.quantizer.fake_quantize(values, *qparams)
    return float(((quantized - values).square() * weights).sum(dtype=torch.float64))


def _channel_importance(walk: StreamWalk, node: fx.Node) -> dict[int, Tensor]:
    """Return |W_c|^2 of every channel, by the axis of the channels; empty if no layer reads the value itself.

    Axes are counted from the end: a linear layer multiplies the last one, a convolution the one before its positions.
    If a linear layer and a 2-d convolution read the value, the result has the keys -1 and -3.
    """
    totals: dict[int, Tensor] = {}
    for user in node.users:
        use = walk.get_layer(user)
        if use is None or len(user.all_input_nodes) > 1:
            continue
        layer, geometry = use.layer, get_geometry(use.layer)
        # A layer in the middle of a group does not read the value itself; a transposed convolution spreads each input.
        if walk.find_source(user, layer) is None or geometry is None or geometry.kind == "conv_transpose":
            continue
        folded_weight, _ = layer.fold_norm()
        weight = layer.to_output_first(folded_weight).detach().to(torch.float32)
        by_group = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, weight.shape[1], -1)
        importance = by_group.square().sum((1, 3)).reshape(-1)
        axis = -1 if geometry.kind == "linear" else 1 - weight.ndim
        totals[axis] = totals[axis] + importance if axis in totals else importance
    return totals


def _sample_values(walk: StreamWalk, node: fx.Node, importance: dict[int, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return a sample of the values that reach the quantizer in the quantized stream, and the weight of each.

    Returns None if there are none, or not all are finite.
    """
    source = node.all_input_nodes[0]
    sizes = [walk.get_value(source, index, noisy=True).numel() for index in range(walk.batch_count)]
    offsets, total = distributed.batch_offsets(distributed.gather_values("values", sizes))
    sample_rate = min(1.0, MAX_SAMPLED_VALUES / max(total, 1))
    values, weights = [torch.empty(0, dtype=torch.float32)], [torch.empty(0, dtype=torch.float32)]
    for index, offset in enumerate(offsets):
        x = walk.get_value(source, index, noisy=True).detach().to(torch.float32)
        channel_weights = _broadcast_importance(importance, x)
        # A hash of the position in the data of all ranks decides, so the sample does not depend on their number.
        positions = torch.arange(offset, offset + x.numel())
        is_sampled = torch.ones(x.numel(), dtype=torch.bool)
        if sample_rate < 1:
            is_sampled = hash_to_uniform(positions) < sample_rate
        values.append(x.reshape(-1)[is_sampled])
        weights.append(channel_weights.expand(x.shape).reshape(-1)[is_sampled])
    parts = distributed.gather_tensors({"values": torch.cat(values), "weights": torch.cat(weights)}, "values")
    all_values, all_weights = (torch.cat([part[name] for part in parts]) for name in ("values", "weights"))
    return (all_values, all_weights) if len(all_values) and bool(all_values.isfinite().all()) else None


def _broadcast_importance(importance: dict[int, Tensor], x: Tensor) -> Tensor:
    """Return the importance of all axes that fit the shape of x, added up; 1 if none fits."""
    fitting = []
    for axis, channels in importance.items():
        if x.ndim >= max(2, -axis) and x.shape[axis] == len(channels):
            trailing_ones = [1] * (-axis - 1)
            fitting.append(channels.view(-1, *trailing_ones))
    return reduce(torch.add, fitting) if fitting else torch.ones((), dtype=torch.float32)
