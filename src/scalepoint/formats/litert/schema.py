"""LiteRtFile: builds a .tflite file from tensors, operators and buffers, by the public FlatBuffer schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalepoint.errors import ExportError, install_hint

INSTALL = install_hint("litert")
IDENTIFIER = b"TFL3"
MAX_FILE_BYTES = 2**31 - 2**20  # offsets of a FlatBuffer have 31 bits
MAX_SHARED_BYTES = 4096  # larger constants are not compared with others
DESCRIPTION_NAME = "scalepoint"  # name of the metadata entry that contains the description, as JSON
TYPES = {  # numpy name -> name in the schema
    "float32": "FLOAT32", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "bool": "BOOL",
    "uint8": "UINT8", "float16": "FLOAT16", "float64": "FLOAT64", "int4": "INT4",
}  # fmt: skip
OPTIONS = {  # operator -> class of its options
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
# The lowest version of an operator that supports what is used here: (with float tensors, with int8 tensors).
VERSIONS = {
    "ADD": (1, 2), "AVERAGE_POOL_2D": (1, 2), "CONCATENATION": (1, 2), "CONV_2D": (1, 3), "DEPTHWISE_CONV_2D": (1, 3),
    "DEQUANTIZE": (2, 2), "EMBEDDING_LOOKUP": (1, 3), "FULLY_CONNECTED": (5, 12), "GATHER": (1, 2),
    "LEAKY_RELU": (1, 2), "MAX_POOL_2D": (1, 2), "MEAN": (1, 2), "MUL": (1, 2), "PAD": (1, 2), "PADV2": (1, 2),
    "QUANTIZE": (1, 2), "RESIZE_BILINEAR": (3, 3), "RESIZE_NEAREST_NEIGHBOR": (3, 3), "SLICE": (1, 2), "SPLIT": (1, 2),
    "STRIDED_SLICE": (1, 2), "SUB": (1, 2), "TILE": (1, 1), "TRANSPOSE": (1, 2), "TRANSPOSE_CONV": (3, 3),
}  # fmt: skip


def import_schema() -> Any:
    """Import the classes that FlatBuffers generated from the schema. They are part of ai-edge-litert."""
    try:
        from ai_edge_litert import schema_py_generated  # noqa: PLC0415  # only files of LiteRT need it
    except ImportError as error:
        raise ExportError(f"target 'litert' needs ai-edge-litert ({error}): {INSTALL}") from error
    return schema_py_generated


class DynamicExtent(int):
    """An extent that depends on the batch size. Its number is the extent for the example inputs."""


@dataclass(frozen=True)
class QuantizationParameters:
    """Scale and zero point of an integer tensor: per tensor, per channel or per block."""

    scale: np.ndarray  # (), (channels,) or (out, blocks)
    zero_point: int = 0
    axis: int = 0  # of the channels
    block: int = 0  # elements per block along the last axis; 0: no blocks

    def equals(self, other: "QuantizationParameters | None") -> bool:
        if other is None or self.scale.shape != other.scale.shape:
            return False
        return self.zero_point == other.zero_point and bool((self.scale == other.scale).all())


class LiteRtFile:
    """A model with one subgraph, under construction."""

    def __init__(self) -> None:
        self.schema = import_schema()
        self.model, self.graph = self.schema.ModelT(), self.schema.SubGraphT()
        self.model.version, self.model.description = 3, "written by scalepoint"
        self.model.subgraphs, self.model.metadata = [self.graph], []
        self.model.buffers, self.model.operatorCodes = [self.schema.BufferT()], []
        self.graph.name, self.graph.tensors, self.graph.operators = "main", [], []
        self._opcode_indices: dict[tuple[str, int], int] = {}  # by name and version
        self._small_constants: dict[tuple[Any, ...], int] = {}  # by dtype, shape and bytes
        self._tensor_names: set[str] = set()

    def add_tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        quantization: QuantizationParameters | None = None,
        buffer: int = 0,
    ) -> int:
        """Add a tensor and return its index. A DynamicExtent in `shape` is dynamic in the file too."""
        tensor = self.schema.TensorT()
        tensor.name = self.unused_name(name).encode()
        tensor.shape, tensor.type = np.array(shape, np.int32), getattr(self.schema.TensorType, TYPES[dtype])
        tensor.buffer, tensor.hasRank = buffer, True
        signature = [-1 if isinstance(size, DynamicExtent) else int(size) for size in shape]
        if -1 in signature:
            tensor.shapeSignature = np.array(signature, np.int32)
        if quantization is not None and quantization.block:
            tensor.quantization = self._blockwise_parameters(name, quantization)
        elif quantization is not None:
            tensor.quantization = self._parameters(quantization)
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def _parameters(self, quantization: QuantizationParameters) -> Any:
        parameters = self.schema.QuantizationParametersT()
        parameters.scale = np.atleast_1d(quantization.scale).astype(np.float32)
        parameters.zeroPoint = np.full(parameters.scale.shape, quantization.zero_point, np.int64)
        parameters.quantizedDimension = quantization.axis
        return parameters

    def _blockwise_parameters(self, name: str, quantization: QuantizationParameters) -> Any:
        """Store the scales of blocks in a float16 tensor of shape (out, in / block)."""
        parameters, blocks = self.schema.QuantizationParametersT(), self.schema.BlockwiseQuantizationT()
        blocks.scales = self.add_constant(f"{name}.scales", quantization.scale.astype(np.float16))
        blocks.zeroPoints, blocks.blockSize = -1, quantization.block
        parameters.detailsType, parameters.details = self.schema.QuantizationDetails.BlockwiseQuantization, blocks
        return parameters

    def add_constant(
        self, name: str, data: np.ndarray, quantization: QuantizationParameters | None = None, dtype: str | None = None
    ) -> int:
        """Add a constant and return its index. Small equal constants without quantization are stored once."""
        dtype, array = dtype or str(data.dtype), np.ascontiguousarray(data)
        packed = _pack_int4(array) if dtype == "int4" else array.reshape(-1).view(np.uint8)
        is_shared = quantization is None and packed.size <= MAX_SHARED_BYTES
        key = (dtype, data.shape, packed.tobytes()) if is_shared else ()
        if key and key in self._small_constants:
            return self._small_constants[key]
        index = self.add_tensor(name, data.shape, dtype, quantization, self.add_buffer(packed))
        if key:
            self._small_constants[key] = index
        return index

    def add_buffer(self, data: np.ndarray) -> int:
        buffer = _aligned_buffer_class(self.schema)()
        buffer.data = data
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def unused_name(self, name: str) -> str:
        """Reserve and return `name`, or the first of name_1, name_2, ... that no tensor has."""
        unused, number = name, 0
        while unused in self._tensor_names:
            number += 1
            unused = f"{name}_{number}"
        self._tensor_names.add(unused)
        return unused

    def add_operator(
        self, name: str, inputs: Sequence[int], outputs: Sequence[int], is_integer: bool, options: Mapping[str, Any]
    ) -> None:
        operator = self.schema.OperatorT()
        float_version, int8_version = VERSIONS.get(name, (1, 1))
        operator.opcodeIndex = self._opcode_index(name, int8_version if is_integer else float_version)
        operator.inputs, operator.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        if name in OPTIONS:
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, OPTIONS[name])
            operator.builtinOptions = getattr(self.schema, f"{OPTIONS[name]}T")()
            for key, value in options.items():
                setattr(operator.builtinOptions, key, value)
        self.graph.operators.append(operator)

    def _opcode_index(self, name: str, version: int) -> int:
        if (name, version) not in self._opcode_indices:
            opcode = self.schema.OperatorCodeT()
            opcode.builtinCode = getattr(self.schema.BuiltinOperator, name)
            opcode.deprecatedBuiltinCode = min(opcode.builtinCode, 127)  # int8, read by old versions of LiteRT
            opcode.version = version
            self.model.operatorCodes.append(opcode)
            self._opcode_indices[name, version] = len(self.model.operatorCodes) - 1
        return self._opcode_indices[name, version]

    def serialize(self, inputs: Mapping[str, int], outputs: Mapping[str, int], description: bytes) -> bytes:
        """Return the bytes of the file, with these inputs and outputs (name -> tensor index) and this description."""
        import flatbuffers  # noqa: PLC0415  # comes with ai-edge-litert

        self.graph.inputs = np.array(list(inputs.values()), np.int32)
        self.graph.outputs = np.array(list(outputs.values()), np.int32)
        signature = self.schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
        signature.inputs, signature.outputs = self._tensor_maps(inputs), self._tensor_maps(outputs)
        self.model.signatureDefs = [signature]
        entry = self.schema.MetadataT()
        entry.name, entry.buffer = DESCRIPTION_NAME.encode(), self.add_buffer(np.frombuffer(description, np.uint8))
        self.model.metadata.append(entry)
        size = sum(len(buffer.data) for buffer in self.model.buffers if buffer.data is not None)
        if size > MAX_FILE_BYTES:
            raise ExportError(
                f"a .tflite file can be at most 2 GB large, but this model has {size / 1e9:.1f} GB of constants"
            )
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
    """Pack two codes into a byte, the first one in the low half."""
    nibbles = codes.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return (nibbles[0::2] | (nibbles[1::2] << 4)).astype(np.uint8)


def _aligned_buffer_class(schema: Any) -> Any:
    """Return a buffer class whose data start at a multiple of 16 bytes.

    The schema asks for this alignment (force_align: 16), but the generated Python classes ignore it.
    """

    class AlignedBuffer(schema.BufferT):  # type: ignore[misc]
        def Pack(self, builder: Any) -> Any:  # noqa: N802  # FlatBuffers calls this name
            # FlatBuffers builds a file from its end to its start.
            builder.StartVector(1, len(self.data), 16)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data.tobytes()
            data = builder.EndVector()
            schema.BufferStart(builder)
            schema.BufferAddData(builder, data)
            return schema.BufferEnd(builder)

    return AlignedBuffer
