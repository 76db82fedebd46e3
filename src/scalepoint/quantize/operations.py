"""Access to operations with a weight and to batch norms, whether they are modules or functional calls.

The kind "head" is a linear layer after a global pool that was replaced by a 1x1 convolution (`HeadConvolution`), which
keeps the layout of the convolutions before it.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.compat.torch_names import BatchNormBase, ConvBase, ConvTransposeBase
from scalepoint.graph import Operation, Reference
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.graph.operations import BIASES, WEIGHTS, Slot
from scalepoint.numerics import is_traced
from scalepoint.patterns.conversions import HeadConvolution

EMBEDDING = "embedding"  # looks up rows of its weight
WEIGHT_PRODUCTS = frozenset(("conv", "conv_transpose", "linear", "head"))
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def get_part_kind(part: nn.Module) -> str:
    """Return the kind of one part of a fused group, such as "conv"; "" for other modules."""
    if isinstance(part, HeadConvolution):
        return "head"
    return part.kind if isinstance(part, Operation) else MODULE_KINDS.get(type(part), "")


def get_weight_shape(part: nn.Module | None) -> tuple[int, ...]:
    weight = getattr(part, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


class NormSettings(NamedTuple):
    """The tensors and epsilon of a batch norm."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float


def get_norm_settings(norm: nn.Module) -> NormSettings:
    """Return the tensors of a batch norm that is a module or a functional call."""
    if isinstance(norm, BatchNormBase):
        return NormSettings(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]
    assert isinstance(norm, Operation)  # noqa: S101  # nothing else has the kind
    tensors = {name: value.value for name, value in norm.arguments.items() if isinstance(value, Reference)}
    mean, var = tensors["running_mean"], tensors["running_var"]
    return NormSettings(tensors.get("weight"), tensors.get("bias"), mean, var, float(norm.arguments.get("eps", 1e-5)))


def get_parameter_owners(part: nn.Module) -> list[nn.Module]:
    """Return the part, and the modules that own the parameters it refers to."""
    if isinstance(part, HeadConvolution):
        return get_parameter_owners(part.linear.owner)
    owners = [reference.owner for reference in part.references().values()] if isinstance(part, Operation) else []
    return [part, *owners]


def can_fold_norm(norm: nn.Module) -> bool:
    """Return whether a batch norm can be folded.

    It needs running statistics. Its weight and bias must be absent or stored, not computed by other operations.
    """
    if isinstance(norm, Operation):
        has_computed_affine = any(isinstance(norm.arguments.get(name), Slot) for name in ("weight", "bias"))
        return {"running_mean", "running_var"} <= norm.references().keys() and not has_computed_affine
    return isinstance(norm, BatchNormBase) and norm.running_mean is not None


def run_with_weight(operation: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the operation with another weight and bias."""
    if isinstance(operation, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(operation, nn.Embedding):
        return F.embedding(x, weight, operation.padding_idx)
    if isinstance(operation, ConvTransposeBase):
        conv_transpose = _CONV_TRANSPOSE[len(operation.kernel_size)]
        o = operation
        return conv_transpose(x, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation)  # type: ignore[arg-type]
    if isinstance(operation, ConvBase):
        return operation._conv_forward(x, weight, bias)
    if isinstance(operation, HeadConvolution):
        return _run_head(x, weight, bias)
    assert isinstance(operation, Operation)  # noqa: S101  # every operation with a weight is one of these
    return _run_operation(operation, x, weight, bias)


def _run_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the head in training as the linear layer it was: the backward pass of a one-pixel convolution is slow."""
    if x.shape[2:] == (1, 1) and x.requires_grad and not is_traced(x):
        return F.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]
    return F.conv2d(x, weight, bias)


def _run_operation(operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    arguments = operation.arguments
    weight_name = next(name for name in WEIGHTS if isinstance(arguments.get(name), Reference))
    # F.linear and F.conv call their second argument "weight". Matrix products such as torch.matmul call it "other" or
    # "mat2", and have no argument for a bias.
    has_bias_argument = weight_name == "weight"
    replacements: dict[str, Any] = {weight_name: weight}
    bias_name = next((name for name in BIASES if isinstance(arguments.get(name), Reference)), None)
    added_bias = None
    if bias_name is not None:
        replacements[bias_name] = bias
    elif bias is not None and has_bias_argument:
        replacements["bias"] = bias  # this call did not pass one
    else:
        added_bias = bias
    y: Tensor = operation.run((x,), replacements)
    return y if added_bias is None else y + added_bias
