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

from scalepoint.formats.litert.schema import Quantized
from scalepoint.formats.litert.values import Free, Held, NotFreeError, Value, channels_last, plain
from scalepoint.formats.litert.walk import Ending, UnfitError, Walk, form

aten = torch.ops.aten
SAME, VALID = 0, 1
LAST = channels_last(4)


@form(aten.conv2d.default, aten.conv1d.default, aten.conv2d.padding, aten.conv1d.padding, aten.convolution.default)
def convolution(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    if given.get("transposed"):
        return _transposed(walk, node, given)
    weight, bias, x = given["weight"], given["bias"], given["input"]
    dims = _data(weight).ndim - 2
    if dims not in (1, 2):
        raise UnfitError("convolves over three axes")
    stride, dilation = (_extents(given[each], dims) for each in ("stride", "dilation"))
    shape, _ = walk.like(node)
    end = walk.ending(node)
    is_integer = _is_integer(x, weight, end)
    x, weight, bias = (each if is_integer else walk.float_of(each) for each in (x, weight, bias))
    weight = _in_four(weight)
    kernel = _data(weight).shape[2:]
    source = _with_height(walk, x)
    out = shape if dims == 2 else (*shape[:2], 1, shape[2])
    before = _padding(given["padding"], kernel, dilation, dims)
    place, how = padded(walk, source, out[2:], (kernel, stride, dilation, before))
    groups, channels = int(given["groups"]), int(source.shape[1])
    is_depthwise = groups > 1 and groups == channels and _data(weight).shape[1] == 1
    options = {
        "padding": how, "strideH": stride[0], "strideW": stride[1], "dilationHFactor": dilation[0],
        "dilationWFactor": dilation[1], "fusedActivationFunction": end.activation,
    }  # fmt: skip
    if is_depthwise:
        options["depthMultiplier"] = out[1] // groups
    held = _held(walk, weight, (1, 2, 3, 0) if is_depthwise else (0, 2, 3, 1), 3 if is_depthwise else 0)
    inputs = [place, held, _bias(walk, bias, source, weight, int(out[1]))]
    operator = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
    codes = end.codes if is_integer else None
    made = walk.emit(operator, inputs, out, "float32", order=LAST, codes=codes, name=node.name, options=options)
    made = made if dims == 2 else _without_height(walk, made, shape)
    return closed(walk, node, end, made)


def closed(walk: Walk, node: fx.Node, end: Ending, made: Value) -> Value:
    """As codes where the ending asks for some that the operator did not give."""
    if end.codes is not None and made.codes is None:
        order = made.order
        made = walk.emit(
            "QUANTIZE", [made.stored[order]], made.shape, made.kind, order=order, codes=end.codes, is_integer=False
        )
    return walk.close(node, end, made)


def _is_integer(x: Any, weight: Any, end: Ending) -> bool:
    is_static = isinstance(x, Value) and x.codes is not None and end.codes is not None
    return is_static and isinstance(weight, Held) and weight.kind == "int8"


def _data(weight: Any) -> Any:
    if isinstance(weight, Value):
        raise UnfitError("has a weight that is computed from the data")
    return weight.data if isinstance(weight, Held) else weight


def _extents(given: Any, dims: int) -> list[int]:
    """Of both axes; one axis lies."""
    values = list(given) * (dims if len(given) == 1 else 1)
    return [int(each) for each in ([1, *values] if dims == 1 else values)]


def _padding(given: Any, kernel: Sequence[int], dilation: Sequence[int], dims: int) -> list[int]:
    """Before the first element of both axes."""
    if given == "valid":
        return [0, 0]
    if given == "same":
        return [(size - 1) * step // 2 for size, step in zip(kernel, dilation, strict=True)]
    values = list(given) * (dims if len(given) == 1 else 1)
    return [int(each) for each in ([0, *values] if dims == 1 else values)]


def _in_four(weight: Any) -> Any:
    data = _data(weight)
    if data.ndim == 4:
        return weight
    return replace(weight, data=data[:, :, None]) if isinstance(weight, Held) else weight[:, :, None]


def _with_height(walk: Walk, x: Value) -> Value:
    """(n, c, w) as (n, c, 1, w), stored with its channels last."""
    if x.rank == 4:
        return x
    if x.rank != 3:
        raise UnfitError(f"takes a tensor of {x.rank} axes, without a batch")
    source = walk.take(x, channels_last(3))
    shape = (*x.shape[:2], 1, x.shape[2])
    return _moved(walk, source, shape, LAST, x.codes)


def _without_height(walk: Walk, x: Value, shape: Sequence[int]) -> Value:
    return _moved(walk, walk.take(x, LAST), shape, channels_last(3), x.codes)


def _moved(walk: Walk, source: int, shape: Sequence[int], order: tuple[int, ...], codes: Quantized | None) -> Value:
    target = [-1 if isinstance(shape[axis], Free) else shape[axis] for axis in order]
    return walk.emit("RESHAPE", [source, walk.ints(target)], shape, "float32", order=order, codes=codes)


def padded(
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
    source = walk.take(x, LAST)
    if not any(each for pad in pads for each in pad):
        return source, VALID
    if same:
        return source, SAME
    table = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [x.shape[0], x.shape[1], *(size + sum(pad) for size, pad in zip(x.shape[2:], pads, strict=True))]
    inputs = [source, walk.constant(table, "paddings")]
    if not lowest:
        made = walk.emit("PAD", inputs, shape, x.kind, order=LAST, codes=x.codes)
    else:
        made = walk.emit("PADV2", [*inputs, _lowest(walk, x)], shape, x.kind, order=LAST, codes=x.codes)
    return walk.take(made, LAST), VALID


def _lowest(walk: Walk, x: Value) -> int:
    if x.codes is None:
        return walk.number(float(np.finfo(np.float32).min), "float32")
    return walk.file.constant("lowest", np.full(1, -128, np.int8), x.codes)


def _held(walk: Walk, weight: Any, order: Sequence[int], axis: int) -> int:
    """A weight in the layout of its operator."""
    if isinstance(weight, Held):
        codes = replace(weight.quantized, axis=axis)
        return walk.take(replace(weight, data=weight.data.transpose(order), quantized=codes))
    return walk.take(weight, tuple(order))


def _bias(walk: Walk, bias: Any, x: Value, weight: Any, channels: int) -> int:
    """Zeros where there is none, which delegates ask for; int32 of the scale s_x s_w beside int8 tensors."""
    if x.codes is None or not isinstance(weight, Held):
        return walk.take(torch.zeros(channels) if bias is None else bias)
    if isinstance(bias, Held):
        return walk.take(bias)
    if bias is not None:
        raise UnfitError("has a float bias beside int8 tensors")
    scale = np.broadcast_to(x.codes.scale * weight.quantized.scale, channels)
    return walk.file.constant("no_bias", np.zeros(channels, np.int32), Quantized(scale))


@form(aten.conv_transpose2d.input, aten.conv_transpose1d.default)
def convolution_transposed(walk: Walk, node: fx.Node) -> Value:
    return _transposed(walk, node, walk.arguments(node))


def _transposed(walk: Walk, node: fx.Node, given: dict[str, Any]) -> Value:
    """All that the kernel reaches, and what padding takes away of it is cut off."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = _data(weight).ndim - 2
    if dims != 2 or given["groups"] != 1 or any(each != 1 for each in given["dilation"]):
        raise UnfitError("is a transposed convolution over other than two axes, in groups, or dilated")
    shape, _ = walk.like(node)
    if isinstance(shape[0], Free):
        raise NotFreeError("a transposed convolution is told its output's shape")
    end = walk.ending(node, folds=False)
    is_integer = _is_integer(x, weight, end)
    x, weight, bias = (each if is_integer else walk.float_of(each) for each in (x, weight, bias))
    stride, pads = (_extents(given[each], dims) for each in ("stride", "padding"))
    kernel = _data(weight).shape[2:]
    reach = [(size - 1) * step + wide for size, step, wide in zip(x.shape[2:], stride, kernel, strict=True)]
    if any(pad + size > whole for pad, size, whole in zip(pads, shape[2:], reach, strict=True)):
        raise UnfitError("is a transposed convolution whose output_padding is larger than its padding")
    held = _held(walk, weight, (1, 2, 3, 0), 0)
    whole = (*shape[:2], *reach)
    biases = _bias(walk, bias, x, weight, shape[1])
    inputs = [walk.ints([whole[axis] for axis in LAST]), held, walk.take(x, LAST), biases]
    codes = end.codes if is_integer else None
    options = {"padding": VALID, "strideH": stride[0], "strideW": stride[1]}
    made = walk.emit(
        "TRANSPOSE_CONV", inputs, whole, "float32", order=LAST, codes=codes, name=node.name, options=options
    )
    if whole != shape:
        begin, size = walk.ints([0, *pads, 0]), walk.ints([shape[axis] for axis in LAST])
        made = walk.emit("SLICE", [walk.take(made, LAST), begin, size], shape, "float32", order=LAST, codes=made.codes)
    return closed(walk, node, end, made)


@form(aten.linear.default)
def linear(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    return _linear(walk, node, given["input"], given["weight"], given["bias"])


@form(aten.addmm.default)
def added_product(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    bias, weight = given["self"], given["mat2"]
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or (given["alpha"], given["beta"]) != (1, 1):
        raise UnfitError("adds to a product that is no linear layer")
    return _linear(walk, node, given["mat1"], walk.called(weight.T, walk.names.get(id(weight), node.name)), bias)


def _linear(walk: Walk, node: fx.Node, x: Any, weight: Any, bias: Any) -> Value:
    shape, _ = walk.like(node)
    end = walk.ending(node)
    is_rows = isinstance(x, Value) and x.is_rows and isinstance(weight, Held)
    is_integer = not is_rows and _is_integer(x, weight, end)
    if not is_integer:
        x, bias = walk.float_of(x), walk.float_of(bias)
        weight = weight if is_rows else walk.float_of(weight)
    if isinstance(weight, Value):
        raise UnfitError("has a weight that is computed from the data")
    inputs = [walk.take(x), walk.take(weight), _bias(walk, bias, x, weight, _data(weight).shape[0])]
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
    return closed(walk, node, end, made)


@form(aten.matmul.default, aten.bmm.default, aten.mm.default)
def product(walk: Walk, node: fx.Node) -> Value:
    given = walk.arguments(node)
    x, y = (walk.float_of(given[each]) for each in ("self", "other" if "other" in given else "mat2"))
    if isinstance(y, Tensor) and y.ndim == 2 and isinstance(x, Value) and walk.is_parameter(y):
        return _linear(walk, node, x, walk.called(y.T, walk.names[id(y)]), None)
    ranks = [each.ndim if isinstance(each, Tensor) else each.rank for each in (x, y)]
    if min(ranks) < 2 or max(ranks) > 5:
        raise UnfitError(f"multiplies tensors of {ranks[0]} and {ranks[1]} axes")
    shape, kind = walk.like(node)
    swapped = (*plain(ranks[1])[:-2], ranks[1] - 1, ranks[1] - 2)
    is_swapped = isinstance(y, Value) and plain(ranks[1]) not in y.stored and swapped in y.stored
    inputs = [walk.take(x), walk.take(y, swapped if is_swapped else None)]
    return walk.emit("BATCH_MATMUL", inputs, shape, kind, name=node.name, options={"adjY": is_swapped})
