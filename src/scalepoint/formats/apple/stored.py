"""The stored graph of Core ML and Core AI: weights as codes with scales or tables, quantizers as Q/DQ.

Both formats describe a quantized model with the same modules. They differ in the dtypes that a file can hold, which
`StorableTypes` lists, and in the operations that the modules are translated to.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import ExportError
from scalepoint.formats.layers import FloatWeight, InputFirstFloatWeight, WeightedOperation
from scalepoint.formats.operators import (
    dequantize,
    dequantize_minval,
    look_up,
    look_up_kept,
    quantize,
    quantize_minval,
    quantize_rows_symmetric,
)
from scalepoint.formats.stored_graph import ModuleFactories, build_stored_graph
from scalepoint.numerics import E8M0, dtype_name
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.spec import (
    PerBlockGranularity,
    PerChannelGranularity,
    PerGroupedChannelGranularity,
    PerTensorGranularity,
    PerTokenGranularity,
)
from scalepoint.spec.palette import is_palette


@dataclass(frozen=True)
class StorableTypes:
    """The dtypes that files of a format can hold.

    Attributes:
        format: Name of the format, for errors.
        weights: Dtypes of weight codes.
        activations: Lowest and highest code by dtype: the operation clips to the whole range of the dtype.
        has_channel_activations: Whether activations may have one scale per channel.
        has_minval: Whether a float minimum may be stored instead of a zero point.
        has_dynamic_rows: Whether the program can compute one scale per row of an activation.
        has_sparse_palettes: Whether pruned weights may have palettes.
        scale_dtypes: Dtypes of scales besides that of the float tensors.
    """

    format: str
    weights: tuple[str, ...]
    activations: Mapping[str, tuple[float, float]]
    has_channel_activations: bool = False
    has_minval: bool = False
    has_dynamic_rows: bool = False
    has_sparse_palettes: bool = False
    scale_dtypes: tuple[torch.dtype, ...] = ()


INTEGER_ACTIVATIONS = {"uint8": (0, 255), "int8": (-128, 127)}
FOUR_BIT_TYPES = ("int4", "uint4")  # in Core ML since iOS 18
COREML_TYPES = StorableTypes("Core ML", (*FOUR_BIT_TYPES, *INTEGER_ACTIVATIONS), INTEGER_ACTIVATIONS)
COREAI_TYPES = StorableTypes(
    "Core AI",
    ("int2", "uint2", *COREML_TYPES.weights, "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"),
    {
        **INTEGER_ACTIVATIONS,
        "uint4": (0, 15),
        "int4": (-8, 7),
        "float8_e4m3fn": (-448.0, 448.0),
        "float8_e5m2": (-57344.0, 57344.0),
        "float4_e2m1fn_x2": (-6.0, 6.0),
    },
    has_channel_activations=True,
    has_minval=True,
    has_dynamic_rows=True,
    has_sparse_palettes=True,
    scale_dtypes=(E8M0,),
)


class StoredWeight(WeightedOperation):
    """An operation whose weight is stored as codes (out, in, ..).

    The zero point is None if it is zero everywhere. With a minimum (`minval`) there is no zero point.
    """

    def __init__(self, types: StorableTypes, source: QuantizedLayer) -> None:
        super().__init__(source)
        quant, deployed = source.weight_quant, source.get_deployed()
        granularity = quant.calculator.granularity
        self.fmt = dtype_name(quant.spec.dtype)
        if self.fmt not in types.weights:
            raise ExportError(
                f"{quant.name}: {types.format} does not support {self.fmt} weights: use {', '.join(types.weights)}"
            )
        if not isinstance(granularity, PerTensorGranularity | PerChannelGranularity | PerBlockGranularity):
            raise ExportError(
                f"{quant.name}: {types.format} does not support weights with {granularity!r}: "
                "use one scale per tensor, per channel or per block"
            )
        scale_dtype = quant.spec.scale_dtype
        if scale_dtype is not None and scale_dtype not in types.scale_dtypes:
            raise ExportError(f"{quant.name}: {types.format} does not support {dtype_name(scale_dtype)} scales")
        if quant.minval is not None and not types.has_minval:
            raise ExportError(f"{quant.name}: {types.format} needs zero points: use qformulation='zp'")
        self.axis = 0 if isinstance(granularity, PerTensorGranularity) else int(granularity.axis or 0)
        self.block = 0  # elements along `axis` that share a scale
        if isinstance(granularity, PerBlockGranularity):
            self.axis, self.block = _find_block(granularity.get_block_size(deployed.codes.shape), deployed.codes.shape)
        # If all codes are zero, they are stored as they are: neither compiler accepts an empty constant.
        self.is_sparse = quant.mask is not None and not quant.zero_point.any() and bool(deployed.codes.any())
        has_zero_point = quant.minval is None and bool(quant.zero_point.any())
        zero_point = quant.zero_point.expand(quant.scale.shape).to(deployed.codes.dtype)
        # detach() returns another tensor object: a constant is named after the first buffer that holds its tensor.
        self.register_buffer("codes", deployed.codes.detach().contiguous())
        self.register_buffer("scale", quant.scale.detach().to(scale_dtype or torch.float32).contiguous().clone())
        self.register_buffer("zero_point", zero_point.contiguous() if has_zero_point else None)
        minval = None if quant.minval is None else quant.minval.detach().to(torch.float32).expand(quant.scale.shape)
        self.register_buffer("minval", None if minval is None else minval.contiguous().clone())
        self.register_buffer("bias", None if deployed.bias is None else deployed.bias.detach().clone())

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None
    bias: Tensor | None

    @property
    def is_smaller_sparse(self) -> bool:
        """Whether the weight is pruned, and its nonzero codes of 8 bits with a bit per weight take less space."""
        share = float((self.codes != 0).to(torch.float32).mean())
        return self.is_sparse and self.fmt in INTEGER_ACTIVATIONS and 8 * share + 1 < 8

    @property
    def needs_ios18(self) -> bool:
        """Whether Core ML can store this weight only since iOS 18."""
        return bool(self.block) or self.fmt in FOUR_BIT_TYPES or self.is_sparse

    def broadcast_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point with as many axes as the codes."""
        if self.block:
            return self.scale, self.zero_point
        shape = [1] * self.codes.ndim
        if self.scale.ndim:
            shape[self.axis] = -1
        return self.scale.view(shape), None if self.zero_point is None else self.zero_point.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.minval is None:
            weight = dequantize(self.codes, self.scale, self.zero_point, self.axis, self.block, self.fmt)
        else:
            weight = dequantize_minval(self.codes, self.scale, self.minval, self.axis, self.block, self.fmt)
        return self.product(x, weight.to(torch.float32), self.bias)


