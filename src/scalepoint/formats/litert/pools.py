"""Max and average pools over images, channels last.

max        works on codes or floats
average    of codes: a depthwise convolution with a weight of ones and the scale 1 / window, which XNNPACK runs and
           rounds as the simulation does; LiteRT's own pool if that is not possible; else a pool of floats

A "source" is the index of the input tensor in the file, already padded where the operator cannot pad as the model does.
"""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx

from scalepoint.formats.litert.graph_writer import GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.products import CHANNELS_LAST_ORDER, VALID, Window, add_zero_bias, pad_input
from scalepoint.formats.litert.schema import QuantizationParameters
from scalepoint.formats.litert.values import Value

aten = torch.ops.aten
MAX_WINDOW = 25  # elements of a window that becomes a convolution: XNNPACK has kernels for up to 5 x 5
ONES_NAME = "average_pool"  # name of the weight of ones; runtimes/litert/child.py recognizes such pools by it


def _to_pair(value: Any, default: Any = ()) -> list[int]:
    extents = list(value or default)
    return [int(extent) for extent in (extents * 2 if len(extents) == 1 else extents)]


@writes(aten.max_pool2d.default)
def max_pool(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    x, kernel = arguments["self"], _to_pair(arguments["kernel_size"])
    stride = _to_pair(arguments["stride"], kernel)
    if any(extent != 1 for extent in _to_pair(arguments["dilation"])):
        raise UnsupportedOperationError("is a pool with dilated windows")
    shape, _ = writer.shape_and_dtype(node)
    window = Window(kernel, stride, dilation=[1, 1], pads_before=_to_pair(arguments["padding"]))
    source, padding = pad_input(writer, x, shape[2:], window, with_lowest=not _is_zero_lowest(x, node))
    return _write_pool(writer, "MAX_POOL_2D", source, node, padding, window, x)


def _is_zero_lowest(x: Value, node: fx.Node) -> bool:
    """Whether no input is below zero. Then padding with zeros is correct, and delegates support PAD, but not PADV2."""
    if x.quantization is not None:
        return x.quantization.zero_point == -128
    source: Any = node.args[0]
    return source.target in (aten.relu.default, aten.relu6.default)


def _write_pool(
    writer: GraphWriter, operator: str, source: int, node: fx.Node, padding: int, window: Window, x: Value
) -> Value:
    """Write a pool operator. `padding` is its padding option, SAME or VALID; x is its input before padding."""
    shape, dtype = writer.shape_and_dtype(node)
    options = {**window.options(padding), "filterHeight": window.kernel[0], "filterWidth": window.kernel[1]}
    return writer.emit(
        operator,
        [source],
        shape,
        dtype,
        order=CHANNELS_LAST_ORDER,
        quantization=x.quantization,
        name=node.name,
        options=options,
    )


@writes(aten.avg_pool2d.default)
def average_pool(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    kernel = _to_pair(arguments["kernel_size"])
    stride, pads = _to_pair(arguments["stride"], kernel), _to_pair(arguments["padding"])
    if arguments["ceil_mode"] or arguments["divisor_override"]:
        raise UnsupportedOperationError("is an average pool with ceil_mode or divisor_override")
    window = Window(kernel, stride, dilation=[1, 1], pads_before=pads)
    return _write_average(writer, node, window, counts_pads=bool(arguments["count_include_pad"]))


def _write_average(writer: GraphWriter, node: fx.Node, window: Window, *, counts_pads: bool) -> Value:
    """Write an average pool. `counts_pads`: zeros of the padding count as elements of the window."""
    has_pads = any(window.pads_before)
    shape, _ = writer.shape_and_dtype(node)
    x, ending = writer.arguments(node)["self"], writer.find_ending(node, folds_activation=False)
    can_be_convolution = prod(window.kernel) <= MAX_WINDOW and (counts_pads or not has_pads)
    if can_be_convolution and x.quantization is not None and ending.quantization is not None:
        average = _write_average_as_convolution(writer, node, x, window, ending.quantization)
        return writer.set_result(node, ending, average)
    has_same_scale = x.quantization is not None and x.quantization.equals(ending.quantization)
    if not has_same_scale:  # LiteRT's pool cannot change the scale
        x = writer.dequantize(x)
    source, padding = pad_input(writer, x, shape[2:], window, always_explicit=counts_pads)
    # SAME leaves its padding out of the mean, an explicit PAD (then VALID) counts it.
    if has_pads and counts_pads != (padding == VALID):
        raise UnsupportedOperationError("is an average pool that counts its padding differently from LiteRT")
    average = _write_pool(writer, "AVERAGE_POOL_2D", source, node, padding, window, x)
    return writer.set_result(node, ending, average)


def _write_average_as_convolution(
    writer: GraphWriter, node: fx.Node, x: Value, window: Window, output_quantization: QuantizationParameters
) -> Value:
    """Write the mean of codes as a depthwise convolution with ones."""
    shape, dtype = writer.shape_and_dtype(node)
    source, padding = pad_input(writer, x, shape[2:], window)
    channels = int(shape[1])
    scale = np.full(channels, 1 / prod(window.kernel), np.float32)
    ones = np.ones((1, *window.kernel, channels), np.int8)
    weight = writer.file.add_constant(ONES_NAME, ones, QuantizationParameters(scale, axis=3))
    bias = add_zero_bias(writer, x, scale)
    return writer.emit(
        "DEPTHWISE_CONV_2D",
        [source, weight, bias],
        shape,
        dtype,
        order=CHANNELS_LAST_ORDER,
        quantization=output_quantization,
        name=node.name,
        options={**window.options(padding), "depthMultiplier": 1},
    )


@writes(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def adaptive_average_pool(writer: GraphWriter, node: fx.Node) -> Value:
    x = writer.arguments(node)["self"]
    shape, dtype = writer.shape_and_dtype(node)
    if tuple(shape[2:]) == (1, 1):
        ending = writer.find_ending(node, folds_activation=False)
        is_integer = x.quantization is not None and ending.quantization is not None
        x = x if is_integer else writer.dequantize(x)
        mean = writer.emit(
            "MEAN",
            [writer.materialize(x, CHANNELS_LAST_ORDER), writer.add_int_list([1, 2])],
            shape,
            dtype,
            order=CHANNELS_LAST_ORDER,
            quantization=ending.quantization if is_integer else None,
            name=node.name,
            options={"keepDims": True},
        )
        return writer.set_result(node, ending, mean)
    sizes = list(zip(x.shape[2:], shape[2:], strict=True))
    if any(input_size % output_size for input_size, output_size in sizes):
        raise UnsupportedOperationError(
            f"pools {tuple(x.shape[2:])} to {tuple(shape[2:])}, in windows of several sizes"
        )
    kernel = [input_size // output_size for input_size, output_size in sizes]
    window = Window(kernel, stride=kernel, dilation=[1, 1], pads_before=[0, 0])
    return _write_average(writer, node, window, counts_pads=True)
