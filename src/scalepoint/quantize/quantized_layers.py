"""A convolution or linear layer that multiplies by its quantized weight, with the batch norm after it folded in.

    s = gamma / sqrt(running_var + eps)
    eval:   y = conv(x, fq(w s)) + (b - mean) s + beta         what the deployed kernel computes
    train:  y = BN(conv(x, fq(w s) / s) + b)                   the same weight, live statistics

Dividing the weight by s instead of the convolution's output is the same sum and needs no second activation. In train
s is a constant: inside the range fq(w s) / s is w, which does not depend on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from scalepoint.errors import UsageError
from scalepoint.graph import Operation
from scalepoint.graph.operations import ComputedTensor, get_tensors
from scalepoint.numerics import (
    LineExtremes,
    QParams,
    Steps,
    can_fold,
    fake_quantize_folded,
    is_traced,
    make_steps,
    round_trip_folded,
    save_codes_for_backward,
)
from scalepoint.quantize.operations import get_norm_settings, get_parameter_owners, get_part_kind, run_with_weight
from scalepoint.quantize.quantizers import (
    QuantStub,
    WeightFakeQuantize,
    resize_buffers_for_loading,
    warn_if_exported_disabled,
)
from scalepoint.quantize.real_tensors import RealTensors
from scalepoint.spec.onnx_export import in_onnx_export
from scalepoint.spec.state import Stateful

MIN_NORM_FACTOR = 1e-12
MAX_BIAS_INTEGER = 2.0**30


class DeployedTensors(NamedTuple):
    """What a file holds of a layer: the codes of its weight as (out, in, ..) in their storage type, which the
    quantizer's scale and zero point belong to, and the bias; with a `bias_scale` the bias is whole numbers of it."""

    codes: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None


