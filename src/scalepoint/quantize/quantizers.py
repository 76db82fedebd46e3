"""The quantizers of a model: a QuantStub on an activation, a WeightFakeQuantize on a weight.

Both hold the parameters of the deployed file (`scale`, `zero_point`) and a quantizer of the tensor layer, which
observes and does the arithmetic. Its calculator holds the present estimate, a different value: empty with
`fixed_calibration`, ahead of the deployed one while observing, not rounded to the types of the file, not raised by
`freeze(least=...)`, not that of chosen codes, and a Parameter while it is learned.
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
from scalepoint.spec.state import Stateful

MIN_WEIGHT_RANGE = 1e-8

Consumers = Iterable[str | nn.Module] | str | nn.Module


def to_consumer_list(consumers: Consumers) -> list[Any]:
    """List the readers of a tensor: names, or the modules themselves."""
    return [consumers] if isinstance(consumers, str | nn.Module) else list(consumers)


def get_consumer_name(reader: str | nn.Module) -> str:
    """Name a reader for a message. A module has no name of its own: its class stands for it."""
    return reader if isinstance(reader, str) else type(reader).__name__


def join_consumer_names(consumers: Iterable[str | nn.Module]) -> str:
    return ", ".join(map(get_consumer_name, consumers))


class QuantizerBase(Stateful):
    """What both have: the spec, the parameters and the switch `enabled`."""

    def __init__(self, consumers: Consumers, spec: QuantizationSpec, target: CompressionTargetTensor) -> None:
        super().__init__()
        self.consumers = to_consumer_list(consumers)
        self.spec = spec
        self.quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, target)
        self.quantizer.disable_fake_quant()  # it observes; when to simulate is said here
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("minval", None)
        self.add_switch("is_enabled", False)

    scale: Tensor
    zero_point: Tensor
    minval: Tensor | None
    round_parameters: Callable[[QParams], QParams] | None = (
        None  # parameters as a format can hold them, near those found
    )

    @property
    def enabled(self) -> bool:
        """Whether the tensor is quantized and dequantized, or passes as it is."""
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
        found: QParamsCalculatorBase = self.quantizer.qparams_calculator
        return found

    @property
    def is_learned(self) -> bool:
        return isinstance(self.calculator, LearnedScaleQParamsCalculator)

    def set_calculator(self, key: str) -> None:
        """Observe in another way ("moving_average", "learned", ..) from now on, starting from the present range."""
        kind = QParamsCalculatorBase.get_class(key)
        old = self.calculator
        if type(old) is kind:
            return
        spec = self.spec.replace(qparam_calculator_cls=key)
        new = QuantizationComponentFactory.create_qparams_calculator(spec, self.quantizer.quantization_target)
        new.name, new.grid, new.granularity, new.on_nan = old.name, old.grid, old.granularity, old.on_nan
        new.replicas = old.replicas
        if old.is_initialized:
            new.seed(old.stored)
        self.quantizer.qparams_calculator = new.to(self.scale.device)

    def learn_scale(self) -> nn.Parameter:
        """Make the scale a Parameter that training changes (LSQ), starting from the present one; it is returned."""
        self.set_calculator("learned")
        scale = self.calculator.scale
        assert isinstance(scale, nn.Parameter)  # noqa: S101  # a learned scale is one
        return scale

    def set_parameters(self, qparams: QParams) -> None:
        """Make these the parameters of the deployed tensor."""
        qparams = qparams if self.round_parameters is None else self.round_parameters(qparams)
        for name, value in zip(QParams._fields, qparams, strict=True):
            if value is not None and not (name == "minval" and self.spec.qformulation == "zp"):
                self._set_buffer(name, self._to_stored_shape(value.detach()))

    def _set_buffer(self, name: str, value: Tensor) -> None:
        """In place where it fits: an optimizer step, a compiled graph or DDP may hold on to the buffer."""
        own = self._buffers[name]
        if own is not None and own.shape == value.shape and own.device == value.device:
            with torch.no_grad():
                own.copy_(value)
        else:
            with torch.inference_mode(False):
                setattr(self, name, value.clone())

    def _to_stored_shape(self, value: Tensor) -> Tensor:
        """One scale has no axes, one a channel has one; blocks keep the shape of their tensor."""
        if isinstance(self.calculator.granularity, PerTensorGranularity):
            return value.reshape(())
        return value.reshape(-1) if isinstance(self.calculator.granularity, PerChannelGranularity) else value

    def broadcast_qparams(self, tensor: Tensor) -> QParams:
        """The parameters as they broadcast against a tensor."""
        parameters = QParams(self.scale, None if self.quantizer.grid.format.is_float else self.zero_point, self.minval)
        granularity = self.calculator.granularity
        if isinstance(granularity, PerChannelGranularity) and self.scale.ndim == 1:
            shape = [1] * tensor.ndim
            shape[granularity.axis or 0] = -1
            return parameters.map(lambda value: value.view(shape))
        return parameters

    def simulate(self, tensor: Tensor) -> Tensor:
        """The tensor as its codes keep it."""
        return self.quantizer.simulate(tensor, self.current_qparams(tensor))

    def current_qparams(self, tensor: Tensor) -> QParams:
        """The same as `qparams_for`, made anew where they are learned or belong to each tensor."""
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
        many = self.scale.numel() > 1
        scale = f"{tuple(self.scale.shape)}" if many else f"{float(self.scale):.6g}"
        zero = "" if many else f", zero_point={int(self.zero_point)}"
        consumers = join_consumer_names(self.consumers)
        return f"{_describe_spec(self.spec)}, scale={scale}{zero}, enabled={self.enabled}, for {consumers}"


def round_scales_to(qparams: QParams, dtypes: tuple[torch.dtype, ...]) -> QParams:
    """With scales that all of these hold."""
    return qparams._replace(scale=reduce(round_to_dtype, dtypes, qparams.scale))


def round_scales_to_float16(qparams: QParams) -> QParams:
    """With scales (or the entries of tables) that float16 holds."""
    return qparams._replace(scale=round_to_dtype(qparams.scale, torch.float16))


def round_to_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest that a narrower type holds, in float32; what is not zero stays so, with its sign."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    rounded = scale.to(dtype).to(torch.float32)
    rounded = torch.where(scale > 0, rounded.clamp(min=least), rounded)
    return torch.where(scale < 0, rounded.clamp(max=-least), rounded)


def resize_buffers_for_loading(
    module: nn.Module, names: Sequence[str], state_dict: dict[str, Any], prefix: str
) -> None:
    """Give buffers that take their shape late the shapes of a checkpoint; what it does not hold stays as it is."""
    for name in names:
        saved, own = state_dict.get(prefix + name), module._buffers[name]
        if saved is not None and (own is None or own.shape != saved.shape):
            device = next(each.device for each in module.buffers() if each is not None)
            setattr(module, name, torch.empty_like(saved, device=device))


def warn_if_exported_disabled() -> None:
    """Warn where torch.onnx.export records a quantizer that is off: its file is a float model."""
    if torch.onnx.is_in_onnx_export():
        message = (
            "torch.onnx.export: quantizers of this model are off, so the file is float there. Call calibrate(model, "
            "data) or enable_fake_quant(model) before the export"
        )
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


def _is_exporting() -> bool:
    """An exported eval graph holds constant scales, as the switch to eval mode left them."""
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()


def _describe_spec(spec: QuantizationSpec) -> str:
    return f"{spec.to_dict()['dtype']} {spec.qscheme}"


class QuantStub(QuantizerBase):
    """The quantizer of an activation. It does nothing until it is enabled.

    While `calibrating` is set it observes values, and `compute_parameters()` computes `scale` and `zero_point` from
    them. With `fixed_calibration=(scale, zero_point)` both are given and calibration does not change them.
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
        self.skip_reason = ""
        self.add_switch("is_calibrating", False)
        self.add_switch("is_following", False)
        self._has_new_statistics = False
        if isinstance(self.calculator, HistogramQParamsCalculator):
            self.calculator.is_deferred = True  # the range is searched once, in compute_parameters
        if fixed_calibration is not None:
            self._set_fixed_parameters(fixed_calibration)

    def _set_fixed_parameters(self, given: tuple[float, int]) -> None:
        try:
            scale, zero_point = float(given[0]), int(given[1])
        except (TypeError, ValueError, IndexError):
            raise SpecError(f"fixed_calibration is (scale, zero_point), not {short_repr(given)}") from None
        low, high = self.spec.quant_min, self.spec.quant_max
        if not 0 < scale < float("inf") or not low <= zero_point <= high:
            raise SpecError(f"fixed_calibration={given}: the scale is positive, the zero point from {low} to {high}")
        self.scale.fill_(scale)
        self.zero_point.fill_(zero_point)

    @property
    def calibrating(self) -> bool:
        """Whether tensors that pass are observed."""
        return self.is_on("is_calibrating")

    @calibrating.setter
    def calibrating(self, on: bool) -> None:
        self.switch("is_calibrating", on)

    @property
    def observes_in_training(self) -> bool:
        """Whether tensors that pass in training are observed: a validation run changes nothing."""
        return self.is_on("is_following")

    @observes_in_training.setter
    def observes_in_training(self, on: bool) -> None:
        self.switch("is_following", on)

    @property
    def fixed_parameters(self) -> bool:
        """Whether `fixed_calibration` was given."""
        return self.fixed_calibration is not None

    @property
    def is_fixed(self) -> bool:
        """Whether calibration has nothing to find: the parameters are given, or made anew for every tensor."""
        return self.fixed_calibration is not None or not self.calculator.needs_calibration

    @property
    def has_observed(self) -> bool:
        return self.is_fixed or self.calculator.is_initialized

    def forward(self, tensor: Tensor) -> Tensor:
        calibrating, following, enabled = self.are_on(("is_calibrating", "is_following", "is_enabled"))
        observing = calibrating or (following and self.training)
        if not enabled and not self.skip_reason:
            warn_if_exported_disabled()
        if not (observing or enabled) or self.quantizer.passes_through(tensor, observing):
            return tensor
        if observing and self.fixed_calibration is None:
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
        """Derive scale and zero point from what was observed; an error names the stub if that was nothing."""
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
        """Take over what was observed while fake quantization was off."""
        if self._has_new_statistics and self.has_observed and not self.is_learned:
            self.compute_parameters()

    def reset(self) -> None:
        """Forget what was observed."""
        if not self.is_fixed:
            self.calculator.reset()


