"""The default fake quantizer: the arithmetic of `scalepoint.numerics`, with caches for frozen tensors."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scalepoint.numerics import (
    Grid,
    QParams,
    Steps,
    dequantize,
    fake_quantize,
    fake_quantize_by_steps,
    is_traced,
    make_steps,
    quantize,
)
from scalepoint.numerics.affine import FEW_ELEMENTS
from scalepoint.numerics.blocks import block_view, is_ragged
from scalepoint.spec.fake_quantize import CompressionTargetTensor, FakeQuantizeImplBase


class _StepsCache(NamedTuple):
    """Steps, and the parameters they were computed from. A frozen quantizer computes them once.

    Attributes:
        versions: Sum of the version counters of the parameters: a write to one of them invalidates the cache.
        shape: Shape of the tensor, if the steps depend on it.
        view: Shape in which the tensor and the steps broadcast, if it differs from that of the tensor.
    """

    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None
    versions: int
    shape: torch.Size | None
    steps: Steps
    view: tuple[int, ...] | None

    @staticmethod
    def make(tensor: Tensor, qparams: QParams, grid: Grid, block: tuple[int, ...] | None) -> "_StepsCache":
        shape = view = None
        viewed = qparams
        if block is not None:
            blocks = block_view(tensor.shape, block)
            shape, view = tensor.shape, blocks.tensor
            viewed = qparams.map(lambda value: value.view(blocks.params))
            if tensor.numel() <= FEW_ELEMENTS:  # expand the parameters once: that saves two views in every call
                view = None
                viewed = viewed.map(lambda value: value.expand(blocks.tensor).reshape(tensor.shape))
        return _StepsCache(*qparams, _versions(*qparams), shape, make_steps(viewed, grid, fixed_zero=True), view)

    def is_valid_for(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> bool:
        return (
            scale is self.scale
            and zero_point is self.zero_point
            and minval is self.minval
            and _versions(scale, zero_point, minval) == self.versions
            and (self.shape is None or tensor.shape == self.shape)
        )


def _can_cache_steps(tensor: Tensor, qparams: QParams, block: tuple[int, ...] | None) -> bool:
    """Whether a later call can tell that steps are still valid.

    Not inside a traced graph, for a scale in training, or with ragged blocks.
    """
    if is_traced(tensor) or qparams.scale.requires_grad or (block is not None and is_ragged(tensor.shape, block)):
        return False
    return not any(value.is_inference() for value in qparams if value is not None)


def _versions(scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> int:
    """Return a number that grows with every write to one of the parameters."""
    return (
        scale._version
        + (zero_point._version if zero_point is not None else 0)
        + (minval._version if minval is not None else 0)
    )


class _WeightCache(NamedTuple):
    """A fake-quantized weight, and what it was computed from.

    `versions` are those of the weight and its parameters, `version` is that of the result when it was returned.
    """

    weight: Tensor
    versions: tuple[int, ...]
    result: Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether the result was not written to since it was returned."""
        return self.result._version == self.version


@FakeQuantizeImplBase.register("default")
class DefaultFakeQuantize(FakeQuantizeImplBase):
    """The default fake quantizer, on the arithmetic of `scalepoint.numerics`.

    A frozen weight in eval mode is computed once and cached. Version counters tell when the weight changes in place.
    Writes through `weight.data` and torch's fused optimizers do not change these: call `clear_cache()` after one. Set
    `cache_weights` to False to save the memory.
    """

    def __init__(self, *args: Any, cache_weights: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_weights = cache_weights
        self._cache: _WeightCache | None = None
        self._steps_cache: _StepsCache | None = None

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> Tensor:
        dtype = self.target_dtype if cast_to_target_dtype else torch.float32
        return quantize(tensor, QParams(scale, zero_point, minval), self.grid, self._block(tensor), dtype)

    def dequantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        return dequantize(tensor, QParams(scale, zero_point, minval), self.grid, self._block(tensor)).to(output_dtype)

    def fake_quantize(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> Tensor:
        cache = None if torch.compiler.is_compiling() else self._steps_cache
        if cache is None or not cache.is_valid_for(tensor, scale, zero_point, minval):
            qparams = QParams(scale, zero_point, minval)
            block = self._block(tensor)
            if not _can_cache_steps(tensor, qparams, block):
                return fake_quantize(tensor, qparams, self.grid, block, fixed_zero=True)
            cache = self._steps_cache = _StepsCache.make(tensor, qparams, self.grid, block)
        if cache.view is None:
            return fake_quantize_by_steps(tensor, cache.steps, self.grid.format)
        return fake_quantize_by_steps(tensor.view(cache.view), cache.steps, self.grid.format).reshape(tensor.shape)

    def _block(self, tensor: Tensor) -> tuple[int, ...] | None:
        granularity = self.granularity
        return None if granularity.broadcasts else granularity.get_block_size(tensor.shape)

    def simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
        if not self._may_cache(tensor) or qparams.scale.is_inference():
            return super().simulate(tensor, qparams)
        versions = _versions_and_pointers(tensor, qparams)
        cache = self._cache
        if cache is not None and cache.weight is tensor and cache.versions == versions and cache.is_unchanged:
            return cache.result
        result = super().simulate(tensor, qparams)
        self._cache = _WeightCache(tensor, versions, result, result._version)
        return result

    def _may_cache(self, tensor: Tensor) -> bool:
        return (
            self.quantization_target == CompressionTargetTensor.WEIGHT
            and self.cache_weights
            and not self.training
            and not self.is_on("observer_enabled")
            and not (torch.is_grad_enabled() and tensor.requires_grad)
            and not is_traced(tensor)
            and not torch.is_inference_mode_enabled()
            and not tensor.is_inference()
        )

    def clear_cache(self) -> None:
        """Discard the stored result for a frozen weight."""
        self._cache = None

    def train(self, mode: bool = True) -> Self:
        self.clear_cache()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.clear_cache()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None, "_steps_cache": None}


def _versions_and_pointers(tensor: Tensor, qparams: QParams) -> tuple[int, ...]:
    values = (tensor, *(value for value in qparams if value is not None))
    return tuple(number for value in values for number in (value._version, value.data_ptr()))
