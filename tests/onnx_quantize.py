"""The ONNX side of the comparison: one QuantizeLinear node, run by ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from scalepoint.numerics import Grid, QParams, QuantizationScheme, get_format, quantize

ONNX_TYPES = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
    "int2": TensorProto.INT2,
    "uint2": TensorProto.UINT2,
}


def runtime_codes(name: str, x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """QuantizeLinear of x in ONNX Runtime, as int32 (a Cast back to float carries sub-byte codes out)."""
    kind = ONNX_TYPES[name]
    nodes = [
        helper.make_node("Cast", ["z"], ["zero"], to=kind),
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["q"]),
        helper.make_node("Cast", ["q"], ["y"], to=TensorProto.INT32),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [None]),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("z", TensorProto.INT32, []),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT32, [None])]
    graph = helper.make_graph(nodes, "quantize", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "s": np.asarray(scale), "z": np.asarray(zero_point)})[0]


def differing_codes(name: str, values: int, generator: np.random.Generator) -> int:
    """How many of `values` random numbers get another code from us, over a few scales, ties included."""
    fmt = get_format(getattr(torch, name))
    differing = 0
    for scale in np.array([0.0173, 0.05, 1 / 3, 2.0**-5], np.float32):
        zero = int(generator.integers(fmt.low, fmt.high + 1))
        width = scale * (fmt.high - fmt.low)
        x = generator.normal(0, width / 4, values // 4).astype(np.float32)
        ties = (np.arange(-500, 500, dtype=np.float32) + np.float32(0.5)) * scale
        x[: min(len(ties), len(x))] = ties[: len(x)]
        theirs = runtime_codes(name, x, scale, np.int32(zero))
        grid = Grid(fmt, fmt.low, fmt.high, QuantizationScheme.ASYMMETRIC)
        qparams = QParams(torch.tensor([float(scale)]), torch.tensor([zero], dtype=torch.int32), torch.zeros(1))
        ours = quantize(torch.from_numpy(x), qparams, grid).numpy().astype(np.int32)
        differing += int((ours != theirs).sum())
    return differing


__all__ = ["ONNX_TYPES", "differing_codes", "runtime_codes"]
