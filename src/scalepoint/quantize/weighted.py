"""A convolution or linear layer that multiplies by its quantized weight, with the batch norm after it folded in.

    s = gamma / sqrt(running_var + eps)
    eval:   y = conv(x, fq(w s)) + (b - mean) s + beta         what the deployed kernel computes
    train:  y = BN(conv(x, fq(w s) / s) + b)                   the same weight, live statistics

Dividing the weight by s instead of the convolution's output is the same sum and needs no second activation. In train
s is a constant: inside the range fq(w s) / s is w, which does not depend on it.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from scalepoint.graph import Operation, Reference
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.graph.modules import BIASES, WEIGHTS
from scalepoint.numerics import is_traced
from scalepoint.patterns.conversions import HeadConvolution
from scalepoint.quantize.stubs import QuantStub, WeightFakeQuantize
from scalepoint.spec.state import Stateful

MULTIPLIES = frozenset(("conv", "conv_transpose", "linear", "head"))
TINY = 1e-12
LARGEST_BIAS = 2.0**30

_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def kind_of_part(part: nn.Module) -> str:
    if isinstance(part, HeadConvolution):
        return "head"
    return part.kind if isinstance(part, Operation) else MODULE_KINDS.get(type(part), "")


def weight_shape(part: nn.Module | None) -> tuple[int, ...]:
    weight = getattr(part, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


class _Folded(NamedTuple):
    """The quantized weight and bias of eval, and what tells that they are still right.

    With a `scale` (s_x * s_w, as it broadcasts against the result) both are codes, and the input is taken as codes too:
    their sums are exact in float32 below 2^24, as they are in an integer kernel.
    """

    marks: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None


class QuantizedWeighted(Stateful):
    """The operation and its batch norm stay where they live in the model; this module owns the weight's quantizer."""

    def __init__(self, operation: nn.Module, norm: nn.Module | None, quantizer: WeightFakeQuantize) -> None:
        super().__init__()
        self.refers = {"operation": operation, "norm": norm, "input": None}  # a plain dict: not registered twice
        self.weight_quant = quantizer
        self.add_switch("is_norm_frozen", False)
        self._folded: _Folded | None = None

    refers: dict[str, nn.Module | None]

    @property
    def operation(self) -> Any:
        return self.refers["operation"]

    @property
    def norm(self) -> Any:
        return self.refers["norm"]

    @property
    def input_stub(self) -> QuantStub | None:
        """The stub on the input, when the bias is rounded to integers of scale s_x * s_w."""
        stub = self.refers["input"]
        return stub if isinstance(stub, QuantStub) else None

    @property
    def kind(self) -> str:
        return kind_of_part(self.operation)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.operation.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.operation.bias
        return bias

    @property
    def is_input_first(self) -> bool:
        return isinstance(self.operation, Operation) and self.operation.has_input_first

    @property
    def uses_batch_statistics(self) -> bool:
        return self.norm is not None and self.norm.training and not self.is_on("is_norm_frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_batch_statistics:
            s = _not_zero(self.factor().detach())
            weight = self.quantized(self._times(self.weight, s))
            result: Tensor = self.norm(run_with(self.operation, x, self._times(weight, 1 / s), self.bias))
            return result
        if not self._may_keep(x):
            return run_with(self.operation, x, *self._deployed())
        if self._folded is None or self._folded.marks != self._marks():
            self._folded = self._as_codes(_Folded(self._marks(), *self._deployed()))
        _, weight, bias, scale = self._folded
        stub = self.input_stub
        if scale is None or stub is None:
            return run_with(self.operation, x, weight, bias)
        sums = run_with(self.operation, (x / stub.scale).round_(), weight, None)
        return (sums if bias is None else sums.add_(bias)).mul_(scale)

    def quantized(self, weight: Tensor) -> Tensor:
        """A weight (out, in, ..) is what a quantizer sees, however the operation stores it."""
        if self.is_input_first:
            return self.weight_quant(weight.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]
        return self.weight_quant(weight)  # type: ignore[no-any-return]

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with the batch norm's statistics and affine in them, before quantization."""
        weight, bias = self.weight, self.bias
        if self.norm is None:
            return weight, bias
        settings = norm_settings(self.norm)
        s = self.factor()
        shift = -settings.mean if bias is None else bias - settings.mean
        shift = shift * s
        return self._times(weight, s), shift if settings.bias is None else shift + settings.bias

    def _as_codes(self, folded: _Folded) -> _Folded:
        """In integers where a target's kernel multiplies integers: its sums are what is to be simulated."""
        stub, scale = self.input_stub, self.bias_scale()
        if scale is None or stub is None or self.kind not in ("linear", "conv", "head"):
            return folded
        if folded.weight.dtype != torch.float32:  # sums of codes do not fit into 16 bits
            return folded
        if stub.spec.qformulation != "zp" or stub.quantizer.grid.format.is_float or stub.scale.ndim:
            return folded
        own = self.weight_quant
        if own.spec.qformulation != "zp" or own.quantizer.grid.format.is_float:
            return folded
        shape = (-1,) if self.kind == "linear" else (-1, *(1 for _ in folded.weight.shape[2:]))
        along = (-1,) if self.is_input_first else (-1, *(1 for _ in folded.weight.shape[1:]))
        scale = scale.expand(folded.weight.shape[-1 if self.is_input_first else 0])
        codes = (folded.weight / own.scale.view(along if own.scale.ndim else ())).round()
        bias = None if folded.bias is None else (folded.bias / scale).round().view(shape)
        return _Folded(folded.marks, codes, bias, scale.view(shape))

    def _deployed(self) -> tuple[Tensor, Tensor | None]:
        """The quantized, folded weight and its bias."""
        weight, bias = self.folded()
        weight = self.quantized(weight)
        scale = None if self.training else self.bias_scale()
        if bias is None or scale is None:
            return weight, bias
        return weight, ((bias / scale).round() * scale).to(bias.dtype)

    def bias_scale(self) -> Tensor | None:
        """s_x * s_w, one value an output channel, where the bias is kept as int32; else None."""
        stub, quant = self.input_stub, self.weight_quant
        if stub is None or not (stub.enabled and quant.enabled) or quant.quantizer.is_disabled():
            return None
        return stub.scale * quant.scale if quant.scale.ndim <= 1 else None

    def freeze(self) -> None:
        """Make the scales of the folded weight constants."""
        with torch.no_grad():
            weight, bias = self.folded()
            self.weight_quant.freeze(weight.transpose(0, 1) if self.is_input_first else weight)
            self._fit_bias(bias)

    def _fit_bias(self, bias: Tensor | None) -> None:
        """A channel with weights near zero has a tiny scale: raise it until the bias fits into int32."""
        stub, scale = self.input_stub, self.weight_quant.scale
        if bias is None or stub is None or scale.ndim > 1 or self.weight_quant.quantizer.is_disabled():
            return
        least = bias.abs() / (stub.scale * LARGEST_BIAS)
        scale.copy_(torch.maximum(scale, least if scale.ndim else least.amax()))

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not mode and self.weight_quant.enabled and not self.weight_quant.frozen and not self.weight.is_meta:
            self.freeze()  # eval mode has the scales of the weight as it is now, for an export that may follow
            self.weight_quant.unfreeze()
        return self

    def freeze_norm(self, frozen: bool = True) -> None:
        self.switch("is_norm_frozen", frozen)

    def factor(self) -> Tensor:
        """s, one value an output channel."""
        settings = norm_settings(self.norm)
        s = torch.rsqrt(settings.var + settings.eps)
        return s if settings.weight is None else settings.weight * s

    def _times(self, weight: Tensor, factor: Tensor) -> Tensor:
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

    def _may_keep(self, x: Tensor) -> bool:
        return not (
            self.training
            or torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or is_traced(x)
            or torch.onnx.is_in_onnx_export()
            or not (self.weight_quant.frozen or not self.weight_quant.is_learned)
        )

    def _marks(self) -> tuple[int, ...]:
        quant = self.weight_quant
        stub = self.input_stub
        values: list[Tensor | None] = [self.weight, self.bias, quant.scale, quant.zero_point]
        values += [] if stub is None else [stub.scale, stub._buffers["is_enabled"]]
        values += [quant._buffers[name] for name in ("is_enabled", "is_frozen")]
        if self.norm is not None:
            settings = norm_settings(self.norm)
            values += [settings.weight, settings.bias, settings.mean, settings.var]
        return tuple(mark for value in values if value is not None for mark in (value._version, value.data_ptr()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folded": None}

    def extra_repr(self) -> str:
        norm = "" if self.norm is None else f", {type(self.norm).__name__} folded in"
        return f"{self.kind} {tuple(self.weight.shape)}{norm}"


class NormSettings(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float


def norm_settings(norm: nn.Module) -> NormSettings:
    """The numbers of a batch norm, written as a module or as a function."""
    if isinstance(norm, _BatchNorm):
        return NormSettings(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]
    assert isinstance(norm, Operation)  # noqa: S101  # nothing else has the kind
    held = {name: value.value for name, value in norm.arguments.items() if isinstance(value, Reference)}
    mean, var = held["running_mean"], held["running_var"]
    return NormSettings(held.get("weight"), held.get("bias"), mean, var, float(norm.arguments.get("eps", 1e-5)))


def can_fold(norm: nn.Module) -> bool:
    """A batch norm without running statistics has nothing that could be folded."""
    if isinstance(norm, Operation):
        return {"running_mean", "running_var"} <= norm.references().keys()
    return isinstance(norm, _BatchNorm) and norm.running_mean is not None


def run_with(operation: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operation with another weight and bias."""
    if isinstance(operation, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(operation, _ConvTransposeNd):
        o = operation
        dims = len(o.kernel_size)
        return _TRANSPOSED[dims](x, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation)  # type: ignore[arg-type]
    if isinstance(operation, _ConvNd):
        return operation._conv_forward(x, weight, bias)
    if isinstance(operation, HeadConvolution):
        return F.conv2d(x, weight, bias)
    assert isinstance(operation, Operation)  # noqa: S101  # what multiplies is one of these
    return _run_operation(operation, x, weight, bias)


def _run_operation(operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    names = operation.arguments
    holder = next(name for name in WEIGHTS if isinstance(names.get(name), Reference))
    instead: dict[str, Any] = {holder: weight}
    bias_name = next((name for name in BIASES if isinstance(names.get(name), Reference)), None)
    late = None
    if bias_name is not None:
        instead[bias_name] = bias
    elif bias is not None and holder == "weight":
        instead["bias"] = bias
    else:
        late = bias
    y: Tensor = operation.run((x,), instead)
    return y if late is None else y + late


def _not_zero(s: Tensor) -> Tensor:
    """A channel with gamma 0 keeps its own weight: batch norm gives its bias whatever the convolution says."""
    return torch.where(s.abs() < TINY, torch.ones_like(s), s)
