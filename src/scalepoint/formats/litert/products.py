"""Convolutions, linear layers and products of two tensors.

    conv      x NHWC, w (out, kh, kw, in); a depthwise one (1, kh, kw, out)
    linear    x (.., in), w (out, in)

In int8 where the input has codes, the weight is codes and the output gets codes; a linear layer whose input is taken by
rows has float tensors beside an int8 or int4 weight, and its kernel rounds the rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.schema import QuantizationParameters
from scalepoint.formats.litert.values import (
    DynamicExtent,
    FixedBatchError,
    QuantizedConstant,
    Value,
    channels_last,
    model_order,
)
from scalepoint.formats.litert.walk import FusedEnding, UnsupportedOperationError, Walk, writes

aten = torch.ops.aten
SAME, VALID = 0, 1
CHANNELS_LAST_ORDER = channels_last(4)


@writes(aten.conv2d.default, aten.conv1d.default, aten.conv2d.padding, aten.conv1d.padding, aten.convolution.default)
def convolution(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    if given.get("transposed"):
        return _write_transposed_convolution(walk, node, given)
    weight, bias, x = given["weight"], given["bias"], given["input"]
    dims = _weight_data(weight).ndim - 2
    if dims not in (1, 2):
        raise UnsupportedOperationError("convolves over three axes")
    stride, dilation = (_two_extents(given[each], dims) for each in ("stride", "dilation"))
    shape, _ = walk.shape_and_dtype(node)
    end = walk.ending(node)
    is_integer = _is_integer(x, weight, end)
    x, weight, bias = (each if is_integer else walk.dequantized(each) for each in (x, weight, bias))
    weight = _to_four_axes(weight)
    kernel = _weight_data(weight).shape[2:]
    source = _add_height(walk, x)
    out = shape if dims == 2 else (*shape[:2], 1, shape[2])
    before = _two_paddings(given["padding"], kernel, dilation, dims)
    place, how = pad_input(walk, source, out[2:], (kernel, stride, dilation, before))
    groups, channels = int(given["groups"]), int(source.shape[1])
    is_depthwise = groups > 1 and groups == channels and _weight_data(weight).shape[1] == 1
    options = {
        "padding": how, "strideH": stride[0], "strideW": stride[1], "dilationHFactor": dilation[0],
        "dilationWFactor": dilation[1], "fusedActivationFunction": end.activation,
    }  # fmt: skip
    if is_depthwise:
        options["depthMultiplier"] = out[1] // groups
    held = _store_weight(walk, weight, (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1), 3 if is_depthwise else 0)
    inputs = [place, held, _store_bias(walk, bias, source, weight, int(out[1]))]
    operator = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
    codes = end.codes if is_integer else None
    made = walk.emit(
        operator, inputs, out, "float32", order=CHANNELS_LAST_ORDER, codes=codes, name=node.name, options=options
    )
    made = made if dims == 2 else _remove_height(walk, made, shape)
    return quantize_result(walk, node, end, made)


def quantize_result(walk: Walk, node: fx.Node, end: FusedEnding, made: Value) -> Value:
    """As codes where the ending asks for some that the operator did not give."""
    if end.codes is not None and made.codes is None:
        order = made.order
        made = walk.emit(
            "QUANTIZE", [made.stored[order]], made.shape, made.kind, order=order, codes=end.codes, is_integer=False
        )
    return walk.close(node, end, made)


def _is_integer(x: Any, weight: Any, end: FusedEnding) -> bool:
    is_static = isinstance(x, Value) and x.codes is not None and end.codes is not None
    return is_static and isinstance(weight, QuantizedConstant) and weight.kind == "int8"


def _weight_data(weight: Any) -> Any:
    if isinstance(weight, Value):
        raise UnsupportedOperationError("has a weight that is computed from the data")
    return weight.data if isinstance(weight, QuantizedConstant) else weight


def _two_extents(given: Any, dims: int) -> list[int]:
    """Of both axes; one axis lies."""
    values = list(given) * (dims if len(given) == 1 else 1)
    return [int(each) for each in ([1, *values] if dims == 1 else values)]


def _two_paddings(given: Any, kernel: Sequence[int], dilation: Sequence[int], dims: int) -> list[int]:
    """Before the first element of both axes."""
    if given == "valid":
        return [0, 0]
    if given == "same":
        return [(size - 1) * step // 2 for size, step in zip(kernel, dilation, strict=True)]
    values = list(given) * (dims if len(given) == 1 else 1)
    return [int(each) for each in ([0, *values] if dims == 1 else values)]


def _to_four_axes(weight: Any) -> Any:
    data = _weight_data(weight)
    if data.ndim == 4:
        return weight
    return replace(weight, data=data[:, :, None]) if isinstance(weight, QuantizedConstant) else weight[:, :, None]


def _add_height(walk: Walk, x: Value) -> Value:
    """(n, c, w) as (n, c, 1, w), stored with its channels last."""
    if x.rank == 4:
        return x
    if x.rank != 3:
        raise UnsupportedOperationError(f"takes a tensor of {x.rank} axes, without a batch")
    source = walk.take(x, channels_last(3))
    shape = (*x.shape[:2], 1, x.shape[2])
    return _reorder_axes(walk, source, shape, CHANNELS_LAST_ORDER, x.codes)


def _remove_height(walk: Walk, x: Value, shape: Sequence[int]) -> Value:
    return _reorder_axes(walk, walk.take(x, CHANNELS_LAST_ORDER), shape, channels_last(3), x.codes)


def _reorder_axes(
    walk: Walk, source: int, shape: Sequence[int], order: tuple[int, ...], codes: QuantizationParameters | None
) -> Value:
    target = [-1 if isinstance(shape[axis], DynamicExtent) else shape[axis] for axis in order]
    return walk.emit("RESHAPE", [source, walk.ints(target)], shape, "float32", order=order, codes=codes)


def pad_input(
    walk: Walk,
    x: Value,
    out: Sequence[int],
    window: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
    *,
    lowest: bool = False,
    explicit: bool = False,
) -> tuple[int, int]:
    """The input of a window operator with its channels last, and the padding that it is told.

    SAME where LiteRT pads as the model does, VALID otherwise, or if `explicit`, after a PAD: with zeros, or with the
    `lowest` value.
    """
    pads, same = [], not explicit
    for size, gives, kernel, stride, dilation, before in zip(x.shape[2:], out, *window, strict=True):
        wide = (kernel - 1) * dilation + 1
        after = max((gives - 1) * stride + wide - size - before, 0)
        total = max((-(-size // stride) - 1) * stride + wide - size, 0)
        same &= gives == -(-size // stride) and (before, after) == (total // 2, total - total // 2)
        pads.append((before, after))
    source = walk.take(x, CHANNELS_LAST_ORDER)
    if not any(each for pad in pads for each in pad):
        return source, VALID
    if same:
        return source, SAME
    table = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [x.shape[0], x.shape[1], *(size + sum(pad) for size, pad in zip(x.shape[2:], pads, strict=True))]
    inputs = [source, walk.constant(table, "paddings")]
    if not lowest:
        made = walk.emit("PAD", inputs, shape, x.kind, order=CHANNELS_LAST_ORDER, codes=x.codes)
    else:
        made = walk.emit(
            "PADV2", [*inputs, _lowest_value(walk, x)], shape, x.kind, order=CHANNELS_LAST_ORDER, codes=x.codes
        )
    return walk.take(made, CHANNELS_LAST_ORDER), VALID


def _lowest_value(walk: Walk, x: Value) -> int:
    if x.codes is None:
        return walk.number(float(np.finfo(np.float32).min), "float32")
    return walk.file.constant("lowest", np.full(1, -128, np.int8), x.codes)


def _store_weight(walk: Walk, weight: Any, order: Sequence[int], axis: int) -> int:
    """A weight in the layout of its operator."""
    if isinstance(weight, QuantizedConstant):
        codes = replace(weight.quantized, axis=axis)
        return walk.take(replace(weight, data=weight.data.transpose(order), quantized=codes))
    return walk.take(weight, tuple(order))


def _store_bias(walk: Walk, bias: Any, x: Value, weight: Any, channels: int) -> int:
    """Zeros where there is none, which delegates ask for; int32 of the scale s_x s_w beside int8 tensors."""
    if x.codes is None or not isinstance(weight, QuantizedConstant):
        return walk.take(torch.zeros(channels) if bias is None else bias)
    if isinstance(bias, QuantizedConstant):
        return walk.take(bias)
    if bias is not None:
        raise UnsupportedOperationError("has a float bias beside int8 tensors")
    scale = np.broadcast_to(x.codes.scale * weight.quantized.scale, channels)
    return walk.file.constant("no_bias", np.zeros(channels, np.int32), QuantizationParameters(scale))


@writes(aten.conv_transpose2d.input, aten.conv_transpose1d.default)
def convolution_transposed(walk: Walk, node: fx.Node) -> Value:
    return _write_transposed_convolution(walk, node, walk.arguments(node))


def _write_transposed_convolution(walk: Walk, node: fx.Node, given: dict[str, Any]) -> Value:
    """All that the kernel reaches, and what padding takes away of it is cut off."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = _weight_data(weight).ndim - 2
    if dims != 2 or given["groups"] != 1 or any(each != 1 for each in given["dilation"]):
        raise UnsupportedOperationError("is a transposed convolution over other than two axes, in groups, or dilated")
    shape, _ = walk.shape_and_dtype(node)
    if isinstance(shape[0], DynamicExtent):
        raise FixedBatchError("a transposed convolution is told its output's shape")
    end = walk.ending(node, folds=False)
    is_integer = _is_integer(x, weight, end)
    x, weight, bias = (each if is_integer else walk.dequantized(each) for each in (x, weight, bias))
    stride, pads = (_two_extents(given[each], dims) for each in ("stride", "padding"))
    kernel = _weight_data(weight).shape[2:]
    reach = [(size - 1) * step + wide for size, step, wide in zip(x.shape[2:], stride, kernel, strict=True)]
    if any(pad + size > whole for pad, size, whole in zip(pads, shape[2:], reach, strict=True)):
        raise UnsupportedOperationError("is a transposed convolution whose output_padding is larger than its padding")
    held = _store_weight(walk, weight, (1, 2, 3, 0), 0)
    whole = (*shape[:2], *reach)
    biases = _store_bias(walk, bias, x, weight, shape[1])
    inputs = [walk.ints([whole[axis] for axis in CHANNELS_LAST_ORDER]), held, walk.take(x, CHANNELS_LAST_ORDER), biases]
    codes = end.codes if is_integer else None
    options = {"padding": VALID, "strideH": stride[0], "strideW": stride[1]}
    made = walk.emit(
        "TRANSPOSE_CONV",
        inputs,
        whole,
        "float32",
        order=CHANNELS_LAST_ORDER,
        codes=codes,
        name=node.name,
        options=options,
    )
    if whole != shape:
        begin, size = walk.ints([0, *pads, 0]), walk.ints([shape[axis] for axis in CHANNELS_LAST_ORDER])
        made = walk.emit(
            "SLICE",
            [walk.take(made, CHANNELS_LAST_ORDER), begin, size],
            shape,
            "float32",
            order=CHANNELS_LAST_ORDER,
            codes=made.codes,
        )
    return quantize_result(walk, node, end, made)


