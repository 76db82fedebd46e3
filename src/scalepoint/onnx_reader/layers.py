"""Convolutions, matrix products, normalization and pooling.

A node whose weights are constants becomes a module of torch (nn.Conv2d, nn.Linear, ...), which prints, trains and is
quantized like a layer of a PyTorch model.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalepoint.onnx_reader.operators import Layer, Node, add_operator, operator, outputs_of, require
from scalepoint.onnx_reader.values import as_list, check_size, sym_max

# Any: the modules and functions for 1, 2 and 3 axes have different types.
CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_FUNCTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED_CONVOLUTIONS: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TRANSPOSED_FUNCTIONS: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_EXPLICIT_PADS = "NOTSET"  # the value of auto_pad with which the attribute `pads` holds


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def set_weights(module: nn.Module, **weights: Tensor | None) -> nn.Module:
    """Replace parameters of a module that was made on the meta device."""
    for name, tensor in weights.items():
        setattr(module, name, None if tensor is None else parameter(tensor))
    return module


# --- padding -------------------------------------------------------------------------------------------------------


class Padding(nn.Module):
    """Padding that torch's layers cannot do: different amounts at both ends, or amounts that depend on the input size.

    Args:
        pads: (before, after) for each spatial axis; None if the amounts depend on the input size.
        mode: With pads=None: "SAME_UPPER" or "SAME_LOWER", as in ONNX's auto_pad.
        windows: With pads=None: kernel size, stride and dilation of each spatial axis.
        fill: The value of the padding.
    """

    def __init__(
        self,
        pads: Sequence[tuple[int, int]] | None,
        mode: str = _EXPLICIT_PADS,
        windows: Sequence[tuple[int, int, int]] = (),
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        self.pads, self.mode, self.windows, self.fill = pads, mode, tuple(windows), fill

    def forward(self, x: Tensor) -> Tensor:
        pads = self.pads
        if pads is None:
            sizes = x.shape[2:]
            pads = [same_pads(self.mode, size, *window) for size, window in zip(sizes, self.windows, strict=True)]
        if all(isinstance(amount, int) and amount == 0 for pair in pads for amount in pair):
            return x
        return F.pad(x, [amount for pair in reversed(pads) for amount in pair], value=self.fill)

    def extra_repr(self) -> str:
        return f"mode={self.mode}" if self.pads is None else f"pads={self.pads}"


def same_pads(mode: str, size: Any, kernel: int, stride: int, dilation: int) -> tuple[Any, Any]:
    """Return the padding before and after an axis with which the output has ceil(size / stride) values."""
    outputs = -(-size // stride)  # ceil(size / stride)
    total = sym_max((outputs - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    smaller = total // 2
    larger = total - smaller
    return (smaller, larger) if mode == "SAME_UPPER" else (larger, smaller)


def split_padding(node: Node, kernel: Sequence[int], fill: float = 0.0) -> tuple[tuple[int, ...], Padding | None]:
    """Return the `padding` argument of torch's layer, and a module for padding that the layer cannot do itself."""
    rank, mode = len(kernel), node.get("auto_pad", _EXPLICIT_PADS)
    zeros = (0,) * rank
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
        windows = list(zip(kernel, strides, dilations, strict=True))
        return zeros, Padding(None, mode, windows, fill)
    amounts = zeros * 2 if mode == "VALID" else tuple(node.get("pads", zeros * 2))
    before, after = amounts[:rank], amounts[rank:]
    if before == after and all(amount >= 0 for amount in before):
        return before, None
    return zeros, Padding(list(zip(before, after, strict=True)), fill=fill)


class PaddedLayer(nn.Module):
    """A layer of torch after padding that the layer cannot do itself."""

    def __init__(self, padding: Padding, layer: nn.Module) -> None:
        super().__init__()
        self.padding = padding
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.padding(x))
        return result


def _with_padding(padding: Padding | None, layer: nn.Module) -> Layer:
    return Layer(layer if padding is None else PaddedLayer(padding, layer))


# --- convolutions --------------------------------------------------------------------------------------------------


