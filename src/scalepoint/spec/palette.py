"""Palettized weights: each weight is one of 2^n values of a table, which neighbouring output channels share.

    palette_spec(n_bits=4, group_size=16)      a table of 16 values for 16 channels; group_size=None: one table
    palette_spec(n_bits=4, cluster_dim=2)      an index for the weights of two neighbouring channels: 2 bits per weight
    palette_spec(n_bits=4, table_dtype="int8")     tables of int8 values, with one scale per table
    palette_spec(n_bits=4, sparsity=0.5)           half of the weights are 0, and have no index in a file

Core ML and Core AI run them (lut_to_dense). The tables are stored as the scale: (groups, 2^n), or (groups, 2^n,
cluster_dim). Codes have the shape of the weight: the channels that share an index repeat it.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, StrictInt
from torch import Tensor, nn

from scalepoint.errors import ExportError, SpecError
from scalepoint.numerics import QParams, check_divides
from scalepoint.numerics.palette import (
    from_groups,
    from_vectors,
    make_tables,
    make_vector_tables,
    nearest_entries,
    nearest_vectors,
    round_tables,
    to_groups,
    to_vectors,
)
from scalepoint.spec.extended import ExtendedQuantizationSpec, choose_spec_class
from scalepoint.spec.fake_quantize import FakeQuantizeImplBase
from scalepoint.spec.granularity import (
    WEIGHT,
    CompressionTargetTensor,
    QuantizationGranularity,
    is_transposed,
    normalize_axis,
)
from scalepoint.spec.onnx_export import in_onnx_export
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, StatefulQParamsCalculatorBase
from scalepoint.spec.sparsity import Sparsity
from scalepoint.spec.spec import QuantizationSpec, to_code_type

INDEX_BITS = (1, 2, 3, 4, 6, 8)


@QuantizationGranularity.register("per_grouped_channel")
class PerGroupedChannelGranularity(QuantizationGranularity):
    """One table or scale for `group_size` neighbouring channels; None: one for all channels."""

    axis: StrictInt | None = None
    group_size: Annotated[StrictInt, Field(gt=0)] | None = None

    @property
    def broadcasts(self) -> bool:
        return False

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        axis = normalize_axis(self, self.axis, shape)
        block = (*shape[:axis], self.group_size or shape[axis], *shape[axis + 1 :])
        check_divides(shape, block)
        return block

    def count_groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the axis, and the number of groups along it."""
        axis = normalize_axis(self, self.axis, shape)
        return axis, shape[axis] // self.get_block_size(shape)[axis]

    def resolve(self, layer: nn.Module | type[nn.Module]) -> "QuantizationGranularity":
        return self if self.axis is not None else self.model_copy(update={"axis": 1 if is_transposed(layer) else 0})


