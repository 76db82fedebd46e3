"""The form that is exported: quantized weights as their codes, biases as the target stores them, quantizers as Q/DQ."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.errors import ExportError
from scalepoint.exporting.attention import scale_before_quantizing
from scalepoint.exporting.operators import BLOCKS_SINCE, TYPES, dequantize
from scalepoint.numerics import QParams, dtype_name
from scalepoint.patterns import Fused
from scalepoint.patterns.language import place_of
from scalepoint.quantize.stubs import Quantizing, QuantStub
from scalepoint.quantize.weighted import QuantizedWeighted, run_with
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, PerTensorGranularity
from scalepoint.spec.onnx_form import quantize_linear


class Stored(nn.Module):
    """What has a form in ONNX, from some opset on."""

    @property
    def opset(self) -> int:
        raise NotImplementedError


class StoredWeight(Stored):
    """An operation over stored codes; a linear layer holds them as (in, out), as every runtime multiplies.

    Zero points of blocks are left away where all are zero: kernels for narrow weights have a faster path then.
    """

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__()
        quant = source.weight_quant
        weight, bias = source.folded()
        self.refers = {"operation": source.operation}
        self.kind = source.kind
        self.fmt = dtype_name(quant.spec.dtype)
        self.axis, self.block = 0, 0
        canonical = weight.transpose(0, 1) if source.is_input_first else weight
        codes = quant.codes(canonical)
        scale = quant.scale
        zero = quant.zero_point if quant.zero_point.shape == scale.shape else torch.zeros_like(scale)
        granularity = quant.calculator.granularity
        if isinstance(granularity, PerChannelGranularity):
            self.axis = granularity.axis or 0
        elif isinstance(granularity, PerBlockGranularity):
            self.axis, self.block = int(granularity.axis or 0), int(granularity.block_size)  # type: ignore[arg-type]
        elif not isinstance(granularity, PerTensorGranularity):
            raise ExportError(f"{quant.name}: no ONNX form for weights with {granularity!r}")
        if self.kind == "linear":
            codes = codes.transpose(0, 1)
            self.axis = 1 - self.axis if not isinstance(granularity, PerTensorGranularity) else 0
            if self.block:
                scale, zero = scale.transpose(0, 1), zero.transpose(0, 1)
        if self.kind == "head":
            codes = codes.flatten(2)[:, :, :, None]
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", scale.detach().to(torch.float32).contiguous().clone())
        is_integer = not codes.is_floating_point()
        zero = zero.to(codes.dtype if is_integer else torch.float32)
        self.register_buffer("zero_point", None if self.block and is_integer and not zero.any() else zero)
        self._keep_bias(source, bias)

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None
    bias_scale: Tensor | None

    def _keep_bias(self, source: QuantizedWeighted, bias: Tensor | None) -> None:
        scale = source.bias_scale()
        rounded = None if bias is None or scale is None else (bias / scale).round()
        if rounded is not None and scale is not None and bias is not None:
            self.register_buffer("bias", rounded.to(torch.int32).expand(bias.shape).contiguous())
            self.register_buffer("bias_scale", scale.detach().expand(bias.shape).contiguous())
        else:
            self.register_buffer("bias", None if bias is None else bias.detach().clone())
            self.register_buffer("bias_scale", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize(self.codes, self.scale, self.zero_point, self.axis, self.block, self.fmt)
        bias = self.bias
        if bias is not None and self.bias_scale is not None:
            bias = dequantize(bias, self.bias_scale, None, 0, 0, "int32")
        if self.kind == "linear":
            y = torch.matmul(x, weight.to(x.dtype))
            return y if bias is None else y + bias
        operation: Any = self.refers["operation"]
        return run_with(operation, x, weight.to(x.dtype), bias)

    @property
    def opset(self) -> int:
        return max(TYPES[self.fmt][1], BLOCKS_SINCE if self.block else 0)


class StoredStub(Stored):
    """QuantizeLinear and DequantizeLinear with constant parameters."""

    def __init__(self, stub: QuantStub, factor: float = 1.0) -> None:
        super().__init__()
        self.stub_name, self.grid, self.granularity = stub.name, stub.quantizer.grid, stub.calculator.granularity
        if stub.calculator.always_called and not stub.is_learned:
            raise ExportError(f"{stub.name}: scales that are made anew for every tensor have no constant form")
        self.register_buffer("scale", stub.scale.detach() * factor)
        self.register_buffer("zero_point", stub.zero_point.detach().clone())

    scale: Tensor
    zero_point: Tensor

    def forward(self, x: Tensor) -> Tensor:
        zero = None if self.grid.format.is_float else self.zero_point
        return quantize_linear(x, QParams(self.scale, zero), self.grid, self.granularity, self.stub_name)

    @property
    def opset(self) -> int:
        return TYPES[self.grid.format.name][1]


class FloatWeight(nn.Module):
    """The same operation in float, with the batch norm folded in: what the quantized file is compared with."""

    def __init__(self, source: QuantizedWeighted) -> None:
        super().__init__()
        weight, bias = source.folded()
        self.refers = {"operation": source.operation}
        self.is_linear = source.kind == "linear"
        if self.is_linear and not source.is_input_first:
            weight = weight.transpose(0, 1)
        self.register_buffer("weight", weight.detach().contiguous().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_linear:
            y = torch.matmul(x, self.weight)
            return y if self.bias is None else y + self.bias
        operation: Any = self.refers["operation"]
        return run_with(operation, x, self.weight, self.bias)


def stored_form(model: fx.GraphModule, float_dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A copy whose weights are codes, for scales that are stored in `float_dtype`."""
    check_ready(model)
    twin = _twin(model)
    if float_dtype != torch.float32:
        _round_scales(twin, float_dtype)
    stored = _replaced(twin, StoredWeight)
    factors = scale_before_quantizing(stored)
    for name, module in list(stored.named_modules()):
        if isinstance(module, QuantStub) and module.enabled and not module.quantizer.is_disabled():
            parent, _, leaf = name.rpartition(".")
            setattr(stored.get_submodule(parent), leaf, StoredStub(module, factors.get(name, 1.0)))
    return stored


