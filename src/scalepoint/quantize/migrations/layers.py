"""What a migration writes to: the weight of a layer as (groups, out, in, taps), its bias or batch norm, and norms.

y = BN(W x + b)      outputs times t: the batch norm's weight and bias, else rows of W and b; inputs: columns of W
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
from scalepoint.quantize.smooth import get_norm_tensors

NORMS = ("layer_norm", "rms_norm")


def give_parameter(module: Any, name: str, value: Tensor) -> None:
    """Let a module have a weight or bias of its own: one that it lacked, or shared with another."""
    if isinstance(module, HeadConvolution):
        module = module.linear.owner
    parameter = nn.Parameter(value.detach().clone(), requires_grad=value.is_floating_point())
    if isinstance(module, Operation):
        module.register_parameter(f"own_{name}", parameter)
        module.arguments[name] = Reference(module, f"own_{name}")
    else:
        setattr(module, name, parameter)


def give_quantizer(model: fx.GraphModule, operation: nn.Module) -> None:
    """Let what quantizes the weight of an operation be its own, where another with the same weight shared it."""
    names = record_of(model).names
    for node in model.graph.nodes:
        group = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        for weighted in group.parts.values() if isinstance(group, Fused) else ():
            if (
                isinstance(weighted, QuantizedLayer)
                and weighted.operation is operation
                and len(weighted.sharing_layers) > 1
            ):
                weighted.sharing_layers.remove(weighted)
                weighted.sharing_layers, name = [weighted], names.get(node.name, node.name)
                shared, weighted.weight_quant = weighted.weight_quant, copy.deepcopy(weighted.weight_quant)
                shared.consumers = [each for each in shared.consumers if each != name]
                weighted.weight_quant.consumers, weighted.weight_quant.name = [name], f"{name}.weight"


class RewritableLayer:
    """A convolution or linear layer, with the batch norm that is folded into it."""

    def __init__(self, op: RecordedOperation) -> None:
        self.op, self.name, self.kind = op, op.name, op.kind
        assert op.module is not None  # noqa: S101  # what multiplies by a weight is a module
        self.module, self.operation = op.module, op.operation
        self.norm: Any = op.module.norm if isinstance(op.module, QuantizedLayer) else None

    @property
    def weight(self) -> Tensor:
        held = self.operation.linear.value if isinstance(self.operation, HeadConvolution) else self.operation.weight
        found: Tensor = held.detach()
        return found

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
        """A view of the weight as (groups, out of a group, in of a group, taps)."""
        weight = self.weight
        if self.kind in ("linear", "head"):
            is_turned = isinstance(self.operation, Operation) and self.operation.has_transposed_weight
            return (weight.transpose(0, 1) if is_turned else weight)[None, :, :, None]
        parted = torch.unflatten(weight, 0, (self.groups, -1)).flatten(3)
        return parted.transpose(1, 2) if self.kind == "conv_transpose" else parted

    def folded(self) -> Tensor:
        """The weight as a kernel has it."""
        matrix = self.matrix().double()
        return matrix if self.norm is None else matrix * self.factor().view(matrix.shape[0], -1, 1, 1)

    def factor(self) -> Tensor:
        """What the batch norm multiplies each output by."""
        found = get_norm_settings(self.norm)
        s = torch.rsqrt(found.var.double() + found.eps)
        return s if found.weight is None else found.weight.detach().double() * s

    @property
    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        found = get_norm_settings(self.norm)
        return found.weight, found.bias

    def output_ranges(self) -> Tensor:
        return self.folded().abs().amax((2, 3)).reshape(-1).cpu()

    def input_ranges(self) -> Tensor:
        return self.folded().abs().amax((1, 3)).reshape(-1).cpu()

    def scale_outputs(self, times: Tensor) -> None:
        if self.norm is not None:
            for tensor in self.affine:
                _multiply_(tensor, times)
            return
        matrix = self.matrix()
        _multiply_(matrix, times.view(matrix.shape[0], -1, 1, 1))
        _multiply_(self.bias, times)

    def scale_inputs(self, times: Tensor) -> None:
        matrix = self.matrix()
        _multiply_(matrix, times.view(matrix.shape[0], 1, -1, 1))

    def shift_outputs(self, by: Tensor) -> None:
        """Add a constant to what it gives."""
        bias = self.bias if self.norm is None else self.affine[1]
        assert bias is not None  # noqa: S101  # give_bias was asked before
        bias.detach().copy_(bias.detach().double() + by.to(bias.device))

    def give_bias(self) -> None:
        if self.norm is None and self.bias is None:
            give_parameter(self.operation, "bias", self.weight.new_zeros(self.output_ranges().numel()))

    def tensors(self) -> list[Tensor]:
        """All that a migration may write."""
        own = [self.weight, self.bias, *(self.affine if self.norm is not None else ())]
        return [each.detach() for each in own if each is not None]

    def why_fixed(self, flow: RecordedGraph) -> str:
        """Why nothing may be written here; "" if it may."""
        if isinstance(self.operation, Operation) and self.operation.is_computed:
            return f"the weight of {self.name} is computed, not stored"
        if self.norm is not None and any(each is None for each in self.affine):
            return f"the batch norm of {self.name} has no weight and bias of its own"
        if flow.is_shared(self.tensors()) or flow.uses[id(self.module)] > 1:
            return f"the weight of {self.name} is used elsewhere too"
        if isinstance(self.module, QuantizedLayer) and len(self.module.sharing_layers) > 1:
            return f"the weight of {self.name} is used elsewhere too"
        return ""

    def why_no_bias(self) -> str:
        """Why no bias can be given to it."""
        is_product = isinstance(self.operation, Operation) and "weight" not in self.operation.arguments
        return f"{self.name} is a plain product and takes no bias" if is_product and self.bias is None else ""


class RewritableNorm:
    """A layer norm or RMS norm over the last axis."""

    def __init__(self, op: RecordedOperation) -> None:
        self.op, self.name, self.kind, self.module = op, op.name, op.kind, op.module
        self.norm: Any = None

    @property
    def width(self) -> int:
        assert self.op.shape is not None  # noqa: S101  # a norm gives a tensor
        return self.op.shape[-1]

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Its weight, given to it where it has none, and its bias."""
        found = get_norm_tensors(self.module, torch.ones((), dtype=torch.float32))
        return found.weight, found.bias

    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """Its weight and bias, as far as it has them."""
        if isinstance(self.module, Operation):
            held = {name: value.value.detach() for name, value in self.module.references().items()}
            if self.module.kind == "mul":  # the last part of a norm that is written out
                return next(iter(held.values()), None), None
            return held.get("weight"), held.get("bias")
        found = (getattr(self.module, name, None) for name in ("weight", "bias"))
        weight, bias = (None if value is None else value.detach() for value in found)
        return weight, bias

    def own_affine(self) -> list[Tensor]:
        return [value for value in self.parts() if value is not None]

    def scale_outputs(self, times: Tensor) -> None:
        for tensor in self.affine():
            _multiply_(tensor, times)

    def tensors(self) -> list[Tensor]:
        return [each for each in self.affine() if each is not None]

    def why_fixed(self, flow: RecordedGraph) -> str:
        held = self.own_affine()
        if flow.is_shared(held) or flow.uses[id(self.module)] > 1:
            return f"{self.name} is used more than once"
        if any(value.numel() not in (0, self.width) for value in held):
            return f"{self.name} normalizes more than the last axis"
        return ""


def _multiply_(tensor: Tensor | None, times: Tensor) -> None:
    """In float64, back into the tensor's own type."""
    if tensor is not None:
        tensor.detach().copy_(tensor.detach().double() * times.to(tensor.device))