@QParamsCalculatorBase.register("palette")
class PaletteQParamsCalculator(StatefulQParamsCalculatorBase):
    """Computes the tables of the current weight by k-means. Palettes have no zero point.

    In training the tables follow the weight: each batch improves them by one iteration.
    """

    def __init__(
        self,
        *args: Any,
        cluster_dim: int = 1,
        table_dtype: str | None = None,
        sparsity: Sparsity | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if sparsity is not None and cluster_dim > 1:
            raise SpecError(f"a pruned palette has no vectors: use cluster_dim=1, got {cluster_dim}, or sparsity=None")
        self.is_pruned = sparsity is not None  # the zeros of the weight are not stored, so tables are made without them
        self.cluster_dim = cluster_dim
        self.table_dtype = None if table_dtype is None else to_code_type(table_dtype)

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        start = self.scale if self.training and self.is_initialized else None
        axis, groups = self.count_groups(tensor.shape)
        if self.cluster_dim > 1:
            vectors = to_vectors(tensor, axis, groups, self.cluster_dim)
            tables = make_vector_tables(vectors, 2**self.grid.format.bits, start=start)
        else:
            values = to_groups(tensor, axis, groups)
            importance = (values != 0).to(torch.float32) if self.is_pruned else None
            tables = make_tables(values, 2**self.grid.format.bits, importance, start)
        return QParams(self.round_tables(tables), torch.zeros((), dtype=torch.int32, device=tensor.device))

    def count_groups(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the axis of the groups of channels, and their number. Vectors must divide the groups."""
        granularity = self.granularity
        assert isinstance(granularity, PerGroupedChannelGranularity)  # noqa: S101  # PaletteFakeQuantize has checked
        axis, groups = granularity.count_groups(shape)
        check_divides((shape[axis] // groups,), (self.cluster_dim,))
        return axis, groups

    def round_tables(self, tables: Tensor) -> Tensor:
        """Round the entries to `table_dtype`."""
        return tables if self.table_dtype is None else round_tables(tables, self.table_dtype)


@FakeQuantizeImplBase.register("palette")
class PaletteFakeQuantize(FakeQuantizeImplBase):
    """Codes are indices into the table of their group. The gradient is 1 everywhere (straight-through)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_palette = isinstance(self.qparams_calculator, PaletteQParamsCalculator)
        if not is_palette or not isinstance(self.granularity, PerGroupedChannelGranularity):
            raise SpecError(
                "a palette needs fake_quantize_cls='palette', qparam_calculator_cls='palette' and the granularity "
                "per_grouped_channel: build the spec with palette_spec(n_bits, group_size)"
            )

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> Tensor:
        axis, groups = self._count_groups(tensor)
        if scale.ndim == 3:
            vectors = to_vectors(tensor.detach(), axis, groups, scale.shape[-1])
            index, _ = nearest_vectors(vectors, scale)
            codes = from_vectors(index[..., None].expand_as(vectors), tensor.shape, axis)
        else:
            codes = from_groups(nearest_entries(to_groups(tensor, axis, groups), scale), tensor.shape, axis)
        return codes.to(self.target_dtype if cast_to_target_dtype else torch.float32)

    def dequantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        axis, groups = self._count_groups(tensor)
        if scale.ndim == 3:
            index = to_vectors(tensor, axis, groups, scale.shape[-1]).long()
            return from_vectors(scale.gather(1, index), tensor.shape, axis).to(output_dtype)
        values = scale.gather(-1, to_groups(tensor, axis, groups).long())
        return from_groups(values, tensor.shape, axis).to(output_dtype)

    def simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
        if in_onnx_export():
            raise ExportError(f"{self._where()}: ONNX does not support palettes: use target='coreml'")
        return self.fake_quantize(tensor, *qparams)

    def _count_groups(self, tensor: Tensor) -> tuple[int, int]:
        calculator = self.qparams_calculator
        assert isinstance(calculator, PaletteQParamsCalculator)  # noqa: S101  # checked in __init__
        return calculator.count_groups(tensor.shape)

    def _check_shape(self, tensor: Tensor, scale: Tensor) -> None:
        if self._count_groups(tensor)[1] != scale.shape[0]:
            raise SpecError(
                f"{self._where()} has {scale.shape[0]} tables, but a tensor of shape {tuple(tensor.shape)} has "
                f"{self._count_groups(tensor)[1]} groups of channels"
            )


def palette_spec(
    n_bits: int = 4,
    group_size: int | None = None,
    cluster_dim: int = 1,
    table_dtype: str | None = None,
    sparsity: Any = None,
) -> QuantizationSpec:
    """Build the spec of palettized weights: indices of `n_bits` bits into a table of values.

    Args:
        n_bits: Bits of an index.
        group_size: Output channels that share a table. None: one table for the weight.
        cluster_dim: Neighbouring output channels that share an index; the entries of a table are vectors.
        table_dtype: "int8", "float8_e4m3fn" or "float8_e5m2" entries; None for float.
        sparsity: Which weights are pruned, for example 0.5 or "2:4". The tables are those of the other weights.
    """
    if n_bits not in INDEX_BITS:
        raise SpecError(f"n_bits={n_bits}: must be one of {', '.join(map(str, INDEX_BITS))} for a palette")
    dtype = getattr(torch, f"uint{n_bits}")
    options: dict[str, Any] = {"cluster_dim": cluster_dim} if cluster_dim != 1 else {}
    options |= {"table_dtype": table_dtype} if table_dtype is not None else {}
    options |= {"sparsity": sparsity} if sparsity is not None else {}
    return choose_spec_class(dtype, options)(
        dtype=dtype,
        qscheme="asymmetric",
        granularity=PerGroupedChannelGranularity(group_size=group_size),
        fake_quantize_cls="palette",
        qparam_calculator_cls="palette",
        **options,
    )


def get_cluster_dim(spec: QuantizationSpec) -> int:
    """Return the number of weights that share an index; 1 without palettes."""
    return spec.cluster_dim if isinstance(spec, ExtendedQuantizationSpec) else 1


def palette_bits(name: str) -> int | None:
    """Return 4 for "palette4", and so on; None for other names."""
    bits = {f"palette{count}": count for count in INDEX_BITS}
    return bits.get(name)


def is_palette(spec: QuantizationSpec) -> bool:
    return bool(spec.fake_quantize_cls is PaletteFakeQuantize)
