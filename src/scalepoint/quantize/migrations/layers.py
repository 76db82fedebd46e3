"""What migrations write: the weight of a layer as (groups, out, in, taps), its bias or batch norm, and norms.

y = BN(W x + b)     scale outputs: multiply weight and bias of the batch norm, without one the rows of W and b
                    scale inputs: multiply the columns of W
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.graph import Operation, Reference
from scalepoint.patterns import Fused
from scalepoint.patterns.conversions import HeadConvolution
from scalepoint.quantize.migrations.recorded_graph import RecordedGraph, RecordedOperation
from scalepoint.quantize.operations import get_norm_settings
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.record import record_of
from scalepoint.quantize.smooth import ensure_norm_tensors, find_norm_tensors


def give_parameter(module: Any, name: str, value: Tensor) -> None:
    """Give a module its own weight or bias, where it had none or shared it with another module."""
    if isinstance(module, HeadConvolution):
        module = module.linear.owner
    parameter = nn.Parameter(value.detach().clone(), requires_grad=value.is_floating_point())
    if isinstance(module, Operation):
        module.register_parameter(f"own_{name}", parameter)
        module.arguments[name] = Reference(module, f"own_{name}")
    else:
        setattr(module, name, parameter)


def give_quantizer(model: fx.GraphModule, operation: nn.Module) -> None:
    """Give the weight of an operation its own quantizer, where it shared one with a layer of the same weight."""
    names = record_of(model).names
    for node in model.graph.nodes:
        group = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        for layer in group.parts.values() if isinstance(group, Fused) else ():
            if not isinstance(layer, QuantizedLayer) or layer.operation is not operation:
                continue
            if len(layer.sharing_layers) < 2:
                continue
            name = names.get(node.name, node.name)
            layer.sharing_layers.remove(layer)
            layer.sharing_layers = [layer]
            shared, layer.weight_quant = layer.weight_quant, copy.deepcopy(layer.weight_quant)
            shared.consumers = [consumer for consumer in shared.consumers if consumer != name]
            layer.weight_quant.consumers, layer.weight_quant.name = [name], f"{name}.weight"


class RewritableLayer:
    """A convolution or linear layer, with the batch norm that is folded into it."""

    def __init__(self, op: RecordedOperation) -> None:
        self.op, self.name, self.kind = op, op.name, op.kind
        assert op.module is not None  # noqa: S101  # an operation that multiplies by a weight is a module
        self.module, self.operation = op.module, op.operation
        self.norm: Any = op.module.norm if isinstance(op.module, QuantizedLayer) else None

    @property
    def weight(self) -> Tensor:
        operation = self.operation
        weight: Tensor = operation.linear.value if isinstance(operation, HeadConvolution) else operation.weight
        return weight.detach()

    @property
    def bias(self) -> Tensor | None:
        bias = self.operation.bias
        return None if bias is None else bias.detach()

    @property
    def groups(self) -> int:
        if isinstance(self.operation, Operation):
            return int(self.operation.arguments.get("groups", 1))
        return int(getattr(self.operation, "groups", 1))

    def matrix(self) -> Tensor:
        """Return a writable view of the weight as (groups, outputs per group, inputs per group, taps)."""
        weight = self.weight
        if self.kind in ("linear", "head"):
            is_transposed = isinstance(self.operation, Operation) and self.operation.has_transposed_weight
            return (weight.transpose(0, 1) if is_transposed else weight)[None, :, :, None]
        grouped = torch.unflatten(weight, 0, (self.groups, -1)).flatten(3)
        return grouped.transpose(1, 2) if self.kind == "conv_transpose" else grouped

    def folded_matrix(self) -> Tensor:
        """Return the weight in float64, with the batch norm folded in."""
        matrix = self.matrix().double()
        return matrix if self.norm is None else matrix * self.norm_factor().view(matrix.shape[0], -1, 1, 1)

    def norm_factor(self) -> Tensor:
        """Return what the batch norm multiplies each output by."""
        settings = get_norm_settings(self.norm)
        factor = torch.rsqrt(settings.var.double() + settings.eps)
        return factor if settings.weight is None else settings.weight.detach().double() * factor

    @property
    def norm_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of the batch norm."""
        settings = get_norm_settings(self.norm)
        return settings.weight, settings.bias

    def output_ranges(self) -> Tensor:
        """Return the largest magnitude of the weights of each output."""
        return self.folded_matrix().abs().amax((2, 3)).reshape(-1).cpu()

    def input_ranges(self) -> Tensor:
        """Return the largest magnitude of the weights of each input."""
        return self.folded_matrix().abs().amax((1, 3)).reshape(-1).cpu()

    def scale_outputs(self, factors: Tensor) -> None:
        if self.norm is not None:
            for tensor in self.norm_tensors:
                _multiply_(tensor, factors)
            return
        matrix = self.matrix()
        _multiply_(matrix, factors.view(matrix.shape[0], -1, 1, 1))
        _multiply_(self.bias, factors)

    def scale_inputs(self, factors: Tensor) -> None:
        matrix = self.matrix()
        _multiply_(matrix, factors.view(matrix.shape[0], 1, -1, 1))

    def shift_outputs(self, shift: Tensor) -> None:
        """Add a constant to each output. A layer without a bias needs `give_bias` first."""
        bias = self.bias if self.norm is None else self.norm_tensors[1]
        assert bias is not None  # noqa: S101  # give_bias was called
        bias.detach().copy_(bias.detach().double() + shift.to(bias.device))

    def give_bias(self) -> None:
        """Add a bias of zeros if there is none."""
        if self.norm is None and self.bias is None:
            give_parameter(self.operation, "bias", self.weight.new_zeros(self.output_ranges().numel()))

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a migration may write."""
        tensors = [self.weight, self.bias, *(self.norm_tensors if self.norm is not None else ())]
        return [tensor.detach() for tensor in tensors if tensor is not None]

    def explain_fixed(self, graph: RecordedGraph) -> str:
        """Return why the layer must not be changed; "" if it may."""
        if isinstance(self.operation, Operation) and self.operation.is_computed:
            return f"the weight of {self.name} is computed, not stored"
        if self.norm is not None and any(tensor is None for tensor in self.norm_tensors):
            return f"the batch norm of {self.name} has no weight and bias of its own"
        has_shared_quantizer = isinstance(self.module, QuantizedLayer) and len(self.module.sharing_layers) > 1
        if graph.is_shared(self.tensors()) or graph.uses[id(self.module)] > 1 or has_shared_quantizer:
            return f"the weight of {self.name} is used elsewhere too"
        return ""

    def explain_no_bias(self) -> str:
        """Return why the layer cannot get a bias; "" if it can or has one."""
        is_product = isinstance(self.operation, Operation) and "weight" not in self.operation.arguments
        return f"{self.name} is a plain product and cannot have a bias" if is_product and self.bias is None else ""


class RewritableNorm:
    """A layer norm or RMS norm over the last axis."""

    def __init__(self, op: RecordedOperation) -> None:
        self.op, self.name, self.kind, self.module = op, op.name, op.kind, op.module
        self.norm: Any = None  # no batch norm; layers have the attribute too

    @property
    def width(self) -> int:
        assert self.op.shape is not None  # noqa: S101  # the result of a norm is a tensor
        return self.op.shape[-1]

    def ensure_affine(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias. A norm without a weight gets one of ones."""
        return ensure_norm_tensors(self.module, torch.ones((), dtype=torch.float32))

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias; None for a missing one."""
        return find_norm_tensors(self.module)

    def affine_tensors(self) -> list[Tensor]:
        return [tensor for tensor in self.affine() if tensor is not None]

    def scale_outputs(self, factors: Tensor) -> None:
        for tensor in self.ensure_affine():
            _multiply_(tensor, factors)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a migration may write."""
        return [tensor for tensor in self.ensure_affine() if tensor is not None]

    def explain_fixed(self, graph: RecordedGraph) -> str:
        """Return why the norm must not be changed; "" if it may."""
        tensors = self.affine_tensors()
        if graph.is_shared(tensors) or graph.uses[id(self.module)] > 1:
            return f"{self.name} is used more than once"
        if any(tensor.numel() not in (0, self.width) for tensor in tensors):
            return f"{self.name} normalizes more than the last axis"
        return ""


def _multiply_(tensor: Tensor | None, factors: Tensor) -> None:
    """Multiply in place: in float64, then rounded to the dtype of the tensor."""
    if tensor is not None:
        tensor.detach().copy_(tensor.detach().double() * factors.to(tensor.device))