class WeightFakeQuantize(QuantizerBase):
    """The quantizer of a weight. It does nothing until it is enabled.

    The scale follows the live weight until `freeze` makes it a constant. Codes are the nearest ones unless an algorithm
    has set others (`set_codes`). The weight itself is not changed: with the quantizer disabled the model is the float
    model.
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
        self.pruning_progress = 1.0  # how far it has come in a training, from 0 to 1
        self.channel_axis = channel_axis
        self.add_switch("is_frozen", False)

    chosen: Tensor | None
    mask: Tensor | None  # which weights stay, of a sparse one

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
        weight = self.apply_mask(weight, anew=not frozen)
        frozen = frozen or (not self.training and _is_exporting())
        if not frozen and not self.is_learned:
            self.update_parameters(weight)
            if self.quantizer.is_disabled():
                return weight
        if frozen:
            return self.quantizer.simulate(weight, self.broadcast_qparams(weight))
        return self.simulate(weight)

    @property
    def has_channel_scales(self) -> bool:
        """Whether its scale is one value, or one for each output channel: blocks have none for a bias."""
        return isinstance(self.calculator.granularity, PerTensorGranularity | PerChannelGranularity)

    @property
    def depends_on_row_extremes(self) -> bool:
        """Whether its parameters are learned or depend on the least and the largest of each channel alone, and codes
        are whole."""
        calculator, quantizer, grid = self.calculator, self.quantizer, self.quantizer.grid
        kinds = (type(self), type(quantizer), type(calculator.range_calculator))
        is_plain = kinds == (WeightFakeQuantize, DefaultFakeQuantize, MinMaxRangeCalculator)
        is_whole = not grid.format.is_float and grid.formulation == "zp" and grid.is_symmetric
        granularity = calculator.granularity
        is_by_row = isinstance(granularity, PerTensorGranularity) or (
            isinstance(granularity, PerChannelGranularity) and granularity.axis == 0
        )
        is_known = self.is_learned or not calculator.always_called
        return is_plain and is_whole and is_by_row and is_known and self.sparsity is None

    def update_parameters(self, weight: Tensor) -> None:
        """Take the parameters of the live weight; the quantizer is disabled when its blocks do not fit."""
        self.quantizer(self.apply_mask(weight, anew=not self.frozen))
        if self.quantizer.is_disabled():
            return
        if not self.calculator.is_initialized:
            raise NotObservedError(f"{self.name or 'a WeightFakeQuantize'} has no scale: its observer is off")
        self.set_parameters(self.calculator.stored)

    def freeze(self, weight: Tensor, least: Tensor | None = None) -> None:
        """Keep the scale of this weight as a constant, so that an exported file holds constant scales; `least` is what
        it must not fall below. Chosen codes stay, with the scale that they were chosen for."""
        if self.chosen is None:
            if self.is_learned and self.calculator.is_initialized:
                self.set_parameters(self.calculator.stored)
            else:
                with torch.no_grad():
                    self.update_parameters(weight.detach())
            if least is not None and not self.quantizer.is_disabled():
                self.scale.copy_(torch.maximum(self.scale, least if self.scale.ndim else least.amax()))
        self.switch("is_frozen", True)

    def unfreeze(self) -> None:
        """Follow the live weight again; chosen codes are forgotten."""
        self.chosen = None
        self.switch("is_frozen", False)

    def set_codes(self, codes: Tensor, qparams: QParams | None = None) -> None:
        """Let these codes stand for the weight from now on, with these parameters or those that it has."""
        if self.quantizer.is_disabled():
            raise UsageError(f"{self.name} is disabled ({self.quantizer.reason}): its weight has no codes")
        wide = codes.detach().to(torch.float32)
        low, high = self.spec.quant_min, self.spec.quant_max
        if not bool(((wide >= low) & (wide <= high)).all()):
            raise UsageError(
                f"{self.name}: codes from {float(wide.min()):g} to {float(wide.max()):g}, its range is {low} to {high}"
            )
        if not self.quantizer.grid.format.is_float and not bool((wide == wide.round()).all()):
            raise UsageError(f"{self.name}: codes of {self.quantizer.grid.format.name} are whole numbers")
        if qparams is not None:
            self.set_parameters(qparams)
        with torch.inference_mode(False):
            self.chosen = wide.to(self.quantizer.target_dtype).clone()
        self.switch("is_frozen", True)

    def codes(self, weight: Tensor) -> Tensor:
        """The integers (or float8 values) that the deployed file holds, in their storage type."""
        if self.quantizer.is_disabled():
            raise UsageError(f"{self.name} is disabled ({self.quantizer.reason}): its weight has no codes")
        if self.chosen is not None:
            return self.chosen
        with torch.no_grad():
            codes: Tensor = self.quantizer.quantize(self.apply_mask(weight), *self.broadcast_qparams(weight))
        return codes

    def values(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What codes stand for."""
        found: Tensor = self.quantizer.dequantize(codes, *self.broadcast_qparams(codes), output_dtype=dtype)
        return found

    def to_qdq_nodes(self, values: Tensor) -> Tensor:
        """The Q/DQ nodes of values that are those of codes already: there is nothing to clip."""
        quantizer = self.quantizer
        grid = quantizer.grid
        if grid.scheme == QuantizationScheme.SYMMETRIC_WITH_CLIPPING:
            grid = replace(grid, scheme=QuantizationScheme.SYMMETRIC)
        return quantize_linear(values, self.broadcast_qparams(values), grid, quantizer.granularity, self.name)

    def apply_mask(self, weight: Tensor, *, anew: bool = False) -> Tensor:
        """The weight without what its mask takes away; `anew` makes the mask from this weight."""
        if self.sparsity is None:
            return weight
        if self.mask is None or anew or self.mask.shape != weight.shape:
            with torch.inference_mode(False), torch.no_grad():
                self.mask = self.sparsity.mask(weight, self.pruning_progress)
        return weight * self.mask

    def _simulate_chosen_codes(self, weight: Tensor) -> Tensor:
        """The values of the chosen codes, with the straight-through gradient."""
        assert self.chosen is not None  # noqa: S101  # asked before
        values = self.values(self.chosen, weight.dtype)
        if _is_exporting():  # as Q/DQ: the nearest codes of these values are the chosen ones
            return self.quantizer.simulate(values, self.broadcast_qparams(values))
        return values + (weight - weight.detach()) if torch.is_grad_enabled() and weight.requires_grad else values

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("chosen", "mask"):
            if prefix + name not in state_dict:
                setattr(self, name, None)
        resize_buffers_for_loading(self, ("chosen", "mask"), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