def _is_computed(node: Node, constants: Sequence[Tensor | None], index: int) -> bool:
    """Whether the node has this input and its value is not a constant."""
    return len(node.inputs) > index and bool(node.inputs[index]) and constants[index] is None


def _conv_settings(node: Node, rank: int) -> dict[str, Any]:
    return {
        "stride": tuple(node.get("strides", [1] * rank)),
        "dilation": tuple(node.get("dilations", [1] * rank)),
        "groups": node.get("group", 1),
    }


def conv_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[1]
    if weight is None or _is_computed(node, constants, 2) or not 3 <= weight.ndim <= 5:
        return None
    bias = constants[2]
    rank, kernel = weight.ndim - 2, tuple(weight.shape[2:])
    inner, padding = split_padding(node, kernel)
    settings = _conv_settings(node, rank)
    channels = weight.shape[1] * settings["groups"]
    layer = CONVOLUTIONS[rank - 1](
        channels, weight.shape[0], kernel, padding=inner, bias=bias is not None, device="meta", **settings
    )
    return _with_padding(padding, set_weights(layer, weight=weight, bias=bias))


@operator("Conv", make_layer=conv_layer)
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    rank = weight.ndim - 2
    require(1 <= rank <= 3, f"a convolution over {rank} axes")
    inner, padding = split_padding(node, tuple(weight.shape[2:]))
    x = x if padding is None else padding(x)
    return _CONV_FUNCTIONS[rank - 1](x, weight, bias, padding=inner, **_conv_settings(node, rank))


