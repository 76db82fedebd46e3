"""Every rule of TensorRT: a small graph that violates it and a corrected one; and files that cannot be read."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from scalepoint.checking import Finding, Severity, check
from scalepoint.checking.tensorrt import POST_BUILD, RULES
from scalepoint.errors import ScalepointError, StoreError, TargetError

INT8, FLOAT, HALF = TensorProto.INT8, TensorProto.FLOAT, TensorProto.FLOAT16
FP8, INT4, FP4, E8M0 = TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0


class Net:
    """Builds a graph: each call adds nodes and returns the name of the result."""

    def __init__(self, opset: int = 21) -> None:
        self.opset, self.nodes, self.constants = opset, [], []
        self.inputs, self.outputs, self.functions = [], [], []

    def input(self, *shape: int | str, kind: int = FLOAT) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def op(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: object) -> str:
        names = [f"{op.lower()}{len(self.nodes)}" + (f"_{index}" if index else "") for index in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names[0]

    def constant(self, value: object, kind: int = FLOAT) -> str:
        name = f"c{len(self.constants)}"
        numbers = np.asarray(value, dtype=np.float32)
        self.constants.append(helper.make_tensor(name, kind, numbers.shape, numbers.ravel().tolist()))
        return name

    def fill(self, *shape: int, kind: int = FLOAT) -> str:
        return self.constant(np.ones(shape), kind)

    def pair(self, x: str, scale: float | list[float] = 0.1, kind: int = INT8, zero: float = 0, **names: object) -> str:
        """x -> Q -> DQ."""
        s = self.constant(scale)
        z = self.constant(np.full(np.shape(scale), zero), kind)
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, s, z, **names), s, z, **names)

    def weight(self, *shape: int, axis: int | None = 0, kind: int = INT8) -> str:
        """A stored weight -> DQ, with a scale per channel of `axis` (None: one)."""
        channels = () if axis is None else (shape[axis],)
        s, z = self.fill(*channels), self.constant(np.zeros(channels), kind)
        return self.op(
            "DequantizeLinear", self.fill(*shape, kind=kind), s, z, **({} if axis is None else {"axis": axis})
        )

    def conv(self, x: str, out: int = 16, in_: int = 16, kernel: int = 1, **attributes: object) -> str:
        """An int8 convolution of data that is already dequantized."""
        return self.op("Conv", x, self.weight(out, in_, kernel, kernel), self.fill(out), **attributes)

    def batch_norm(self, x: str, channels: int = 16) -> str:
        return self.op("BatchNormalization", x, *(self.fill(channels) for _ in range(4)))

    def image(self, channels: int = 16, size: int = 8) -> str:
        return self.input("n", channels, size, size)

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [helper.make_empty_tensor_value_info(name) for name in outputs or (self.nodes[-1].output[0],)]
        graph = helper.make_graph(self.nodes, "net", self.inputs, infos, self.constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("trt", 1), helper.make_opsetid("own", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=self.functions)


Case = Callable[[bool], Net]
CASES: dict[str, Case] = {}


def case(build: Case) -> Case:
    """Register a function `r01_some_words(bad)`, which builds a graph that violates only R01, or a corrected one."""
    CASES[build.__name__] = build
    return build


@case
def r01_zero_point_is_not_zero(bad: bool) -> Net:
    net = Net()
    net.conv(net.pair(net.image(), zero=3 if bad else 0))
    return net


@case
def r01_uint8(bad: bool) -> Net:
    net = Net()
    net.conv(net.pair(net.image(), kind=TensorProto.UINT8 if bad else INT8))
    return net


@case
def r01_no_zero_point_and_no_type(bad: bool) -> Net:
    net = Net()
    scale = net.constant(0.1)
    q = net.op("QuantizeLinear", net.image(), scale, **({} if bad else {"output_dtype": INT8}))
    z = net.constant(0, TensorProto.UINT8) if bad else net.constant(0, INT8)
    net.conv(net.op("DequantizeLinear", q, scale, z))
    return net


@case
def r01_zero_point_shape(bad: bool) -> Net:
    net = Net()
    zero = net.constant(0 if bad else np.zeros(16), INT8)
    w = net.op("DequantizeLinear", net.fill(16, 16, 1, 1, kind=INT8), net.fill(16), zero, axis=0)
    net.op("Conv", net.pair(net.image()), w)
    return net


@case
def r01_zero_point_is_computed(bad: bool) -> Net:
    net = Net()
    scale, zero = net.constant(0.1), net.input(kind=INT8) if bad else net.constant(0, INT8)
    net.conv(net.op("DequantizeLinear", net.op("QuantizeLinear", net.image(), scale, zero), scale, zero))
    return net


@case
def r02_scale_is_not_positive(bad: bool) -> Net:
    net = Net()
    net.conv(net.pair(net.image(), scale=0.0 if bad else 0.1))
    return net


@case
def r02_scale_is_computed(bad: bool) -> Net:
    net = Net()
    x = net.image()
    scale = net.op("ReduceMax", x, keepdims=0) if bad else net.op("Identity", net.constant(0.1))
    zero = net.constant(0, INT8)
    net.conv(net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero))
    return net


@case
def r02_scales_do_not_fit_the_axis(bad: bool) -> Net:
    net = Net()
    count = 8 if bad else 16
    zero = net.constant(np.zeros(count), INT8)
    w = net.op("DequantizeLinear", net.fill(16, 16, 1, 1, kind=INT8), net.fill(count), zero, axis=0)
    net.op("Conv", net.pair(net.image()), w)
    return net


@case
def r02_axis_save_with_external_data(bad: bool) -> Net:
    net = Net()
    zero, axis = net.constant(np.zeros(16), INT8), 4 if bad else -4
    w = net.op("DequantizeLinear", net.fill(16, 16, 1, 1, kind=INT8), net.fill(16), zero, axis=axis)
    net.op("Conv", net.pair(net.image()), w)
    return net


@case
def r02_rank(bad: bool) -> Net:
    net = Net()
    shape = (16, 1) if bad else (16,)
    zero = net.constant(np.zeros(shape), INT8)
    w = net.op("DequantizeLinear", net.fill(16, 16, 1, 1, kind=INT8), net.fill(*shape), zero, axis=0)
    net.op("Conv", net.pair(net.image()), w)
    return net


@case
def r03_activation_per_channel(bad: bool) -> Net:
    net = Net()
    net.conv(net.pair(net.image(), scale=[0.1] * 16 if bad else 0.1))
    return net


@case
def r04_conv_weight_axis(bad: bool) -> Net:
    net = Net()
    net.op("Conv", net.pair(net.image()), net.weight(16, 16, 3, 3, axis=1 if bad else 0))
    return net


@case
def r04_one_scale_for_the_weight(bad: bool) -> Net:
    net = Net()
    net.op("Conv", net.pair(net.image()), net.weight(16, 16, 3, 3, axis=None if bad else 0))
    return net


@case
def r04_gemm_without_transposed_weight(bad: bool) -> Net:
    net = Net()
    net.op("Gemm", net.pair(net.input("n", 32)), net.weight(32, 16, axis=0 if bad else 1))
    return net


@case
def r04_axis_behind_a_transpose(bad: bool) -> Net:
    net = Net()
    w = net.op("Transpose", net.weight(16, 32, axis=1 if bad else 0), perm=[1, 0])
    net.op("MatMul", net.pair(net.input("n", 32)), w)
    return net


@case
def r05_int32_bias(bad: bool) -> Net:
    net = Net()
    bias = net.fill(16)
    if bad:
        bias = net.op("DequantizeLinear", net.fill(16, kind=TensorProto.INT32), net.fill(16), axis=0)
    net.op("Conv", net.pair(net.image()), net.weight(16, 16, 1, 1), bias)
    return net


@case
def r05_int8_bias(bad: bool) -> Net:
    net = Net()
    net.op("Conv", net.pair(net.image()), net.weight(16, 16, 1, 1), net.weight(16, axis=None) if bad else net.fill(16))
    return net


@case
def r05_bias_added_behind_matmul(bad: bool) -> Net:
    net = Net()
    y = net.op("MatMul", net.pair(net.input("n", 32)), net.weight(32, 32, axis=1))
    net.op("Add", net.weight(32, axis=None) if bad else net.fill(32), y)
    return net


@case
def r06_integer_operator(bad: bool) -> Net:
    net = Net()
    x, zero = net.input("n", 32, kind=INT8), net.constant(0, INT8)
    if bad:
        net.op("MatMulInteger", x, net.fill(32, 32, kind=INT8))
    else:
        net.op("MatMul", net.op("DequantizeLinear", x, net.constant(0.1), zero), net.weight(32, 32, axis=1))
    return net


@case
def r07_axis_in_opset_12(bad: bool) -> Net:
    net = Net(12 if bad else 13)
    net.conv(net.pair(net.image()))
    return net


@case
def r07_fp8_in_opset_18(bad: bool) -> Net:
    net = Net(18 if bad else 19)
    net.op("Conv", net.pair(net.image(32), kind=FP8), net.weight(32, 32, 3, 3, kind=FP8))
    return net


@case
def r08_scale_type(bad: bool) -> Net:
    net = Net(23)
    x, zero = net.input("n", 16, 8, 8, kind=HALF), net.constant(0, INT8)
    q = net.op("QuantizeLinear", x, net.constant(0.1, FLOAT if bad else HALF), zero)
    net.conv(net.op("DequantizeLinear", q, net.constant(0.1), zero))
    return net


@case
def r08_operands_of_two_types(bad: bool) -> Net:
    net = Net()
    net.op("Conv", net.pair(net.image()), net.weight(16, 16, 1, 1), net.fill(16, kind=HALF if bad else FLOAT))
    return net


@case
def r08_cast_behind_dequantize(bad: bool) -> Net:
    net = Net()
    x = net.pair(net.input("n", 32))
    net.op("MatMul", net.op("Cast", x, to=FLOAT) if bad else x, net.weight(32, 32, axis=1))
    return net


@case
def r09_weight_alone(bad: bool) -> Net:
    net = Net()
    x = net.image()
    net.conv(x if bad else net.pair(x))
    return net


@case
def r09_data_alone(bad: bool) -> Net:
    net = Net()
    x = net.pair(net.input("n", 32))
    net.op("MatMul", x, net.fill(32, 32) if bad else net.weight(32, 32, axis=1))
    return net


@case
def r10_pair_before_batch_norm(bad: bool) -> Net:
    net = Net()
    y = net.conv(net.pair(net.image()))
    net.op("Relu", net.batch_norm(net.pair(y) if bad else y))
    return net


@case
def r10_pair_before_relu(bad: bool) -> Net:
    net = Net()
    y = net.batch_norm(net.conv(net.pair(net.image())))
    net.op("Relu", net.pair(y) if bad else y)
    return net


@case
def r10_pair_before_bias(bad: bool) -> Net:
    net = Net()
    y = net.op("MatMul", net.pair(net.input("n", 32)), net.weight(32, 32, axis=1))
    y = net.op("Add", net.pair(y) if bad else y, net.fill(32))
    net.op("MatMul", net.pair(y), net.weight(32, 32, axis=1))
    return net


@case
def r11_pair_before_the_stem_pool(bad: bool) -> Net:
    net = Net()
    y = net.op("Relu", net.batch_norm(net.conv(net.pair(net.image(3)), in_=3, kernel=3)))
    y = net.op("MaxPool", net.pair(y) if bad else y, kernel_shape=[2, 2])
    net.conv(y if bad else net.pair(y))
    return net


@case
def r11_pair_between_pad_and_conv(bad: bool) -> Net:
    net = Net()
    x, pads = net.image(), net.constant([0, 0, 1, 1, 0, 0, 1, 1], TensorProto.INT64)
    net.conv(net.pair(net.op("Pad", x, pads)) if bad else net.op("Pad", net.pair(x), pads))
    return net


def residual(side: bool, skip: bool, *, downsample: bool = False, swap: bool = False) -> Net:
    net = Net()
    x = net.pair(net.op("Relu", net.image()))
    long = net.batch_norm(net.conv(net.pair(net.op("Relu", net.conv(x)))))
    short = net.conv(x) if downsample else net.op("Relu", net.image())
    operands = [net.pair(long) if side else long, net.pair(short) if skip else short]
    net.conv(net.pair(net.op("Relu", net.op("Add", *(operands[::-1] if swap else operands)))))
    return net


@case
def r12_skip_is_float(bad: bool) -> Net:
    return residual(side=False, skip=not bad)


@case
def r12_skip_is_float_and_first(bad: bool) -> Net:
    return residual(side=False, skip=not bad, swap=True)


@case
def r12_pair_on_the_convolution_side(bad: bool) -> Net:
    return residual(side=bad, skip=True)


@case
def r12_pair_on_the_longer_side(bad: bool) -> Net:
    return residual(side=bad, skip=not bad, downsample=True)


@case
def r12_both_sides(bad: bool) -> Net:
    return residual(side=bad, skip=True, downsample=True)


@case
def r12_neither_side(bad: bool) -> Net:
    return residual(side=False, skip=not bad, downsample=True)


@case
def r13_pool_with_float_output(bad: bool) -> Net:
    net = Net()
    y = net.op("GlobalAveragePool", net.pair(net.image()))
    net.op("Flatten", y) if bad else net.conv(net.pair(net.op("Relu", y)))
    return net


@case
def r13_resize_of_a_convolution(bad: bool) -> Net:
    net = Net()
    y = net.op("Relu", net.conv(net.pair(net.image())))
    net.op("Resize", y if bad else net.pair(y), "", net.constant([1, 1, 2, 2]))
    return net


def concat(scales: tuple[float, float, float], *, nested: bool = False) -> Net:
    net = Net()
    a, b = (net.pair(net.op("Relu", net.image()), scale) for scale in scales[:2])
    y = net.op("Concat", a, b, axis=1)
    if nested:
        y = net.op("Concat", y, net.op("Relu", net.image()), axis=1)
    net.conv(net.pair(y, scales[2]), in_=48 if nested else 32)
    return net


@case
def r14_concat_of_two_scales(bad: bool) -> Net:
    return concat((0.1, 0.3 if bad else 0.1, 0.1))


@case
def r14_concat_of_one_scale_into_another(bad: bool) -> Net:
    return concat((0.1, 0.1, 0.3 if bad else 0.1))


@case
def r14_concat_of_concat(bad: bool) -> Net:
    return concat((0.1, 0.3 if bad else 0.1, 0.1), nested=True)


@case
def r15_two_scales_on_one_tensor(bad: bool) -> Net:
    net = Net()
    x = net.image()
    net.op("Concat", net.conv(net.pair(x, 0.1)), net.conv(net.pair(x, 0.2 if bad else 0.1)), axis=1)
    return net


@case
def r15_requantized_back_to_back(bad: bool) -> Net:
    net = Net()
    net.conv(net.pair(net.op("Identity", net.pair(net.image(), 0.1)), 0.2 if bad else 0.1))
    return net


def product(m: int | str = "n", k: int = 32, n: int = 32) -> Net:
    net = Net()
    net.op("Gemm", net.pair(net.input(m, k)), net.weight(n, k), net.fill(n), transB=1)
    return net


@case
def r16_narrow_result(bad: bool) -> Net:
    return product(n=10 if bad else 16)


@case
def r16_short_sum(bad: bool) -> Net:
    return product(k=8 if bad else 16)


@case
def r16_one_row(bad: bool) -> Net:
    return product(m=1 if bad else 2)


def convolution(out: int, in_: int, kernel: int, group: int = 1, *, kind: int = INT8) -> Net:
    net = Net()
    x = net.op("Relu", net.image(in_ * group))
    net.op("Conv", net.pair(x, kind=kind), net.weight(out, in_, kernel, kernel, kind=kind), group=group)
    return net


@case
def r17_few_channels(bad: bool) -> Net:
    return convolution(8, 4 if bad else 16, 3)


@case
def r17_odd_channels(bad: bool) -> Net:
    return convolution(20, 3 if bad else 8, 3)


@case
def r17_pointwise_groups(bad: bool) -> Net:
    return convolution(16, 1, 1 if bad else 3, group=16)


@case
def r17_grouped_fp8(bad: bool) -> Net:
    return convolution(64, 32, 3, group=2 if bad else 1, kind=FP8)


@case
def r17_computed_weight(bad: bool) -> Net:
    net = Net()
    w = net.weight(16, 16, 1, 1)
    net.op("Conv", net.pair(net.image()), net.pair(net.input(16, 16, 1, 1)) if bad else w)
    return net


def attention(tokens: int = 64, *, mask: str = "", mask_pair: bool = False, guard: bool = False) -> Net:
    net = Net()
    q, k, v = (net.pair(net.input("n", 4, *shape)) for shape in ((tokens, 32), (32, tokens), (tokens, 32)))
    y = net.op("Mul", net.op("MatMul", q, k), net.constant(0.2))
    if mask:
        m = net.input("n", 1, tokens, tokens) if mask == "computed" else net.fill(1, 1, tokens, tokens)
        y = net.op("Add", y, net.pair(m) if mask_pair else m)
    y = net.op("Softmax", y)
    net.op("MatMul", net.op("Where", net.op("IsNaN", y), net.constant(0), y) if guard else y, v)
    return net


@case
def r18_too_many_tokens(bad: bool) -> Net:
    return attention(513 if bad else 512)


@case
def r18_too_many_tokens_with_the_guard_that_torch_writes(bad: bool) -> Net:
    return attention(513 if bad else 512, guard=True)


@case
def r18_computed_mask(bad: bool) -> Net:
    return attention(mask="computed" if bad else "constant")


def fp8_attention(**change: object) -> Net:
    net = Net()
    head = int(change.get("head", 32))  # type: ignore[call-overload]
    q, v = (net.pair(net.input("n", 4, 64, head), kind=FP8) for _ in range(2))
    k = net.input("n", 4, 64, head)
    if change.get("transpose") == "late":
        k = net.op("Transpose", net.pair(k, kind=FP8), perm=[0, 1, 3, 2])
    else:
        k = net.pair(net.op("Transpose", k, perm=[0, 1, 3, 2]), kind=FP8)
    scores = net.op("MatMul", q, k)
    if change.get("between"):
        scores = net.op(str(change["between"]), scores, net.constant(1))
    y = net.op("Softmax", scores)
    if change.get("softmax") != "float":
        y = net.pair(y, float(change.get("scale", 1 / 448)), kind=FP8)  # type: ignore[arg-type]
    y = net.op("MatMul", y, v)
    if change.get("result") != "float":
        net.op("MatMul", net.pair(y, kind=FP8), net.weight(head, 32, axis=1, kind=FP8))
    return net


@case
def r19_softmax_is_float(bad: bool) -> Net:
    return fp8_attention(softmax="float" if bad else "fp8")


@case
def r19_result_is_float(bad: bool) -> Net:
    return fp8_attention(result="float" if bad else "fp8")


@case
def r19_softmax_scale(bad: bool) -> Net:
    return fp8_attention(scale=0.01 if bad else 1 / 448)


@case
def r19_wide_head(bad: bool) -> Net:
    return fp8_attention(head=288 if bad else 256)


@case
def r19_transpose_behind_the_pair(bad: bool) -> Net:
    return fp8_attention(transpose="late" if bad else "early")


@case
def r19_odd_step_before_softmax(bad: bool) -> Net:
    return fp8_attention(between="Max" if bad else "Mul")


@case
def r20_softmax_of_a_pair(bad: bool) -> Net:
    net = Net()
    x = net.op("MatMul", net.pair(net.input("n", 4, 32)), net.weight(32, 32, axis=1))
    net.op("Softmax", net.pair(x) if bad else x)
    return net


@case
def r20_layer_norm_of_a_pair(bad: bool) -> Net:
    net = Net()
    x = net.op("Relu", net.input("n", 4, 32))
    net.op("LayerNormalization", net.pair(x) if bad else x, net.fill(32), net.fill(32))
    return net


@case
def r20_parameter_of_layer_norm(bad: bool) -> Net:
    net = Net()
    x = net.op("Relu", net.input("n", 4, 32))
    net.op("LayerNormalization", x, net.weight(32, axis=None) if bad else net.fill(32), net.fill(32))
    return net


@case
def r20_inside_a_written_out_layer_norm(bad: bool) -> Net:
    net = Net()
    x = net.op("Relu", net.input("n", 4, 32))
    last = net.constant([-1], TensorProto.INT64)
    centred = net.op("Sub", x, net.op("ReduceMean", x, last))
    variance = net.op("ReduceMean", net.op("Pow", centred, net.constant(2)), last)
    root = net.op("Sqrt", net.op("Add", variance, net.constant(1e-5)))
    net.op("Div", net.pair(centred) if bad else centred, root)
    return net


@case
def r20_inside_gelu(bad: bool) -> Net:
    net = Net()
    x = net.op("Relu", net.input("n", 4, 32))
    y = net.op("Erf", net.op("Div", x, net.constant(1.4142)))
    y = net.op("Add", net.pair(y) if bad else y, net.constant(1))
    y = net.op("Mul", net.op("Mul", x, y), net.constant(0.5))
    net.op("MatMul", net.pair(y), net.weight(32, 32, axis=1))
    return net


@case
def r20_layer_norm_behind_a_convolution(bad: bool) -> Net:
    net = Net()
    y = net.op("Transpose", net.conv(net.pair(net.image())), perm=[0, 2, 3, 1])
    net.op("LayerNormalization", y if bad else net.pair(y), net.fill(16), net.fill(16))
    return net


@case
def r21_pair_inside_silu(bad: bool) -> Net:
    net = Net()
    y = net.conv(net.pair(net.image()))
    y = net.pair(y) if bad else y
    net.conv(net.pair(net.op("Mul", y, net.op("Sigmoid", y))))
    return net


def int4_weight(*shape: int, block: int = 64, axis: int = 0, data: str = "") -> Net:
    net = Net()
    blocks = [-(-size // block) if index == axis else size for index, size in enumerate(shape)]
    stored = data or net.fill(*shape, kind=INT4)
    w = net.op("DequantizeLinear", stored, net.fill(*blocks), axis=axis, block_size=block)
    net.op("MatMul", net.input("n", shape[-2]), w)
    return net


@case
def r23_int4_blocks(bad: bool) -> Net:
    return int4_weight(128, 32, block=32 if bad else 64)


@case
def r23_int4_odd_size(bad: bool) -> Net:
    return int4_weight(128, 33 if bad else 34)


@case
def r23_int4_blocks_along_an_outer_axis(bad: bool) -> Net:
    return int4_weight(64, 64, 64, axis=0 if bad else 1)


@case
def r23_int4_activation(bad: bool) -> Net:
    net = Net()
    net.op("MatMul", net.pair(net.input("n", 32), kind=INT4 if bad else INT8), net.weight(32, 32, axis=1))
    return net


def fp4_weight(block: int = 16, *, two: bool = True, dynamic: bool = True) -> Net:
    net = Net(23)
    scale = net.fill(32, 64 // block)
    if two:
        scale = net.op("DequantizeLinear", net.fill(32, 64 // block, kind=FP8), net.constant(0.5))
    w = net.op("DequantizeLinear", net.fill(32, 64, kind=FP4), scale, axis=-1, block_size=block)
    x, amax = net.input("n", 64), net.constant(0.1)
    q = net.op("TRT_FP4DynamicQuantize", x, amax, outputs=2, domain="trt", axis=-1, block_size=16)
    if not dynamic:
        q = net.op("QuantizeLinear", x, amax, net.constant(0, FP4))
    levels = net.op("DequantizeLinear", f"{q}_1", amax) if dynamic else scale
    x = net.op("DequantizeLinear", q, levels, axis=-1, block_size=16)
    w = net.op("Cast", w, to=FLOAT)  # NVIDIA's exporter writes one
    net.op("MatMul", x, net.op("Transpose", w, perm=[1, 0]))
    return net


@case
def r23_fp4_activation_without_dynamic_quantize(bad: bool) -> Net:
    return fp4_weight(dynamic=not bad)


@case
def r23_fp4_with_one_dequantize(bad: bool) -> Net:
    return fp4_weight(two=not bad)


@case
def r23_fp4_blocks(bad: bool) -> Net:
    return fp4_weight(block=32 if bad else 16)


@case
def r23_e8m0_scales(bad: bool) -> Net:
    net = Net(24)
    kind = E8M0 if bad else FLOAT
    x = net.pair(net.input("n", 64), kind=FP8)
    w = net.op("DequantizeLinear", net.fill(64, 32, kind=FP8), net.fill(2, 32, kind=kind), axis=0, block_size=32)
    net.op("MatMul", x, w)
    return net


@case
def r23_mxfp8_blocks(bad: bool) -> Net:
    net, size = Net(), 48 if bad else 64
    q = net.op("TRT_MXFP8DynamicQuantize", net.input("n", 64), outputs=2, domain="trt", axis=-1, block_size=32)
    x = net.op("TRT_MXFP8DequantizeLinear", q, f"{q}_1", domain="trt", axis=-1, block_size=32)
    stored, scale = net.fill(64, size, kind=FP8), net.fill(64, 2, kind=TensorProto.UINT8)
    w = net.op("TRT_MXFP8DequantizeLinear", stored, scale, domain="trt", axis=-1, block_size=32)
    net.op("MatMul", x, net.op("Transpose", w, perm=[1, 0]))
    return net


@case
def r24_op_between_transposed_convolution_and_batch_norm(bad: bool) -> Net:
    net = Net()
    y = net.op("ConvTranspose", net.pair(net.image()), net.weight(16, 16, 2, 2, axis=1))
    net.op("Relu", net.batch_norm(net.op("Relu", y) if bad else y))
    return net


@case
def r25_compared(bad: bool) -> Net:
    net = Net()
    x = net.image()
    net.op("Greater", net.pair(x) if bad else x, net.constant(0.5))
    return net


@case
def r25_parameter_of_batch_norm(bad: bool) -> Net:
    net = Net()
    mean = net.weight(16, axis=None) if bad else net.fill(16)
    net.op("BatchNormalization", net.image(), net.fill(16), net.fill(16), mean, net.fill(16))
    return net


@case
def r25_tiny_tensor(bad: bool) -> Net:
    net = Net()
    x = net.op("Relu", net.input(4 if bad else 8))
    net.op("Flatten", net.op("Sin", net.pair(x)))
    return net


@case
def r25_model_output(bad: bool) -> Net:
    net = Net()
    y = net.conv(net.pair(net.image()))
    if bad:
        net.pair(y)
    return net


@case
def r26_weight_times_a_factor(bad: bool) -> Net:
    net = Net()
    weight = net.fill(16, 16, 1, 1)
    weight = net.op("Mul", weight, net.fill(16, 1, 1, 1)) if bad else weight
    net.op("Conv", net.pair(net.image()), net.pair(weight, [0.1] * 16, axis=0))
    return net


def violated_rules(net: Net, **options: object) -> list[str]:
    return [finding.rule for finding in check(net.model(), **options)]


@pytest.mark.parametrize("name", CASES)
def test_a_graph_that_violates_one_rule_has_findings_of_this_rule_only(name: str) -> None:
    rules = violated_rules(CASES[name](True))
    assert rules
    assert set(rules) == {name[:3].upper()}


@pytest.mark.parametrize("name", CASES)
def test_the_corrected_graph_has_no_findings(name: str) -> None:
    assert [str(finding) for finding in check(CASES[name](False).model())] == []


def test_a_mean_with_a_quantized_result_counts_as_a_pool() -> None:
    net = Net()
    pooled = net.op("ReduceMean", net.pair(net.image()), net.constant([2, 3], TensorProto.INT64), keepdims=1)
    net.conv(net.pair(pooled))
    assert violated_rules(net) == []


def test_every_rule_has_a_case() -> None:
    by_version = {"R22"}
    assert {name[:3].upper() for name in CASES} | by_version == {rule.id for rule in RULES}
    assert [rule.id for rule in RULES] == [f"R{number:02}" for number in range(1, 27)]
    assert all(rule.check.__doc__ and rule.check.__doc__.startswith(rule.id) for rule in RULES)
    assert all(POST_BUILD.values())


def test_fp32_results_are_reported_once_from_tensorrt_11_on() -> None:
    net = Net()
    net.conv(net.pair(net.op("Relu", net.conv(net.pair(net.image())))))
    assert violated_rules(net) == []
    assert violated_rules(net, version=11) == ["R22"]


def test_fp16_results_have_no_findings_in_tensorrt_11() -> None:
    net = Net()
    scale, zero, weight_scales = net.constant(0.1, HALF), net.constant(0, INT8), net.fill(16, kind=HALF)
    x = net.input("n", 16, 8, 8, kind=HALF)
    x = net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)
    zeros = net.constant(np.zeros(16), INT8)
    net.op("Conv", x, net.op("DequantizeLinear", net.fill(16, 16, 1, 1, kind=INT8), weight_scales, zeros, axis=0))
    assert violated_rules(net, version="11.2") == []


@pytest.mark.parametrize(("version", "axis"), [("8.6", 0), ("9.3", 1), ("10.0", 0), ("10.2", 1), (10, 1), (11, 1)])
def test_the_axis_of_a_transposed_convolution_depends_on_the_version(version: str | int, axis: int) -> None:
    def net(axis: int) -> Net:
        net = Net()
        net.op("ConvTranspose", net.pair(net.image()), net.weight(16, 32, 2, 2, axis=axis))
        return net

    assert "R04" not in violated_rules(net(axis), version=version)
    assert "R04" in violated_rules(net(1 - axis), version=version)


def test_grouped_transposed_convolutions_need_channels_before_10_9() -> None:
    net = Net()
    net.op("ConvTranspose", net.pair(net.image(16)), net.weight(16, 4, 2, 2, axis=1), group=8)
    assert violated_rules(net, version="10.8") == ["R24"]
    assert violated_rules(net, version="10.9") == []


def test_a_pair_on_the_mask_and_the_mask_itself_are_both_reported() -> None:
    findings = check(attention(mask="constant", mask_pair=True).model())
    assert "the mask Add before a Softmax has Q/DQ" in [finding.why.split(":")[0] for finding in findings]
    assert "R18" in [finding.rule for finding in findings]


def test_convnext_skip_that_starts_at_a_convolution_needs_no_pair() -> None:
    net = Net()
    first = net.conv(net.pair(net.image()))
    branch = net.conv(net.pair(net.op("Relu", net.conv(net.pair(first)))))
    net.conv(net.pair(net.op("Add", branch, first)))
    assert violated_rules(net) == []


def test_depthwise_convolution_may_have_a_pair_before_its_silu() -> None:
    net = Net()
    y = net.pair(net.op("Conv", net.pair(net.image()), net.weight(16, 1, 3, 3), group=16))
    net.conv(net.pair(net.op("Mul", y, net.op("Sigmoid", y))))
    assert violated_rules(net) == []


def residual_network() -> Net:
    """A stem with pool, a block with a downsample, a block with an identity skip, a pool, a 1x1 convolution as head."""
    net = Net()
    y = net.op("Relu", net.batch_norm(net.conv(net.pair(net.image(3, 32)), 16, 3, 7)))
    x = net.pair(net.op("MaxPool", y, kernel_shape=[2, 2]))
    for channels, has_downsample in ((32, True), (32, False)):
        width = 16 if has_downsample else 32
        y = net.pair(net.op("Relu", net.batch_norm(net.conv(x, channels, width), channels)))
        y = net.batch_norm(net.conv(y, channels, channels), channels)
        skip = net.pair(net.batch_norm(net.conv(x, channels, width), channels), 0.3) if has_downsample else x
        x = net.pair(net.op("Relu", net.op("Add", y, skip)))
    pooled = net.op("GlobalAveragePool", x)
    net.op("Flatten", net.conv(net.pair(pooled), 64, 32))
    return net


def test_a_residual_network_placed_by_the_rules_has_no_findings() -> None:
    model = residual_network().model()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(model.graph.output[0].name, FLOAT, ["n", 64]))
    onnx.checker.check_model(model, full_check=True)
    assert [str(finding) for finding in check(model)] == []


def test_findings_are_sorted_by_graph_order_then_by_rule() -> None:
    net = Net()
    y = net.op("Relu", net.pair(net.conv(net.pair(net.image(), zero=1)), zero=1))
    net.op("Softmax", net.pair(y, scale=[0.1] * 16))
    first = check(net.model())
    assert first == check(net.model())
    assert [finding.rule for finding in first] == ["R01", "R01", "R01", "R10", "R01", "R03", "R20"]


def test_a_finding_is_one_short_line_even_with_hostile_names() -> None:
    net = Net()
    net.conv(net.image())
    model = net.model()
    model.graph.node[-1].name = "a\nb\x1b[31m" + "c" * 10_000
    (finding,) = check(model)
    assert finding.severity is Severity.PERFORMANCE
    assert "\n" not in str(finding)
    assert "\x1b" not in str(finding)
    assert len(str(finding)) < 500
    assert str(Finding("R09", Severity.ERROR, "n", "t", "w", "Do.")) == "R09 error: n (t): w. What to do: Do."


def test_a_node_without_a_name_is_reported_by_its_output() -> None:
    net = Net()
    y = net.conv(net.image())
    (finding,) = check(net.model())
    assert (finding.node, finding.tensor) == (y, "in0")


def test_constant_nodes_are_constants() -> None:
    model = r01_zero_point_is_not_zero(True).model()
    for tensor in list(model.graph.initializer):
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    assert {finding.rule for finding in check(model)} == {"R01"}


def test_constant_nodes_that_hold_plain_numbers_are_constants() -> None:
    for number, rules in ((0.1, set()), (-0.1, {"R02"})):
        net = Net()
        scale, zero = net.op("Constant", value_float=number), net.constant(0, INT8)
        net.conv(net.op("DequantizeLinear", net.op("QuantizeLinear", net.image(), scale, zero), scale, zero))
        assert set(violated_rules(net)) == rules


def test_rules_report_nothing_if_shapes_are_unknown() -> None:
    net = Net()
    net.inputs.append(helper.make_tensor_value_info("x", FLOAT, None))
    y = net.op("Own", net.pair("x"), domain="own")
    net.op("MatMul", net.pair(y), net.pair(net.op("Own", y, domain="own")))
    assert violated_rules(net) == []


def test_bodies_and_functions_are_checked_too() -> None:
    net = Net()
    x, flag = net.image(), net.input(kind=TensorProto.BOOL)
    inner = Net()
    inner.nodes.append(helper.make_node("Conv", [x, net.fill(16, 16, 1, 1)], ["bare"]))
    weight = inner.weight(16, 16, 1, 1)
    inner.nodes.append(helper.make_node("Conv", [x, weight], ["half"]))
    for tensor in inner.constants:
        tensor.name = f"inner_{tensor.name}"
    for node in inner.nodes:
        node.input[:] = [f"inner_{name}" if node.op_type == "DequantizeLinear" else name for name in node.input]
    body = helper.make_graph(inner.nodes, "b", [], [helper.make_empty_tensor_value_info("half")], inner.constants)
    other = helper.make_graph(
        [helper.make_node("Identity", [x], ["same"])], "o", [], [helper.make_empty_tensor_value_info("same")]
    )
    net.op("If", flag, then_branch=body, else_branch=other)
    assert violated_rules(net) == ["R09"]

    outer = Net()
    nodes = [helper.make_node("MatMulInteger", ["a", "b"], ["c"])]
    outer.functions.append(helper.make_function("own", "F", ["a", "b"], ["c"], nodes, [helper.make_opsetid("", 21)]))
    outer.op("F", outer.input("n", 32, kind=INT8), outer.fill(32, 32, kind=INT8), domain="own")
    assert violated_rules(outer) == ["R06"]


# Files that cannot be read


def test_a_file_has_the_findings_of_its_model(tmp_path: Path) -> None:
    model = r09_weight_alone(True).model()
    onnx.save(model, tmp_path / "m.onnx")
    assert check(tmp_path / "m.onnx") == check(str(tmp_path / "m.onnx")) == check(model)


def test_a_truncated_file_is_an_error_or_a_complete_model(tmp_path: Path) -> None:
    data = product().model().SerializeToString()
    path = tmp_path / "cut.onnx"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        try:
            check(path)
        except StoreError:
            continue
        assert onnx.load(path).opset_import


def test_changed_bytes_raise_no_other_exception_than_ours(tmp_path: Path) -> None:
    data = bytearray(product().model().SerializeToString())
    path, rng = tmp_path / "changed.onnx", np.random.default_rng(0)
    for _ in range(400):
        changed = bytearray(data)
        changed[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(changed)
        try:
            check(path)
        except ScalepointError:
            continue


@pytest.mark.parametrize("source", ["missing.onnx", ".", "a\0b", 7, None])
def test_a_source_that_is_not_a_file_is_rejected(source: object) -> None:
    with pytest.raises(StoreError):
        check(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04" + b"0" * 100, b"\x00" * 64], ids=repr)
def test_a_file_that_is_not_onnx_is_rejected(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(StoreError, match=r"m\.onnx"):
        check(tmp_path / "m.onnx")


def save_with_external_data(location: str, tmp_path: Path, **entries: str) -> Path:
    """Save a model whose weight has its data in `location`."""
    net = Net()
    net.op("Gemm", net.input("n", 32), net.fill(32, 32))
    model = net.model()
    tensor = model.graph.initializer[0]
    del tensor.float_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    (folder / "data").write_bytes(bytes(4096))
    (tmp_path / "secret").write_bytes(bytes(4096))
    return folder / "m.onnx"


def test_external_data_next_to_the_file_is_read(tmp_path: Path) -> None:
    assert check(save_with_external_data("data", tmp_path, offset="0", length="4096")) == []


def test_external_scales_are_read(tmp_path: Path) -> None:
    model = r02_scale_is_not_positive(True).model()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="data")
    assert (tmp_path / "data").stat().st_size > 0
    assert {finding.rule for finding in check(tmp_path / "m.onnx")} == {"R02"}


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "ABSOLUTE", "..\\secret", "", "gone", "link", "hard"]
)
def test_external_data_outside_of_the_folder_is_rejected(location: str, tmp_path: Path) -> None:
    path = save_with_external_data(str(tmp_path / "secret") if location == "ABSOLUTE" else location, tmp_path)
    (path.parent / "link").symlink_to(tmp_path / "secret")
    os.link(tmp_path / "secret", path.parent / "hard")
    with pytest.raises(StoreError, match="c0"):
        check(path)


@pytest.mark.parametrize(
    "entries", [{"offset": "4000", "length": "4096"}, {"offset": "-1"}, {"length": "x"}, {"evil": "1"}]
)
def test_external_data_with_invalid_entries_is_rejected(entries: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="c0"):
        check(save_with_external_data("data", tmp_path, **entries))


def test_external_data_of_a_model_in_memory_is_rejected(tmp_path: Path) -> None:
    model = onnx.load(save_with_external_data("data", tmp_path), load_external_data=False)
    with pytest.raises(StoreError, match="path"):
        check(model)


def test_a_tensor_with_values_in_two_fields_is_rejected() -> None:
    model = product().model()
    model.graph.initializer[0].raw_data = b"\0\0\0\0"
    with pytest.raises(StoreError, match="float_data and raw_data"):
        check(model)


def test_a_scale_with_too_few_bytes_is_rejected() -> None:
    model = product().model()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "c0"))
    model.graph.initializer[0].dims[:] = [2**40]
    with pytest.raises(StoreError, match="c0"):
        check(model)


def test_names_that_are_not_text_and_negative_sizes_are_rejected(tmp_path: Path) -> None:
    data = product().model().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"quantizelinear0", b"quantizelinea\xff0"))
    with pytest.raises(StoreError, match="not text"):
        check(tmp_path / "m.onnx")
    model = product().model()
    model.graph.initializer[0].dims[:] = [-1]
    with pytest.raises(StoreError, match="negative"):
        check(model)


def test_opsets_and_ir_versions_out_of_range_are_rejected() -> None:
    for opset in (9, 999):
        with pytest.raises(StoreError, match=f"opset {opset}"):
            check(with_opset(opset))
    model = product().model()
    model.ir_version = 999
    with pytest.raises(StoreError, match="999"):
        check(model)


def with_opset(opset: int) -> onnx.ModelProto:
    model = product().model()
    model.opset_import[0].version = opset
    return model


def test_an_invalid_graph_is_rejected() -> None:
    for damage, message in (("order", "no earlier node"), ("twice", "two nodes"), ("output", "no node computes")):
        model = product().model()
        if damage == "order":
            model.graph.node.reverse()
        elif damage == "twice":
            model.graph.node.append(model.graph.node[0])
        else:
            model.graph.output[0].name = "missing"
        with pytest.raises(StoreError, match=message):
            check(model)


def test_functions_that_call_themselves_or_grow_too_large_are_rejected() -> None:
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]

    def function(name: str, *calls: str) -> onnx.FunctionProto:
        nodes = [helper.make_node(call, ["a"], [f"b{index}"], domain="own") for index, call in enumerate(calls)]
        return helper.make_function("own", name, ["a"], ["b0"], nodes, opset)

    for functions in ([function("F", "F")], [function(f"F{n or ''}", *[f"F{n + 1}"] * 4) for n in range(12)]):
        net = Net()
        net.functions = functions
        net.op("F", net.input(1), domain="own")
        with pytest.raises(StoreError, match=r"calls itself|grow"):
            check(net.model())


def test_unknown_targets_and_versions_are_rejected() -> None:
    model = product().model()
    with pytest.raises(TargetError, match="did you mean 'tensorrt'"):
        check(model, "tensort")
    for version in (10.2, "ten", None, True, "10.x"):
        with pytest.raises(TargetError, match="version"):
            check(model, version=version)  # type: ignore[arg-type]


def test_import_scalepoint_does_not_import_the_checker_or_onnx() -> None:
    code = "import scalepoint, sys; assert not {'onnx', 'scalepoint.check'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