class _EvalCache(NamedTuple):
    """Weight and bias as eval multiplies by them, and what tells that they are still right.

    With a `scale` (s_x * s_w, as it broadcasts against the result) both are codes, and the input is taken as codes too:
    their sums are exact in float32 below 2^24, as they are in an integer kernel.
    """

    marks: tuple[int, ...] | None
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class QuantizedLayer(Stateful):
    """The operation and its batch norm stay where they live in the model; this module owns the weight's quantizer, and
    what an algorithm adds to the bias (`bias_shift`): both are off with the quantizer.

    What is kept between calls notices writes by their version counters; after one through `.data`, switch the mode.
    """

    def __init__(self, operation: nn.Module, norm: nn.Module | None, quantizer: WeightFakeQuantize) -> None:
        super().__init__()
        self.module_refs = {"operation": operation, "norm": norm, "input": None}  # a plain dict: not registered twice
        self.weight_quant = quantizer
        self.sharing_layers = [self]  # all that multiply by this quantizer's weight
        self.computes_in_float = False  # stored as codes, multiplied as floats: what stays float for speed
        self.register_buffer("bias_shift", None)
        self.add_switch("is_norm_frozen", False)
        self._weight_cache: _EvalCache | None = None
        self._real_tensors: RealTensors | None = None  # for a plain ONNX export

    module_refs: dict[str, nn.Module | None]
    bias_shift: Tensor | None
    has_bias_correction: bool = False  # whether the shift is calibration's; tuning chooses its own

    @property
    def operation(self) -> Any:
        return self.module_refs["operation"]

    @property
    def norm(self) -> Any:
        return self.module_refs["norm"]

    @property
    def input_stub(self) -> QuantStub | None:
        """The stub on the input, when the bias is rounded to integers of scale s_x * s_w."""
        stub = self.module_refs["input"]
        return stub if isinstance(stub, QuantStub) else None

    @property
    def kind(self) -> str:
        return get_part_kind(self.operation)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.operation.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self.operation, "bias", None)
        return bias

    @property
    def is_input_first(self) -> bool:
        return isinstance(self.operation, Operation) and self.operation.has_transposed_weight

    @property
    def uses_batch_statistics(self) -> bool:
        return self.norm is not None and self.norm.training and not self.is_on("is_norm_frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_batch_statistics:
            weight, make = self._make_training_weight(_replace_zeros(self.norm_factor().detach()))
            with save_codes_for_backward(x, weight, make):
                y = run_with_weight(self.operation, x, weight, self.bias)
            result: Tensor = self.norm(y)
            return result
        if not self._can_use_cache(x):
            weight, bias = self._make_export_tensors() if self._exports_constants() else self._compute_live_tensors()
            with save_codes_for_backward(x):
                return run_with_weight(self.operation, x, weight, bias)
        kept = self._weight_cache
        if kept is None or kept.marks is None or kept.marks != self._get_versions():
            with torch.inference_mode(False), torch.no_grad():
                kept = self._weight_cache = self._build_eval_cache()
        stub = self.input_stub
        if kept.scale is None or stub is None:
            return run_with_weight(self.operation, x, kept.weight, kept.bias)
        sums = run_with_weight(self.operation, (x / stub.scale).round_(), kept.weight, None)
        return (sums if kept.bias is None else sums.add_(kept.bias)).mul_(kept.scale)

    def _make_training_weight(self, s: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """fq(w s) / s with its gradient, and what makes it again for backward; in one pass where that is known."""
        found = self._make_row_steps(s)
        if found is not None:
            steps, places = found
            fmt, held = self.weight_quant.quantizer.grid.format, steps.map(Tensor.detach)
            made = fake_quantize_folded(self.weight, s, steps, fmt, clamped_indices=places, owns_grad=True)
            return made, self._make_recompute(lambda weight: round_trip_folded(weight, s, held, fmt))
        wide = self._scale_channels(self.weight, s)
        with save_codes_for_backward(None, wide, self._make_recompute(lambda weight: self._scale_channels(weight, s))):
            weight = self.quantize_weight(wide)
        del wide
        return self._scale_channels(weight, 1 / s), self._make_quantized_recompute(s)

    def _make_row_steps(self, s: Tensor) -> tuple[Steps, Tensor | None] | None:
        """The steps of w s and the places that they clamp, as far as known, where they are learned or its extremes are
        all that they depend on, and rows are its channels; else None."""
        quant = self.weight_quant
        if is_traced(self.weight) or self.is_input_first or self.kind == "conv_transpose":
            return None
        if not self._is_quantizing or quant.chosen is not None or not quant.depends_on_row_extremes:
            return None
        steps = make_steps(quant.broadcast_qparams(self.weight), quant.quantizer.grid, fixed_zero=True)
        if not self.weight.numel() or not can_fold(self.weight, steps._replace(scale=s)):
            return None
        if quant.is_learned and not quant.frozen:
            return steps._replace(scale=quant.current_qparams(self.weight).scale), None
        if quant.frozen:
            return steps._replace(scale=quant.scale.detach().clone()), None
        lines = LineExtremes.compute(self.weight.detach(), s)
        quant.update_parameters(lines.extremes())
        steps = steps._replace(scale=quant.scale.detach().clone())
        return steps, lines.find_clamped(steps)

    def _make_recompute(self, made: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Makes a value of the weight again, for backward."""
        weight, name = self.weight, self.weight_quant.name
        version = weight._version

        def make() -> Tensor:
            if weight._version != version:
                raise UsageError(f"{name} was written to between forward and backward: step after backward")
            return made(weight.detach())

        return make

    def _make_quantized_recompute(self, s: Tensor) -> Callable[[], Tensor] | None:
        """Makes the quantized weight of a training step again; None where it has no codes of its own."""
        quant = self.weight_quant
        if not self._is_quantizing or quant.chosen is not None or is_traced(self.weight):
            return None
        qparams = quant.broadcast_qparams(self.to_output_first(self.weight)).map(lambda value: value.detach().clone())

        def made(weight: Tensor) -> Tensor:
            wide = quant.apply_mask(self.to_output_first(self._scale_channels(weight, s)))
            return self._scale_channels(self.to_output_first(quant.quantizer.fake_quantize(wide, *qparams)), 1 / s)

        return self._make_recompute(made)

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """The weight as its codes keep it."""
        return self.to_output_first(self.weight_quant(self.to_output_first(weight)))

    def to_output_first(self, weight: Tensor) -> Tensor:
        """A weight (out, in, ..) is what a quantizer sees, however the operation stores it; and back."""
        return weight.transpose(0, 1) if self.is_input_first else weight

    def fold_norm(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the batch norm's statistics and affine in them, before quantization."""
        weight, bias = self.weight, self.bias
        if self.norm is None:
            return weight, bias
        settings = get_norm_settings(self.norm)
        s = self.norm_factor()
        shift = -settings.mean if bias is None else bias - settings.mean
        shift = shift * s
        return self._scale_channels(weight, s), shift if settings.bias is None else shift + settings.bias

    def get_deployed(self) -> DeployedTensors:
        """What runs when the quantizer is on: the one place where eval, export and tests look."""
        weight, bias = self.fold_norm()
        codes, bias = self.weight_quant.codes(self.to_output_first(weight)), self._add_bias_shift(bias)
        scale = self.bias_scale()
        if bias is None or scale is None:
            return DeployedTensors(codes, bias, None)
        return DeployedTensors(codes, _to_bias_integers(bias, scale), scale.expand(bias.shape))

    def set_codes(self, codes: Tensor, qparams: QParams | None = None, bias_shift: Tensor | None = None) -> None:
        """Let these codes, as (out, in, ..), stand for the folded weight, and add a shift to its bias.

        `qparams` are new parameters of the weight; without, the codes are for those that it has.
        """
        shape = self.to_output_first(self.weight).shape
        if codes.shape != shape:
            raise UsageError(
                f"{self.weight_quant.name}: codes of shape {tuple(codes.shape)}, its weight has {tuple(shape)}"
            )
        self._real_tensors = None  # eval() looks again
        if not self.weight_quant.frozen:
            self.freeze()
        self.weight_quant.set_codes(codes, qparams)
        if bias_shift is not None:
            self.set_bias_shift(bias_shift)

    def set_bias_shift(self, shift: Tensor | None) -> None:
        """Add this to the bias while the quantizer is on; None takes it away."""
        if shift is not None and shift.shape != (self.out_channels,):
            raise UsageError(
                f"{self.weight_quant.name}: the bias shift must have one value for each of the "
                f"{self.out_channels} output channels, got shape {tuple(shift.shape)}"
            )
        self.has_bias_correction = False
        self._real_tensors = None
        with torch.inference_mode(False):
            self.bias_shift = None if shift is None else shift.detach().to(torch.float32).clone()

    def discard_codes(self) -> None:
        """Let go of chosen codes, and of what is kept between calls."""
        self.weight_quant.unfreeze()
        self._weight_cache = self._real_tensors = None

    @property
    def out_channels(self) -> int:
        """How many values an output has."""
        if self.kind == "conv_transpose":
            return int(self.weight.shape[1]) * self._groups()
        return int(self.to_output_first(self.weight).shape[0])

    def _add_bias_shift(self, bias: Tensor | None) -> Tensor | None:
        shift = self.bias_shift
        if shift is None:
            return bias
        return shift.to(self.weight.dtype) if bias is None else (bias + shift).to(bias.dtype)

    def _compute_live_tensors(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with their gradients."""
        weight, bias = self.fold_norm()
        weight = self.quantize_weight(weight)
        if not self._is_quantizing:
            return weight, bias
        bias, scale = self._add_bias_shift(bias), None if self.training else self.bias_scale()
        if bias is None or scale is None:
            return weight, bias
        rounded = (_to_bias_integers(bias, scale) * scale).to(bias.dtype)
        return weight, bias + (rounded - bias).detach()

    def _collect_real_tensors(self) -> RealTensors | None:
        """References to all that `deployed` reads; None where a weight is made of other parameters."""
        parts = [self.operation, *(each for each in (self.norm, self.input_stub) if each is not None)]
        owners = [owner for part in parts for owner in get_parameter_owners(part)]
        whole = [self] if self.input_stub is None else [self, self.input_stub]
        return (
            None if any(isinstance(owner, ComputedTensor) for owner in owners) else RealTensors.collect(whole, owners)
        )

    def _exports_constants(self) -> bool:
        """Whether torch.onnx.export records, and weight and bias can be constants of its file."""
        return (
            self._real_tensors is not None
            and self._real_tensors.have_same_shapes()
            and not self.training
            and in_onnx_export()
        )

    def _make_export_tensors(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in a plain ONNX export: constants, the weight behind Q/DQ where it is quantized."""
        assert self._real_tensors is not None  # noqa: S101  # asked before
        if not self.weight_quant.enabled:
            warn_if_exported_disabled()
        kind = self.weight.dtype
        values, bias = self._real_tensors.compute(lambda: self._compute_constants(kind))
        return (self.to_output_first(self.weight_quant.to_qdq_nodes(values)) if self._is_quantizing else values), bias

    def _compute_constants(self, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the codes stand for, or the folded weight where it is not quantized; and the bias."""
        if self._is_quantizing:
            codes, bias, scale = self.get_deployed()
            values = self.weight_quant.values(codes, kind)
            bias = bias if bias is None or scale is None else bias * scale
        else:
            values, bias = self.fold_norm()
        return values.detach().clone(), None if bias is None else bias.detach().to(kind).clone()

    def _build_eval_cache(self) -> _EvalCache:
        """What eval multiplies by, from what is deployed."""
        weight, bias = self.fold_norm()
        quant = self.weight_quant
        if quant.enabled and not quant.frozen and not quant.quantizer.is_disabled():
            quant.update_parameters(self.to_output_first(weight))
        marks = self._get_versions()
        if not self._is_quantizing:
            return _EvalCache(marks, weight, bias)
        codes, bias, scale = self.get_deployed()
        if self._multiplies_codes(weight):
            return self._build_integer_cache(marks, codes, bias)
        values = self.to_output_first(quant.values(codes, weight.dtype))
        return _EvalCache(marks, values, bias if bias is None or scale is None else (bias * scale).to(weight.dtype))

    @property
    def _is_quantizing(self) -> bool:
        return self.weight_quant.enabled and not self.weight_quant.quantizer.is_disabled()

    def _multiplies_codes(self, weight: Tensor) -> bool:
        """Whether the target's kernel multiplies integers: its sums are what is to be simulated."""
        stub, own = self.input_stub, self.weight_quant
        if self.bias_scale() is None or stub is None or self.kind not in ("linear", "conv", "head"):
            return False
        if weight.dtype != torch.float32:  # sums of codes do not fit into 16 bits
            return False
        if stub.spec.qformulation != "zp" or stub.quantizer.grid.format.is_float or stub.scale.ndim:
            return False
        return own.spec.qformulation == "zp" and not own.quantizer.grid.format.is_float

    def _build_integer_cache(self, marks: tuple[int, ...] | None, codes: Tensor, bias: Tensor | None) -> _EvalCache:
        shape = (-1,) if self.kind == "linear" else (-1, *(1 for _ in codes.shape[2:]))
        zero = self.weight_quant.broadcast_qparams(codes).zero_point
        centred = codes.to(torch.float32) - (0 if zero is None else zero)
        scale = self.bias_scale()
        assert scale is not None  # noqa: S101  # asked before
        whole = None if bias is None else bias.view(shape)
        return _EvalCache(marks, self.to_output_first(centred), whole, scale.expand(codes.shape[0]).view(shape))

    def bias_scale(self) -> Tensor | None:
        """s_x * s_w, one value an output channel, where the bias is kept as int32; else None."""
        stub, quant = self.input_stub, self.weight_quant
        if stub is None or not (stub.enabled and quant.enabled) or quant.quantizer.is_disabled():
            return None
        return stub.scale * quant.scale if quant.scale.ndim <= 1 else None

    def freeze(self) -> None:
        """Make the scales of the folded weight constants.

        A channel with weights near zero has a tiny scale: it is raised until the bias of every layer that multiplies by
        this weight fits into int32.
        """
        with torch.no_grad():
            weight, _ = self.fold_norm()
            self.weight_quant.freeze(self.to_output_first(weight), self.min_scale())

    def min_scale(self) -> Tensor | None:
        """Of each channel of the weight: what keeps the biases of all that multiply by it within int32."""
        floors = [floor for each in self.sharing_layers if (floor := each._min_scale_for_bias()) is not None]
        return torch.stack(floors).amax(0) if floors and self.weight_quant.has_channel_scales else None

    def _min_scale_for_bias(self) -> Tensor | None:
        stub, bias = self.input_stub, self._add_bias_shift(self.fold_norm()[1])
        return None if bias is None or stub is None else bias.abs() / (stub.scale * MAX_BIAS_INTEGER)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._weight_cache = self._real_tensors = None
        is_whole = not self.weight.is_meta and not hasattr(self.weight, "full_tensor")  # one in parts is, in a forward
        if not mode and self.weight_quant.enabled and not self.weight_quant.frozen and is_whole:
            self.freeze()  # eval mode has the scales of the weight as it is now, for an export that may follow
            self.weight_quant.unfreeze()
        if not mode and is_whole:
            self._real_tensors = self._collect_real_tensors()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._real_tensors = None  # parameters may be others now
        return super()._apply(fn, recurse)

    def freeze_norm(self, frozen: bool = True) -> None:
        self.switch("is_norm_frozen", frozen)

    def norm_factor(self) -> Tensor:
        """s, one value an output channel."""
        settings = get_norm_settings(self.norm)
        s = torch.rsqrt(settings.var + settings.eps)
        return s if settings.weight is None else settings.weight * s

    def _scale_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Output channels of a weight times one value each."""
        if self.kind == "conv_transpose":
            groups = self._groups()
            shape = (groups, -1, factor.numel() // groups, *weight.shape[2:])
            scaled = weight.reshape(shape) * factor.view(groups, 1, -1, *(1 for _ in weight.shape[2:]))
            return scaled.reshape(weight.shape)
        if self.is_input_first:
            return weight * factor
        return weight * factor.view(-1, *(1 for _ in weight.shape[1:]))

    def _groups(self) -> int:
        operation = self.operation
        return int(operation.arguments.get("groups", 1) if isinstance(operation, Operation) else operation.groups)

    def _can_use_cache(self, x: Tensor) -> bool:
        return not (
            self.training
            or torch.is_grad_enabled()
            or is_traced(x)
            or torch.onnx.is_in_onnx_export()
            or not (self.weight_quant.frozen or not self.weight_quant.is_learned)
        )

    def _get_versions(self) -> tuple[int, ...] | None:
        """A number for every write to what counts; None where writes leave no trace."""
        quant = self.weight_quant
        stub = self.input_stub
        values: list[Tensor | None] = [*get_tensors(self.operation), self.bias_shift]
        values += [quant.scale, quant.zero_point, quant.minval, quant.chosen, quant.mask]
        values += [] if stub is None else [stub.scale, stub._buffers["is_enabled"]]
        values += [quant._buffers[name] for name in ("is_enabled", "is_frozen")]
        if self.norm is not None:
            settings = get_norm_settings(self.norm)
            values += [settings.weight, settings.bias, settings.mean, settings.var]
        known = [value for value in values if value is not None]
        if any(value.is_inference() for value in known):
            return None
        return tuple(mark for value in known for mark in (value._version, value.data_ptr()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._real_tensors = None
        if prefix + "bias_shift" not in state_dict:
            self.bias_shift = None
        resize_buffers_for_loading(self, ("bias_shift",), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight_cache": None, "_real_tensors": None}

    def extra_repr(self) -> str:
        norm = "" if self.norm is None else f", {type(self.norm).__name__} folded in"
        return f"{self.kind} {tuple(self.weight.shape)}{norm}"


def _to_bias_integers(bias: Tensor, scale: Tensor) -> Tensor:
    """A bias in whole numbers of its scale."""
    return (bias.to(torch.float32) / scale).round()


def _replace_zeros(s: Tensor) -> Tensor:
    """A channel with gamma 0 keeps its own weight: batch norm gives its bias whatever the convolution says."""
    return torch.where(s.abs() < MIN_NORM_FACTOR, torch.ones_like(s), s)
