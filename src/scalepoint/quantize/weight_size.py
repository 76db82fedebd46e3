"""The bits that files need for quantized weights: codes, scales, zero points or minima, tables of palettes, masks."""

from collections import defaultdict
from dataclasses import dataclass
from math import ceil, prod

from torch import nn

from scalepoint.errors import UsageError
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import get_consumer_name
from scalepoint.quantize.record import has_record, record_of
from scalepoint.spec import PerGroupedChannelGranularity, QuantizationSpec
from scalepoint.spec.extended import get_sparsity
from scalepoint.spec.palette import get_cluster_dim
from scalepoint.targets import Target


@dataclass(frozen=True)
class BitsPerWeightResult:
    """The size of the quantized weights of a model.

    Attributes:
        bpw: Average bits per quantized weight.
        per_module_map: Average bits per weight of each layer, by name. A weight that several layers share is listed
            under the first.
        total_bits: Bits of all quantized weights.
        total_weights: Number of quantized weights.
    """

    bpw: float
    per_module_map: dict[str, float]
    total_bits: int
    total_weights: int


def bits_per_weight(model: nn.Module) -> BitsPerWeightResult:
    """Return the average bits per quantized weight of a model, as its target's files store them.

    Scales, zero points, the tables of palettes and the masks of pruned weights are included. Float weights, biases and
    activations are not. A zero point that is always 0 takes no bits. Codes take the bits of their dtype, also if a
    format stores them in a wider one. The model may be calibrated or not.

    Args:
        model: A model that `quantize` or `insert_qdq` returned.

    Returns:
        The average of the model and of each layer, and the two totals.

    Raises:
        UsageError: No weight of the model is quantized.

    Example:
        >>> model = quantize(net, x, QuantConfig.weight_only("int4", block_size=32))
        >>> bits_per_weight(model).bpw  # 4 bits, and a float32 scale for every 32 weights
        5.0
    """
    target = record_of(model).target if has_record(model) else None
    bits: defaultdict[str, float] = defaultdict(float)
    weights: defaultdict[str, int] = defaultdict(int)
    counted = set()
    for layer in model.modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        quant = layer.weight_quant
        if quant in counted or quant.quantizer.is_disabled():
            continue
        counted.add(quant)
        name, shape = get_consumer_name(quant.consumers[0]), tuple(layer.to_output_first(layer.weight).shape)
        bits[name] += count_weight_bits(quant.spec, shape, target)
        weights[name] += prod(shape)
    if not weights:
        raise UsageError("no weight of this model is quantized: pass a model that quantize or insert_qdq returned")
    total_bits, total_weights = round(sum(bits.values())), sum(weights.values())
    return BitsPerWeightResult(
        bpw=total_bits / total_weights,
        per_module_map={name: bits[name] / count for name, count in weights.items()},
        total_bits=total_bits,
        total_weights=total_weights,
    )


def count_weight_bits(spec: QuantizationSpec, shape: tuple[int, ...], target: Target | None = None) -> float:
    """Return the bits that a file of the target needs for a weight of this shape.

    The entries of palettes are counted as float, also with `table_dtype`: files store their values.
    """
    count, granularity = prod(shape), spec.granularity
    float_bits = 16 if target is not None and target.has_half_scales else 32
    if isinstance(granularity, PerGroupedChannelGranularity):  # a palette
        _, tables = granularity.count_groups(shape)
        cluster_dim, sparsity = get_cluster_dim(spec), get_sparsity(spec)
        index_bits = spec.n_bits / cluster_dim
        if sparsity is not None:  # only kept weights have an index, and there is a bit per weight
            index_bits = index_bits * sparsity.kept_share + 1
        return count * index_bits + tables * (1 << spec.n_bits) * cluster_dim * float_bits
    block = granularity.get_block_size(shape)
    scales = prod(ceil(size / extent) for size, extent in zip(shape, block, strict=True))
    scale_bits = float_bits if spec.scale_dtype is None else 8 * spec.scale_dtype.itemsize
    return count * _code_bits(spec, target) + scales * (scale_bits + _offset_bits(spec, float_bits))


def _code_bits(spec: QuantizationSpec, target: Target | None) -> float:
    """Return the bits of codes per weight. Some files omit the zeros of pruned weights, and store a mask instead."""
    sparsity = get_sparsity(spec)
    if sparsity is None or target is None or spec.n_bits not in target.sparse_code_bits or _offset_bits(spec, 1):
        return spec.n_bits
    return spec.n_bits * sparsity.kept_share + 1


def _offset_bits(spec: QuantizationSpec, float_bits: int) -> int:
    """Return the bits of the minimum or zero point of one scale. Symmetric signed codes have none."""
    if spec.qformulation == "minval":
        return float_bits
    return spec.n_bits if spec.qscheme == "asymmetric" or spec.quant_min == 0 else 0
