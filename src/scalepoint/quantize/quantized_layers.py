"""A convolution or linear layer with a quantized weight, and the batch norm after it folded into that weight.

    s = gamma / sqrt(running_var + eps)
    eval:   y = conv(x, fq(w s)) + (b - mean) s + beta         what the deployed kernel computes
    train:  y = BN(conv(x, fq(w s) / s) + b)                   the same weight, batch statistics

In train mode the weight is divided by s, which gives the same sum as dividing the convolution's output and needs no
second activation. No gradient flows through s there: where nothing is clamped, s nearly cancels.
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
from scalepoint.quantize.untraced_tensors import UntracedTensors
from scalepoint.spec.onnx_export import in_onnx_export
from scalepoint.spec.state import Stateful

MIN_NORM_FACTOR = 1e-12
MAX_BIAS_INTEGER = 2.0**30  # leaves half of the int32 range for the sum that the bias is added to


class DeployedTensors(NamedTuple):
    """The tensors of a layer in a deployed file.

    Attributes:
        codes: Codes of the weight as (out, in, ...), in their storage type. Scale and zero point are in the quantizer.
        bias: With a `bias_scale` integers, otherwise float values.
        bias_scale: One per output channel, or None.
    """

    codes: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None


class _EvalCache(NamedTuple):
    """Weight and bias of eval mode, kept between calls.

    With a `scale` (s_x * s_w, in the shape of the output) weight and bias are integers, and the input is divided by
    s_x: sums of integers are exact in float32 below 2^24, as they are in an integer kernel.
    """

    versions: tuple[int, ...] | None  # of the tensors that the cache was computed from; None if it cannot be kept
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class QuantizedLayer(Stateful):
    """Runs an operation with its quantized weight.

    The operation and its batch norm keep their places in the model. This module owns the quantizer of the weight, and
    what an algorithm adds to the bias (`bias_shift`). Both have no effect while the quantizer is disabled.

    The cache of eval mode is updated if the version counter of a tensor changes. Writes through `.data` do not change
    it: after one, switch the mode of the model.

    Attributes:
        sharing_layers: All layers that multiply by the weight of this quantizer.
        computes_in_float: The weight is stored as codes but multiplied as float: a layer that stays float for speed.
        has_bias_correction: The bias shift comes from calibration. Tuning replaces it by its own.
    """

    def __init__(self, operation: nn.Module, norm: nn.Module | None, quantizer: WeightFakeQuantize) -> None:
        super().__init__()
        # A plain dict: torch must not register these modules a second time. insert_qdq sets "input" to the quantizer of
        # the input, if that has a constant scale.
        self.module_refs = {"operation": operation, "norm": norm, "input": None}
        self.weight_quant = quantizer
        self.sharing_layers = [self]
        self.computes_in_float = False
        self.register_buffer("bias_shift", None)
        self.add_switch("is_norm_frozen", False)
        self._weight_cache: _EvalCache | None = None
        self._untraced_tensors: UntracedTensors | None = None  # for a plain torch.onnx.export

    module_refs: dict[str, nn.Module | None]
    bias_shift: Tensor | None
    has_bias_correction: bool = False

    @property
    def operation(self) -> Any:
        return self.module_refs["operation"]

    @property
    def norm(self) -> Any:
        return self.module_refs["norm"]

    @property
    def input_stub(self) -> QuantStub | None:
        """The quantizer of the input, if the bias is rounded to integers of scale s_x * s_w."""
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
    def out_channels(self) -> int:
        if self.kind == "conv_transpose":
            return int(self.weight.shape[1]) * self._groups
        return int(self.to_output_first(self.weight).shape[0])

    @property
    def is_input_first(self) -> bool:
        """Whether the operation stores its weight as (in, out)."""
        return isinstance(self.operation, Operation) and self.operation.has_transposed_weight

    @property
    def _groups(self) -> int:
        operation = self.operation
        return int(operation.arguments.get("groups", 1) if isinstance(operation, Operation) else operation.groups)

    @property
    def uses_batch_statistics(self) -> bool:
        return self.norm is not None and self.norm.training and not self.is_on("is_norm_frozen")

    @property
    def _is_quantizing(self) -> bool:
        return self.weight_quant.enabled and not self.weight_quant.quantizer.is_disabled()

    def forward(self, x: Tensor) -> Tensor:
        """Run the operation. Weight and bias depend on the mode.

        training with batch statistics: the quantized weight divided by s, with its gradient
        eval without gradients: tensors kept between calls
        inside a plain torch.onnx.export: constants
        otherwise: tensors computed in this call, with their gradients
        """
        if self.uses_batch_statistics:
            return self._forward_with_batch_statistics(x)
        if self._can_use_cache(x):
            return self._forward_with_cache(x)
        weight, bias = self._make_onnx_constants() if self._can_export_constants() else self._compute_live_tensors()
        with save_codes_for_backward(x):
            return run_with_weight(self.operation, x, weight, bias)

    def _compute_live_tensors(self) -> tuple[Tensor, Tensor | None]:
        """Compute weight and bias with their gradients."""
        weight, bias = self.fold_norm()
        weight = self.quantize_weight(weight)
        if not self._is_quantizing:
            return weight, bias
        bias, scale = self._add_bias_shift(bias), None if self.training else self.compute_bias_scale()
        if bias is None or scale is None:
            return weight, bias
        rounded = (_to_bias_integers(bias, scale) * scale).to(bias.dtype)
        return weight, bias + (rounded - bias).detach()  # the straight-through gradient

    def _forward_with_cache(self, x: Tensor) -> Tensor:
        cache = self._weight_cache
        if cache is None or cache.versions is None or cache.versions != self._get_versions():
            with torch.inference_mode(False), torch.no_grad():
                cache = self._weight_cache = self._build_eval_cache()
        stub = self.input_stub
        if cache.scale is None or stub is None:
            return run_with_weight(self.operation, x, cache.weight, cache.bias)
        # x is quantized, so x / s_x is an integer up to float rounding.
        sums = run_with_weight(self.operation, (x / stub.scale).round_(), cache.weight, None)
        return (sums if cache.bias is None else sums.add_(cache.bias)).mul_(cache.scale)

    def _can_use_cache(self, x: Tensor) -> bool:
        if self.training or torch.is_grad_enabled() or is_traced(x) or torch.onnx.is_in_onnx_export():
            return False
        return self.weight_quant.frozen or not self.weight_quant.is_learned

    def _build_eval_cache(self) -> _EvalCache:
        """Compute weight and bias of eval mode from the deployed tensors."""
        weight, bias = self.fold_norm()
        quant = self.weight_quant
        if self._is_quantizing and not quant.frozen:
            quant.update_parameters(self.to_output_first(weight))
        versions = self._get_versions()
        if not self._is_quantizing:  # asked again: update_parameters disables a quantizer whose blocks do not fit
            return _EvalCache(versions, weight, bias)
        codes, bias, scale = self.get_deployed()
        if self._multiplies_codes(weight):
            return self._build_integer_cache(versions, codes, bias)
        values = self.from_output_first(quant.values(codes, weight.dtype))
        return _EvalCache(versions, values, _dequantize_bias(bias, scale, weight.dtype))

    def _multiplies_codes(self, weight: Tensor) -> bool:
        """Return whether the target's kernel multiplies integers, so that eval mode must compute the same sums."""
        stub = self.input_stub
        if self.compute_bias_scale() is None or stub is None or self.kind not in ("linear", "conv", "head"):
            return False
        if weight.dtype != torch.float32:  # sums of codes overflow 16-bit types
            return False
        have_integer_codes = all(
            quantizer.spec.qformulation == "zp" and not quantizer.quantizer.grid.format.is_float
            for quantizer in (stub, self.weight_quant)
        )
        return have_integer_codes and not stub.scale.ndim

    def _build_integer_cache(self, versions: tuple[int, ...] | None, codes: Tensor, bias: Tensor | None) -> _EvalCache:
        zero_point = self.weight_quant.broadcast_qparams(codes).zero_point
        centred_codes = codes.to(torch.float32)
        if zero_point is not None:
            centred_codes = centred_codes - zero_point
        scale = self.compute_bias_scale()
        assert scale is not None  # noqa: S101  # checked by the caller
        # Output channels are the last axis of a linear layer, and axis 1 of a convolution.
        spatial_axes = 0 if self.kind == "linear" else codes.ndim - 2
        shape = (-1, *[1] * spatial_axes)
        return _EvalCache(
            versions,
            self.from_output_first(centred_codes),
            None if bias is None else bias.view(shape),
            scale.expand(codes.shape[0]).view(shape),
        )

    def _get_versions(self) -> tuple[int, ...] | None:
        """Return a number for every write to a tensor that the cache depends on; None for tensors without versions."""
        quant = self.weight_quant
        stub = self.input_stub
        tensors: list[Tensor | None] = [*get_tensors(self.operation), self.bias_shift]
        tensors += [quant.scale, quant.zero_point, quant.minval, quant.chosen, quant.mask]
        tensors += [] if stub is None else [stub.scale, stub._buffers["is_enabled"]]
        tensors += [quant._buffers[name] for name in ("is_enabled", "is_frozen")]
        if self.norm is not None:
            settings = get_norm_settings(self.norm)
            tensors += [settings.weight, settings.bias, settings.mean, settings.var]
        present = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.is_inference() for tensor in present):
            return None  # inference tensors have no version counter
        return tuple(number for tensor in present for number in (tensor._version, tensor.data_ptr()))

    def _forward_with_batch_statistics(self, x: Tensor) -> Tensor:
        factor = _replace_zeros(self.compute_norm_factor().detach())
        weight, recompute_weight = self._make_training_weight(factor)
        # Autograd keeps the codes of a quantized x instead of its values, and computes the weight again in backward.
        with save_codes_for_backward(x, weight, recompute_weight):
            y = run_with_weight(self.operation, x, weight, self.bias)
        result: Tensor = self.norm(y)
        return result

    def _make_training_weight(self, s: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """Compute fq(w s) / s with its gradient.

        Returns:
            The weight, and a function that computes it again in backward, so that autograd does not save it. The
            function is None if the weight cannot be computed again.
        """
        row_steps = self._update_row_steps(s)
        if row_steps is not None:
            # One fused pass over the weight instead of multiply, quantize, divide. Nothing else reads its gradient.
            steps, clamped_indices = row_steps
            fmt, constant_steps = self.weight_quant.quantizer.grid.format, steps.map(Tensor.detach)
            weight = fake_quantize_folded(self.weight, s, steps, fmt, clamped_indices=clamped_indices, owns_grad=True)
            return weight, self._make_recompute(lambda weight: round_trip_folded(weight, s, constant_steps, fmt))
        folded = self._scale_channels(self.weight, s)
        recompute_folded = self._make_recompute(lambda weight: self._scale_channels(weight, s))
        with save_codes_for_backward(None, folded, recompute_folded):
            quantized = self.quantize_weight(folded)
        del folded  # frees its memory before the next product is computed
        return self._scale_channels(quantized, 1 / s), self._make_quantized_recompute(s)

    def _update_row_steps(self, s: Tensor) -> tuple[Steps, Tensor | None] | None:
        """Update the scale for w s and return its quantization steps, if `fake_quantize_folded` can be used.

        It needs rows that are output channels, and parameters that are learned or depend on the extremes of
        each row.

        Returns:
            The steps, and the indices of the clamped elements if they are known. None if the kernel cannot be used.
        """
        quant = self.weight_quant
        if is_traced(self.weight) or self.is_input_first or self.kind == "conv_transpose":
            return None
        if not self._is_quantizing or quant.chosen is not None or not quant.can_quantize_row_by_row:
            return None
        steps = make_steps(quant.broadcast_qparams(self.weight), quant.quantizer.grid, fixed_zero=True)
        # The scale is set below. can_fold reads only its number of elements: at most one per row, as many as s has.
        if not self.weight.numel() or not can_fold(self.weight, steps._replace(scale=s)):
            return None
        if quant.is_learned and not quant.frozen:
            return steps._replace(scale=quant.current_qparams(self.weight).scale), None
        # Copy the scale: backward reads it, and the next forward would overwrite it in place.
        if quant.frozen:
            return steps._replace(scale=quant.scale.detach().clone()), None
        lines = LineExtremes.compute(self.weight.detach(), s)
        quant.update_parameters(lines.extremes())  # the extremes of w s give the same scale as w s itself
        steps = steps._replace(scale=quant.scale.detach().clone())
        return steps, lines.find_clamped(steps)

    def _make_recompute(self, compute: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Return a function that computes a tensor from the weight again, in backward."""
        weight, name = self.weight, self.weight_quant.name
        version = weight._version

        def recompute() -> Tensor:
            if weight._version != version:
                raise UsageError(
                    f"{name} was written to between forward and backward: call optimizer.step() after backward()"
                )
            return compute(weight.detach())

        return recompute

    def _make_quantized_recompute(self, s: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that computes the quantized weight again; None for a weight that is not simply rounded."""
        quant = self.weight_quant
        if not self._is_quantizing or quant.chosen is not None or is_traced(self.weight):
            return None
        qparams = quant.broadcast_qparams(self.to_output_first(self.weight)).map(lambda value: value.detach().clone())

        def compute(weight: Tensor) -> Tensor:
            folded = quant.apply_mask(self.to_output_first(self._scale_channels(weight, s)))
            quantized = self.from_output_first(quant.quantizer.fake_quantize(folded, *qparams))
            return self._scale_channels(quantized, 1 / s)

        return self._make_recompute(compute)

    def fold_norm(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias with the batch norm folded in, before quantization."""
        weight, bias = self.weight, self.bias
        if self.norm is None:
            return weight, bias
        settings = get_norm_settings(self.norm)
        s = self.compute_norm_factor()
        centered_bias = -settings.mean if bias is None else bias - settings.mean
        folded_bias = centered_bias * s
        if settings.bias is not None:
            folded_bias = folded_bias + settings.bias
        return self._scale_channels(weight, s), folded_bias

    def compute_norm_factor(self) -> Tensor:
        """Return s, one value per output channel."""
        settings = get_norm_settings(self.norm)
        s = torch.rsqrt(settings.var + settings.eps)
        return s if settings.weight is None else settings.weight * s

    def _scale_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Multiply the output channels of a weight by one value each."""
        if self.kind == "conv_transpose":
            # The weight is (in, out / groups, ...), with the input channels of all groups one after the other.
            groups = self._groups
            shape = (groups, -1, factor.numel() // groups, *weight.shape[2:])
            scaled = weight.reshape(shape) * factor.view(groups, 1, -1, *(1 for _ in weight.shape[2:]))
            return scaled.reshape(weight.shape)
        if self.is_input_first:
            return weight * factor
        return weight * factor.view(-1, *(1 for _ in weight.shape[1:]))

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Quantize and dequantize a weight in the layout of the operation."""
        return self.from_output_first(self.weight_quant(self.to_output_first(weight)))

    def to_output_first(self, weight: Tensor) -> Tensor:
        """Convert a weight from the layout of the operation to (out, in, ...), which quantizers use."""
        return weight.transpose(0, 1) if self.is_input_first else weight

    def from_output_first(self, weight: Tensor) -> Tensor:
        """Convert a weight from (out, in, ...) to the layout of the operation."""
        return self.to_output_first(weight)  # the same two axes change places

    def get_deployed(self) -> DeployedTensors:
        """Return the tensors of the deployed file. Eval mode, export and verification all use these.

        The codes can be the buffer of the quantizer. Formats store `codes.detach()`, which is another tensor object: an
        exporter names a constant after the first buffer that is its tensor.
        """
        weight, bias = self.fold_norm()
        codes, bias = self.weight_quant.codes(self.to_output_first(weight)), self._add_bias_shift(bias)
        scale = self.compute_bias_scale()
        if bias is None or scale is None:
            return DeployedTensors(codes, bias, None)
        return DeployedTensors(codes, _to_bias_integers(bias, scale), scale.expand(bias.shape))

    def set_codes(self, codes: Tensor, qparams: QParams | None = None, bias_shift: Tensor | None = None) -> None:
        """Use these codes for the folded weight instead of the nearest ones.

        Args:
            codes: Codes as (out, in, ...).
            qparams: New parameters of the weight; without them the codes are for the current ones.
            bias_shift: Added to the bias, one value per output channel.
        """
        shape = self.to_output_first(self.weight).shape
        if codes.shape != shape:
            raise UsageError(
                f"{self.weight_quant.name}: codes must have the shape of the weight {tuple(shape)}, got "
                f"{tuple(codes.shape)}"
            )
        self._untraced_tensors = None  # eval() collects them again, with the new codes
        if not self.weight_quant.frozen:
            self.freeze()
        self.weight_quant.set_codes(codes, qparams)
        if bias_shift is not None:
            self.set_bias_shift(bias_shift)

    def set_bias_shift(self, shift: Tensor | None) -> None:
        """Add this to the bias while the quantizer is enabled. None removes the shift."""
        if shift is not None and shift.shape != (self.out_channels,):
            raise UsageError(
                f"{self.weight_quant.name}: the bias shift must have one value for each of the "
                f"{self.out_channels} output channels, got shape {tuple(shift.shape)}"
            )
        self.has_bias_correction = False
        self._untraced_tensors = None
        with torch.inference_mode(False):
            self.bias_shift = None if shift is None else shift.detach().to(torch.float32).clone()

    def _add_bias_shift(self, bias: Tensor | None) -> Tensor | None:
        shift = self.bias_shift
        if shift is None:
            return bias
        return shift.to(self.weight.dtype) if bias is None else (bias + shift).to(bias.dtype)

    def compute_bias_scale(self) -> Tensor | None:
        """Return s_x * s_w, one value per output channel, if the file stores the bias as int32."""
        stub, quant = self.input_stub, self.weight_quant
        if stub is None or not (stub.enabled and quant.enabled) or quant.quantizer.is_disabled():
            return None
        # Scales of blocks keep the rank of the weight: there is no single one per output channel.
        return stub.scale * quant.scale if quant.scale.ndim <= 1 else None

    def reset(self) -> None:
        """Discard chosen codes, compute the scale from the weight again, and drop all tensors kept between calls."""
        self.weight_quant.unfreeze()
        self._weight_cache = self._untraced_tensors = None

    def freeze(self) -> None:
        """Make the scales of the folded weight constants.

        A channel with weights near zero has a tiny scale. It is raised until the bias of every layer with this weight
        fits into int32.
        """
        with torch.no_grad():
            weight, _ = self.fold_norm()
            self.weight_quant.freeze(self.to_output_first(weight), self.compute_min_scale())

    def compute_min_scale(self) -> Tensor | None:
        """Return, per channel of the weight, the smallest scale with which all biases fit into int32."""
        min_scales = [layer._compute_min_scale_for_bias() for layer in self.sharing_layers]
        known = [scale for scale in min_scales if scale is not None]
        return torch.stack(known).amax(0) if known and self.weight_quant.has_scales_for_bias else None

    def _compute_min_scale_for_bias(self) -> Tensor | None:
        stub, bias = self.input_stub, self._add_bias_shift(self.fold_norm()[1])
        return None if bias is None or stub is None else bias.abs() / (stub.scale * MAX_BIAS_INTEGER)

    def freeze_norm(self, frozen: bool = True) -> None:
        self.switch("is_norm_frozen", frozen)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._weight_cache = self._untraced_tensors = None
        is_sharded = hasattr(self.weight, "full_tensor")  # fully_shard gathers the weight in forward only
        if mode or self.weight.is_meta or is_sharded:
            return self
        if self.weight_quant.enabled and not self.weight_quant.frozen:
            # An export in eval mode uses the scales of the current weight. They do not become constants.
            self.freeze()
            self.weight_quant.unfreeze()
        self._untraced_tensors = self._collect_untraced_tensors()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._untraced_tensors = None  # .to() may replace parameters
        return super()._apply(fn, recurse)

    def _can_export_constants(self) -> bool:
        """Return whether torch.onnx.export traces this layer, and the file can contain weight and bias as constants."""
        can_store = self._untraced_tensors is not None and self._untraced_tensors.have_same_shapes()
        return can_store and not self.training and in_onnx_export()

    def _make_onnx_constants(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as constants of a plain ONNX export. A quantized weight goes through Q/DQ nodes."""
        assert self._untraced_tensors is not None  # noqa: S101  # checked by the caller
        if not self.weight_quant.enabled:
            warn_if_exported_disabled()
        dtype = self.weight.dtype
        values, bias = self._untraced_tensors.compute(lambda: self._compute_constant_values(dtype))
        if self._is_quantizing:
            values = self.from_output_first(self.weight_quant.to_qdq_nodes(values))
        return values, bias

    def _compute_constant_values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the float values of weight and bias.

        A quantized weight is dequantized from the deployed codes as (out, in, ...). A float weight has the batch norm
        folded in, in the layout of the operation.
        """
        if self._is_quantizing:
            codes, bias, scale = self.get_deployed()
            values, bias = self.weight_quant.values(codes, dtype), _dequantize_bias(bias, scale, dtype)
        else:
            values, bias = self.fold_norm()
        return values.detach().clone(), None if bias is None else bias.detach().to(dtype).clone()

    def _collect_untraced_tensors(self) -> UntracedTensors | None:
        """Collect references to all tensors that `get_deployed` reads; None if the weight is computed from others."""
        further_parts = [part for part in (self.norm, self.input_stub) if part is not None]
        owners = [owner for part in (self.operation, *further_parts) for owner in get_parameter_owners(part)]
        if any(isinstance(owner, ComputedTensor) for owner in owners):
            return None
        return UntracedTensors.collect([self] if self.input_stub is None else [self, self.input_stub], owners)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._untraced_tensors = None
        if prefix + "bias_shift" not in state_dict:
            self.bias_shift = None
        resize_buffers_for_loading(self, ("bias_shift",), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight_cache": None, "_untraced_tensors": None}

    def extra_repr(self) -> str:
        norm = "" if self.norm is None else f", {type(self.norm).__name__} folded in"
        return f"{self.kind} {tuple(self.weight.shape)}{norm}"


def _to_bias_integers(bias: Tensor, scale: Tensor) -> Tensor:
    """Round a bias to integer multiples of its scale."""
    return (bias.to(torch.float32) / scale).round()


def _dequantize_bias(bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert the integers of a bias to float values. Without a scale the bias is float already."""
    if bias is None or scale is None:
        return bias
    return (bias * scale).to(dtype)


def _replace_zeros(s: Tensor) -> Tensor:
    """Replace factors near zero by 1: with gamma 0, batch norm gives its bias whatever the convolution computes."""
    return torch.where(s.abs() < MIN_NORM_FACTOR, torch.ones_like(s), s)
