"""The default fake quantizer: the arithmetic of `scalepoint.numerics`, with three caches for frozen quantizers.

    _WeightCache     the fake-quantized weight itself, in eval mode
    _StepsCache      the operands of the arithmetic, computed from scale and zero point
    _PreparedCall    for a small tensor: a function without the checks of `forward`, which take longer than the result

Each cache stores the tensors that it was computed from and their version counters, which torch increments with every
write in place. A cache whose tensors were replaced or written to is computed again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scalepoint.compat.torch_names import is_functorch_active
from scalepoint.numerics import (
    FP4,
    Grid,
    QParams,
    Steps,
    dequantize,
    fake_quantize,
    fake_quantize_by_steps,
    get_format,
    is_traced,
    make_steps,
    max_prepared_elements,
    prepare_round_trip,
    quantize,
    round_to_float,
)
from scalepoint.numerics.affine import FEW_ELEMENTS
from scalepoint.numerics.blocks import block_view, is_ragged
from scalepoint.spec.fake_quantize import SWITCHES, FakeQuantizeImplBase
from scalepoint.spec.granularity import CompressionTargetTensor

# Methods that a subclass may override. A prepared call skips them.
_STEPS_OF_FORWARD = ("forward", "passes_through", "simulate", "fake_quantize", "_fused_fake_quant_dequant")


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
        self._prepared_call: _PreparedCall | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(tensor)
        prepared = self._prepared_call
        if prepared is not None and prepared.is_valid_for(tensor, self):
            return prepared.run(tensor)
        result = super().forward(tensor)
        self._prepared_call = self._prepare_call(tensor)
        return result

    def _prepare_call(self, tensor: Tensor) -> "_PreparedCall | None":
        """Prepare the next call, if this one was of a frozen quantizer with a small tensor.

        None for weights whose result is cached, and for classes that change a step of `forward`.
        """
        steps, fmt = self._steps_cache, self.grid.format
        is_cached_weight = self.cache_weights and self.quantization_target == CompressionTargetTensor.WEIGHT
        if is_cached_weight or steps is None or steps.view is not None:
            return None
        if not _is_small_and_plain(tensor, tensor.ndim, max_prepared_elements(fmt)) or not self._has_default_steps():
            return None
        calculator = self.qparams_calculator
        stored = calculator.stored
        is_frozen = self.are_on(SWITCHES) == [False, True, False] and not calculator.always_called
        if not is_frozen or not steps.is_valid_for(tensor, *stored):
            return None
        switches = (self.observer_enabled, self.fake_quant_enabled, self.disabled)
        if any(switch.is_inference() for switch in switches):
            return None
        return _PreparedCall(
            prepare_round_trip(steps.steps, fmt),
            self.grid,
            (*switches, *stored),
            sum(switch._version for switch in switches) + _versions(*stored),
            None if steps.shape is None and steps.steps.is_uniform else tensor.shape,
            tensor.ndim,
            max_prepared_elements(fmt),
        )

    def _has_default_steps(self) -> bool:
        """Return whether neither the class nor this object replaces a step of `forward`."""
        return all(
            getattr(type(self), name) is getattr(DefaultFakeQuantize, name) and name not in self.__dict__
            for name in _STEPS_OF_FORWARD
        )

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
        if type(self)._fused_fake_quant_dequant is DefaultFakeQuantize._fused_fake_quant_dequant:
            return self._round_trip(tensor, scale, zero_point, minval)
        return super().fake_quantize(tensor, scale, zero_point, minval)

    def _fused_fake_quant_dequant(
        self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None
    ) -> Tensor:
        return self._round_trip(tensor, scale, zero_point, minval)

    def _round_trip(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> Tensor:
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
        return None if self.granularity.broadcasts else self.get_block_size(tensor.shape)

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
        return {**self.__dict__, "_cache": None, "_steps_cache": None, "_prepared_call": None}


def fp4_forward(tensor: Tensor) -> Tensor:
    """Round to the nearest FP4 (E2M1) value: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with either sign.

    A tie goes to the even code. Larger magnitudes become 6, and NaN stays NaN.

    Args:
        tensor: Values already divided by their scale.

    Returns:
        The rounded values in float32.
    """
    fmt = get_format(FP4)
    return round_to_float(tensor.to(torch.float32).clamp(fmt.low, fmt.high), fmt)


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


def _versions_and_pointers(tensor: Tensor, qparams: QParams) -> tuple[int, ...]:
    values = (tensor, *(value for value in qparams if value is not None))
    return tuple(number for value in values for number in (value._version, value.data_ptr()))


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


class _PreparedCall(NamedTuple):
    """A call of a frozen quantizer with a small tensor, prepared because its checks take longer than its arithmetic.

    Attributes:
        run: Computes the result.
        grid: The grid of the quantizer.
        buffers: The switches and parameters that `run` was prepared from.
        versions: Sum of the version counters of the buffers.
        shape: Shape of the tensor, if `run` depends on it.
        ndim: Number of axes of the tensor.
        max_elements: Largest size of the tensor.
    """

    run: Callable[[Tensor], Tensor]
    grid: Grid
    buffers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    versions: int
    shape: torch.Size | None
    ndim: int
    max_elements: int

    def is_valid_for(self, tensor: Tensor, fake_quantizer: "DefaultFakeQuantize") -> bool:
        """Return whether `run` gives what `forward` gives: nothing was written to, and nothing is traced.

        This runs in every call of a small quantizer, where it takes longer than the arithmetic. So it reads buffers
        from the dictionaries of the modules: access by attribute is several times as slow.
        """
        observing, quantizing, disabled, scale, zero_point, minval = self.buffers
        calculator: Any = fake_quantizer._modules["qparams_calculator"]
        switches, parameters = fake_quantizer._buffers, calculator._buffers
        versions = observing._version + quantizing._version + disabled._version + _versions(scale, zero_point, minval)
        return (
            versions == self.versions
            and _is_small_and_plain(tensor, self.ndim, self.max_elements)
            and (self.shape is None or tensor.shape == self.shape)
            and switches["observer_enabled"] is observing
            and switches["fake_quant_enabled"] is quantizing
            and switches["disabled"] is disabled
            and parameters["scale"] is scale
            and parameters["zero_point"] is zero_point
            and parameters["minval"] is minval
            and fake_quantizer.grid is self.grid
        )


def _is_small_and_plain(tensor: Tensor, ndim: int, max_elements: int) -> bool:
    """Return whether a function of `prepare_round_trip` computes this tensor as `forward` does.

    `forward` does not call this while torch.compile traces it.
    """
    return (
        type(tensor) is Tensor
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch does not annotate it
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.ndim == ndim
        and 0 < tensor.numel() <= max_elements
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not is_functorch_active()
    )
