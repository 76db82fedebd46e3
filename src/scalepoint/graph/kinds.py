"""The kind of an operation: one name for all ways to write it. `F.relu`, `x.relu_()` and `nn.ReLU` are all "relu".

Patterns find operations by kind. An operation that is not listed here has its aten base name as its kind.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scalepoint.compat.torch_names import OpOverload

# Base names of aten operators, and of functions and methods that fx records, where they differ from the kind.
_NAMES: dict[str, tuple[str, ...]] = {
    "conv": ("conv1d", "conv2d", "conv3d"),
    "conv_transpose": ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "max_pool": ("max_pool1d", "max_pool2d", "max_pool3d"),
    "avg_pool": ("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    "adaptive_avg_pool": ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    "adaptive_max_pool": ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    "attention": ("scaled_dot_product_attention",),
    "dropout": (
        *("dropout1d", "dropout2d", "dropout3d"),
        *("feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
    ),
    "matmul": ("mm", "bmm"),
    "add": ("iadd",),
    "mul": ("imul",),
    "div": ("truediv",),
    "cat": ("concat", "concatenate"),
    "reshape": ("view", "_unsafe_view"),
    "grouped_linear": ("_grouped_mm", "grouped_mm", "grouped_mm_fallback"),  # the experts of a mixture-of-experts layer
    "rnn": ("rnn_tanh", "rnn_relu"),
    "silu": ("swish",),
    "identity": ("lift_fresh_copy", "alias", "detach"),
}
KINDS_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names}

_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "conv_transpose": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "linear": (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "layer_norm": (nn.LayerNorm,),
    "group_norm": (nn.GroupNorm,),
    "rms_norm": (nn.RMSNorm,),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    "embedding": (nn.Embedding,),
    "lstm": (nn.LSTM,),
    "gru": (nn.GRU,),
    "rnn": (nn.RNN,),
    "prelu": (nn.PReLU,),
    "relu": (nn.ReLU,),
    "relu6": (nn.ReLU6,),
    "leaky_relu": (nn.LeakyReLU,),
    "elu": (nn.ELU,),
    "selu": (nn.SELU,),
    "celu": (nn.CELU,),
    "gelu": (nn.GELU,),
    "silu": (nn.SiLU,),
    "mish": (nn.Mish,),
    "hardswish": (nn.Hardswish,),
    "hardsigmoid": (nn.Hardsigmoid,),
    "hardtanh": (nn.Hardtanh,),
    "sigmoid": (nn.Sigmoid,),
    "tanh": (nn.Tanh,),
    "softplus": (nn.Softplus,),
    "softmax": (nn.Softmax,),
    "max_pool": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "avg_pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    "adaptive_avg_pool": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    "adaptive_max_pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    "dropout": (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    "flatten": (nn.Flatten,),
    "identity": (nn.Identity,),
}
MODULE_KINDS = {module: kind for kind, modules in _MODULES.items() for module in modules}

RECTIFIERS = ("relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "hardtanh")
SMOOTH = ("gelu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus")
NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
RECURRENT = ("lstm", "gru", "rnn")
POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "mean")
ARITHMETIC = ("add", "sub", "mul", "div", "matmul", "cat", "softmax", "attention")

OPAQUE = "left"  # a submodule of leave=, which is called as it is

# Operations that rearrange or select values without changing them: the list from which all others are derived. Casts
# are not among them, because they may round.
VALUE_PRESERVING = frozenset(
    (
        *("reshape", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "clone", "expand", "flatten"),
        *("select", "unflatten", "getitem", "split", "split_with_sizes", "chunk", "slice", "unbind"),
    )
)
CASTS = ("to", "_to_copy", "type_as", "float")

ACTIVATIONS = frozenset((*RECTIFIERS, *SMOOTH))
PRODUCTS = ("conv", "conv_transpose", "linear", "grouped_linear", "embedding", "embedding_bag")
# Matrix products of any two tensors; the first four also add a tensor.
PRODUCTS_WITH_ADDEND = ("addmm", "baddbmm", "addbmm", "addmv")
WEIGHTLESS_PRODUCTS = ("matmul", *PRODUCTS_WITH_ADDEND, "mv", "dot", "inner", "tensordot", "einsum", "bilinear")
WEIGHTED = frozenset((*PRODUCTS, "prelu", *NORMS, *RECURRENT))
# Kinds that become modules in a captured graph; shape operations stay functions.
LIFTED_KINDS = frozenset((*WEIGHTED, *ACTIVATIONS, *POOLS, *ARITHMETIC, "dropout", "flatten"))


def base_name(function: Callable[..., Any]) -> str:
    """Return the name of an aten overload, torch function or operator without namespace and trailing underscore."""
    if isinstance(function, OpOverload):
        return function._schema.name.split("::")[-1].removesuffix("_")
    return getattr(function, "__name__", str(function)).strip("_")


def kind_of_function(function: Callable[..., Any], settings: dict[str, Any]) -> str:
    """Return the kind of a function. A hardtanh or clamp from 0 to 6 is a relu6."""
    name = base_name(function)
    kind = KINDS_BY_NAME.get(name, name)
    low = settings.get("min_val", settings.get("min"))
    high = settings.get("max_val", settings.get("max"))
    return "relu6" if kind in ("hardtanh", "clamp") and low == 0 and high == 6 else kind


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether an aten overload writes into its first argument."""
    if not isinstance(function, OpOverload) or not function._schema.arguments:
        return False
    alias = function._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def get_functional_overload(function: Any) -> Any:
    """Return the overload that returns a new tensor instead of writing into its first argument; None if none exists."""
    if not is_in_place(function):
        return function
    packet = getattr(torch.ops.aten, base_name(function), None)
    return getattr(packet, function._overloadname, None) if packet is not None else None
