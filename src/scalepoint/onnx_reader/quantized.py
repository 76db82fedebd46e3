"""Operators of quantized files. A quantized weight is a constant, so it is dequantized while the module is built."""

from typing import Any

import torch
from onnx_ir import DataType
from torch import Tensor

from scalepoint.onnx_reader.operators import Node, operator, outputs_of, require
from scalepoint.onnx_reader.values import torch_dtype

# A file with one of these counts as quantized. The table of operators has only those that are defined below.
QUANTIZED_OPERATORS = frozenset(
    (
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "com.microsoft::DynamicQuantizeLSTM",
        "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::MatMulIntegerToFloat",
        "com.microsoft::MatMulNBits",
        "com.microsoft::MatMulBnb4",
        "com.microsoft::QAttention",
        "com.microsoft::QGemm",
        "com.microsoft::QLinearAdd",
        "com.microsoft::QLinearAveragePool",
        "com.microsoft::QLinearConcat",
        "com.microsoft::QLinearGlobalAveragePool",
        "com.microsoft::QLinearLeakyRelu",
        "com.microsoft::QLinearMul",
        "com.microsoft::QLinearSigmoid",
        "com.microsoft::QLinearConv",
        "com.microsoft::QLinearSoftmax",
        "com.microsoft::QLinearWhere",
        "com.microsoft::QuantizeLinear",
        "com.microsoft::DequantizeLinear",
    )
)
DEQUANTIZE_NBITS = "DequantizeNBits"  # the weight of a com.microsoft::MatMulNBits as float, of shape (inputs, outputs)
CODE_RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.uint16: (0, 65535), torch.int16: (-32768, 32767)}


def _along_axis(node: Node, x: Tensor, parameter: Tensor) -> Tensor:
    """Give a scale or zero point a shape that broadcasts to `x`: per tensor, per channel or per block."""
    if parameter.numel() == 1:
        return parameter.reshape(())
    axis = node.get("axis", 1) % x.ndim
    if block := node.get("block_size", 0):
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if parameter.ndim > 1:  # per direction and channel, in a DynamicQuantizeLSTM
        return parameter.unsqueeze(1)
    return parameter.reshape([-1 if index == axis else 1 for index in range(x.ndim)])


@operator("QuantizeLinear", "com.microsoft::QuantizeLinear")
def quantize_linear(node: Node, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    dtype = zero_point.dtype if zero_point is not None else torch_dtype(node.get("output_dtype") or DataType.UINT8)
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        return (x.float() / _along_axis(node, x, scale.float())).clamp(-largest, largest).to(dtype)
    require(dtype in CODE_RANGES, f"quantization to {dtype}")
    codes = torch.round(x.float() / _along_axis(node, x, scale.float()))
    if zero_point is not None:
        codes = codes + _along_axis(node, x, zero_point.float())
    return codes.clamp(*CODE_RANGES[dtype]).to(dtype)


@operator("DequantizeLinear", "com.microsoft::DequantizeLinear")
def dequantize_linear(node: Node, codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    numbers = codes.to(torch.float32)
    if zero_point is not None:
        numbers = numbers - _along_axis(node, codes, zero_point.to(torch.float32))
    return (numbers * _along_axis(node, codes, scale.to(torch.float32))).to(scale.dtype)


@operator(DEQUANTIZE_NBITS)
def dequantize_nbits(node: Node, codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    bits, rows, columns, block = (node.get(name) for name in ("bits", "N", "K", "block_size"))
    require(bits in (2, 4, 8), f"MatMulNBits with {bits} bits")
    blocks = -(-columns // block)
    values = _unpack(codes.reshape(rows, -1), bits)[:, : blocks * block].reshape(rows, blocks, block).float()
    if zero_point is None:
        values = values - 2 ** (bits - 1)
    elif zero_point.is_floating_point():
        values = values - zero_point.reshape(rows, blocks, 1)
    else:
        values = values - _unpack(zero_point.reshape(rows, -1), bits)[:, :blocks].reshape(rows, blocks, 1)
    return (values * scale.reshape(rows, blocks, 1)).reshape(rows, -1)[:, :columns].T


def _unpack(data: Tensor, bits: int) -> Tensor:
    """Split the bytes of each row into codes, the lowest bits first."""
    parts = [(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).reshape(data.shape[0], -1)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(node: Node, x: Tensor) -> Any:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    zero_point = torch.round(-low / scale).clamp(0, 255)
    codes = (torch.round(x / scale) + zero_point).clamp(0, 255).to(torch.uint8)
    return outputs_of(node, codes, scale, zero_point.to(torch.uint8))


@operator("MatMulInteger")
def matmul_integer(
    node: Node, x: Tensor, y: Tensor, x_zero: Tensor | None = None, y_zero: Tensor | None = None
) -> Tensor:
    left, right = x.to(torch.int32), y.to(torch.int32)
    if x_zero is not None:
        is_per_row = x_zero.ndim == 1 and x_zero.numel() > 1
        left = left - (x_zero.unsqueeze(-1) if is_per_row else x_zero).to(torch.int32)
    if y_zero is not None:
        right = right - y_zero.to(torch.int32)
    return torch.matmul(left, right)


@operator("QLinearMatMul")
def qlinear_matmul(
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    result_scale: Tensor,
    result_zero: Tensor,
) -> Tensor:
    product = torch.matmul((x.double() - x_zero.double()), (y.double() - y_zero.double()))
    factor = x_scale.double() * y_scale.double() / result_scale.double()
    codes = torch.round(product * factor) + result_zero.double()
    return codes.clamp(*CODE_RANGES[result_zero.dtype]).to(result_zero.dtype)
