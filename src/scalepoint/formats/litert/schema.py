"""A .tflite file by its public FlatBuffer schema: tensors, operators and buffers, put together one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalepoint.errors import ExportError, install_hint

INSTALL = install_hint("litert")
IDENTIFIER = b"TFL3"
MAX_FILE_BYTES = 2**31 - 2**20  # bytes: offsets of a FlatBuffer have 31 bits
DESCRIPTION_NAME = "scalepoint"  # the metadata in which a file says what it is
TYPES = {
    "float32": "FLOAT32", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "bool": "BOOL",
    "uint8": "UINT8", "float16": "FLOAT16", "float64": "FLOAT64", "int4": "INT4",
}  # fmt: skip
OPTIONS = {
    "ADD": "AddOptions", "ARG_MAX": "ArgMaxOptions", "AVERAGE_POOL_2D": "Pool2DOptions",
    "BATCH_MATMUL": "BatchMatMulOptions", "CAST": "CastOptions", "CONCATENATION": "ConcatenationOptions",
    "CONV_2D": "Conv2DOptions", "CUMSUM": "CumsumOptions", "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "DIV": "DivOptions", "FULLY_CONNECTED": "FullyConnectedOptions", "GATHER": "GatherOptions", "GELU": "GeluOptions",
    "LEAKY_RELU": "LeakyReluOptions", "MAX_POOL_2D": "Pool2DOptions", "MEAN": "ReducerOptions", "MUL": "MulOptions",
    "REDUCE_ANY": "ReducerOptions", "REDUCE_ALL": "ReducerOptions", "REDUCE_MAX": "ReducerOptions",
    "REDUCE_MIN": "ReducerOptions", "REDUCE_PROD": "ReducerOptions", "RESIZE_BILINEAR": "ResizeBilinearOptions",
    "RESIZE_NEAREST_NEIGHBOR": "ResizeNearestNeighborOptions", "SOFTMAX": "SoftmaxOptions",
    "STRIDED_SLICE": "StridedSliceOptions", "SUB": "SubOptions", "SUM": "ReducerOptions",
    "TRANSPOSE_CONV": "TransposeConvOptions",
}  # fmt: skip
# The first version of an operator that has what is used here: (with float tensors, with int8 ones).
VERSIONS = {
    "ADD": (1, 2), "AVERAGE_POOL_2D": (1, 2), "CONCATENATION": (1, 2), "CONV_2D": (1, 3), "DEPTHWISE_CONV_2D": (1, 3),
    "DEQUANTIZE": (2, 2), "EMBEDDING_LOOKUP": (1, 3), "FULLY_CONNECTED": (5, 12), "GATHER": (1, 2),
    "LEAKY_RELU": (1, 2), "MAX_POOL_2D": (1, 2), "MEAN": (1, 2), "MUL": (1, 2), "PAD": (1, 2), "PADV2": (1, 2),
    "QUANTIZE": (1, 2), "RESIZE_BILINEAR": (3, 3), "RESIZE_NEAREST_NEIGHBOR": (3, 3), "SLICE": (1, 2), "SPLIT": (1, 2),
    "STRIDED_SLICE": (1, 2), "SUB": (1, 2), "TILE": (1, 1), "TRANSPOSE": (1, 2), "TRANSPOSE_CONV": (3, 3),
}  # fmt: skip


def import_schema() -> Any:
    """The classes that FlatBuffers makes of the schema, which come with LiteRT."""
    try:
        from ai_edge_litert import schema_py_generated  # noqa: PLC0415  # only files of LiteRT need it
    except ImportError as error:
        raise ExportError(f"target 'litert' needs ai-edge-litert ({error}): {INSTALL}") from error
    return schema_py_generated


@dataclass(frozen=True)
class QuantizationParameters:
    """The parameters of an integer tensor: one scale and zero point, a scale each along an axis, or one a `block`."""

    scale: np.ndarray
    zero_point: int = 0
    axis: int = 0
    block: int = 0

    def is_same(self, other: "QuantizationParameters | None") -> bool:
        if other is None or self.scale.shape != other.scale.shape:
            return False
        return self.zero_point == other.zero_point and bool((self.scale == other.scale).all())


class LiteRtFile:
    """One subgraph, as it grows."""

    def __init__(self) -> None:
        self.schema = import_schema()
        self.model, self.graph = self.schema.ModelT(), self.schema.SubGraphT()
        self.model.version, self.model.description = 3, "written by scalepoint"
        self.model.subgraphs, self.model.metadata = [self.graph], []
        self.model.buffers, self.model.operatorCodes = [self.schema.BufferT()], []
        self.graph.name, self.graph.tensors, self.graph.operators = "main", [], []
        self._codes: dict[tuple[str, int], int] = {}
        self._constants: dict[tuple[Any, ...], int] = {}
        self.names: set[str] = set()

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        kind: str,
        quantized: QuantizationParameters | None = None,
        buffer: int = 0,
    ) -> int:
        """Its place. Extents that are `free` (see values.py) are so in the file too."""
        made = self.schema.TensorT()
        made.name = self.unused_name(name).encode()
        made.shape, made.type = np.array(shape, np.int32), getattr(self.schema.TensorType, TYPES[kind])
        made.buffer, made.hasRank = buffer, True
        signature = [-1 if getattr(each, "is_free", False) else int(each) for each in shape]
        if -1 in signature:
            made.shapeSignature = np.array(signature, np.int32)
        if quantized is not None:
            made.quantization = self._blocks(name, quantized) if quantized.block else self._parameters(quantized)
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def _parameters(self, quantized: QuantizationParameters) -> Any:
        parameters = self.schema.QuantizationParametersT()
        parameters.scale = np.atleast_1d(quantized.scale).astype(np.float32)
        parameters.zeroPoint = np.full(parameters.scale.shape, quantized.zero_point, np.int64)
        parameters.quantizedDimension = quantized.axis
        return parameters

    def _blocks(self, name: str, quantized: QuantizationParameters) -> Any:
        """Their scales are a tensor of float16 beside, (out, in / block)."""
        parameters, blocks = self.schema.QuantizationParametersT(), self.schema.BlockwiseQuantizationT()
        blocks.scales = self.constant(f"{name}.scales", quantized.scale.astype(np.float16))
        blocks.zeroPoints, blocks.blockSize = -1, quantized.block
        parameters.detailsType, parameters.details = self.schema.QuantizationDetails.BlockwiseQuantization, blocks
        return parameters

    def constant(
        self, name: str, data: np.ndarray, quantized: QuantizationParameters | None = None, kind: str | None = None
    ) -> int:
        """The place of a tensor that holds its values; the same values without parameters are there once."""
        kind, raw = kind or str(data.dtype), np.ascontiguousarray(data)
        packed = _pack_int4(raw) if kind == "int4" else raw.reshape(-1).view(np.uint8)
        key = (kind, data.shape, packed.tobytes()) if quantized is None and packed.size <= 4096 else ()
        if key and key in self._constants:
            return self._constants[key]
        index = self.tensor(name, data.shape, kind, quantized, self.buffer(packed))
        if key:
            self._constants[key] = index
        return index

    def buffer(self, data: np.ndarray) -> int:
        buffer = _aligned_buffer_class(self.schema)()
        buffer.data = data
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def unused_name(self, name: str) -> str:
        """The name, or the first like it that no tensor has."""
        unused, number = name, 0
        while unused in self.names:
            number += 1
            unused = f"{name}_{number}"
        self.names.add(unused)
        return unused

    def operation(
        self, name: str, inputs: Sequence[int], outputs: Sequence[int], is_integer: bool, options: Mapping[str, Any]
    ) -> None:
        operator = self.schema.OperatorT()
        version = VERSIONS.get(name, (1, 1))[is_integer]
        operator.opcodeIndex = self._code(name, version)
        operator.inputs, operator.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        if name in OPTIONS:
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, OPTIONS[name])
            operator.builtinOptions = getattr(self.schema, f"{OPTIONS[name]}T")()
            for key, value in options.items():
                setattr(operator.builtinOptions, key, value)
        self.graph.operators.append(operator)

    def _code(self, name: str, version: int) -> int:
        if (name, version) not in self._codes:
            operator_code, code = self.schema.OperatorCodeT(), getattr(self.schema.BuiltinOperator, name)
            operator_code.builtinCode, operator_code.deprecatedBuiltinCode, operator_code.version = (
                code,
                min(code, 127),
                version,
            )
            self.model.operatorCodes.append(operator_code)
            self._codes[name, version] = len(self.model.operatorCodes) - 1
        return self._codes[name, version]

    def serialize(self, inputs: Mapping[str, int], outputs: Mapping[str, int], description: bytes) -> bytes:
        """The bytes of the file: these tensors by these names, and what it says of itself."""
        import flatbuffers  # noqa: PLC0415  # comes with ai-edge-litert

        self.graph.inputs = np.array(list(inputs.values()), np.int32)
        self.graph.outputs = np.array(list(outputs.values()), np.int32)
        signature = self.schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
        signature.inputs, signature.outputs = (self._tensor_maps(each) for each in (inputs, outputs))
        self.model.signatureDefs = [signature]
        entry = self.schema.MetadataT()
        entry.name, entry.buffer = DESCRIPTION_NAME.encode(), self.buffer(np.frombuffer(description, np.uint8))
        self.model.metadata.append(entry)
        size = sum(len(each.data) for each in self.model.buffers if each.data is not None)
        if size > MAX_FILE_BYTES:
            raise ExportError(f"a .tflite file holds 2 GB at most, this model has {size / 1e9:.1f} GB of constants")
        builder = flatbuffers.Builder(size + 65_536)
        builder.Finish(self.model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def _tensor_maps(self, tensors: Mapping[str, int]) -> list[Any]:
        maps = []
        for name, index in tensors.items():
            entry = self.schema.TensorMapT()
            entry.name, entry.tensorIndex = name.encode(), index
            maps.append(entry)
        return maps


def _pack_int4(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the first in its low half."""
    flat = codes.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
    flat = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)


def _aligned_buffer_class(schema: Any) -> Any:
    """A buffer whose data begin at a multiple of 16, as the schema asks for and its Python classes forget."""

    class Aligned(schema.BufferT):  # type: ignore[misc]
        def Pack(self, builder: Any) -> Any:  # noqa: N802  # as FlatBuffers calls it
            builder.StartVector(1, len(self.data), 16)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data.tobytes()
            place = builder.EndVector()
            schema.BufferStart(builder)
            schema.BufferAddData(builder, place)
            return schema.BufferEnd(builder)

    return Aligned
