"""Convolutions, linear layers and matrix products.

    convolution   x NHWC, weight (out, kh, kw, in); depthwise: weight (1, kh, kw, out)
    linear        x (.., in), weight (out, in)

They are computed in int8 if the input, the weight and the output are quantized. A linear layer whose input is quantized
per row has float inputs and outputs next to an int8 or int4 weight; its kernel quantizes the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from scalepoint.formats.litert.graph_writer import FusedEnding, GraphWriter, UnsupportedOperationError, writes
from scalepoint.formats.litert.schema import DynamicExtent, QuantizationParameters
from scalepoint.formats.litert.values import FixedBatchError, QuantizedConstant, Value, channels_last, model_order

aten = torch.ops.aten
SAME, VALID = 0, 1  # Padding of the schema
CHANNELS_LAST_ORDER = channels_last(4)


class Window(NamedTuple):
    """How a convolution or pool moves over its input; each entry for height and width."""

    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    pads_before: Sequence[int]  # padding before the first element

    def options(self, padding: int) -> dict[str, Any]:
        """Return the options of an operator with this window; `padding` is SAME or VALID."""
        return {"padding": padding, "strideH": self.stride[0], "strideW": self.stride[1]}


@writes(aten.conv2d.default, aten.conv1d.default, aten.conv2d.padding, aten.conv1d.padding, aten.convolution.default)
def convolution(writer: GraphWriter, node: fx.Node) -> Value:
    """Write CONV_2D or DEPTHWISE_CONV_2D; a 1-d convolution works on images of height 1."""
    arguments = writer.arguments(node)
    if arguments.get("transposed"):
        return _write_transposed_convolution(writer, node, arguments)
    spatial_axes = _weight_data(arguments["weight"]).ndim - 2
    if spatial_axes not in (1, 2):
        raise UnsupportedOperationError("convolves over three axes")
    stride, dilation = (_two_extents(arguments[name], spatial_axes) for name in ("stride", "dilation"))
    shape, _ = writer.shape_and_dtype(node)
    ending = writer.find_ending(node)
    x, weight, bias, quantization = _prepare_operands(writer, arguments, ending)
    x, weight = _add_height(writer, x), _to_four_axes(weight)
    output_shape = shape if spatial_axes == 2 else (*shape[:2], 1, shape[2])
    kernel = _weight_data(weight).shape[2:]
    pads_before = _two_paddings(arguments["padding"], kernel, dilation, spatial_axes)
    window = Window(kernel, stride, dilation, pads_before)
    padded, padding = pad_input(writer, x, output_shape[2:], window)
    options = {**window.options(padding), "dilationHFactor": dilation[0], "dilationWFactor": dilation[1]}
    options["fusedActivationFunction"] = ending.activation
    groups, channels = int(arguments["groups"]), int(x.shape[1])
    is_depthwise = groups > 1 and groups == channels and _weight_data(weight).shape[1] == 1
    if is_depthwise:
        options["depthMultiplier"] = output_shape[1] // groups
        stored_weight = _store_weight(writer, weight, (1, 2, 3, 0), 3)
    else:
        stored_weight = _store_weight(writer, weight, (0, 2, 3, 1), 0)
    result = writer.emit(
        "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D",
        [padded, stored_weight, _store_bias(writer, bias, x, weight, int(output_shape[1]))],
        output_shape,
        "float32",
        order=CHANNELS_LAST_ORDER,
        quantization=quantization,
        name=node.name,
        options=options,
    )
    if spatial_axes == 1:
        result = _remove_height(writer, result, shape)
    return writer.set_result(node, ending, result)


def _prepare_operands(
    writer: GraphWriter, arguments: Mapping[str, Any], ending: FusedEnding
) -> tuple[Any, Any, Any, QuantizationParameters | None]:
    """Return input, weight, bias and the parameters of the output; without int8 kernel all are float (None)."""
    x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    if _is_integer(x, weight, ending):
        return x, weight, bias, ending.quantization
    return writer.dequantize(x), writer.dequantize(weight), writer.dequantize(bias), None


def _is_integer(x: Any, weight: Any, ending: FusedEnding) -> bool:
    """Whether input, weight and output are int8."""
    is_static = isinstance(x, Value) and x.quantization is not None and ending.quantization is not None
    return is_static and isinstance(weight, QuantizedConstant) and weight.dtype == "int8"


def _weight_data(weight: Any) -> Any:
    if isinstance(weight, Value):
        raise UnsupportedOperationError("has a weight that is computed from the data")
    return weight.codes if isinstance(weight, QuantizedConstant) else weight


def _two_extents(argument: Any, spatial_axes: int) -> list[int]:
    """Return the extents for height and width; the height of a 1-d convolution has 1."""
    extents = [int(extent) for extent in argument]
    if spatial_axes == 1:
        return [1, *extents]
    return extents * 2 if len(extents) == 1 else extents


def _two_paddings(argument: Any, kernel: Sequence[int], dilation: Sequence[int], spatial_axes: int) -> list[int]:
    """Return the padding before the first row and the first column."""
    if argument == "valid":
        return [0, 0]
    if argument == "same":
        return [(size - 1) * step // 2 for size, step in zip(kernel, dilation, strict=True)]
    pads = [int(pad) for pad in argument]
    if spatial_axes == 1:
        return [0, *pads]
    return pads * 2 if len(pads) == 1 else pads


def _to_four_axes(weight: Any) -> Any:
    data = _weight_data(weight)
    if data.ndim == 4:
        return weight
    if isinstance(weight, QuantizedConstant):
        return replace(weight, codes=data[:, :, None])
    return weight[:, :, None]


def _add_height(writer: GraphWriter, x: Value) -> Value:
    """Reshape (n, c, w) to (n, c, 1, w), stored with channels last."""
    if x.rank == 4:
        return x
    if x.rank != 3:
        raise UnsupportedOperationError(f"takes a tensor of {x.rank} axes, without a batch")
    source, shape = writer.materialize(x, channels_last(3)), (*x.shape[:2], 1, x.shape[2])
    return writer.reshape_stored(x, source, shape, CHANNELS_LAST_ORDER)


def _remove_height(writer: GraphWriter, x: Value, shape: Sequence[int]) -> Value:
    return writer.reshape_stored(x, writer.materialize(x, CHANNELS_LAST_ORDER), shape, channels_last(3))


def pad_input(
    writer: GraphWriter,
    x: Value,
    output_sizes: Sequence[int],
    window: Window,
    *,
    with_lowest: bool = False,
    always_explicit: bool = False,
) -> tuple[int, int]:
    """Prepare the input of a convolution or pool: channels last, padded if the operator's own padding differs.

    Args:
        writer: The file.
        x: The input.
        output_sizes: Height and width of the result.
        window: How the operator moves over the input.
        with_lowest: Pad with the lowest value instead of zeros.
        always_explicit: Write a PAD even if the operator's SAME padding gives the same result.

    Returns:
        The index of the tensor, and the padding option of the operator: SAME if it pads as the model does, else VALID.
    """
    pads: list[tuple[int, int]] = []
    is_same = not always_explicit
    for size, output_size, kernel, stride, dilation, before in zip(x.shape[2:], output_sizes, *window, strict=True):
        window_size = (kernel - 1) * dilation + 1
        after = max((output_size - 1) * stride + window_size - size - before, 0)
        # SAME as LiteRT defines it: ceil(size / stride) results; an odd element of padding goes to the end.
        same_size = -(-size // stride)
        same_total = max((same_size - 1) * stride + window_size - size, 0)
        is_same &= output_size == same_size and (before, after) == (same_total // 2, same_total - same_total // 2)
        pads.append((before, after))
    source = writer.materialize(x, CHANNELS_LAST_ORDER)
    if all(pad == (0, 0) for pad in pads):
        return source, VALID
    if is_same:
        return source, SAME
    paddings = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [x.shape[0], x.shape[1], *(size + sum(pad) for size, pad in zip(x.shape[2:], pads, strict=True))]
    inputs = [source, writer.add_constant(paddings, "paddings")]
    if with_lowest:
        inputs.append(_add_lowest_value(writer, x))
    padded = writer.emit(
        "PADV2" if with_lowest else "PAD",
        inputs,
        shape,
        x.dtype,
        order=CHANNELS_LAST_ORDER,
        quantization=x.quantization,
    )
    return writer.materialize(padded, CHANNELS_LAST_ORDER), VALID


def _add_lowest_value(writer: GraphWriter, x: Value) -> int:
    if x.quantization is None:
        return writer.add_number(float(np.finfo(np.float32).min), "float32")
    return writer.file.add_constant("lowest", np.full(1, -128, np.int8), x.quantization)


def _store_weight(writer: GraphWriter, weight: Any, order: Sequence[int], channel_axis: int) -> int:
    """Store a weight in the axis order of its operator, where `channel_axis` has the output channels."""
    if isinstance(weight, QuantizedConstant):
        quantization = replace(weight.quantization, axis=channel_axis)
        weight = replace(weight, codes=weight.codes.transpose(order), quantization=quantization)
        return writer.materialize(weight)
    return writer.materialize(weight, tuple(order))


def _store_bias(writer: GraphWriter, bias: Any, x: Value, weight: Any, channels: int) -> int:
    """Store the bias: float, or int32 with the scale s_x * s_w next to int8 tensors.

    A missing bias becomes zeros, because delegates require one.
    """
    if x.quantization is None or not isinstance(weight, QuantizedConstant):
        return writer.materialize(torch.zeros(channels) if bias is None else bias)
    if isinstance(bias, QuantizedConstant):
        return writer.materialize(bias)
    if bias is not None:
        raise UnsupportedOperationError("has a float bias next to int8 tensors")
    return add_zero_bias(writer, x, np.broadcast_to(weight.quantization.scale, channels))


def add_zero_bias(writer: GraphWriter, x: Value, weight_scale: np.ndarray) -> int:
    """Add an int32 bias of zeros with one scale per channel."""
    assert x.quantization is not None  # noqa: S101  # the caller computes in int8
    quantization = QuantizationParameters(x.quantization.scale * weight_scale)
    return writer.file.add_constant("no_bias", np.zeros(weight_scale.shape, np.int32), quantization)


@writes(aten.conv_transpose2d.input, aten.conv_transpose1d.default)
def convolution_transposed(writer: GraphWriter, node: fx.Node) -> Value:
    return _write_transposed_convolution(writer, node, writer.arguments(node))


def _write_transposed_convolution(writer: GraphWriter, node: fx.Node, arguments: Mapping[str, Any]) -> Value:
    """Write TRANSPOSE_CONV without padding, and cut off what the model's padding removes."""
    is_dilated = any(extent != 1 for extent in arguments["dilation"])
    if _weight_data(arguments["weight"]).ndim != 4 or arguments["groups"] != 1 or is_dilated:
        raise UnsupportedOperationError(
            "is a transposed convolution that is grouped, dilated, or over one or three axes"
        )
    shape, _ = writer.shape_and_dtype(node)
    if isinstance(shape[0], DynamicExtent):
        raise FixedBatchError("a transposed convolution takes the shape of its output as a constant")
    ending = writer.find_ending(node, folds_activation=False)
    x, weight, bias, quantization = _prepare_operands(writer, arguments, ending)
    stride, pads = (_two_extents(arguments[name], 2) for name in ("stride", "padding"))
    kernel = _weight_data(weight).shape[2:]
    full_sizes = [
        (size - 1) * step + kernel_size for size, step, kernel_size in zip(x.shape[2:], stride, kernel, strict=True)
    ]
    for pad, size, full_size in zip(pads, shape[2:], full_sizes, strict=True):
        if pad + size > full_size:
            raise UnsupportedOperationError(
                "is a transposed convolution whose output_padding is larger than its padding"
            )
    stored_weight = _store_weight(writer, weight, (1, 2, 3, 0), 0)
    full_shape = (*shape[:2], *full_sizes)
    stored_bias = _store_bias(writer, bias, x, weight, shape[1])
    output_sizes = writer.add_int_list([full_shape[axis] for axis in CHANNELS_LAST_ORDER])
    result = writer.emit(
        "TRANSPOSE_CONV",
        [output_sizes, stored_weight, writer.materialize(x, CHANNELS_LAST_ORDER), stored_bias],
        full_shape,
        "float32",
        order=CHANNELS_LAST_ORDER,
        quantization=quantization,
        name=node.name,
        options={"padding": VALID, "strideH": stride[0], "strideW": stride[1]},
    )
    if full_shape != shape:
        begin = writer.add_int_list([0, *pads, 0])
        size = writer.add_int_list([shape[axis] for axis in CHANNELS_LAST_ORDER])
        inputs = [writer.materialize(result, CHANNELS_LAST_ORDER), begin, size]
        result = writer.emit("SLICE", inputs, shape, "float32", order=CHANNELS_LAST_ORDER, quantization=quantization)
    return writer.set_result(node, ending, result)


