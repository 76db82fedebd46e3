"""Classes and functions of torch that have no public name, tested with torch 2.13.

None of them changes torch. All other modules import them from here, so that a new version of torch breaks one module.
"""

import copy
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.autograd import forward_ad
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNormBase",
    "ConvBase",
    "ConvTransposeBase",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "PyTreeCodeGen",
    "PyTreeInfo",
    "TorchDispatchMode",
    "copy_codegen",
    "default_store",
    "get_reserved_names",
    "has_saved_tensor_hooks",
    "is_fake",
    "is_functorch_active",
    "make_fake_input",
    "pytree",
    "pytree_info",
]


def pytree_info(graph: fx.Graph) -> PyTreeInfo | None:
    """Return how inputs and outputs of a graph are nested; None for a graph of torch.fx.symbolic_trace."""
    info: PyTreeInfo | None = getattr(graph._codegen, "pytree_info", None)
    return info


def copy_codegen(graph: fx.Graph) -> Any:
    """Copy the code generator of a graph, which contains the nesting of its inputs and outputs."""
    return copy.copy(graph._codegen)


def make_fake_input(mode: FakeTensorMode, name: str, tensor: torch.Tensor, dynamic_axes: set[int]) -> FakeTensor:
    """Make a fake tensor like `tensor`, with a symbol as the size of each dynamic axis."""
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415  # slow to import
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext  # noqa: PLC0415

    kinds = [DimDynamic.DYNAMIC if axis in dynamic_axes else DimDynamic.STATIC for axis in range(tensor.ndim)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def is_functorch_active() -> bool:
    """Whether vmap, func.grad or forward-mode differentiation is running."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are set already, or must not be set (inside torch.func)."""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def get_reserved_names() -> frozenset[str]:
    """Return the attribute names that fx.GraphModule uses itself, so that a model cannot use them."""
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    return frozenset(dir(empty)) - frozenset(dir(nn.Module()))


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415  # distributed may be missing

    return _get_default_store()
