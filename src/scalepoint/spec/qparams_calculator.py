"""The base class of qparams calculators: they compute scale, zero point and minval, and store them.

A fake quantizer calls its calculator with every tensor that it observes. For a new rule override `compute_qparams`.

tensor -> range_calculator -> (min, max) -> compute_qparams -> scale, zero_point, minval -> buffers
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, distributed

from scalepoint.errors import FrozenError, NonFiniteError, SpecError, TensorError, UsageError, short_repr
from scalepoint.numerics import (
    E4M3,
    CodeType,
    Grid,
    QParams,
    QuantizationFormulation,
    QuantizationScheme,
    ScaleRounding,
    choose_qparams,
    get_format,
    is_traced,
    tensor_scale,
)
from scalepoint.numerics.blocks import as_memory_order, block_counts
from scalepoint.spec.granularity import (
    CompressionTargetTensor,
    PerTensorGranularity,
    QuantizationGranularity,
    get_target_block_size,
)
from scalepoint.spec.range_calculator import MinMaxRangeCalculator, RangeCalculatorBase
from scalepoint.spec.registry import ClassRegistry, parse_enum, to_scheme
from scalepoint.spec.state import Stateful

OnNan = Literal["error", "skip"]


class QParamsCalculatorBase(ClassRegistry, Stateful):
    """Base of the components that compute scale, zero point and minval of a tensor.

    A call returns (scale, zero_point, minval) and stores them as buffers, which are empty before the first call. For
    float dtypes `zero_point` and `minval` are None. Statistics and scales are float32 for every dtype of the tensor. A
    batch with NaN or infinity raises an error; with on_nan="skip" it is skipped and counted in `skipped_batches`.
    Returned values keep the gradient to the tensor, stored ones do not.

    Attributes:
        always_called: Whether a fake quantizer also calls it when its observer is off.
        learns: Whether a fake quantizer lets gradients reach the scale.
        replicas: In training, number of ranks that each see a part of a batch. The range is that of all parts.
    """

    _registry: ClassVar[dict[str, Any]] = {}
    always_called: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __init__(
        self,
        dtype: CodeType,
        qscheme: QuantizationScheme,
        granularity: QuantizationGranularity,
        target_dtype: torch.dtype,
        quant_min: float,
        quant_max: float,
        range_calculator: RangeCalculatorBase,
        float_range: Sequence[float | None] = (None, None),
        scale_dtype: torch.dtype | None = None,
        *,
        qformulation: QuantizationFormulation = QuantizationFormulation.ZP,
        scale_rounding: ScaleRounding = ScaleRounding.FLOOR,
        exact_zero: bool = False,
        on_nan: OnNan = "error",
        **extra: Any,
    ) -> None:
        super().__init__()
        fmt = get_format(dtype)
        self.dtype, self.target_dtype = dtype, target_dtype
        self.float_range = tuple(float_range)
        self.on_nan = on_nan
        if on_nan not in get_args(OnNan):
            raise SpecError(f"on_nan={on_nan!r}: use 'error' or 'skip'")
        self.name = ""
        self.replicas = 1
        self.grid = Grid(
            fmt,
            quant_min,
            quant_max,
            to_scheme(qscheme),
            parse_enum(QuantizationFormulation, qformulation),
            scale_dtype,
            parse_enum(ScaleRounding, scale_rounding),
            exact_zero,
        )
        self._granularity = QuantizationGranularity.build(granularity)
        self.range_calculator = range_calculator
        self.add_empty("scale")
        self.add_empty("zero_point", None if fmt.is_float else torch.int32)
        self.add_empty("minval", None if fmt.is_float else torch.float32)
        self.add_empty("tensor_scale", torch.float32 if fmt.is_float and scale_dtype == E4M3 else None)
        self.add_counter("observed_batches")
        self.add_counter("skipped_batches")
        self.add_switch("export_mode", False)

    scale: Tensor
    zero_point: Tensor | None
    minval: Tensor | None
    tensor_scale: Tensor | None
    observed_batches: Tensor
    skipped_batches: Tensor

    @property
    def qscheme(self) -> QuantizationScheme:
        return self.grid.scheme

    @qscheme.setter
    def qscheme(self, qscheme: QuantizationScheme) -> None:
        self.grid = replace(self.grid, scheme=to_scheme(qscheme))

    @property
    def quant_min(self) -> float:
        return self.grid.low

    @quant_min.setter
    def quant_min(self, quant_min: float) -> None:
        self.grid = replace(self.grid, low=quant_min)

    @property
    def quant_max(self) -> float:
        return self.grid.high

    @quant_max.setter
    def quant_max(self, quant_max: float) -> None:
        self.grid = replace(self.grid, high=quant_max)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        return self.grid.scale_dtype

    @property
    def quantization_target(self) -> CompressionTargetTensor:
        """Whether the tensor is a weight, an activation or a table."""
        return self.range_calculator.quantization_target

    @quantization_target.setter
    def quantization_target(self, target: CompressionTargetTensor) -> None:
        self.range_calculator.quantization_target = target

    def get_block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the size of a block along each axis of a tensor of this shape."""
        return get_target_block_size(self.granularity, shape, self.quantization_target)

    @property
    def is_initialized(self) -> bool:
        return self.scale.numel() > 0

    @property
    def granularity(self) -> QuantizationGranularity:
        return self._granularity

    @granularity.setter
    def granularity(self, granularity: QuantizationGranularity) -> None:
        if self.is_initialized:
            raise FrozenError(
                f"cannot change granularity after the first use: {self._where()} has parameters for "
                f"{self._granularity!r}; call reset() first"
            )
        self._granularity = QuantizationGranularity.build(granularity)
        self.range_calculator.granularity = self._granularity

    def forward(self, tensor: Tensor) -> QParams:
        if self.is_on("export_mode"):
            return self.get_qparams()
        if None not in self.float_range:
            if not self.is_initialized:
                self.store(self.choose(*self._zero_range(tensor)))
            return self.stored
        self._check_observable(tensor)
        observed_range = self._compute_range(tensor)
        if observed_range is None:  # a skipped batch
            return self.stored
        batch_range = self.prepare_range(*observed_range)
        if not self.is_initialized:
            self._initialize_state(tensor, *batch_range)
        qparams = to_qparams(self.compute_qparams(tensor, *batch_range), type(self).__name__)
        self.store(qparams)
        self.observed_batches.add_(1)
        return qparams

    def copy_settings(self, other: "QParamsCalculatorBase") -> None:
        """Copy what was set on another calculator after it was built. What it observed is not copied, see `seed`."""
        self.name, self.on_nan, self.replicas = other.name, other.on_nan, other.replicas
        self.grid, self.granularity = other.grid, other.granularity

    def compute_for(self, tensor: Tensor) -> QParams:
        """Return the parameters of this tensor, without observing it. For calculators with `always_called`."""
        return to_qparams(self(tensor), type(self).__name__)

    @property
    def needs_calibration(self) -> bool:
        """Whether the parameters depend on calibration data."""
        return True

    def prepare_range(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range of a batch that `compute_qparams` gets: with zero, and the fixed ends of float_range."""
        low, high = self._replace_fixed_ends(min_val, max_val)
        return low.clamp(max=0.0), high.clamp(min=0.0)

    def _replace_fixed_ends(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.float_range
        return (
            min_val if low is None else torch.full_like(min_val, low),
            max_val if high is None else torch.full_like(max_val, high),
        )

    def _initialize_state(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> None:
        """Do nothing. A subclass may create state here: it is called once, before the first `compute_qparams`.

        Args:
            tensor: The first tensor.
            min_val: Its smallest value per block, at most 0.
            max_val: Its largest value per block, at least 0.
        """

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        """Return the parameters for a tensor with this range. A subclass may return a plain tuple of the three."""
        return self.choose(min_val, max_val)

    def choose(self, min_val: Tensor, max_val: Tensor) -> QParams:
        """Compute the parameters of a range. Fixed ends of float_range replace the observed ones."""
        min_val, max_val = self._replace_fixed_ends(min_val, max_val)
        if self.tensor_scale is not None:
            largest = torch.maximum(min_val.clamp(max=0.0).abs(), max_val.clamp(min=0.0))
            self.set_buffer("tensor_scale", tensor_scale(largest, self.grid.format))
        return choose_qparams(min_val, max_val, self.grid)

    def store(self, qparams: QParams) -> None:
        """Store the parameters in the buffers."""
        for name, value in zip(QParams._fields, qparams, strict=True):
            if value is not None and getattr(self, name) is not None:
                self.set_buffer(name, value)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Set a buffer: in place if shape and device are equal, because a graph, a compiler or DDP may hold it.

        Otherwise, and if the value has a gradient whose graph may read the old buffer, the buffer becomes a new tensor.
        The stored value has no gradient.
        """
        buffer = self._buffers[name]
        can_copy = (
            buffer is not None
            and buffer.shape == value.shape
            and buffer.device == value.device
            and not value.requires_grad
        )
        if buffer is not None and can_copy and (torch.compiler.is_compiling() or not buffer.is_inference()):
            buffer.copy_(value)
            return
        with torch.inference_mode(False):  # tensors of inference mode cannot be written to later
            setattr(self, name, value.detach().clone())

    @property
    def stored(self) -> QParams:
        buffers = self._buffers  # attribute access of nn.Module is slow
        return QParams(buffers["scale"], buffers["zero_point"], buffers["minval"])  # type: ignore[arg-type]

    def get_qparams(self) -> QParams:
        """Return the stored parameters. Before the first use they are empty, with a warning."""
        if not self.is_initialized:
            warnings.warn(f"{self._where()} has observed nothing yet: its parameters are empty", stacklevel=2)
        return self.stored

    def seed(self, qparams: QParams) -> None:
        """Start with given parameters, as if their range had been observed."""
        self.store(qparams)

    def finalize(self) -> QParams:
        """Return the parameters for all observed data. A calculator with deferred work does it here."""
        return self.get_qparams()

    def set_export_mode(self, enabled: bool = True) -> None:
        """In export mode the stored parameters do not change."""
        self.switch("export_mode", enabled)

    def reset(self) -> None:
        """Delete everything observed, as before the first use."""
        for name, buffer in list(self._buffers.items()):
            if buffer is not None and name not in self._switch_values:
                is_counter = name.endswith("_batches")
                setattr(self, name, torch.zeros_like(buffer) if is_counter else buffer.new_empty(0))

    def merge(self, other: "QParamsCalculatorBase") -> None:
        """Add what another calculator of the same spec observed on other data."""
        raise UsageError(
            f"{type(self).__name__} cannot be merged, because it stores no statistics of the data: "
            "use moving_average, global_minmax or a histogram calculator"
        )

    def statistics(self) -> dict[str, Tensor]:
        """Return what was observed, as tensors that can be sent to another process."""
        return {
            name: value
            for name, value in self._buffers.items()
            if value is not None and name not in self._switch_values
        }

    def merge_all(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the state by that of a calculator that observed the data of all parts, in their order.

        Args:
            parts: `statistics()` of each part.
        """
        other = deepcopy(self)
        skipped = sum(int(part["skipped_batches"]) for part in parts)
        self.reset()
        for part in parts:
            other.reset()
            for name, value in part.items():
                other.set_buffer(name, value.to(self.scale.device))
            if other.is_initialized:
                self.merge(other)
        self.skipped_batches.fill_(skipped)

    def extra_repr(self) -> str:
        values = [f"{name}={_shorten(getattr(self, name))}" for name in QParams._fields]
        return ", ".join([*values, f"export_mode={self.is_on('export_mode')}"])

    @property
    def _export_mode(self) -> bool:
        return self.is_on("export_mode")

    def _zero_range(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return a range of zeros, for a float_range with two fixed ends."""
        counts = block_counts(tensor.shape, self.get_block_size(tensor.shape))
        zeros = torch.zeros(counts, dtype=torch.float32, device=tensor.device)
        return zeros, zeros

    def _check_observable(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            raise TensorError(f"{self._where()} cannot observe an empty tensor of shape {tuple(tensor.shape)}")
        if is_traced(tensor) and not torch.compiler.is_compiling():
            raise TensorError(
                f"{self._where()} cannot observe inside vmap, torch.func or forward-mode AD, nor a "
                f"{type(tensor).__name__} outside of a graph, because its state lives longer: call disable_observer() "
                "first"
            )

    def check_shape(self, counts: torch.Size) -> None:
        """Raise TensorError if a tensor has other blocks than earlier ones. Per tensor, every shape is allowed."""
        if (
            self.is_initialized
            and counts != self.scale.shape
            and not isinstance(self.granularity, PerTensorGranularity)
        ):
            raise TensorError(
                f"{self._where()} observed tensors with {tuple(self.scale.shape)} blocks before, this one has "
                f"{tuple(counts)}: with {self.granularity!r} use one shape, or call reset()"
            )

    def _compute_range(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the range of a batch; None if the batch is skipped.

        Min and max are NaN if any value is, so no extra pass is needed to find NaN.
        """
        if torch.compiler.is_compiling():
            low, high = self.range_calculator(tensor)
            return low, high
        if type(self.range_calculator) is MinMaxRangeCalculator:
            low, high = self._reduce_over_replicas(*self.range_calculator(tensor))
            return (low, high) if self._is_finite(tensor.detach(), low.detach(), high.detach()) else None
        extremes = torch.aminmax(as_memory_order(tensor.detach()))
        ends = self._reduce_over_replicas(extremes.min.to(torch.float32), extremes.max.to(torch.float32))
        if not self._is_finite(tensor.detach(), *ends):
            return None
        return self._reduce_over_replicas(*self.range_calculator(tensor))

    def _reduce_over_replicas(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return minimum and maximum of all ranks. NaN on one rank becomes infinity on all ranks."""
        if self.replicas == 1:
            return low, high
        ends = torch.stack((-low.detach(), high.detach())).nan_to_num(nan=torch.inf)
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        return -ends[0], ends[1]

    def _is_finite(self, tensor: Tensor, low: Tensor, high: Tensor) -> bool:
        """Return False if the batch with these extremes is skipped; NonFiniteError with on_nan="error"."""
        if bool(torch.isfinite(low + 0 * high).all()):
            return True
        nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        if nans + infs:
            problem = f"{nans} NaN and {infs} infinite"
        else:
            is_alone = self.replicas == 1
            problem = "some, outside the range of float32," if is_alone else "some on another rank, none here"
        batch = int(self.observed_batches) + int(self.skipped_batches)
        message = f"{self._where()}, batch {batch}: {problem} of {tensor.numel()} values of shape {tuple(tensor.shape)}"
        if self.on_nan == "error":
            raise NonFiniteError(
                f"{message}. Nothing was changed. Fix the data or the model, or skip such batches with on_nan='skip'"
            )
        if not int(self.skipped_batches):
            warnings.warn(f"{message}. This batch and all such batches are skipped: see skipped_batches", stacklevel=2)
        self.skipped_batches.add_(1)
        return False

    def _where(self) -> str:
        return self.name or f"an unnamed {type(self).__name__}"


def to_qparams(value: Any, source: str) -> QParams:
    """Convert the result of a calculator to QParams: (scale, zero_point, minval), the last two may be None."""
    if isinstance(value, QParams):
        return value
    if not isinstance(value, tuple | list) or not 1 <= len(value) <= 3 or not isinstance(value[0], Tensor):
        raise SpecError(f"{source} must return (scale, zero_point, minval), got {short_repr(value)}")
    return QParams(*value)


def _shorten(value: Tensor | None) -> str:
    return str(value) if value is None or value.numel() <= 8 else f"tensor of shape {tuple(value.shape)}"


@QParamsCalculatorBase.register("default")
class DefaultQParamsCalculator(QParamsCalculatorBase):
    """A placeholder: the factory uses `static` for weights and `moving_average` for activations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "DefaultQParamsCalculator is a marker class: build it with QuantizationComponentFactory, which replaces "
            "it for weights and activations, or use 'static' or 'moving_average'"
        )


class StatefulQParamsCalculatorBase(QParamsCalculatorBase):
    """Base of the calculators that store their parameters as buffers, unlike `StatelessQParamsCalculatorBase`."""


@QParamsCalculatorBase.register("static")
class StaticQParamsCalculator(StatefulQParamsCalculatorBase):
    """Computes parameters from the current tensor only. The default for weights."""


def check_same_kind(calculator: QParamsCalculatorBase, other: QParamsCalculatorBase) -> None:
    """Raise SpecError if two calculators cannot be merged, because they come from different specs."""
    is_same = type(calculator) is type(other) and calculator.grid == other.grid
    if not is_same or calculator.granularity != other.granularity:
        raise SpecError(f"cannot merge {other!r} into {calculator!r}: both must come from the same spec")
