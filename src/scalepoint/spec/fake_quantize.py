"""The module that stands on a tensor: observe, then simulate what the deployed integer or float code keeps.

A new kind of rounding derives from DefaultFakeQuantize, or implements quantize and dequantize on the base.
"""

import warnings
from abc import abstractmethod
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from scalepoint.errors import BlockSizeMismatchError, NotObservedError, SpecError, TensorError
from scalepoint.numerics import (
    Grid,
    QParams,
    QuantizationFormulation,
    QuantizationScheme,
    Steps,
    dequantize,
    fake_quantize,
    format_of,
    is_traced,
    quantize,
    steps_of,
    straight_through,
)
from scalepoint.numerics.affine import SMALL
from scalepoint.numerics.blocks import block_view, is_ragged
from scalepoint.spec.granularity import QuantizationGranularity
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase
from scalepoint.spec.registry import Registry
from scalepoint.spec.state import Stateful

_SWITCHES = ("observer_enabled", "fake_quant_enabled", "disabled")


class CompressionTargetTensor(StrEnum):
    """What a quantizer stands on."""

    WEIGHT = "weight"
    ACTIVATION = "activation"


class FakeQuantizeImplBase(Registry, Stateful):
    """Observes when `observer_enabled`, quantizes and dequantizes when `fake_quant_enabled`.

    Both switches are one-byte buffers with methods; a write to either is noticed. A tensor that cannot be
    quantized (integers, an empty one) passes through, with why in `reason`; one whose blocks do not fit
    disables the quantizer with a warning, or with strict=True is an error.
    """

    _registry: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        dtype: torch.dtype,
        qscheme: QuantizationScheme,
        qformulation: QuantizationFormulation,
        granularity: QuantizationGranularity,
        target_dtype: torch.dtype,
        quant_min: float,
        quant_max: float,
        qparams_calculator: QParamsCalculatorBase,
        quantization_target: CompressionTargetTensor | str = CompressionTargetTensor.WEIGHT,
        n_bits: int | None = None,
        *,
        strict: bool = False,
        **extra: Any,
    ) -> None:
        super().__init__()
        fmt = format_of(dtype)
        self.dtype, self.target_dtype = dtype, target_dtype
        self.n_bits = fmt.bits if n_bits is None else n_bits
        self.quantization_target = CompressionTargetTensor(quantization_target)
        self.grid = Grid(fmt, quant_min, quant_max, QuantizationScheme(qscheme), QuantizationFormulation(qformulation))
        self.strict = strict
        self.reason = ""
        self.qparams_calculator = qparams_calculator
        self.granularity = granularity
        self.add_switch("observer_enabled", True)
        self.add_switch("fake_quant_enabled", True)
        self.add_switch("disabled", False)

    qscheme = property(lambda self: self.grid.scheme)
    qformulation = property(lambda self: self.grid.formulation)
    quant_min = property(lambda self: self.grid.low)
    quant_max = property(lambda self: self.grid.high)

    @property
    def name(self) -> str:
        """Where it stands, as errors and reports say it: "layer1.0.conv1.weight"."""
        return self.qparams_calculator.name

    @name.setter
    def name(self, name: str) -> None:
        self.qparams_calculator.name = name

    @property
    def granularity(self) -> QuantizationGranularity:
        return self.qparams_calculator.granularity

    @granularity.setter
    def granularity(self, granularity: QuantizationGranularity) -> None:
        if granularity != self.qparams_calculator.granularity:
            self.qparams_calculator.granularity = granularity

    def forward(self, tensor: Tensor) -> Tensor:
        observing, quantizing, disabled = self.are_on(_SWITCHES)
        if disabled or not (observing or quantizing) or self._passes(tensor, observing):
            return tensor
        calculator: Any = self._modules["qparams_calculator"]
        if observing or calculator.always_called:
            qparams = self._observe(tensor)
        else:
            qparams = calculator.stored
            if not qparams.scale.numel():
                raise NotObservedError(
                    f"{self._where()} has no parameters: nothing was observed and the observer is off. "
                    "Run calibration data through the model with the observer on, or load a calibrated state"
                )
        return tensor if qparams is None or not quantizing else self._simulate(tensor, qparams)

    def _simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
        if qparams.scale.ndim != tensor.ndim or qparams.scale.device != tensor.device:
            qparams = self._fitted(tensor, qparams)
        return self.fake_quantize(tensor, *qparams)

    def fake_quantize(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> Tensor:
        """dequantize(quantize(tensor)) with a gradient of 1 everywhere; DefaultFakeQuantize does better."""
        codes = self.quantize(tensor.detach(), scale, zero_point, minval, cast_to_target_dtype=False)
        values = self.dequantize(codes, scale, zero_point, minval).to(tensor.dtype)
        return values + (tensor - tensor.detach()) if torch.is_grad_enabled() and tensor.requires_grad else values

    @abstractmethod
    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> Tensor:
        """The codes, in the storage dtype or as float32."""
        raise SpecError(f"{type(self).__name__} must implement quantize")

    @abstractmethod
    def dequantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """What the codes stand for."""
        raise SpecError(f"{type(self).__name__} must implement dequantize")

    def calculate_qparams(self) -> QParams:
        """The stored scale, zero point and minval."""
        return self.qparams_calculator.get_qparams()

    def enable_observer(self, enabled: bool = True) -> None:
        self.switch("observer_enabled", enabled)

    def disable_observer(self) -> None:
        self.switch("observer_enabled", False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        self.switch("fake_quant_enabled", enabled)

    def disable_fake_quant(self) -> None:
        self.switch("fake_quant_enabled", False)

    def is_disabled(self) -> bool:
        """Whether the quantizer gave up because its blocks do not fit the tensor; `reason` says why."""
        return self.is_on("disabled")

    def set_export_mode(self, enabled: bool = True) -> None:
        """Make the stored parameters final."""
        self.qparams_calculator.set_export_mode(enabled)

    @classmethod
    def with_args(cls, **kwargs: Any) -> "PartialConstructor":
        """A constructor with some arguments given, as PT2E wants one."""
        return PartialConstructor(partial(cls, **kwargs))

    def convert(self, model: nn.Module, node: Any) -> None:
        """PT2E asks a quantizer to replace its node; ours stays where it is."""

    def extra_repr(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        state = (
            "disabled: " + self.reason
            if self.is_disabled()
            else (
                f"observer={'on' if self.is_on('observer_enabled') else 'off'}, "
                f"fake_quant={'on' if self.is_on('fake_quant_enabled') else 'off'}"
            )
        )
        return (
            f"{name}{self.quantization_target}, {self.grid.format.name} [{self.quant_min}, {self.quant_max}], "
            f"{self.qscheme}, {self.qformulation}, {self.granularity!r}, {state}"
        )

    def _where(self) -> str:
        return self.name or f"an unnamed {self.quantization_target} quantizer"

    def _passes(self, tensor: Tensor, observing: bool) -> bool:
        """Whether a tensor is returned as it came: it holds no values to quantize."""
        if torch.compiler.is_compiling():
            return not tensor.is_floating_point()
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            _check_type(tensor, self._where())
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            _check_type(tensor, self._where())
            self.reason = f"a {str(tensor.dtype).removeprefix('torch.')} tensor has nothing to quantize"
            return True
        if tensor.numel() == 0:
            return True
        if tensor.is_meta:
            if observing:
                raise TensorError(
                    f"{self._where()} cannot observe a meta tensor, it has no values: materialize it first"
                )
            return True
        return False

    def _observe(self, tensor: Tensor) -> QParams | None:
        """New parameters, or None when this tensor is left alone."""
        try:
            qparams: QParams = self.qparams_calculator(tensor)
        except BlockSizeMismatchError as error:
            self._give_up(error)
            return None
        return qparams if qparams.scale.numel() else None

    def _give_up(self, error: BlockSizeMismatchError) -> None:
        if self.strict:
            raise BlockSizeMismatchError(f"{self._where()}: {Exception.__str__(error)}") from error
        self.reason = Exception.__str__(error)
        self.switch("disabled", True)
        warnings.warn(f"{self._where()} is disabled and passes its tensor through: {self.reason}", stacklevel=4)

    def _fitted(self, tensor: Tensor, qparams: QParams) -> QParams:
        """The parameters in the tensor's rank; one scale for all fits every rank."""
        scale = qparams.scale
        if scale.device != tensor.device:
            raise TensorError(
                f"{self._where()}: the tensor is on {tensor.device}, the parameters are on {scale.device}. "
                f"Move the quantizer: .to({str(tensor.device)!r})"
            )
        if scale.numel() == 1:
            return qparams.map(lambda value: value.reshape((1,) * tensor.ndim))
        raise TensorError(
            f"{self._where()} was calibrated on a tensor of {scale.ndim} axes and got {tuple(tensor.shape)}: "
            "only per-tensor parameters fit another rank"
        )


class PartialConstructor:
    """A class with some constructor arguments given; `with_args` gives more."""

    def __init__(self, constructor: "partial[Any]") -> None:
        self.constructor = constructor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.constructor(*args, **kwargs)

    def with_args(self, **kwargs: Any) -> "PartialConstructor":
        return PartialConstructor(partial(self.constructor, **kwargs))

    def __repr__(self) -> str:
        return f"PartialConstructor({self.constructor!r})"


class _Kept(NamedTuple):
    """The steps made from parameters, and what tells that they changed; a frozen quantizer makes them once."""

    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None
    versions: int
    shape: torch.Size | None
    steps: Steps
    view: tuple[int, ...] | None

    @staticmethod
    def make(tensor: Tensor, qparams: QParams, grid: Grid, block: tuple[int, ...] | None) -> "_Kept":
        shape = view = None
        at_hand = qparams
        if block is not None:
            blocks = block_view(tensor.shape, block)
            shape, view = tensor.shape, blocks.tensor
            at_hand = qparams.map(lambda value: value.view(blocks.params))
            if tensor.numel() <= SMALL:  # one value an element costs nothing here, and saves two views a call
                view = None
                at_hand = at_hand.map(lambda value: value.expand(blocks.tensor).reshape(tensor.shape))
        return _Kept(*qparams, _versions(*qparams), shape, steps_of(at_hand, grid, fixed_zero=True), view)

    def fits(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> bool:
        return (
            scale is self.scale
            and zero_point is self.zero_point
            and minval is self.minval
            and _versions(scale, zero_point, minval) == self.versions
            and (self.shape is None or tensor.shape == self.shape)
        )


def _versions(scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> int:
    """A number that grows with every write to one of the three."""
    return (
        scale._version
        + (zero_point._version if zero_point is not None else 0)
        + (minval._version if minval is not None else 0)
    )


class _Cached(NamedTuple):
    """A weight's fake-quantized form, and what it was made from."""

    weight: Tensor
    marks: tuple[int, ...]
    result: Tensor


@FakeQuantizeImplBase.register("default")
class DefaultFakeQuantize(FakeQuantizeImplBase):
    """The arithmetic of `scalepoint.numerics`; a frozen weight in eval is computed once and remembered.

    The cache notices in-place changes of the weight and of the parameters by their version counters, which
    `weight.data` writes bypass: call `clear_cache()` after one. `cache_weights = False` saves the memory.
    """

    def __init__(self, *args: Any, cache_weights: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_weights = cache_weights
        self._cache: _Cached | None = None
        self._kept: _Kept | None = None

    def quantize(
        self,
        tensor: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        minval: Tensor | None,
        cast_to_target_dtype: bool = True,
    ) -> Tensor:
        codes = quantize(tensor, QParams(scale, zero_point, minval), self.grid, self._block(tensor))
        return codes.to(self.target_dtype) if cast_to_target_dtype else codes

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
        kept = self._kept
        if kept is None or not kept.fits(tensor, scale, zero_point, minval) or torch.compiler.is_compiling():
            qparams = QParams(scale, zero_point, minval)
            block = self._block(tensor)
            ragged = block is not None and is_ragged(tensor.shape, block)
            if torch.compiler.is_compiling() or scale.requires_grad or scale.is_inference() or ragged:
                return fake_quantize(tensor, qparams, self.grid, block, fixed_zero=True)
            kept = self._kept = _Kept.make(tensor, qparams, self.grid, block)
        if kept.view is None:
            return straight_through(tensor, kept.steps, self.grid.format)
        return straight_through(tensor.view(kept.view), kept.steps, self.grid.format).reshape(tensor.shape)

    def _block(self, tensor: Tensor) -> tuple[int, ...] | None:
        granularity = self.granularity
        return None if granularity.broadcasts else granularity.get_block_size(tensor.shape)

    def _simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
        if not self._may_cache(tensor) or qparams.scale.is_inference():
            return super()._simulate(tensor, qparams)
        marks = _marks(tensor, qparams)
        if self._cache is not None and self._cache.weight is tensor and self._cache.marks == marks:
            return self._cache.result
        result = super()._simulate(tensor, qparams)
        self._cache = _Cached(tensor, marks, result)
        return result

    def _may_cache(self, tensor: Tensor) -> bool:
        return (
            self.quantization_target == CompressionTargetTensor.WEIGHT
            and self.cache_weights
            and not self.training
            and not self.is_on("observer_enabled")
            and not (torch.is_grad_enabled() and tensor.requires_grad)
            and not is_traced(tensor)
            and not tensor.is_inference()
        )

    def clear_cache(self) -> None:
        self._cache = None

    def train(self, mode: bool = True) -> Self:
        self.clear_cache()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.clear_cache()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None, "_kept": None}


def _marks(tensor: Tensor, qparams: QParams) -> tuple[int, ...]:
    values = (tensor, *(value for value in qparams if value is not None))
    return tuple(mark for value in values for mark in (value._version, value.data_ptr()))


def _check_type(tensor: Tensor, where: str) -> None:
    """Refuse what has no plain float values: sparse, nested, quantized, complex and wrapped tensors."""
    kind = ""
    if tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    elif tensor.is_quantized:
        kind = "already quantized"
    elif tensor.is_complex():
        kind = "complex"
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not _is_tracing_tensor(tensor):
        kind = f"a {type(tensor).__name__}"
    if kind:
        raise TensorError(f"{where} cannot quantize a tensor that is {kind}: pass a plain float tensor")


def _is_tracing_tensor(tensor: Tensor) -> bool:
    """The stand-ins that torch itself uses while it records a graph."""
    return type(tensor).__module__.startswith("torch._subclasses")
