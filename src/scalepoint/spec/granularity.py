"""Which elements share a scale: a tensor, a channel, a block or a token.

`get_block_size(shape)` is the size of a block along each axis. The arithmetic only needs this tuple.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, StrictInt, field_validator, model_serializer, model_validator
from torch import nn

from scalepoint.errors import SpecError, did_you_mean, short_repr
from scalepoint.numerics import check_divides
from scalepoint.spec.registry import ClassRegistry
from scalepoint.support.validation_errors import CheckedModel

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class CompressionTargetTensor(StrEnum):
    """Whether a quantizer is for a weight, an activation, or the table (LUT) of a palettized weight."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    LUT = "lut"


WEIGHT = CompressionTargetTensor.WEIGHT


class QuantizationGranularity(CheckedModel, ClassRegistry):
    """Base class and registry of granularities. A mapping such as {"type": "per_channel", "axis": 0} builds one."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    error_class = SpecError
    _registry: ClassVar[dict[str, Any]] = {}

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        """Return the size of a block along each axis of a tensor of this shape.

        Args:
            shape: Shape of the tensor.
            quantization_target: Whether the tensor is a weight or an activation. It matters for PerBlockGranularity.
        """
        raise SpecError(f"{type(self).__name__} must implement get_block_size(shape)")

    def resolve(self, layer: nn.Module | type[nn.Module]) -> "QuantizationGranularity":
        """Return a granularity whose axis, if it is None, is that of the layer whose weight is quantized."""
        return self

    @property
    def broadcasts(self) -> bool:
        """Whether parameters with one value per block broadcast against the tensor."""
        return True

    @classmethod
    def build(cls, value: Any) -> "QuantizationGranularity":
        """Return a granularity as it is, or build it from a dict."""
        if isinstance(value, QuantizationGranularity):
            QuantizationGranularity.key_of(type(value))
            return value
        if not isinstance(value, dict) or "type" not in value:
            keys = ", ".join(QuantizationGranularity._registry)
            raise SpecError(
                f"granularity must be an object or a dict with 'type' (one of {keys}), got {short_repr(value)}"
            )
        fields = dict(value)
        built: QuantizationGranularity = QuantizationGranularity.get_class(fields.pop("type"))(**fields)
        return built

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if cls in cls._registry.values() and data.get("type") == cls.key_of(cls):
                data = {name: value for name, value in data.items() if name != "type"}
            for name in data:
                if name not in cls.model_fields:
                    known = did_you_mean(str(name), cls.model_fields) if cls.model_fields else "it has no fields"
                    raise SpecError(f"{cls.__name__} has no field {name!r}: {known}")
        return data

    @model_serializer(mode="wrap")
    def _with_type(self, handler: Any) -> dict[str, Any]:
        return {"type": QuantizationGranularity.key_of(type(self)), **handler(self)}


@QuantizationGranularity.register("per_tensor")
class PerTensorGranularity(QuantizationGranularity):
    """One scale per tensor."""

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        return tuple(shape)


@QuantizationGranularity.register("per_channel")
class PerChannelGranularity(QuantizationGranularity):
    """One scale per index of an axis. `axis=None` is the axis of output channels."""

    axis: StrictInt | None = None

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        axis = normalize_axis(self, self.axis, shape)
        return (*shape[:axis], 1, *shape[axis + 1 :])

    def resolve(self, layer: nn.Module | type[nn.Module]) -> "QuantizationGranularity":
        if self.axis is not None:
            return self
        return self.model_copy(update={"axis": 1 if is_transposed(layer) else 0})


@QuantizationGranularity.register("per_token")
class PerTokenGranularity(QuantizationGranularity):
    """One scale for each vector along the last axis, such as a token of a sequence."""

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        if not len(shape):
            raise SpecError("a 0-d tensor has no last axis: use PerTensorGranularity()")
        return (*(1 for _ in shape[:-1]), shape[-1])


@QuantizationGranularity.register("per_token_block")
class PerTokenBlockGranularity(QuantizationGranularity):
    """One scale for `block_size` elements along the last axis, for any rank: MX and NVFP4 activations."""

    block_size: Annotated[StrictInt, Field(gt=0)]

    @property
    def broadcasts(self) -> bool:
        return False

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        if not len(shape):
            raise SpecError("a 0-d tensor has no last axis: use PerTensorGranularity()")
        block = (*(1 for _ in shape[:-1]), self.block_size)
        check_divides(shape, block)
        return block


@QuantizationGranularity.register("per_block")
class PerBlockGranularity(QuantizationGranularity):
    """One scale per block of elements.

    Attributes:
        axis: Axis of the blocks; None is the axis of input channels.
        block_size: An int is the size along `axis`. In a weight a block has size 1 on the others of the first two axes,
            and contains all of the later axes (a kernel); in an activation it has size 1 on all other axes. A tuple is
            the size along every axis, -1 for all of it.
        pad: Allow a shorter last block.

    Example:
        >>> PerBlockGranularity(axis=1, block_size=16).get_block_size((8, 64, 3, 3))
        (1, 16, 3, 3)
        >>> PerBlockGranularity(axis=1, block_size=16).get_block_size((8, 64, 3, 3), CompressionTargetTensor.ACTIVATION)
        (1, 16, 1, 1)
    """

    axis: StrictInt | None = None
    block_size: StrictInt | tuple[StrictInt, ...]
    pad: bool = False

    @field_validator("block_size")
    @classmethod
    def _positive(cls, block_size: int | tuple[int, ...]) -> int | tuple[int, ...]:
        extents = block_size if isinstance(block_size, tuple) else (block_size,)
        allowed = "a positive number of elements" + (
            ", or -1 for all of an axis" if isinstance(block_size, tuple) else ""
        )
        for extent in extents:
            if extent < 1 and not (extent == -1 and isinstance(block_size, tuple)):
                raise SpecError(f"block_size={block_size}: each size must be {allowed}")
        if not extents:
            raise SpecError("block_size=(): give one size per axis")
        return block_size

    @model_serializer(mode="wrap")
    def _with_type(self, handler: Any) -> dict[str, Any]:
        fields = handler(self)
        if not self.pad:
            fields.pop("pad", None)
        return {"type": QuantizationGranularity.key_of(type(self)), **fields}

    @property
    def broadcasts(self) -> bool:
        return False

    def get_block_size(
        self, shape: Sequence[int], quantization_target: CompressionTargetTensor = WEIGHT
    ) -> tuple[int, ...]:
        if isinstance(self.block_size, tuple):
            block = self._tile(shape)
        else:
            block = self._along_axis(self.block_size, shape, quantization_target)
        if self.pad:
            return tuple(min(extent, size) for extent, size in zip(block, shape, strict=True))
        check_divides(shape, block)
        return block

    def _tile(self, shape: Sequence[int]) -> tuple[int, ...]:
        assert isinstance(self.block_size, tuple)  # noqa: S101  # the caller checked
        if self.axis is not None:
            raise SpecError(f"block_size={self.block_size} contains the size along every axis: leave out axis=")
        if len(self.block_size) != len(shape):
            raise SpecError(
                f"block_size={self.block_size} is for tensors of {len(self.block_size)} axes, got shape "
                f"{tuple(shape)}: give one size per axis, -1 for all of it"
            )
        return _replace_whole_axes(shape, self.block_size)

    def _along_axis(self, block_size: int, shape: Sequence[int], target: CompressionTargetTensor) -> tuple[int, ...]:
        axis = normalize_axis(self, self.axis, shape)
        is_activation = target == CompressionTargetTensor.ACTIVATION
        block = [1 if is_activation or index < 2 else size for index, size in enumerate(shape)]
        block[axis] = block_size
        return tuple(block)

    def resolve(self, layer: nn.Module | type[nn.Module]) -> "QuantizationGranularity":
        if self.axis is not None or isinstance(self.block_size, tuple):
            return self
        return self.model_copy(update={"axis": 0 if is_transposed(layer) else 1})


def resolve_block_sizes(tensor_shape: Sequence[int], block_sizes: Sequence[int]) -> list[int]:
    """Return the size of a block along each axis, with -1 replaced by the size of the axis.

    Args:
        tensor_shape: Shape of the tensor.
        block_sizes: One size per axis; -1 for all of it.

    Raises:
        SpecError: There is not one size per axis, or a size is neither positive nor -1.
        BlockSizeMismatchError: A size does not divide its axis.
    """
    if len(block_sizes) != len(tensor_shape):
        raise SpecError(
            f"block sizes {tuple(block_sizes)} are for {len(block_sizes)} axes, got shape {tuple(tensor_shape)}: give "
            "one size per axis, -1 for all of it"
        )
    if any(size < 1 and size != -1 for size in block_sizes):
        raise SpecError(f"block sizes {tuple(block_sizes)}: each must be positive, or -1 for all of an axis")
    block = _replace_whole_axes(tensor_shape, block_sizes)
    check_divides(tensor_shape, block)
    return list(block)


def get_target_block_size(
    granularity: QuantizationGranularity, shape: Sequence[int], target: CompressionTargetTensor
) -> tuple[int, ...]:
    """Return the size of a block of a weight or an activation. A user's class may take the shape alone."""
    if (
        target == CompressionTargetTensor.ACTIVATION
        and type(granularity).get_block_size is PerBlockGranularity.get_block_size
    ):
        return granularity.get_block_size(shape, target)
    return granularity.get_block_size(shape)


def _replace_whole_axes(shape: Sequence[int], block_sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size if extent == -1 else extent for extent, size in zip(block_sizes, shape, strict=True))


def normalize_axis(granularity: QuantizationGranularity, axis: int | None, shape: Sequence[int]) -> int:
    """Return the axis as a number from 0."""
    if axis is None:
        raise SpecError(f"{granularity!r} has no axis: pass axis=, or call granularity.resolve(layer)")
    if not -len(shape) <= axis < len(shape):
        raise SpecError(f"axis {axis} is outside shape {tuple(shape)}: pass another axis to {granularity!r}")
    return axis % len(shape)


def is_transposed(layer: nn.Module | type[nn.Module]) -> bool:
    kind = layer if isinstance(layer, type) else type(layer)
    return issubclass(kind, _TRANSPOSED)
