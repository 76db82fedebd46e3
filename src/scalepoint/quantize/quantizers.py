"""The quantizers of a model: QuantStub for an activation, WeightFakeQuantize for a weight.

Each holds the parameters of the deployed file (`scale`, `zero_point`) and a fake quantizer of the tensor layer, which
observes and does the arithmetic. The calculator of the fake quantizer has parameters of its own, its current estimate.
They differ from the deployed ones: they are empty with `fixed_calibration`, newer while observing, not rounded to the
types of the file, not raised by `freeze(min_scale=...)`, not those of chosen codes, and a Parameter while learned.

`calculator.always_called` means that parameters are computed in every call: from the Parameter of a learned scale, or
from the tensor itself (dynamic). The parameters of all other calculators change only while observing.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from scalepoint.errors import (
    BlockSizeMismatchError,
    NotObservedError,
    ScalepointWarning,
    SpecError,
    UsageError,
    short_repr,
)
from scalepoint.graph.user_traceback import user_level
from scalepoint.numerics import QParams
from scalepoint.quantize.config import CalibrationMethod, TensorQuantConfig, to_short_form
from scalepoint.spec import (
    CompressionTargetTensor,
    DefaultFakeQuantize,
    HistogramQParamsCalculator,
    LearnedScaleQParamsCalculator,
    MinMaxRangeCalculator,
    PerChannelGranularity,
    PerTensorGranularity,
    QParamsCalculatorBase,
    QuantizationComponentFactory,
    QuantizationScheme,
    QuantizationSpec,
)
from scalepoint.spec.extended import get_sparsity
from scalepoint.spec.onnx_export import quantize_linear
from scalepoint.spec.palette import is_palette
from scalepoint.spec.state import Stateful

MIN_WEIGHT_RANGE = 1e-8  # a constant weight gets a scale of this range, not of zero

Consumers = Iterable[str | nn.Module] | str | nn.Module


class QuantizerBase(Stateful):
    """Spec, parameters and the switch `enabled`, which both kinds of quantizers have.

    A tensor is returned unchanged in these cases:

        not enabled                   until `calibrate` or `enable_fake_quant`, and after `disable_fake_quant`
        skip_reason is set            a QuantStub that calibration did not reach, which must stay disabled
        quantizer.is_disabled()       from now on: blocks do not divide the tensor; `quantizer.reason` has the sizes
        quantizer.passes_through()    in this call: the tensor is empty or has integers

    The inner quantizer has a switch of its own for fake quantization. It is always off: a call of the inner quantizer
    only observes, and `simulate` does not depend on the switch.
    """

    def __init__(self, consumers: Consumers, spec: QuantizationSpec, target: CompressionTargetTensor) -> None:
        super().__init__()
        self.consumers = to_consumer_list(consumers)
        self.spec = spec
        self.quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, target)
        self.quantizer.disable_fake_quant()  # `self.enabled` is used instead
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("minval", None)
        self.add_switch("is_enabled", False)

    scale: Tensor
    zero_point: Tensor
    minval: Tensor | None
    # Rounds parameters to values that the file format can store; None keeps them.
    round_parameters: Callable[[QParams], QParams] | None = None

    @property
    def enabled(self) -> bool:
        """Whether the tensor is quantized and dequantized. Otherwise it passes unchanged."""
        return self.is_on("is_enabled")

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self.switch("is_enabled", on)

    @property
    def config(self) -> TensorQuantConfig | QuantizationSpec:
        """The spec in its short form, or the spec itself if it has no short form. Both have n_bits and quant_min."""
        return to_short_form(self.spec, self.quantizer.quantization_target)

    @property
    def name(self) -> str:
        return self.quantizer.name

    @name.setter
    def name(self, name: str) -> None:
        self.quantizer.name = name

    @property
    def calculator(self) -> QParamsCalculatorBase:
        calculator: QParamsCalculatorBase = self.quantizer.qparams_calculator
        return calculator

    @property
    def is_learned(self) -> bool:
        return isinstance(self.calculator, LearnedScaleQParamsCalculator)

    def set_calculator(self, key: str) -> None:
        """Replace the calculator by another kind, such as "moving_average", starting from the current range."""
        old = self.calculator
        if type(old) is QParamsCalculatorBase.get_class(key):
            return
        spec = self.spec.replace(qparam_calculator_cls=key)
        new = QuantizationComponentFactory.create_qparams_calculator(spec, self.quantizer.quantization_target)
        new.copy_settings(old)
        if old.is_initialized:
            new.seed(old.stored)
        self.quantizer.qparams_calculator = new.to(self.scale.device)

    def learn_scale(self) -> nn.Parameter:
        """Make the scale a Parameter that training changes (LSQ), starting from the current scale, and return it."""
        self.set_calculator("learned")
        scale = self.calculator.scale
        assert isinstance(scale, nn.Parameter)  # noqa: S101  # a learned scale is one
        return scale

    def set_parameters(self, qparams: QParams) -> None:
        """Set the parameters of the deployed tensor, rounded to what the file format can store."""
        if self.round_parameters is not None:
            qparams = self.round_parameters(qparams)
        for name, value in zip(QParams._fields, qparams, strict=True):
            is_unused = name == "minval" and self.spec.qformulation == "zp"  # these have a zero point instead
            if value is not None and not is_unused:
                self._set_buffer(name, self._to_stored_shape(value.detach()))

    def _set_buffer(self, name: str, value: Tensor) -> None:
        """Write in place if the shape fits: an optimizer, a compiled graph or DDP may hold the buffer."""
        buffer = self._buffers[name]
        if buffer is not None and buffer.shape == value.shape and buffer.device == value.device:
            with torch.no_grad():
                buffer.copy_(value)
        else:
            with torch.inference_mode(False):  # also below: a tensor of inference mode could not be written to later
                setattr(self, name, value.clone())

    def _to_stored_shape(self, value: Tensor) -> Tensor:
        """Make per-tensor values scalars and per-channel values vectors. Values of blocks keep the tensor's rank."""
        granularity = self.calculator.granularity
        if isinstance(granularity, PerTensorGranularity):
            return value.reshape(())
        return value.reshape(-1) if isinstance(granularity, PerChannelGranularity) else value

    def broadcast_qparams(self, tensor: Tensor) -> QParams:
        """Return the deployed parameters in a shape that broadcasts against a tensor."""
        parameters = QParams(self.scale, None if self.quantizer.grid.format.is_float else self.zero_point, self.minval)
        granularity = self.calculator.granularity
        if isinstance(granularity, PerChannelGranularity) and self.scale.ndim == 1:
            shape = [1] * tensor.ndim
            shape[granularity.axis or 0] = -1
            return parameters.map(lambda value: value.view(shape))
        return parameters

    def simulate(self, tensor: Tensor) -> Tensor:
        """Quantize and dequantize the tensor, with a gradient."""
        return self.quantizer.simulate(tensor, self.current_qparams(tensor))

    def current_qparams(self, tensor: Tensor) -> QParams:
        """Return the parameters for this tensor. Learned and dynamic ones are computed again in every call.

        A learned scale is also written to the buffer `scale`, which is the one that files and reports read. A compiled
        graph does not write buffers: the next call outside of it does.
        """
        if not self.calculator.always_called:
            return self.broadcast_qparams(tensor)
        qparams = self.calculator.compute_for(tensor)
        if self.is_learned and not torch.compiler.is_compiling():
            self.set_parameters(qparams)
        return qparams

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        resize_buffers_for_loading(self, QParams._fields, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        is_single = self.scale.numel() <= 1
        scale = f"{float(self.scale):.6g}" if is_single else f"{tuple(self.scale.shape)}"
        zero_point = f", zero_point={int(self.zero_point)}" if is_single else ""
        consumers = join_consumer_names(self.consumers)
        return f"{_describe_spec(self.spec)}, scale={scale}{zero_point}, enabled={self.enabled}, for {consumers}"


class QuantStub(QuantizerBase):
    """The quantizer of an activation. It passes the tensor unchanged until it is enabled.

    While `calibrating` is set it observes values, and `compute_parameters()` computes `scale` and `zero_point` from
    them. With `fixed_calibration=(scale, zero_point)` calibration does not change them.
    """

    def __init__(
        self,
        consumers: Consumers,
        n_bits: int = 8,
        symmetric: bool = True,
        calibration_method: CalibrationMethod = CalibrationMethod.MINMAX,
        *,
        fixed_calibration: tuple[float, int] | None = None,
        spec: QuantizationSpec | None = None,
    ) -> None:
        if spec is None:
            short = TensorQuantConfig(n_bits=n_bits, symmetric=symmetric, calibration_method=calibration_method)
            spec = short.activation_spec()
        super().__init__(consumers, spec, CompressionTargetTensor.ACTIVATION)
        self.fixed_calibration = fixed_calibration
        self.skip_reason = ""  # set by `calibrate`, and by `load` for a saved model
        self.add_switch("is_calibrating", False)
        self.add_switch("is_following", False)  # observes_in_training; saved models contain the switch by this name
        self._has_new_statistics = False
        if isinstance(self.calculator, HistogramQParamsCalculator):
            self.calculator.is_deferred = True  # batches only fill the histogram; compute_parameters searches the range
        if fixed_calibration is not None:
            self._set_fixed_parameters(fixed_calibration)

    def _set_fixed_parameters(self, fixed_calibration: tuple[float, int]) -> None:
        try:
            scale, zero_point = float(fixed_calibration[0]), int(fixed_calibration[1])
        except (TypeError, ValueError, IndexError):
            raise SpecError(
                f"fixed_calibration must be (scale, zero_point), got {short_repr(fixed_calibration)}"
            ) from None
        low, high = self.spec.quant_min, self.spec.quant_max
        if not 0 < scale < float("inf") or not low <= zero_point <= high:
            raise SpecError(
                f"fixed_calibration must have a positive scale and a zero point from {low} to {high}, got "
                f"{fixed_calibration}"
            )
        self.scale.fill_(scale)
        self.zero_point.fill_(zero_point)

    @property
    def calibrating(self) -> bool:
        """Whether calls observe their tensor."""
        return self.is_on("is_calibrating")

    @calibrating.setter
    def calibrating(self, on: bool) -> None:
        self.switch("is_calibrating", on)

    @property
    def observes_in_training(self) -> bool:
        """Whether calls in train mode observe their tensor. A validation run in eval mode changes nothing."""
        return self.is_on("is_following")

    @observes_in_training.setter
    def observes_in_training(self, on: bool) -> None:
        self.switch("is_following", on)

    @property
    def fixed_parameters(self) -> bool:
        """Whether scale and zero point are those of `fixed_calibration`. Then nothing is observed."""
        return self.fixed_calibration is not None

    @property
    def is_fixed(self) -> bool:
        """Whether calibration has nothing to compute: `fixed_parameters`, or parameters computed for every tensor."""
        return self.fixed_parameters or not self.calculator.needs_calibration

    @property
    def has_observed(self) -> bool:
        """Whether the quantizer can be used: it has observed a tensor, or needs none."""
        return self.is_fixed or self.calculator.is_initialized

    def forward(self, tensor: Tensor) -> Tensor:
        calibrating, observes_in_training, enabled = self.are_on(("is_calibrating", "is_following", "is_enabled"))
        observing = calibrating or (observes_in_training and self.training)
        if not enabled and not self.skip_reason:
            warn_if_exported_disabled()
        if not (observing or enabled) or self.quantizer.passes_through(tensor, observing):
            return tensor
        if observing and not self.fixed_parameters:
            self.quantizer(tensor)
            self._has_new_statistics = True
            if enabled and not self.calculator.always_called:
                self.set_parameters(self.calculator.stored)
        if not enabled or self.quantizer.is_disabled():
            return tensor
        try:
            return self.simulate(tensor)
        except BlockSizeMismatchError as error:
            return self.quantizer.disable(tensor, error)

    def compute_parameters(self) -> None:
        """Compute scale and zero point from the observed values.

        Raises:
            NotObservedError: Nothing was observed.
        """
        if self.is_fixed or self.quantizer.is_disabled():
            return
        if not self.calculator.is_initialized:
            raise NotObservedError(
                f"{self.name or 'a QuantStub'} (read by {join_consumer_names(self.consumers)}) has observed nothing: "
                "run data through the model while `calibrating` is set"
            )
        self.set_parameters(self.calculator.finalize())
        self._has_new_statistics = False

    def apply_new_statistics(self) -> None:
        """Compute the parameters from what was observed while fake quantization was disabled."""
        if self._has_new_statistics and self.has_observed and not self.is_learned:
            self.compute_parameters()

    def reset(self) -> None:
        """Discard what was observed."""
        if not self.is_fixed:
            self.calculator.reset()


class WeightFakeQuantize(QuantizerBase):
    """The quantizer of a weight. It passes the weight unchanged until it is enabled.

    The scale is computed from the current weight until `freeze` makes it a constant. Codes are the nearest ones unless
    an algorithm has set others (`set_codes`). The weight itself is not changed: with the quantizer disabled the model
    is the float model.
    """

    def __init__(
        self,
        consumers: Consumers,
        n_bits: int = 8,
        symmetric: bool = True,
        per_channel: bool = False,
        *,
        channel_axis: int = 0,
        spec: QuantizationSpec | None = None,
    ) -> None:
        if spec is None:
            spec = TensorQuantConfig(n_bits=n_bits, symmetric=symmetric, per_channel=per_channel).weight_spec()
        granularity = spec.granularity
        if isinstance(granularity, PerChannelGranularity):
            if granularity.axis is None:
                spec = spec.replace(granularity=PerChannelGranularity(axis=channel_axis))
            else:
                channel_axis = granularity.axis
        super().__init__(consumers, spec, CompressionTargetTensor.WEIGHT)
        self.calculator.grid = replace(self.calculator.grid, least_range=MIN_WEIGHT_RANGE)
        self.register_buffer("chosen", None)
        self.register_buffer("mask", None)
        self.sparsity = get_sparsity(spec)
        self.pruning_progress = 1.0  # share of the final sparsity; training raises it from 0 to 1
        self.channel_axis = channel_axis
        self.add_switch("is_frozen", False)

    chosen: Tensor | None  # codes that an algorithm set; None for the nearest codes. Files store this name.
    mask: Tensor | None  # 1 for the weights that a sparse weight keeps

    @property
    def frozen(self) -> bool:
        """Whether the scale is a constant."""
        return self.is_on("is_frozen")

    def forward(self, weight: Tensor) -> Tensor:
        enabled, frozen = self.are_on(("is_enabled", "is_frozen"))
        if not enabled:
            warn_if_exported_disabled()
        if not enabled or self.quantizer.is_disabled():
            return weight
        if frozen and self.chosen is not None:
            return self._simulate_chosen_codes(weight)
        weight = self.apply_mask(weight, update=not frozen)
        # An export in eval mode contains the scale that eval() computed.
        is_constant = frozen or (not self.training and _is_exporting())
        if not is_constant and not self.is_learned:
            self._update_from_masked(weight)
            if self.quantizer.is_disabled():
                return weight
        qparams = self.broadcast_qparams(weight) if is_constant else self.current_qparams(weight)
        return self._prune_palette(self.quantizer.simulate(weight, qparams))

    def _prune_palette(self, values: Tensor) -> Tensor:
        """Set pruned weights of a palette to zero: its tables are those of the other weights and need not have a 0."""
        return values * self.mask if self.mask is not None and is_palette(self.spec) else values

    @property
    def has_scales_for_bias(self) -> bool:
        """Whether there is one scale, or one per output channel. Blocks have no scale that a bias could use."""
        return isinstance(self.calculator.granularity, PerTensorGranularity | PerChannelGranularity)

    @property
    def can_quantize_row_by_row(self) -> bool:
        """Whether a fused kernel can quantize row by row.

        Codes must be symmetric integers, and the scale either learned or a function of the extremes of each row.
        """
        calculator, quantizer, grid = self.calculator, self.quantizer, self.quantizer.grid
        classes = (type(self), type(quantizer), type(calculator.range_calculator))
        has_default_classes = classes == (WeightFakeQuantize, DefaultFakeQuantize, MinMaxRangeCalculator)
        has_symmetric_integers = not grid.format.is_float and grid.formulation == "zp" and grid.is_symmetric
        granularity = calculator.granularity
        is_per_row = isinstance(granularity, PerTensorGranularity) or (
            isinstance(granularity, PerChannelGranularity) and granularity.axis == 0
        )
        is_dynamic = calculator.always_called and not self.is_learned
        return (
            has_default_classes and has_symmetric_integers and is_per_row and not is_dynamic and self.sparsity is None
        )

    def update_parameters(self, weight: Tensor) -> None:
        """Compute the parameters from the current weight. The quantizer is disabled if its blocks do not fit."""
        self._update_from_masked(self.apply_mask(weight, update=not self.frozen))

    def _update_from_masked(self, weight: Tensor) -> None:
        self.quantizer(weight)  # observes
        if self.quantizer.is_disabled():
            return
        if not self.calculator.is_initialized:
            raise NotObservedError(
                f"{self.name or 'a WeightFakeQuantize'} has no scale: its observer is disabled, enable it first"
            )
        self.set_parameters(self.calculator.stored)

    def freeze(self, weight: Tensor, min_scale: Tensor | None = None) -> None:
        """Make the scale of this weight a constant, so that an exported file contains constant scales.

        Chosen codes keep the scale that they were chosen for.

        Args:
            weight: The current weight.
            min_scale: Scales below these are raised to them.
        """
        if self.chosen is None:
            if self.is_learned and self.calculator.is_initialized:
                self.set_parameters(self.calculator.stored)
            else:
                with torch.no_grad():
                    self.update_parameters(weight.detach())
            if min_scale is not None and not self.quantizer.is_disabled():
                self.scale.copy_(torch.maximum(self.scale, min_scale if self.scale.ndim else min_scale.amax()))
        self.switch("is_frozen", True)

    def unfreeze(self) -> None:
        """Compute the scale from the current weight again, and discard chosen codes."""
        self.chosen = None
        self.switch("is_frozen", False)

    def set_codes(self, codes: Tensor, qparams: QParams | None = None) -> None:
        """Use these codes instead of the nearest ones, with new parameters or the current ones."""
        self._check_not_disabled()
        values = codes.detach().to(torch.float32)
        low, high = self.spec.quant_min, self.spec.quant_max
        if not bool(((values >= low) & (values <= high)).all()):
            raise UsageError(
                f"{self.name}: codes must be from {low} to {high}, got {float(values.min()):g} to "
                f"{float(values.max()):g}"
            )
        if not self.quantizer.grid.format.is_float and not bool((values == values.round()).all()):
            raise UsageError(f"{self.name}: codes of {self.quantizer.grid.format.name} must be integers")
        if qparams is not None:
            self.set_parameters(qparams)
        with torch.inference_mode(False):
            self.chosen = values.to(self.quantizer.target_dtype).clone()
        self.switch("is_frozen", True)

    def codes(self, weight: Tensor) -> Tensor:
        """Return the integers (or float8 values) of the deployed file, in their storage type."""
        self._check_not_disabled()
        if self.chosen is not None:
            return self.chosen
        with torch.no_grad():
            codes: Tensor = self.quantizer.quantize(self.apply_mask(weight), *self.broadcast_qparams(weight))
        return codes

    def _check_not_disabled(self) -> None:
        if self.quantizer.is_disabled():
            raise UsageError(f"{self.name} is disabled ({self.quantizer.reason}): its weight has no codes")

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of codes."""
        values: Tensor = self.quantizer.dequantize(codes, *self.broadcast_qparams(codes), output_dtype=dtype)
        return self._prune_palette(values)

    def to_qdq_nodes(self, values: Tensor) -> Tensor:
        """Emit the ONNX nodes QuantizeLinear and DequantizeLinear for values of codes.

        Such values need no clipping, so SYMMETRIC_WITH_CLIPPING becomes SYMMETRIC, which emits no Clip.
        """
        quantizer = self.quantizer
        grid = quantizer.grid
        if grid.scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING:
            grid = replace(grid, scheme=QuantizationScheme.SYMMETRIC)
        return quantize_linear(values, self.broadcast_qparams(values), grid, quantizer.granularity, self.name)

    def apply_mask(self, weight: Tensor, *, update: bool = False) -> Tensor:
        """Set the pruned weights to zero; `update` computes the mask from this weight first."""
        if self.sparsity is None:
            return weight
        if self.mask is None or update or self.mask.shape != weight.shape:
            with torch.inference_mode(False), torch.no_grad():
                self.mask = self.sparsity.mask(weight, self.pruning_progress)
        return weight * self.mask

    def _simulate_chosen_codes(self, weight: Tensor) -> Tensor:
        """Return the values of the chosen codes, with the straight-through gradient."""
        assert self.chosen is not None  # noqa: S101  # checked by the caller
        values = self.values(self.chosen, weight.dtype)
        if _is_exporting():  # emit Q/DQ nodes; the nearest codes of these values are the chosen ones
            return self.quantizer.simulate(values, self.broadcast_qparams(values))
        return values + (weight - weight.detach()) if torch.is_grad_enabled() and weight.requires_grad else values

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("chosen", "mask"):
            if prefix + name not in state_dict:
                setattr(self, name, None)
        resize_buffers_for_loading(self, ("chosen", "mask"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def to_consumer_list(consumers: Consumers) -> list[Any]:
    """Return the consumers of a tensor as a list: names, or the modules themselves."""
    return [consumers] if isinstance(consumers, str | nn.Module) else list(consumers)


def get_consumer_name(consumer: str | nn.Module) -> str:
    """Return the name of a consumer for a message. A module does not know its path: its class name is used."""
    return consumer if isinstance(consumer, str) else type(consumer).__name__


def join_consumer_names(consumers: Iterable[str | nn.Module]) -> str:
    return ", ".join(map(get_consumer_name, consumers))


def round_scales_to(qparams: QParams, dtypes: tuple[torch.dtype, ...]) -> QParams:
    """Round scales to values that all of these types can represent."""
    return qparams._replace(scale=reduce(round_to_dtype, dtypes, qparams.scale))


def round_scales_to_float16(qparams: QParams) -> QParams:
    """Round scales, or the entries of palettes, to float16."""
    return qparams._replace(scale=round_to_dtype(qparams.scale, torch.float16))


def round_to_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a narrower type, in float32. A value that is not zero stays so and keeps its sign."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal number
    rounded = scale.to(dtype).to(torch.float32)
    rounded = torch.where(scale > 0, rounded.clamp(min=smallest), rounded)
    return torch.where(scale < 0, rounded.clamp(max=-smallest), rounded)


def resize_buffers_for_loading(
    module: nn.Module, names: Sequence[str], state_dict: dict[str, Any], prefix: str
) -> None:
    """Give buffers, whose shape is known only after calibration, the shapes of a checkpoint."""
    for name in names:
        saved, buffer = state_dict.get(prefix + name), module._buffers[name]
        if saved is not None and (buffer is None or buffer.shape != saved.shape):
            device = next(other.device for other in module.buffers() if other is not None)
            setattr(module, name, torch.empty_like(saved, device=device))


def warn_if_exported_disabled() -> None:
    """Warn if torch.onnx.export records a disabled quantizer: the file would contain a float model."""
    if torch.onnx.is_in_onnx_export():
        message = (
            "torch.onnx.export: quantizers of this model are disabled, so the file is float there: call "
            "calibrate(model, data) or enable_fake_quant(model) before the export"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _is_exporting() -> bool:
    """Return whether the model is exported. An export in eval mode contains the scales that eval() computed."""
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()


def _describe_spec(spec: QuantizationSpec) -> str:
    return f"{spec.to_dict()['dtype']} {spec.qscheme}"
