"""The base class of fake quantizers: they observe a tensor, then simulate its quantization.

For a new kind of rounding derive from DefaultFakeQuantize, or implement `quantize` and `dequantize` on this base.
"""

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from scalepoint.errors import BlockSizeMismatchError, NotObservedError, SpecError, TensorError, short_repr
from scalepoint.numerics import (
    CodeType,
    Grid,
    QParams,
    QuantizationFormulation,
    QuantizationScheme,
    dtype_name,
    get_format,
)
from scalepoint.numerics.blocks import block_counts
from scalepoint.spec.dynamic import StatelessQParamsCalculatorBase
from scalepoint.spec.granularity import CompressionTargetTensor, QuantizationGranularity
from scalepoint.spec.onnx_export import in_onnx_export, quantize_linear
from scalepoint.spec.qparams_calculator import QParamsCalculatorBase, to_qparams
from scalepoint.spec.registry import ClassRegistry, parse_enum, to_scheme
from scalepoint.spec.state import Stateful

SWITCHES = ("observer_enabled", "fake_quant_enabled", "disabled")


class FakeQuantizeImplBase(ClassRegistry, Stateful):
    """Observes when `observer_enabled`, quantizes and dequantizes when `fake_quant_enabled`.

    Both switches are one-byte buffers, which may also be written to directly. A tensor that cannot be quantized
    (integers, an empty one) passes through, and `reason` says why. If blocks do not divide a tensor, the quantizer is
    disabled with a warning; with strict=True that is an error. Arguments that are None are those of the calculator.
    """

    _registry: ClassVar[dict[str, Any]] = {}

    observer_enabled: Tensor
    fake_quant_enabled: Tensor
    disabled: Tensor

    def __init__(
        self,
        dtype: CodeType,
        qscheme: QuantizationScheme | None = None,
        qformulation: QuantizationFormulation | None = None,
        granularity: QuantizationGranularity | None = None,
        target_dtype: torch.dtype | None = None,
        quant_min: float | None = None,
        quant_max: float | None = None,
        qparams_calculator: QParamsCalculatorBase | None = None,
        quantization_target: CompressionTargetTensor | str | None = None,
        n_bits: int | None = None,
        *,
        strict: bool = False,
        **extra: Any,
    ) -> None:
        super().__init__()
        if qparams_calculator is None:
            raise SpecError(
                f"{type(self).__name__} needs qparams_calculator=: build it with create_fake_quantizer(spec)"
            )
        _register_with_torchao()
        fmt, calculator_grid = get_format(dtype), qparams_calculator.grid
        self.dtype, self.target_dtype = dtype, target_dtype or qparams_calculator.target_dtype
        self.n_bits = fmt.bits if n_bits is None else n_bits
        self.grid = Grid(
            fmt,
            calculator_grid.low if quant_min is None else quant_min,
            calculator_grid.high if quant_max is None else quant_max,
            to_scheme(calculator_grid.scheme if qscheme is None else qscheme),
            parse_enum(QuantizationFormulation, qformulation or calculator_grid.formulation),
        )
        self.strict = strict
        self.reason = ""
        self._fitting_shape: torch.Size | None = None
        self.qparams_calculator = qparams_calculator
        if granularity is not None:
            self.granularity = granularity
        if quantization_target is not None:
            self.quantization_target = quantization_target
        self.add_switch("observer_enabled", True)
        self.add_switch("fake_quant_enabled", True)
        self.add_switch("disabled", False)

    qscheme = property(lambda self: self.grid.scheme)
    qformulation = property(lambda self: self.grid.formulation)
    quant_min = property(lambda self: self.grid.low)
    quant_max = property(lambda self: self.grid.high)

    @property
    def name(self) -> str:
        """The name of the tensor in errors and reports, such as "layer1.0.conv1.weight"."""
        return self.qparams_calculator.name

    @name.setter
    def name(self, name: str) -> None:
        self.qparams_calculator.name = name

    @property
    def quantization_target(self) -> CompressionTargetTensor:
        """Whether the tensor is a weight, an activation or a table."""
        return self.qparams_calculator.quantization_target

    @quantization_target.setter
    def quantization_target(self, target: CompressionTargetTensor | str) -> None:
        self.qparams_calculator.quantization_target = parse_enum(CompressionTargetTensor, target)

    @property
    def is_stateless(self) -> bool:
        """Whether the parameters are computed again from every tensor, and none are stored."""
        return isinstance(self.qparams_calculator, StatelessQParamsCalculatorBase)

    @property
    def granularity(self) -> QuantizationGranularity:
        return self.qparams_calculator.granularity

    @granularity.setter
    def granularity(self, granularity: QuantizationGranularity) -> None:
        granularity = QuantizationGranularity.build(granularity)
        if granularity != self.qparams_calculator.granularity:
            self.qparams_calculator.granularity = granularity

    def get_block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the size of a block along each axis of a tensor of this shape."""
        return self.qparams_calculator.get_block_size(shape)

    def forward(self, tensor: Tensor) -> Tensor:
        observing, quantizing, disabled = self.are_on(SWITCHES)
        if disabled or not (observing or quantizing) or self.passes_through(tensor, observing):
            return tensor
        calculator: Any = self._modules["qparams_calculator"]
        try:
            if observing:
                qparams = self._observe(tensor, calculator)
            elif calculator.always_called:
                qparams = calculator.compute_for(tensor)
            else:
                qparams = calculator.stored
                if not qparams.scale.numel():
                    raise NotObservedError(self._missing_parameters_error())
                if qparams.scale.numel() > 1 and tensor.shape != self._fitting_shape:
                    self._check_shape(tensor, qparams.scale)
            return tensor if qparams is None or not quantizing else self.simulate(tensor, qparams)
        except BlockSizeMismatchError as error:
            return self.disable(tensor, error)

    def _missing_parameters_error(self) -> str:
        return (
            f"{self._where()} has no parameters: it is frozen and has observed nothing. "
            "Run calibration data through the model with the observer on, or load a calibrated state"
        )

    def simulate(self, tensor: Tensor, qparams: QParams) -> Tensor:
        """Quantize and dequantize a tensor, independent of the switches. An ONNX export gets Q/DQ nodes."""
        if in_onnx_export():
            return quantize_linear(tensor, qparams, self.grid, self.granularity, self._where())
        if qparams.scale.ndim != tensor.ndim or qparams.scale.device != tensor.device:
            qparams = self._fit_rank(tensor, qparams)
        return self.fake_quantize(tensor, *qparams)

    def fake_quantize(self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None) -> Tensor:
        """Compute dequantize(quantize(tensor)) in float32, and return it in the dtype of the tensor."""
        values = self._fused_fake_quant_dequant(tensor.to(torch.float32), scale, zero_point, minval)
        return values.to(tensor.dtype)

    def _fused_fake_quant_dequant(
        self, tensor: Tensor, scale: Tensor, zero_point: Tensor | None, minval: Tensor | None
    ) -> Tensor:
        """Quantize and dequantize a float32 tensor. The gradient is 1, also for clamped values.

        A subclass may override it, for example for another gradient.
        """
        codes = self.quantize(tensor.detach(), scale, zero_point, minval, cast_to_target_dtype=False)
        values = self.dequantize(codes, scale, zero_point, minval)
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
        """Return the codes, in the storage dtype or as float32."""
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
        """Return the values of codes."""
        raise SpecError(f"{type(self).__name__} must implement dequantize")

    def calculate_qparams(self) -> QParams:
        """Return the stored scale, zero point and minval."""
        return self.qparams_calculator.get_qparams()

    def enable_observer(self, enabled: bool = True) -> None:
        """Update the parameters from every tensor, or stop with False."""
        self.switch("observer_enabled", enabled)

    def disable_observer(self) -> None:
        """Keep the parameters as they are."""
        self.switch("observer_enabled", False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize and dequantize tensors, or stop with False."""
        self.switch("fake_quant_enabled", enabled)

    def disable_fake_quant(self) -> None:
        """Pass tensors through unchanged."""
        self.switch("fake_quant_enabled", False)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call fn on this module, as nn.Module does. torchao's `disable_observer` and the like take effect here."""
        _register_with_torchao()
        return super().apply(fn)

    def is_disabled(self) -> bool:
        """Whether the quantizer disabled itself because its blocks do not divide the tensor; see `reason`."""
        return self.is_on("disabled")

    def set_export_mode(self, enabled: bool = True) -> None:
        """In export mode the stored parameters do not change."""
        self.qparams_calculator.set_export_mode(enabled)

    @classmethod
    def with_args(cls, **kwargs: Any) -> "PartialConstructor":
        """Return a constructor with some arguments bound, as PT2E expects one."""
        return PartialConstructor(partial(cls, **kwargs))

    def convert(self, model: nn.Module, node: Any) -> None:
        """Do nothing. PT2E calls this method to let a quantizer replace its node."""

    def extra_repr(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        observer, fake_quant = ("on" if self.is_on(key) else "off" for key in SWITCHES[:2])
        state = f"observer={observer}, fake_quant={fake_quant}"
        if self.is_disabled():
            state = f"disabled: {self.reason}"
        return (
            f"{name}{self.quantization_target}, {self.grid.format.name} [{self.quant_min}, {self.quant_max}], "
            f"{self.qscheme}, {self.qformulation}, {self.granularity!r}, {state}"
        )

    def _where(self) -> str:
        return self.name or f"an unnamed {self.quantization_target} quantizer"

    def passes_through(self, tensor: Tensor, observing: bool) -> bool:
        """Whether a tensor is returned unchanged because it has no values to quantize."""
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            _check_type(tensor, self._where())
        if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.is_nested or tensor.layout != torch.strided:
            _check_type(tensor, self._where())
            if not torch.compiler.is_compiling():
                self.reason = f"a tensor of {dtype_name(tensor.dtype)} cannot be quantized"
            return True
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # torch does not annotate it
            return False
        if torch.compiler.is_compiling():
            return tensor.numel() == 0
        if tensor.numel() == 0:
            self.reason = "the tensor is empty"
            return True
        if tensor.is_meta:
            if observing:
                raise TensorError(
                    f"{self._where()} cannot observe a meta tensor, which has no values: materialize it first"
                )
            return True
        return False

    def _observe(self, tensor: Tensor, calculator: QParamsCalculatorBase) -> QParams | None:
        """Observe a tensor and return its parameters; None if the tensor is passed through."""
        if calculator.scale.device != tensor.device and calculator.is_initialized:
            self._fit_rank(tensor, calculator.stored)
        if not calculator.is_initialized and calculator.is_on("export_mode"):
            raise NotObservedError(self._missing_parameters_error())
        with torch.set_grad_enabled(calculator.learns and torch.is_grad_enabled()):
            qparams = to_qparams(calculator(tensor), type(calculator).__name__)
        return qparams if qparams.scale.numel() else None

    def disable(self, tensor: Tensor, error: BlockSizeMismatchError) -> Tensor:
        """Pass tensors through from now on, with a warning."""
        if self.strict:
            raise BlockSizeMismatchError(f"{self._where()}: {Exception.__str__(error)}") from error
        if not torch.compiler.is_compiling():
            self.reason = Exception.__str__(error)
            self.switch("disabled", True)
            warnings.warn(f"{self._where()} is disabled and passes its tensor through: {self.reason}", stacklevel=4)
        return tensor

    def _fit_rank(self, tensor: Tensor, qparams: QParams) -> QParams:
        """Reshape a single scale to the rank of the tensor. Raises TensorError for another device or shape."""
        scale = qparams.scale
        if scale.device != tensor.device:
            raise TensorError(
                f"{self._where()}: the tensor is on {tensor.device}, the parameters are on {scale.device}: "
                f"move the quantizer with .to({str(tensor.device)!r})"
            )
        if scale.numel() > 1:
            self._check_shape(tensor, scale)
        return qparams.map(lambda value: value.reshape((1,) * tensor.ndim))

    def _check_shape(self, tensor: Tensor, scale: Tensor) -> None:
        """Raise TensorError if a tensor has other blocks than the parameters."""
        counts = block_counts(tensor.shape, self.get_block_size(tensor.shape))
        if tuple(scale.shape) != counts:
            raise TensorError(
                f"{self._where()} has parameters of shape {tuple(scale.shape)}, but {self.granularity!r} of a tensor "
                f"of shape {tuple(tensor.shape)} needs {counts}: it was calibrated on another shape"
            )
        if not torch.compiler.is_compiling():
            self._fitting_shape = tensor.shape


def _register_with_torchao() -> None:
    """Register our quantizers as instances of FakeQuantizeBase of torchao and torch, if one of them is imported.

    Their functions `enable_observer`, `disable_observer`, `enable_fake_quant` and `disable_fake_quant` skip modules of
    other classes (torchao 0.18, torch 2.13). They write to our switches.
    """
    for name in ("torchao.quantization.pt2e.fake_quantize", "torch.ao.quantization.fake_quantize"):
        base = getattr(sys.modules.get(name), "FakeQuantizeBase", None)
        if base is not None and not issubclass(FakeQuantizeImplBase, base):
            base.register(FakeQuantizeImplBase)


class PartialConstructor:
    """A class with some constructor arguments bound; `with_args` binds more."""

    def __init__(self, constructor: "partial[Any]") -> None:
        self.constructor = constructor
        self.__name__ = getattr(constructor.func, "__name__", type(self).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.constructor(*args, **kwargs)

    def with_args(self, **kwargs: Any) -> "PartialConstructor":
        return PartialConstructor(partial(self.constructor, **kwargs))

    def __repr__(self) -> str:
        return f"PartialConstructor({self.constructor!r})"


def _check_type(tensor: Any, where: str) -> None:
    """Raise TensorError for sparse, nested, quantized, complex and wrapped tensors."""
    if not isinstance(tensor, Tensor):
        raise TensorError(f"{where} got {short_repr(tensor)}: pass a torch.Tensor")
    kind = ""
    if tensor.is_nested:
        kind = "nested"
    elif tensor.layout != torch.strided:
        kind = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
        kind = "already quantized"
    elif tensor.is_complex():
        kind = "complex"
    elif tensor.is_floating_point() and tensor.itemsize < 2:
        kind = f"of {dtype_name(tensor.dtype)}"
    elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not _is_tracing_tensor(tensor):
        kind = f"of the class {type(tensor).__name__}"
    if kind:
        raise TensorError(f"{where} cannot quantize a tensor that is {kind}: pass a plain float tensor")


def _is_tracing_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is one of the classes without values that torch uses while it traces."""
    return type(tensor).__module__.startswith("torch._subclasses")