@writes(aten.linear.default)
def linear(writer: GraphWriter, node: fx.Node) -> Value:
    arguments = writer.arguments(node)
    return _write_linear(writer, node, arguments["input"], arguments["weight"], arguments["bias"])


@writes(aten.addmm.default)
def addmm(writer: GraphWriter, node: fx.Node) -> Value:
    """Write bias + x @ weight as a linear layer, if weight and bias are constants."""
    arguments = writer.arguments(node)
    bias, weight = arguments["self"], arguments["mat2"]
    are_constant = isinstance(weight, Tensor) and isinstance(bias, Tensor)
    if not are_constant or (arguments["alpha"], arguments["beta"]) != (1, 1):
        raise UnsupportedOperationError("adds to a product, but is not a linear layer")
    weight_name = writer.constant_names.get(id(weight), node.name)
    return _write_linear(writer, node, arguments["mat1"], writer.name_constant(weight.T, weight_name), bias)


def _write_linear(writer: GraphWriter, node: fx.Node, x: Any, weight: Any, bias: Any) -> Value:
    shape, _ = writer.shape_and_dtype(node)
    ending = writer.find_ending(node)
    quantizes_rows = isinstance(x, Value) and x.is_quantized_per_row and isinstance(weight, QuantizedConstant)
    is_integer = not quantizes_rows and _is_integer(x, weight, ending)
    if not is_integer:
        x, bias = writer.dequantize(x), writer.dequantize(bias)
        weight = weight if quantizes_rows else writer.dequantize(weight)
    if isinstance(weight, Value):
        raise UnsupportedOperationError("has a weight that is computed from the data")
    inputs = [
        writer.materialize(x),
        writer.materialize(weight),
        _store_bias(writer, bias, x, weight, _weight_data(weight).shape[0]),
    ]
    result = writer.emit(
        "FULLY_CONNECTED",
        inputs,
        shape,
        "float32",
        quantization=ending.quantization if is_integer else None,
        name=node.name,
        is_integer=is_integer or quantizes_rows,
        options={
            "fusedActivationFunction": ending.activation,
            "keepNumDims": len(shape) != 2,
            "asymmetricQuantizeInputs": quantizes_rows,
        },
    )
    return writer.set_result(node, ending, result)