def float_form(model: fx.GraphModule) -> fx.GraphModule:
    """A copy without quantizers."""
    plain = _replaced(_twin(model), FloatWeight)
    for module in plain.modules():
        if isinstance(module, QuantStub):
            module.enabled = False
    return plain


def _twin(model: fx.GraphModule) -> fx.GraphModule:
    return copy.deepcopy(model).cpu().eval()


def _round_scales(model: fx.GraphModule, dtype: torch.dtype) -> None:
    """To what the file can hold, before codes are made with them; never to zero."""
    for module in model.modules():
        if isinstance(module, Quantizing):
            rounded = module.scale.to(dtype).clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
            module.take(QParams(rounded.to(torch.float32)))


def _replaced(twin: fx.GraphModule, kind: type[StoredWeight | FloatWeight]) -> fx.GraphModule:
    made: dict[int, nn.Module] = {}
    with torch.no_grad():
        for fused in twin.modules():
            if not isinstance(fused, Fused):
                continue
            for role, part in fused.parts.items():
                if isinstance(part, QuantizedWeighted):
                    if id(part) not in made:
                        gave_up = part.weight_quant.quantizer.is_disabled()
                        made[id(part)] = (FloatWeight if gave_up else kind)(part).eval()
                        fused.add_module(f"stored_{role}", made[id(part)])
                    fused.parts[role] = made[id(part)]
    for node in twin.graph.nodes:  # torch.export names what it records after this
        path = place_of(node) if node.op != "call_module" else str(node.target)
        node.meta["nn_module_stack"] = {path: (path, nn.Module)} if node.op.startswith("call") else {}
    return twin


def check_ready(model: fx.GraphModule) -> None:
    """Never a float model in disguise: everything calibrated, switched on and frozen."""
    stubs = {name: module for name, module in model.named_modules() if isinstance(module, QuantStub)}
    weights = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeighted)}
    if not stubs and not weights:
        raise ExportError("this model has no quantizers: export what insert_qdq made")
    faults = [
        (name, "was never calibrated: calibrate(model, data) first")
        for name, stub in stubs.items()
        if not stub.has_observed and not stub.skipped_because
    ]
    faults += [
        (name, "is switched off: enable_fake_quant(model) first")
        for name, stub in stubs.items()
        if stub.has_observed and not stub.enabled and not stub.skipped_because
    ]
    faults += [
        (name, "has a weight that is not fake-quantized: enable_fake_quant(model) first")
        for name, weighted in weights.items()
        if not weighted.weight_quant.enabled
    ]
    faults += [
        (name, "has a live weight scale: freeze(model) first, or calibrate(..., freeze_weights=True)")
        for name, weighted in weights.items()
        if weighted.weight_quant.enabled and not weighted.weight_quant.frozen
    ]
    if faults:
        name, why = faults[0]
        raise ExportError(f"{name} {why} ({len(faults)} like it)")
