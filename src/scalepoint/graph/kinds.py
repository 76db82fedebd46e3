"""The kind of an operation: one name for all ways to write it. `F.relu`, `x.relu_()` and `nn.ReLU` are all "relu".

Patterns find operations by kind. An operation that is not listed here has its aten base name as its kind.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scalepoint.compat.torch_names import OpOverload

# Base names of aten operators, and of functions and methods that fx records -> kind, where the two differ.
KINDS_BY_NAME = {
    "conv1d": "conv",
    "conv2d": "conv",
    "conv3d": "conv",
    "conv_transpose1d": "conv_transpose",
    "conv_transpose2d": "conv_transpose",
    "conv_transpose3d": "conv_transpose",
    "max_pool1d": "max_pool",
    "max_pool2d": "max_pool",
    "max_pool3d": "max_pool",
    "avg_pool1d": "avg_pool",
    "avg_pool2d": "avg_pool",
    "avg_pool3d": "avg_pool",
    "adaptive_avg_pool1d": "adaptive_avg_pool",
    "adaptive_avg_pool2d": "adaptive_avg_pool",
    "adaptive_avg_pool3d": "adaptive_avg_pool",
    "adaptive_max_pool1d": "adaptive_max_pool",
    "adaptive_max_pool2d": "adaptive_max_pool",
    "adaptive_max_pool3d": "adaptive_max_pool",
    "scaled_dot_product_attention": "attention",
    "dropout1d": "dropout",
    "dropout2d": "dropout",
    "dropout3d": "dropout",
    "feature_dropout": "dropout",
    "alpha_dropout": "dropout",
    "feature_alpha_dropout": "dropout",
    "mm": "matmul",
    "bmm": "matmul",
    "iadd": "add",
    "imul": "mul",
    "truediv": "div",
    "concat": "cat",
    "concatenate": "cat",
    "view": "reshape",
    "_unsafe_view": "reshape",
    "_grouped_mm": "grouped_linear",  # the experts of a mixture-of-experts layer
    "grouped_mm": "grouped_linear",
    "grouped_mm_fallback": "grouped_linear",
    "rnn_tanh": "rnn",
    "rnn_relu": "rnn",
    "swish": "silu",
    "lift_fresh_copy": "identity",
    "alias": "identity",
    "detach": "identity",
}

MODULE_KINDS: dict[type[nn.Module], str] = {
    nn.Conv1d: "conv",
    nn.Conv2d: "conv",
    nn.Conv3d: "conv",
    nn.ConvTranspose1d: "conv_transpose",
    nn.ConvTranspose2d: "conv_transpose",
    nn.ConvTranspose3d: "conv_transpose",
    nn.Linear: "linear",
    nn.modules.linear.NonDynamicallyQuantizableLinear: "linear",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.RMSNorm: "rms_norm",
    nn.InstanceNorm1d: "instance_norm",
    nn.InstanceNorm2d: "instance_norm",
    nn.InstanceNorm3d: "instance_norm",
    nn.Embedding: "embedding",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "rnn",
    nn.PReLU: "prelu",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardtanh: "hardtanh",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Softplus: "softplus",
    nn.Softmax: "softmax",
    nn.MaxPool1d: "max_pool",
    nn.MaxPool2d: "max_pool",
    nn.MaxPool3d: "max_pool",
    nn.AvgPool1d: "avg_pool",
    nn.AvgPool2d: "avg_pool",
    nn.AvgPool3d: "avg_pool",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool",
    nn.AdaptiveAvgPool3d: "adaptive_avg_pool",
    nn.AdaptiveMaxPool1d: "adaptive_max_pool",
    nn.AdaptiveMaxPool2d: "adaptive_max_pool",
    nn.AdaptiveMaxPool3d: "adaptive_max_pool",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout",
    nn.Dropout2d: "dropout",
    nn.Dropout3d: "dropout",
    nn.AlphaDropout: "dropout",
    nn.Flatten: "flatten",
    nn.Identity: "identity",
}

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
