"""Pools: windows over pictures whose channels stand last.

max        the codes of its input
average    of codes: a depthwise convolution by ones of the scale 1 / window, which XNNPACK has and rounds as simulated,
           or where that cannot be LiteRT's own pool; else of floats
"""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx

from scalepoint.formats.litert.products import CHANNELS_LAST_ORDER, VALID, pad_input, quantize_result
from scalepoint.formats.litert.schema import QuantizationParameters
from scalepoint.formats.litert.values import Value
from scalepoint.formats.litert.walk import UnsupportedOperationError, Walk, writes

aten = torch.ops.aten
MAX_WINDOW = 25  # elements of a window that is multiplied by ones: XNNPACK has kernels for 5 x 5 and less
ONES_NAME = "average_pool"  # what their tensor is called, by which the runtime's room knows them


def _to_pair(given: Any, default: Any = ()) -> list[int]:
    values = list(given or default)
    return [int(each) for each in (values * 2 if len(values) == 1 else values)]


@writes(aten.max_pool2d.default)
def max_pool(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, kernel = given["self"], _to_pair(given["kernel_size"])
    stride = _to_pair(given["stride"], kernel)
    if any(each != 1 for each in _to_pair(given["dilation"])):
        raise UnsupportedOperationError("is a pool with dilated windows")
    shape, _ = walk.shape_and_dtype(node)
    window = (kernel, stride, [1, 1], _to_pair(given["padding"]))
    place, how = pad_input(walk, x, shape[2:], window, lowest=not _is_positive(x, node))
    return _write_pool(walk, "MAX_POOL_2D", place, node, (how, kernel, stride), x)


def _is_positive(x: Value, node: fx.Node) -> bool:
    """Whether zero is the lowest value, so that a plain PAD will do, which delegates have."""
    if x.codes is not None:
        return x.codes.zero_point == -128
    source: Any = node.args[0]
    return source.target in (aten.relu.default, aten.relu6.default)


def _write_pool(walk: Walk, operator: str, place: int, node: fx.Node, window: tuple[int, Any, Any], x: Value) -> Value:
    how, kernel, stride = window
    shape, kind = walk.shape_and_dtype(node)
    options = {
        "padding": how, "filterHeight": kernel[0], "filterWidth": kernel[1], "strideH": stride[0], "strideW": stride[1]
    }  # fmt: skip
    return walk.emit(
        operator, [place], shape, kind, order=CHANNELS_LAST_ORDER, codes=x.codes, name=node.name, options=options
    )


@writes(aten.avg_pool2d.default)
def average_pool(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    kernel = _to_pair(given["kernel_size"])
    stride, pads = _to_pair(given["stride"], kernel), _to_pair(given["padding"])
    if given["ceil_mode"] or given["divisor_override"]:
        raise UnsupportedOperationError("is an average pool with ceil_mode or a divisor of its own")
    return _write_average(walk, node, (kernel, stride, pads), counts_pads=bool(given["count_include_pad"]))


def _write_average(
    walk: Walk, node: fx.Node, window: tuple[list[int], list[int], list[int]], counts_pads: bool
) -> Value:
    kernel, stride, pads = window
    shape, _ = walk.shape_and_dtype(node)
    x, end = walk.arguments(node)["self"], walk.ending(node, folds=False)
    if x.codes is not None and end.codes is not None and prod(kernel) <= MAX_WINDOW and (counts_pads or not any(pads)):
        place, how = pad_input(walk, x, shape[2:], (kernel, stride, [1, 1], pads))
        return quantize_result(
            walk,
            node,
            end,
            _write_average_as_convolution(walk, node, place, (how, kernel, stride), (x.codes, end.codes)),
        )
    is_same = x.codes is not None and x.codes.is_same(end.codes)
    x = x if is_same else walk.dequantized(x)
    place, how = pad_input(walk, x, shape[2:], (kernel, stride, [1, 1], pads), explicit=counts_pads)
    if any(pads) and counts_pads != (how == VALID):
        raise UnsupportedOperationError("is an average pool whose padding LiteRT counts otherwise")
    return quantize_result(walk, node, end, _write_pool(walk, "AVERAGE_POOL_2D", place, node, (how, kernel, stride), x))


def _write_average_as_convolution(
    walk: Walk,
    node: fx.Node,
    place: int,
    window: tuple[int, Any, Any],
    codes: tuple[QuantizationParameters, QuantizationParameters],
) -> Value:
    """The mean of codes as a product with ones."""
    (how, kernel, stride), (given, gives) = window, codes
    shape, kind = walk.shape_and_dtype(node)
    channels = int(shape[1])
    scale = np.full(channels, 1 / prod(kernel), np.float32)
    ones = np.ones((1, *kernel, channels), np.int8)
    weight = walk.file.constant(ONES_NAME, ones, QuantizationParameters(scale, axis=3))
    bias = walk.file.constant("no_bias", np.zeros(channels, np.int32), QuantizationParameters(scale * given.scale))
    options = {"padding": how, "strideH": stride[0], "strideW": stride[1], "depthMultiplier": 1}
    inputs = [place, weight, bias]
    return walk.emit(
        "DEPTHWISE_CONV_2D",
        inputs,
        shape,
        kind,
        order=CHANNELS_LAST_ORDER,
        codes=gives,
        name=node.name,
        options=options,
    )


@writes(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def adaptive_average_pool(walk: Walk, node: fx.Node) -> Value:
    x = walk.arguments(node)["self"]
    shape, kind = walk.shape_and_dtype(node)
    if tuple(shape[2:]) == (1, 1):
        end = walk.ending(node, folds=False)
        is_integer = x.codes is not None and end.codes is not None
        x = x if is_integer else walk.dequantized(x)
        inputs = [walk.take(x, CHANNELS_LAST_ORDER), walk.ints([1, 2])]
        codes = end.codes if is_integer else None
        made = walk.emit(
            "MEAN",
            inputs,
            shape,
            kind,
            order=CHANNELS_LAST_ORDER,
            codes=codes,
            name=node.name,
            options={"keepDims": True},
        )
        return quantize_result(walk, node, end, made)
    if any(whole % part for whole, part in zip(x.shape[2:], shape[2:], strict=True)):
        raise UnsupportedOperationError(
            f"pools {tuple(x.shape[2:])} to {tuple(shape[2:])}, in windows of several sizes"
        )
    kernel = [whole // part for whole, part in zip(x.shape[2:], shape[2:], strict=True)]
    return _write_average(walk, node, (kernel, kernel, [0, 0]), counts_pads=True)