@writes(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matrix_product(writer: GraphWriter, node: fx.Node) -> Value:
    """Write a product by a parameter as a linear layer, other products as BATCH_MATMUL in float."""
    arguments = writer.arguments(node)
    x = writer.dequantize(arguments["self"])
    y = writer.dequantize(arguments["other"] if "other" in arguments else arguments["mat2"])
    if isinstance(y, Tensor) and y.ndim == 2 and isinstance(x, Value) and writer.is_parameter(y):
        return _write_linear(writer, node, x, writer.name_constant(y.T, writer.constant_names[id(y)]), None)
    x_rank, y_rank = (operand.ndim if isinstance(operand, Tensor) else operand.rank for operand in (x, y))
    if min(x_rank, y_rank) < 2 or max(x_rank, y_rank) > 5:
        raise UnsupportedOperationError(f"multiplies tensors of {x_rank} and {y_rank} axes")
    shape, dtype = writer.shape_and_dtype(node)
    transposed = (*model_order(y_rank)[:-2], y_rank - 1, y_rank - 2)
    # BATCH_MATMUL reads a transposed y (adjY), so that K of an attention needs no TRANSPOSE.
    is_transposed = isinstance(y, Value) and model_order(y_rank) not in y.tensors and transposed in y.tensors
    inputs = [writer.materialize(x), writer.materialize(y, transposed if is_transposed else None)]
    return writer.emit("BATCH_MATMUL", inputs, shape, dtype, name=node.name, options={"adjY": is_transposed})