class StoredPalette(WeightedOperation):
    """An operation whose weight is stored as indices (out, in, ..) into tables (groups, entries).

    With vectors, the tables are (groups, entries, dim), and there is one index for `dim` neighbouring channels. A
    pruned weight has a mask: only the indices of kept weights are stored. If no weight is kept, there is no mask but
    tables of zeros: Core AI's compiler aborts at an empty constant.
    """

    def __init__(self, types: StorableTypes, source: QuantizedLayer) -> None:
        super().__init__(source)
        quant, deployed = source.weight_quant, source.get_deployed()
        granularity = quant.calculator.granularity
        assert isinstance(granularity, PerGroupedChannelGranularity)  # noqa: S101  # the only one of a palette
        dim = quant.scale.shape[2] if quant.scale.ndim == 3 else 1
        if quant.mask is not None and not types.has_sparse_palettes:
            raise ExportError(f"{quant.name}: {types.format} does not support pruned palettes: use sparsity=None")
        self.fmt, self.axis = dtype_name(quant.spec.dtype), int(granularity.axis or 0)
        codes = deployed.codes.detach()
        if dim > 1:  # codes repeat an index for each of its channels
            codes = codes.index_select(self.axis, torch.arange(0, codes.shape[self.axis], dim))
        self.register_buffer("codes", codes.contiguous())
        mask, tables = quant.mask, quant.scale.detach().to(torch.float32).contiguous().clone()
        if mask is not None and not mask.any():
            mask, tables = None, torch.zeros_like(tables)
        self.register_buffer("mask", None if mask is None else mask.detach().to(torch.uint8).contiguous())
        self.register_buffer("tables", tables)
        self.register_buffer("bias", None if deployed.bias is None else deployed.bias.detach().clone())

    codes: Tensor
    mask: Tensor | None
    tables: Tensor
    bias: Tensor | None
    needs_ios18 = True

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            weight = look_up(self.codes, self.tables, self.axis, self.fmt)
        else:
            weight = look_up_kept(self.codes, self.mask, self.tables, self.axis, self.fmt)
        return self.product(x, weight, self.bias)


def _find_block(block: tuple[int, ...], shape: torch.Size) -> tuple[int, int]:
    """Return the first axis that has several blocks, and the size of a block along it."""
    axis = next((axis for axis, size in enumerate(block) if 1 < size < shape[axis]), 0)
    return axis, block[axis]


