"""The parts of a group that multiply by a weight, and the batch norms after them, however they were written."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from scalepoint.compat.torch_names import BatchNormBase, ConvBase, ConvTransposeBase
from scalepoint.graph import Operation, Reference
from scalepoint.graph.kinds import MODULE_KINDS
from scalepoint.graph.operations import BIASES, WEIGHTS, Slot
from scalepoint.numerics import is_traced
from scalepoint.patterns.conversions import HeadConvolution

EMBEDDING = "embedding"  # looks rows of its weight up
WEIGHT_PRODUCTS = frozenset(("conv", "conv_transpose", "linear", "head"))
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def get_part_kind(part: nn.Module) -> str:
    if isinstance(part, HeadConvolution):
        return "head"
    return part.kind if isinstance(part, Operation) else MODULE_KINDS.get(type(part), "")


def get_weight_shape(part: nn.Module | None) -> tuple[int, ...]:
    weight = getattr(part, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


class NormSettings(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor
    eps: float


def get_norm_settings(norm: nn.Module) -> NormSettings:
    """The numbers of a batch norm, written as a module or as a function."""
    if isinstance(norm, BatchNormBase):
        return NormSettings(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)  # type: ignore[arg-type]
    assert isinstance(norm, Operation)  # noqa: S101  # nothing else has the kind
    held = {name: value.value for name, value in norm.arguments.items() if isinstance(value, Reference)}
    mean, var = held["running_mean"], held["running_var"]
    return NormSettings(held.get("weight"), held.get("bias"), mean, var, float(norm.arguments.get("eps", 1e-5)))


def get_parameter_owners(part: nn.Module) -> list[nn.Module]:
    """The part, and the modules that own the parameters it refers to."""
    if isinstance(part, HeadConvolution):
        return get_parameter_owners(part.linear.owner)
    owners = [reference.owner for reference in part.references().values()] if isinstance(part, Operation) else []
    return [part, *owners]


def can_fold_norm(norm: nn.Module) -> bool:
    """A batch norm without running statistics has nothing that could be folded."""
    if isinstance(norm, Operation):
        is_given = any(isinstance(norm.arguments.get(name), Slot) for name in ("weight", "bias"))
        return {"running_mean", "running_var"} <= norm.references().keys() and not is_given
    return isinstance(norm, BatchNormBase) and norm.running_mean is not None


def run_with_weight(operation: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operation with another weight and bias."""
    if isinstance(operation, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(operation, nn.Embedding):
        return F.embedding(x, weight, operation.padding_idx)
    if isinstance(operation, ConvTransposeBase):
        o = operation
        dims = len(o.kernel_size)
        return _CONV_TRANSPOSE[dims](x, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation)  # type: ignore[arg-type]
    if isinstance(operation, ConvBase):
        return operation._conv_forward(x, weight, bias)
    if isinstance(operation, HeadConvolution):
        return _run_head(x, weight, bias)
    assert isinstance(operation, Operation)  # noqa: S101  # what multiplies is one of these
    return _run_operation(operation, x, weight, bias)


def _run_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In training as the linear layer that it was: a convolution on one pixel goes a slow way back."""
    if x.shape[2:] == (1, 1) and x.requires_grad and not is_traced(x):
        return F.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]
    return F.conv2d(x, weight, bias)


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
