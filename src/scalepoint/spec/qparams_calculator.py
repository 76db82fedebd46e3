"""From a range to parameters, and where they are kept. A new rule overrides `compute_qparams`.

tensor -> range_calculator -> (min, max) -> compute_qparams -> scale, zero_point, minval -> buffers
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
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
from scalepoint.spec.granularity import PerTensorGranularity, QuantizationGranularity
from scalepoint.spec.range_calculator import MinMaxRangeCalculator, RangeCalculatorBase
from scalepoint.spec.registry import Registry, parse_enum, to_scheme
from scalepoint.spec.state import Stateful

OnNan = Literal["error", "skip"]


class QParamsCalculatorBase(Registry, Stateful):
    """Base of the components that compute scale, zero point and minval of a tensor.

    A call returns (scale, zero_point, minval) and stores them as buffers, which are empty before the first call. For
    float
    dtypes `zero_point` and `minval` are None. Statistics and scales are float32 for every dtype of the tensor. A batch
    with NaN or infinity raises an error, or with on_nan="skip" is left out and counted in `skipped_batches`. Returned
    values keep the gradient to the tensor, stored ones do not.
    """

    _registry: ClassVar[dict[str, Any]] = {}
    always_called: ClassVar[bool] = False  # also when the observer is off: its parameters are not just stored ones
    learns: ClassVar[bool] = False  # whether a fake quantizer lets gradients reach its scale

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
        self.replicas = 1  # ranks that each see a part of one batch, in training: the range is that of all parts
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

    qscheme = property(lambda self: self.grid.scheme)
    quant_min = property(lambda self: self.grid.low)
    quant_max = property(lambda self: self.grid.high)
    scale_dtype = property(lambda self: self.grid.scale_dtype)

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
                f"cannot change granularity after the first use, {self._where()} is initialized with "
                f"{self._granularity!r}: call reset() first, or build a new one"
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
        observed = self._range_of(tensor)
        if observed is None:
            return self.stored
        qparams = to_qparams(self.compute_qparams(tensor, *observed), type(self).__name__)
        self.store(qparams)
        self.observed_batches.add_(1)
        return qparams

    def compute_for(self, tensor: Tensor) -> QParams:
        """The parameters of this very tensor, for calculators that are always called; nothing is observed."""
        return to_qparams(self(tensor), type(self).__name__)

    @property
    def observes(self) -> bool:
        """Whether calibration has something to find."""
        return True

    def compute_qparams(self, tensor: Tensor, min_val: Tensor, max_val: Tensor) -> QParams:
        """Return the parameters for a tensor with this range. A subclass may return a plain tuple of the three."""
        return self.choose(min_val, max_val)

    def choose(self, min_val: Tensor, max_val: Tensor) -> QParams:
        """The formulas of the grid; a fixed end of float_range replaces the observed one."""
        low, high = self.float_range
        min_val = min_val if low is None else torch.full_like(min_val, low)
        max_val = max_val if high is None else torch.full_like(max_val, high)
        if self.tensor_scale is not None:
            largest = torch.maximum(min_val.clamp(max=0.0).abs(), max_val.clamp(min=0.0))
            self.keep("tensor_scale", tensor_scale(largest, self.grid.format))
        return choose_qparams(min_val, max_val, self.grid)

    def store(self, qparams: QParams) -> None:
        """Keep the parameters."""
        for name, value in zip(QParams._fields, qparams, strict=True):
            if value is not None and getattr(self, name) is not None:
                self.keep(name, value)

    def keep(self, name: str, value: Tensor) -> None:
        """Set a buffer: in place where it fits (a graph, a compiler or DDP holds on to it), else as a new tensor.

        The value alone is kept, never the graph behind it; that graph may need the old one, which is then not written.
        """
        buffer = self._buffers[name]
        fits = (
            buffer is not None
            and buffer.shape == value.shape
            and buffer.device == value.device
            and not value.requires_grad
        )
        if buffer is not None and fits and (torch.compiler.is_compiling() or not buffer.is_inference()):
            buffer.copy_(value)
            return
        with torch.inference_mode(False):  # a state that can be written and trained on later
            setattr(self, name, value.detach().clone())

    @property
    def stored(self) -> QParams:
        buffers = self._buffers  # not by attribute: nn.Module looks those up slowly
        return QParams(buffers["scale"], buffers["zero_point"], buffers["minval"])  # type: ignore[arg-type]

    def get_qparams(self) -> QParams:
        """The stored parameters; empty, with a warning, before the first use."""
        if not self.is_initialized:
            warnings.warn(f"{self._where()} has observed nothing yet: its parameters are empty", stacklevel=2)
        return self.stored

    def seed(self, qparams: QParams) -> None:
        """Start from parameters that were found elsewhere, as if their range had been observed."""
        self.store(qparams)

    def finalize(self) -> QParams:
        """The parameters for all that was observed; what a calculator put off, it does now."""
        return self.get_qparams()

    def set_export_mode(self, enabled: bool = True) -> None:
        """In export mode the stored parameters are final."""
        self.switch("export_mode", enabled)

    def reset(self) -> None:
        """Forget everything observed, as before the first use."""
        for name, buffer in list(self._buffers.items()):
            if buffer is not None and name not in self._mirror:
                fresh = torch.zeros_like(buffer) if name.endswith("_batches") else buffer.new_empty(0)
                setattr(self, name, fresh)

    def merge(self, other: "QParamsCalculatorBase") -> None:
        """Take in what another calculator of the same spec observed on other data."""
        raise UsageError(
            f"{type(self).__name__} cannot be merged, it has no memory of the data: "
            "use moving_average, global_minmax or a histogram calculator"
        )

    def statistics(self) -> dict[str, Tensor]:
        """What was observed, as tensors that another process can take in."""
        return {name: value for name, value in self._buffers.items() if value is not None and name not in self._mirror}

    def merge_all(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Be what would have observed the data of all these parts (`statistics`), in their order."""
        other = deepcopy(self)
        counted = [int(part["skipped_batches"]) for part in parts]
        self.reset()
        for part in parts:
            other.reset()
            for name, value in part.items():
                other.keep(name, value.to(self.scale.device))
            if other.is_initialized:
                self.merge(other)
        self.skipped_batches.fill_(sum(counted))

    def extra_repr(self) -> str:
        values = [f"{name}={_shorten(getattr(self, name))}" for name in QParams._fields]
        return ", ".join([*values, f"export_mode={self.is_on('export_mode')}"])

    @property
    def _export_mode(self) -> bool:
        return self.is_on("export_mode")

    def _zero_range(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros in the place of observed ends: both are fixed."""
        counts = block_counts(tensor.shape, self.granularity.get_block_size(tensor.shape))
        zeros = torch.zeros(counts, dtype=torch.float32, device=tensor.device)
        return zeros, zeros

    def _check_observable(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            raise TensorError(f"{self._where()} cannot observe an empty tensor of shape {tuple(tensor.shape)}")
        if is_traced(tensor) and not torch.compiler.is_compiling():
            raise TensorError(
                f"{self._where()} cannot observe inside vmap, torch.func or forward-mode AD, nor a "
                f"{type(tensor).__name__} outside a graph: its state would outlive them. Call disable_observer() first"
            )

    def check_shape(self, counts: torch.Size) -> None:
        """Refuse a tensor whose blocks are not those observed before; one range for all takes every shape."""
        if (
            self.is_initialized
            and counts != self.scale.shape
            and not isinstance(self.granularity, PerTensorGranularity)
        ):
            raise TensorError(
                f"{self._where()} observed tensors with {tuple(self.scale.shape)} blocks before, this one has "
                f"{tuple(counts)}: {self.granularity!r} needs one shape, or reset()"
            )

    def _range_of(self, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """What the range calculator finds; None for a batch that is left out. Min and max show NaN: one pass does."""
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
        """The least and the most of all ranks; what is no number on one is infinite on all, so that all do the same."""
        if self.replicas == 1:
            return low, high
        ends = torch.stack((-low.detach(), high.detach())).nan_to_num(nan=torch.inf)
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        return -ends[0], ends[1]

    def _is_finite(self, tensor: Tensor, low: Tensor, high: Tensor) -> bool:
        """False when the batch with these extremes is to be skipped, an error when it may not be."""
        if bool(torch.isfinite(low + 0 * high).all()):
            return True
        nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        elsewhere = "some, outside the range of float32," if self.replicas == 1 else "some on another rank, none here"
        bad = f"{nans} NaN and {infs} infinite" if nans + infs else elsewhere
        batch = int(self.observed_batches) + int(self.skipped_batches)
        message = f"{self._where()}, batch {batch}: {bad} of {tensor.numel()} values of shape {tuple(tensor.shape)}"
        if self.on_nan == "error":
            raise NonFiniteError(
                f"{message}. Nothing was changed. Mend the data or the model, or leave such batches out: on_nan='skip'"
            )
        if not int(self.skipped_batches):
            warnings.warn(
                f"{message}. The batch is left out, as further ones will be: see skipped_batches", stacklevel=2
            )
        self.skipped_batches.add_(1)
        return False

    def _where(self) -> str:
        return self.name or f"an unnamed {type(self).__name__}"


def to_qparams(value: Any, source: str) -> QParams:
    """Make QParams of what a calculator gave: (scale, zero_point, minval), the last two may be None."""
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
            "DefaultQParamsCalculator is a marker class: build through QuantizationComponentFactory, which knows "
            "whether this is a weight or an activation, or name 'static' or 'moving_average'"
        )


@QParamsCalculatorBase.register("static")
class StaticQParamsCalculator(QParamsCalculatorBase):
    """Computes parameters from the current tensor only. The default for weights."""


def check_same_kind(one: QParamsCalculatorBase, other: QParamsCalculatorBase) -> None:
    """Two calculators can be merged only if they count the same thing."""
    if type(one) is not type(other) or one.grid != other.grid or one.granularity != other.granularity:
        raise SpecError(f"cannot merge {other!r} into {one!r}: both must come from the same spec")