def _build_stored_weight(types: StorableTypes, source: QuantizedLayer) -> nn.Module:
    return StoredPalette(types, source) if is_palette(source.weight_quant.spec) else StoredWeight(types, source)


class StoredStub(nn.Module):
    """A quantizer of activations as quantize and dequantize with constant parameters.

    `factor` is multiplied into the scale: the scaling of an attention's query (see attention.py).
    """

    def __init__(self, types: StorableTypes, stub: QuantStub, factor: float = 1.0) -> None:
        super().__init__()
        grid, granularity = stub.quantizer.grid, stub.calculator.granularity
        self.fmt, self.low, self.high = grid.format.name, grid.low, grid.high
        is_per_channel = isinstance(granularity, PerChannelGranularity) and types.has_channel_activations
        has_range = types.activations.get(self.fmt) == (grid.low, grid.high)
        if not has_range or (stub.minval is not None and not types.has_minval):
            raise ExportError(
                f"{stub.name}: {types.format} quantizes activations to the full range of "
                f"{' or '.join(types.activations)}{'' if types.has_minval else ', with a zero point'}"
            )
        if stub.scale.ndim and not is_per_channel:
            raise ExportError(f"{stub.name}: {types.format} does not support activations with {granularity!r}")
        self.axis = int(granularity.axis or 0) if isinstance(granularity, PerChannelGranularity) else 0
        scale, zero_point = stub.scale.detach() * factor, stub.zero_point.detach().expand(stub.scale.shape)
        minval = None if stub.minval is None else (stub.minval.detach() * factor).expand(stub.scale.shape)
        if is_per_channel:
            scale, zero_point = scale.reshape(-1), zero_point.reshape(-1)
            minval = None if minval is None else minval.reshape(-1)
        self.register_buffer("scale", scale.to(torch.float32))
        self.register_buffer("zero_point", zero_point.to(grid.format.storage).clone())
        self.has_zero_point = stub.minval is None and bool(zero_point.any())
        self.register_buffer("minval", None if minval is None else minval.to(torch.float32).clone())

    scale: Tensor
    zero_point: Tensor
    minval: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.minval is not None:
            codes = quantize_minval(x, self.scale, self.minval, self.axis, self.low, self.high, self.fmt)
            restored: Tensor = dequantize_minval(codes, self.scale, self.minval, self.axis, 0, self.fmt)
            return restored
        codes = quantize(x, self.scale, self.zero_point, axis=self.axis, low=self.low, high=self.high, fmt=self.fmt)
        values: Tensor = dequantize(codes, self.scale, self.zero_point, axis=self.axis, block=0, fmt=self.fmt)
        return values


class StoredRows(nn.Module):
    """A dynamic quantizer of activations: the program computes one int8 scale for each row."""

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = quantize_rows_symmetric(x)
        return values


def _build_stored_stub(types: StorableTypes, stub: QuantStub, factor: float = 1.0) -> nn.Module:
    if not stub.calculator.always_called or stub.is_learned:
        return StoredStub(types, stub, factor)
    if types.has_dynamic_rows and isinstance(stub.calculator.granularity, PerTokenGranularity):
        return StoredRows()
    raise ExportError(
        f"{stub.name}: {types.format} does not support dynamic scales with {stub.calculator.granularity!r}"
    )


COREML_FACTORIES = ModuleFactories(
    partial(_build_stored_weight, COREML_TYPES), partial(_build_stored_stub, COREML_TYPES), InputFirstFloatWeight
)
COREAI_FACTORIES = ModuleFactories(
    partial(_build_stored_weight, COREAI_TYPES), partial(_build_stored_stub, COREAI_TYPES), FloatWeight
)


def build_coreml_graph(model: fx.GraphModule, float_dtype: torch.dtype) -> fx.GraphModule:
    """Copy a model for export to Core ML: weights as codes, scales rounded to `float_dtype`."""
    return build_stored_graph(model, COREML_FACTORIES, float_dtype)


def build_coreai_graph(model: fx.GraphModule, float_dtype: torch.dtype) -> fx.GraphModule:
    """Copy a model for export to Core AI: weights as codes, scales rounded to `float_dtype`."""
    return build_stored_graph(model, COREAI_FACTORIES, float_dtype)


def operation_label(path: str) -> str:
    """Return the name that a module's operation has in the program: layer_ and the path in snake case.

    torch.fx writes the names of buffers and parameters in snake case too (LogSigmoid becomes log_sigmoid).
    """
    return "layer_" + re.sub(r"(?<=[a-z])([A-Z])", r"_\1", re.sub(r"\W", "_", path)).lower()