@writes(aten.linear.default)
def linear(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    return _write_linear(walk, node, given["input"], given["weight"], given["bias"])


@writes(aten.addmm.default)
def write_addmm(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    bias, weight = given["self"], given["mat2"]
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or (given["alpha"], given["beta"]) != (1, 1):
        raise UnsupportedOperationError("adds to a product that is no linear layer")
    return _write_linear(
        walk, node, given["mat1"], walk.name_constant(weight.T, walk.names.get(id(weight), node.name)), bias
    )


def _write_linear(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any) -> Value:
    shape, _ = walk.shape_and_dtype(node)
    end = walk.ending(node)
    is_rows = isinstance(x, Value) and x.is_rows and isinstance(weight, QuantizedConstant)
    is_integer = not is_rows and _is_integer(x, weight, end)
    if not is_integer:
        x, bias = walk.dequantized(x), walk.dequantized(bias)
        weight = weight if is_rows else walk.dequantized(weight)
    if isinstance(weight, Value):
        raise UnsupportedOperationError("has a weight that is computed from the data")
    inputs = [walk.take(x), walk.take(weight), _store_bias(walk, bias, x, weight, _weight_data(weight).shape[0])]
    options = {
        "fusedActivationFunction": end.activation,
        "keepNumDims": len(shape) != 2,
        "asymmetricQuantizeInputs": is_rows,
    }
    codes = end.codes if is_integer else None
    made = walk.emit(
        "FULLY_CONNECTED",
        inputs,
        shape,
        "float32",
        codes=codes,
        name=node.name,
        is_integer=is_integer or is_rows,
        options=options,
    )
    return quantize_result(walk, node, end, made)


@writes(aten.matmul.default, aten.bmm.default, aten.mm.default)
def product(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, y = (walk.dequantized(given[each]) for each in ("self", "other" if "other" in given else "mat2"))
    if isinstance(y, Tensor) and y.ndim == 2 and isinstance(x, Value) and walk.is_parameter(y):
        return _write_linear(walk, node, x, walk.name_constant(y.T, walk.names[id(y)]), None)
    ranks = [each.ndim if isinstance(each, Tensor) else each.rank for each in (x, y)]
    if min(ranks) < 2 or max(ranks) > 5:
        raise UnsupportedOperationError(f"multiplies tensors of {ranks[0]} and {ranks[1]} axes")
    shape, kind = walk.shape_and_dtype(node)
    swapped = (*model_order(ranks[1])[:-2], ranks[1] - 1, ranks[1] - 2)
    is_swapped = isinstance(y, Value) and model_order(ranks[1]) not in y.stored and swapped in y.stored
    inputs = [walk.take(x), walk.take(y, swapped if is_swapped else None)]
    return walk.emit("BATCH_MATMUL", inputs, shape, kind, name=node.name, options={"adjY": is_swapped})