def _transposed_settings(
    node: Node, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the settings of torch's layer, and the amounts to cut off its output: (before, after) for each axis."""
    rank = len(kernel)
    settings = _conv_settings(node, rank)
    extra = tuple(node.get("output_padding", [0] * rank))
    shape, mode = node.get("output_shape"), node.get("auto_pad", _EXPLICIT_PADS)
    uncut_sizes = []
    axes = zip(sizes, settings["stride"], kernel, settings["dilation"], extra, strict=True)
    for size, stride, taps, dilation, added in axes:
        window = (taps - 1) * dilation + 1
        uncut_sizes.append((size - 1) * stride + window + added)
    if shape is None and mode.startswith("SAME"):
        shape = [size * stride for size, stride in zip(sizes, settings["stride"], strict=True)]
    if shape is not None:
        # An odd amount is divided as ONNX says: SAME_UPPER cuts more after the values, all other modes before them.
        cuts = []
        for uncut, size in zip(uncut_sizes, shape[-rank:], strict=True):
            smaller = (uncut - size) // 2
            larger = uncut - size - smaller
            cuts.append((smaller, larger) if mode == "SAME_UPPER" else (larger, smaller))
    elif mode == "VALID":
        cuts = [(0, 0)] * rank
    else:
        pads = node.get("pads", [0] * (2 * rank))
        cuts = list(zip(pads[:rank], pads[rank:], strict=True))
    settings["output_padding"] = extra
    return settings, cuts


def conv_transpose_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[1]
    depends_on_size = node.get("output_shape") or node.get("auto_pad", _EXPLICIT_PADS) not in (_EXPLICIT_PADS, "VALID")
    if weight is None or _is_computed(node, constants, 2) or depends_on_size or not 3 <= weight.ndim <= 5:
        return None
    rank, kernel = weight.ndim - 2, tuple(weight.shape[2:])
    settings, cuts = _transposed_settings(node, [1] * rank, kernel)
    if any(before != after for before, after in cuts):
        return None
    steps = zip(settings["output_padding"], settings["stride"], settings["dilation"], strict=True)
    if any(extra >= max(stride, dilation) for extra, stride, dilation in steps):
        return None  # torch refuses such an output_padding
    bias = constants[2]
    layer = TRANSPOSED_CONVOLUTIONS[rank - 1](
        weight.shape[0],
        weight.shape[1] * settings["groups"],
        kernel,
        padding=tuple(before for before, _ in cuts),
        bias=bias is not None,
        device="meta",
        **settings,
    )
    return Layer(set_weights(layer, weight=weight, bias=bias))


@operator("ConvTranspose", make_layer=conv_transpose_layer)
def conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.ndim - 2
    require(1 <= rank <= 3, f"a convolution over {rank} axes")
    settings, cuts = _transposed_settings(node, x.shape[2:], weight.shape[2:])
    output_padding = settings.pop("output_padding")
    y = _TRANSPOSED_FUNCTIONS[rank - 1](x, weight, bias, **settings)
    pads: list[Any] = []  # in the order of F.pad: from the last axis; negative amounts cut
    for (before, after), extra in reversed(list(zip(cuts, output_padding, strict=True))):
        pads += [-before, extra - after]
    if bias is None or not any(output_padding):
        return F.pad(y, pads)
    channel_bias = bias.reshape(-1, *[1] * rank)
    return F.pad(y - channel_bias, pads) + channel_bias  # the padded values are the bias, not 0


# --- products ------------------------------------------------------------------------------------------------------


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Make an nn.Linear; `weight` has the shape (outputs, inputs)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return set_weights(layer, weight=weight, bias=bias)


def matmul_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[1]
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return None
    return Layer(linear_layer(weight.T, constants[2]))


@operator("MatMul", "Linear", make_layer=matmul_layer)
def matmul(node: Node, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ y + bias. "Linear" is not an operator of ONNX: `rewrites.py` makes it of MatMul and Add."""
    product = torch.matmul(x, y)
    return product if bias is None else product + bias


def gemm_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight, bias = constants[1:3]
    if weight is None or _is_computed(node, constants, 2) or node.get("transA", 0) or not weight.is_floating_point():
        return None
    weight = weight if node.get("transB", 0) else weight.T
    if bias is not None:
        if bias.numel() not in (1, weight.shape[0]) or (bias.ndim == 2 and bias.shape[0] != 1):
            return None  # a matrix, or a column with one number for each row of x
        bias = bias.reshape(-1).expand(weight.shape[0]) * node.get("beta", 1.0)
    if node.get("alpha", 1.0) != 1:
        weight = weight * node.get("alpha")
    return Layer(linear_layer(weight, bias))


@operator("Gemm", make_layer=gemm_layer)
def gemm(node: Node, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x.T if node.get("transA", 0) else x
    y = y.T if node.get("transB", 0) else y
    product = x @ y
    if node.get("alpha", 1.0) != 1:
        product = (product * node.get("alpha")).to(x.dtype)
    if bias is None:
        return product
    if node.get("beta", 1.0) != 1:
        bias = (bias * node.get("beta")).to(x.dtype)
    return product + bias


add_operator("Einsum", lambda node, *tensors: torch.einsum(node.get("equation").replace(" ", ""), *tensors))
add_operator("Det", lambda node, x: torch.linalg.det(x))


# --- normalization -------------------------------------------------------------------------------------------------


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d for inputs with any number of spatial axes: a file may not declare the shape of the input."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # the name in torch
        pass


def batch_norm_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight, bias, mean, variance = constants[1:5]
    if weight is None or bias is None or mean is None or variance is None or node.get("training_mode", 0):
        return None
    momentum = round(1 - node.get("momentum", 0.9), 6)  # ONNX's momentum is the share of the old average
    layer = BatchNorm(weight.shape[0], node.get("epsilon", 1e-5), momentum, device="meta")
    set_weights(layer, weight=weight, bias=bias)
    # Exporters store equal tensors once: without a copy, training would change other averages with the same numbers.
    layer.running_mean, layer.running_var = mean.clone(), variance.clone()
    layer.num_batches_tracked = torch.tensor(0)
    return Layer(layer)


@operator("BatchNormalization", make_layer=batch_norm_layer)
def batch_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    epsilon = node.get("epsilon", 1e-5)
    if not node.get("training_mode", 0):
        return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)
    old_share = node.get("momentum", 0.9)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    new_mean, new_variance = x.mean(axes), x.var(axes, correction=0)
    y = F.batch_norm(x, new_mean, new_variance, scale, bias, eps=epsilon)
    running_mean = old_share * mean + (1 - old_share) * new_mean
    running_variance = old_share * variance + (1 - old_share) * new_variance
    return outputs_of(node, y, running_mean, running_variance)


def layer_norm_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[1]
    # nn.LayerNorm needs the sizes of the normalized axes. Only for one axis the weight says it; a weight of one number
    # may also be broadcast.
    if weight is None or weight.ndim != 1 or node.get("axis", -1) != -1 or _is_computed(node, constants, 2):
        return None
    bias = constants[2]
    if node.get("stash_type", 1) != 1 or len(node.outputs) > 1 or weight.numel() == 1:
        return None
    layer = nn.LayerNorm(weight.shape[0], node.get("epsilon", 1e-5), bias=bias is not None, device="meta")
    return Layer(set_weights(layer, weight=weight, bias=bias))


@operator("LayerNormalization", make_layer=layer_norm_layer)
def layer_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    axis = node.get("axis", -1) % x.ndim
    axes = list(range(axis, x.ndim))
    mean = x.mean(axes, keepdim=True)
    deviation = x - mean
    inverse = torch.rsqrt((deviation * deviation).mean(axes, keepdim=True) + node.get("epsilon", 1e-5))
    y = deviation * inverse * weight
    return outputs_of(node, y if bias is None else y + bias, mean, inverse)


def rms_norm_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight = constants[1]
    if weight is None or weight.ndim != 1 or weight.numel() == 1:  # one number may be broadcast
        return None
    if node.get("axis", -1) != -1 or len(node.outputs) > 1:
        return None
    return Layer(set_weights(nn.RMSNorm(weight.shape[0], node.get("epsilon", 1e-5), device="meta"), weight=weight))


@operator("RMSNormalization", "SimplifiedLayerNormalization", make_layer=rms_norm_layer)
def rms_norm(node: Node, x: Tensor, weight: Tensor) -> Tensor:
    axes = list(range(node.get("axis", -1) % x.ndim, x.ndim))
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + node.get("epsilon", 1e-5)) * weight


def instance_norm_layer(node: Node, constants: Sequence[Tensor | None]) -> Layer | None:
    weight, bias = constants[1:3]
    if weight is None or bias is None:
        return None
    layer = InstanceNorm(weight.shape[0], node.get("epsilon", 1e-5), affine=True, device="meta")
    return Layer(set_weights(layer, weight=weight, bias=bias))


class InstanceNorm(nn.InstanceNorm2d):
    """nn.InstanceNorm2d for inputs with any number of spatial axes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)


@operator("InstanceNormalization", make_layer=instance_norm_layer)
def instance_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = node.get("num_groups")
    if weight.shape[0] == groups and groups != x.shape[1]:  # before opset 21: one value for each group
        weight, bias = (value.repeat_interleave(x.shape[1] // groups) for value in (weight, bias))
    return F.group_norm(x, groups, weight, bias, node.get("epsilon", 1e-5))


@operator("LRN")
def local_response_norm(node: Node, x: Tensor) -> Any:
    size, alpha = node.get("size"), node.get("alpha", 1e-4)
    before = (size - 1) // 2
    squares = F.pad((x * x).unsqueeze(1).flatten(3), (0, 0, before, size - 1 - before))
    sums = F.avg_pool2d(squares, (size, 1), stride=1) * size
    scale = node.get("bias", 1.0) + alpha / size * sums.squeeze(1).reshape(x.shape)
    return x / scale.pow(node.get("beta", 0.75))


# --- pooling -------------------------------------------------------------------------------------------------------

_MAX_POOLS: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_MAX_POOL_MODULES: tuple[Any, ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE_POOL_MODULES: tuple[Any, ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def _pool_settings(node: Node) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return kernel sizes, strides and dilations."""
    kernel = tuple(node.get("kernel_shape"))
    ones = (1,) * len(kernel)
    return kernel, tuple(node.get("strides", ones)), tuple(node.get("dilations", ones))


def _extra_pads(node: Node, x: Tensor, pads: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the padding that the last window needs at the end of each axis with ceil_mode.

    A number is negative if the last window ends before the padding does.
    """
    if not node.get("ceil_mode", 0):
        return [0] * len(pads)
    extra = []
    for size, k, stride, dilation, (before, after) in zip(x.shape[2:], *_pool_settings(node), pads, strict=True):
        last_start = size + before + after - (k - 1) * dilation - 1  # where a window must start to end with the padding
        outputs = -(-last_start // stride) + 1  # ceil(last_start / stride) + 1
        if (outputs - 1) * stride >= size + before:  # ONNX and torch drop a window that starts in the padding
            outputs -= 1
        extra.append((outputs - 1) * stride - last_start)
    return extra


def _window_pads(node: Node, x: Tensor, kernel: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return the padding (before, after) of each spatial axis."""
    inner, padding = split_padding(node, kernel)
    if padding is None:
        return [(amount, amount) for amount in inner]
    if padding.pads is not None:
        return list(padding.pads)
    return [same_pads(padding.mode, size, *window) for size, window in zip(x.shape[2:], padding.windows, strict=True)]


def max_pool_layer(node: Node, constants: Any) -> Layer | None:
    kernel, strides, dilations = _pool_settings(node)
    inner, padding = split_padding(node, kernel, fill=float("-inf"))
    ceil_mode = bool(node.get("ceil_mode", 0))
    if node.has_output(1) or not 1 <= len(kernel) <= 3 or (padding is not None and ceil_mode):
        return None
    if _exceeds_half_a_window(inner, kernel):
        return None
    layer = _MAX_POOL_MODULES[len(kernel) - 1](kernel, strides, inner, dilations, ceil_mode=ceil_mode)
    return _with_padding(padding, layer)


def _exceeds_half_a_window(padding: Sequence[int], kernel: Sequence[int]) -> bool:
    """Whether torch's pooling refuses this padding."""
    return any(amount > k // 2 for amount, k in zip(padding, kernel, strict=True))


@operator("MaxPool", make_layer=max_pool_layer)
def max_pool(node: Node, x: Tensor) -> Any:
    kernel, strides, dilations = _pool_settings(node)
    rank = len(kernel)
    require(1 <= rank <= 3, f"pooling over {rank} axes")
    pads = _window_pads(node, x, kernel)
    wide = x.to(torch.float32) if not x.is_floating_point() else x  # integers have no -inf
    padded = F.pad(wide, _pad_amounts(pads, _extra_pads(node, x, pads)), value=float("-inf"))
    settings = {"kernel_size": kernel, "stride": strides, "dilation": dilations}
    if not node.has_output(1):
        return _MAX_POOLS[rank - 1](padded, **settings).to(x.dtype)
    values, indices = _MAX_POOLS[rank - 1](padded, return_indices=True, **settings)
    return values.to(x.dtype), _indices_in_tensor(node, x, indices, padded.shape[2:], pads)


def _indices_in_tensor(
    node: Node, x: Tensor, indices: Tensor, padded_sizes: Sequence[int], pads: Sequence[tuple[int, int]]
) -> Tensor:
    """Convert torch's indices, which count in one padded channel, to ONNX's, which count in the whole tensor `x`."""
    sizes, rest = list(x.shape[2:]), indices
    coordinates: list[Tensor] = []
    for size in reversed(padded_sizes):
        coordinates.insert(0, rest % size)
        rest = rest // size
    coordinates = [coordinate - before for coordinate, (before, _) in zip(coordinates, pads, strict=True)]
    axes_from_last = list(reversed(range(len(sizes))))
    is_column_major = node.get("storage_order", 0) == 1
    index, stride = torch.zeros_like(indices), 1
    for axis in reversed(axes_from_last) if is_column_major else axes_from_last:
        index = index + coordinates[axis] * stride
        stride *= sizes[axis]
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * stride
    return index + planes.reshape(*x.shape[:2], *[1] * len(sizes))


def average_pool_layer(node: Node, constants: Any) -> Layer | None:
    kernel, strides, dilations = _pool_settings(node)
    inner, padding = split_padding(node, kernel)
    counts_padding, ceil_mode = bool(node.get("count_include_pad", 0)), bool(node.get("ceil_mode", 0))
    if not 1 <= len(kernel) <= 3 or any(dilation != 1 for dilation in dilations):
        return None
    if padding is not None and not counts_padding:
        return None  # the layer would take the values of `padding` for values of the input
    has_padding = padding is not None or any(inner)
    if ceil_mode and (has_padding or counts_padding):
        return None  # torch divides the last window by another number than ONNX
    if _exceeds_half_a_window(inner, kernel):
        return None
    module = _AVERAGE_POOL_MODULES[len(kernel) - 1]
    layer = module(kernel, strides, inner, ceil_mode=ceil_mode, count_include_pad=counts_padding)
    return _with_padding(padding, layer)


@operator("AveragePool", make_layer=average_pool_layer)
def average_pool(node: Node, x: Tensor) -> Any:
    """Divide the sum over each window by the number of its values that count."""
    pads = _window_pads(node, x, tuple(node.get("kernel_shape")))
    extra = _extra_pads(node, x, pads)
    # 1 where a value counts: the input, and the declared padding with count_include_pad, but never the extra padding.
    padding_counts = 1.0 if node.get("count_include_pad", 0) else 0.0
    is_counted = F.pad(torch.ones_like(x[:1, :1]), _pad_amounts(pads), value=padding_counts)
    counts = _window_sums(node, F.pad(is_counted, _pad_amounts([(0, amount) for amount in extra])))
    return _window_sums(node, F.pad(x, _pad_amounts(pads, extra))) / counts


def _pad_amounts(pads: Sequence[tuple[Any, Any]], extra: Sequence[Any] | None = None) -> list[Any]:
    """Return amounts in the order of F.pad: from the last axis. `extra` is added at the end of each axis."""
    amounts: list[Any] = []
    for (before, after), more in reversed(list(zip(pads, extra or [0] * len(pads), strict=True))):
        amounts += [before, after + more]
    return amounts


def _window_sums(node: Node, x: Tensor) -> Any:
    """Return the sum over each window: a convolution with ones, where each channel is an image of its own."""
    kernel, strides, dilations = _pool_settings(node)
    require(1 <= len(kernel) <= 3, f"pooling over {len(kernel)} axes")
    flat, ones = x.reshape(-1, 1, *x.shape[2:]), torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    sums = _CONV_FUNCTIONS[len(kernel) - 1](flat, ones, stride=strides, dilation=dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


@operator("LpPool")
def lp_pool(node: Node, x: Tensor) -> Any:
    p = node.get("p", 2)
    pads = _window_pads(node, x, tuple(node.get("kernel_shape")))
    padded = F.pad(x.abs().pow(p), _pad_amounts(pads, _extra_pads(node, x, pads)))
    return _window_sums(node, padded).pow(1 / p)


class GlobalAveragePool(nn.Module):
    """The mean over all spatial axes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1) if x.ndim == 4 else x.mean(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalAveragePool", make_layer=lambda node, constants: Layer(GlobalAveragePool()))
def global_average_pool(node: Node, x: Tensor) -> Any:
    return GlobalAveragePool()(x)


add_operator("GlobalMaxPool", lambda node, x: x.amax(list(range(2, x.ndim)), keepdim=True))


@operator("GlobalLpPool")
def global_lp_pool(node: Node, x: Tensor) -> Any:
    return torch.linalg.vector_norm(x, node.get("p", 2), list(range(2, x.ndim)), keepdim=True)


@operator("MaxUnpool", known_inputs=(2,))
def max_unpool(node: Node, x: Tensor, indices: Tensor, shape: Any = None) -> Tensor:
    kernel, strides, _ = _pool_settings(node)
    pads = node.get("pads", [0] * (2 * len(kernel)))
    sizes = []
    for axis, (size, stride, window) in enumerate(zip(x.shape[2:], strides, kernel, strict=True)):
        total_pad = pads[axis] + pads[axis + len(kernel)]
        sizes.append((size - 1) * stride + window - total_pad)
    unpooled_shape = [*x.shape[:2], *sizes]
    check_size(unpooled_shape)
    y = x.new_zeros(math.prod(unpooled_shape)).scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(unpooled_shape)
    if shape is None:
        return y
    growth = [(0, new - old) for old, new in zip(unpooled_shape, as_list(shape, "shape"), strict=True)]
    return F.pad(y, _pad_amounts(growth))
