"""Whether LiteRT runs a file written by its public schema, with codes and scales of our own, in integer kernels.

    pip install ai-edge-litert        # an environment of its own
    python bench/litert_road.py

For a convolution, a depthwise one and a linear layer: which operations the interpreter holds, and how many of the codes
they give equal those of exact integer arithmetic, with LiteRT's own kernels and with XNNPACK. Nothing of scalepoint is
used: docs/decisions/0017 says why files are written so.
"""

from typing import Any

import numpy as np

try:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.interpreter import Interpreter, OpResolverType
except ModuleNotFoundError:  # said by main
    schema = None

INPUT, OUTPUT = (np.float32(0.03), 5), (np.float32(0.05), -7)  # scale and zero point


class File:
    """A model of one subgraph, tensor after tensor."""

    def __init__(self) -> None:
        self.model, self.graph = schema.ModelT(), schema.SubGraphT()
        self.model.version, self.model.subgraphs = 3, [self.graph]
        self.model.buffers, self.model.operatorCodes = [schema.BufferT()], []
        self.graph.tensors, self.graph.operators = [], []

    def tensor(self, shape: Any, kind: int, data: Any = None, scale: Any = None, zero: Any = 0, axis: int = 0) -> int:
        made = schema.TensorT()
        made.name, made.shape, made.type = f"t{len(self.graph.tensors)}", np.array(shape, np.int32), kind
        if data is not None:
            held = schema.BufferT()
            held.data = np.frombuffer(data.tobytes(), np.uint8)
            self.model.buffers.append(held)
            made.buffer = len(self.model.buffers) - 1
        if scale is not None:
            told = schema.QuantizationParametersT()
            told.scale = np.atleast_1d(scale).astype(np.float32)
            told.zeroPoint, told.quantizedDimension = np.full(told.scale.shape, zero, np.int64), axis
            made.quantization = told
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def operation(self, code: int, inputs: Any, outputs: Any, kind: int = 0, options: Any = None) -> None:
        told, made = schema.OperatorCodeT(), schema.OperatorT()
        told.builtinCode, told.deprecatedBuiltinCode, told.version = code, min(code, 127), 3
        self.model.operatorCodes.append(told)
        made.opcodeIndex, made.builtinOptionsType = len(self.model.operatorCodes) - 1, kind
        made.inputs, made.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        made.builtinOptions = options
        self.graph.operators.append(made)

    def packed(self, inputs: int, outputs: int) -> bytes:
        self.graph.inputs, self.graph.outputs = np.array([inputs], np.int32), np.array([outputs], np.int32)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def layer(kind: str, rng: np.random.Generator) -> tuple[Any, Any, Any, int]:
    """A weight as LiteRT lays it out, input and output shapes, the axis of its scales."""
    if kind == "FULLY_CONNECTED":
        return rng.integers(-127, 128, (16, 64)).astype(np.int8), (8, 64), (8, 16), 0
    if kind == "DEPTHWISE_CONV_2D":
        return rng.integers(-127, 128, (1, 3, 3, 8)).astype(np.int8), (1, 10, 10, 8), (1, 8, 8, 8), 3
    return rng.integers(-127, 128, (16, 3, 3, 8)).astype(np.int8), (1, 10, 10, 8), (1, 8, 8, 16), 0


def options(kind: str) -> tuple[int, Any]:
    if kind == "FULLY_CONNECTED":
        return schema.BuiltinOptions.FullyConnectedOptions, schema.FullyConnectedOptionsT()
    is_plain = kind == "CONV_2D"
    made: Any = schema.Conv2DOptionsT() if is_plain else schema.DepthwiseConv2DOptionsT()
    made.padding, made.strideW, made.strideH = schema.Padding.VALID, 1, 1
    made.dilationWFactor = made.dilationHFactor = 1
    if is_plain:
        return schema.BuiltinOptions.Conv2DOptions, made
    made.depthMultiplier = 1
    return schema.BuiltinOptions.DepthwiseConv2DOptions, made


def exact(kind: str, codes: Any, weight: Any) -> Any:
    wide = weight.astype(np.int64)
    if kind == "FULLY_CONNECTED":
        return codes @ wide.T
    places = [(row, column) for row in range(3) for column in range(3)]
    if kind == "DEPTHWISE_CONV_2D":
        return sum(codes[:, r : r + 8, c : c + 8] * wide[0, r, c] for r, c in places)
    return sum(codes[:, r : r + 8, c : c + 8] @ wide[:, r, c].T for r, c in places)


def compared(kind: str, resolver: Any) -> str:
    rng = np.random.default_rng(0)
    weight, given, gives, axis = layer(kind, rng)
    scales = (rng.random(weight.shape[axis]) * 0.004 + 0.0005).astype(np.float32)
    bias = rng.integers(-500, 500, len(scales)).astype(np.int32)
    file, types = File(), schema.TensorType
    source, target = file.tensor(given, types.FLOAT32), file.tensor(gives, types.FLOAT32)
    codes_in = file.tensor(given, types.INT8, None, *INPUT)
    codes_out = file.tensor(gives, types.INT8, None, *OUTPUT)
    held = [
        file.tensor(weight.shape, types.INT8, weight, scales, 0, axis),
        file.tensor(bias.shape, types.INT32, bias, INPUT[0] * scales),
    ]
    operators = schema.BuiltinOperator
    file.operation(operators.QUANTIZE, [source], [codes_in])
    file.operation(getattr(operators, kind), [codes_in, *held], [codes_out], *options(kind))
    file.operation(operators.DEQUANTIZE, [codes_out], [target])
    run = Interpreter(model_content=file.packed(source, target), experimental_op_resolver_type=resolver)
    run.allocate_tensors()
    x = rng.standard_normal(given).astype(np.float32)
    run.set_tensor(source, x)
    run.invoke()
    found = np.rint(run.get_tensor(target) / OUTPUT[0]) + OUTPUT[1]
    codes = np.clip(np.rint(x / INPUT[0]) + INPUT[1], -128, 127).astype(np.int64) - INPUT[1]
    values = (exact(kind, codes, weight) + bias) * (np.float64(INPUT[0]) * scales)
    apart = np.abs(found - np.clip(np.rint(values / OUTPUT[0]) + OUTPUT[1], -128, 127))
    ran = ", ".join(sorted({each["op_name"] for each in run._get_ops_details()} - {"QUANTIZE", "DEQUANTIZE"}))
    return f"{100 * float((apart == 0).mean()):6.2f} % equal, at most {int(apart.max())} apart, {ran}"


def main() -> None:
    if schema is None:
        raise SystemExit("LiteRT is not here: pip install ai-edge-litert, in an environment of its own")
    kernels = {"own": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES, "XNNPACK": OpResolverType.AUTO}
    for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
        for name, resolver in kernels.items():
            print(f"{kind:18} {name:8} {compared(kind, resolver)}", flush=True)


if __name__ == "__main__":
    main()
