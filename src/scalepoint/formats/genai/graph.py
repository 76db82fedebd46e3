"""Builds an ONNX graph node by node, with the weights of a quantized checkpoint as initializers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight
from scalepoint.errors import ExportError, did_you_mean
from scalepoint.formats.genai.initializers import InitializerFile, to_array
from scalepoint.formats.genai.layout import PackedMatrix, pack_matrix, stack_matrices

MICROSOFT_DOMAIN = "com.microsoft"
ONNX_FLOAT = 1  # TensorProto.FLOAT
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: the fast kernels
BIAS_INPUT = 5  # the index of this input of MatMulNBits; the inputs before it may be empty
NAME_PREFIXES = ("", "model.", "transformer.")  # folders store the same tensor with or without one of these


def find_tensor_name(tensor: str, has_tensor: Callable[[str], bool]) -> str | None:
    """Return the name that a checkpoint uses for a tensor, or None if it has no such tensor."""
    names = [name for prefix in NAME_PREFIXES for name in (f"{prefix}{tensor}", tensor.removeprefix(prefix))]
    return next((name for name in names if has_tensor(name)), None)


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized weight among the initializers."""

    names: tuple[str, ...]  # codes, scales and, if there are any, zero points
    rows: int
    columns: int
    bits: int
    block_size: int


class GraphBuilder:
    """Collects nodes and initializers. Methods that start with `add_` return the name of the tensor they add."""

    def __init__(self, checkpoint: QuantizedCheckpoint, initializers: InitializerFile) -> None:
        self.checkpoint, self.initializers = checkpoint, initializers
        self.nodes: list[Any] = []
        self.matrices: dict[str, StoredMatrix] = {}  # by layer, or by the label of several stacked layers
        self._constants: dict[tuple[Any, ...], str] = {}

    def add_node(self, kind: str, inputs: Sequence[str], *, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        outputs = [name or f"{kind}_{len(self.nodes)}"]
        return self.add_multi_output_node(kind, inputs, outputs, domain=domain, **attributes)[0]

    def add_multi_output_node(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node, and return the names of its outputs."""
        from onnx import helper  # noqa: PLC0415  # only an export needs it

        name = f"/{outputs[0]}"
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name, domain=domain, **attributes))
        return list(outputs)

    def add_constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Add a constant; equal constants share one initializer."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializers.add(f"constant.{len(self._constants)}", array)
        return self._constants[key]

    def checkpoint_name(self, tensor: str) -> str:
        """Return the name that the checkpoint uses for a tensor; raise ExportError if it has no such tensor."""
        name = find_tensor_name(tensor, self._is_in_checkpoint)
        if name is None:
            source = self.checkpoint.source
            raise ExportError(f"{source.folder} has no tensor {tensor!r}: {did_you_mean(tensor, [*source.tensors])}")
        return name

    def has_tensor(self, tensor: str) -> bool:
        return find_tensor_name(tensor, self._is_in_checkpoint) is not None

    def _is_in_checkpoint(self, name: str) -> bool:
        checkpoint = self.checkpoint
        return name in checkpoint.source.tensors or name in checkpoint.changed or name in checkpoint.quantized

    def read_float32(self, tensor: str) -> Tensor:
        """Read a float tensor of the checkpoint as float32."""
        return self.checkpoint.tensor(self.checkpoint_name(tensor)).float()

    def add_float32(self, tensor: str, values: Tensor | None = None) -> str:
        """Add a float32 initializer: a tensor of the checkpoint, or `values` computed from it."""
        if tensor in self.initializers.tensors:
            return tensor
        return self.initializers.add(tensor, to_array(self.read_float32(tensor) if values is None else values))

    def add_float_matrix(self, layer: str, rows: Tensor | None = None) -> str:
        """Add the weight of a float layer, in 16 bits if the checkpoint has it in 16 bits; `rows` selects rows."""
        name = f"{layer}.weight"
        if name not in self.initializers.tensors:
            weight = self.checkpoint.tensor(self.checkpoint_name(name))
            weight = weight if weight.dtype in (torch.float16, torch.bfloat16) else weight.float()
            self.initializers.add(name, to_array(weight if rows is None else weight[rows]))
        return name

    def add_cast_to_float32(self, value: str, matrix: str) -> str:
        """Cast `value`, which has the dtype of the initializer `matrix`, to float32 if it is not float32."""
        if self.initializers.tensors[matrix].data_type == ONNX_FLOAT:
            return value
        return self.add_node("Cast", [value], to=ONNX_FLOAT)

    def is_quantized(self, layer: str) -> bool:
        name = f"{layer}.weight"
        return self.has_tensor(name) and self.checkpoint_name(name) in self.checkpoint.quantized

    def quantized_weight(self, layer: str) -> QuantizedWeight:
        return self.checkpoint.quantized[self.checkpoint_name(f"{layer}.weight")]

    def add_linear(
        self, value: str, layer: str, *, rows: Tensor | None = None, name: str = "", is_transposed: bool = False
    ) -> str:
        """Add value W^T + b for one layer, quantized or float.

        Args:
            value: The input.
            layer: The layer in the checkpoint.
            rows: An order for the output channels; None keeps the checkpoint's order.
            name: The name of the output.
            is_transposed: Whether the checkpoint stores a float weight as (in, out).
        """
        if not self.is_quantized(layer):
            return self._add_float_linear(value, layer, rows, name, is_transposed)
        if layer not in self.matrices:
            matrix = pack_matrix(self.quantized_weight(layer))
            self.add_matrix(layer, matrix if rows is None else matrix.select_rows(rows.numpy()))
        return self.add_product(value, layer, self.read_bias([layer], rows), name)

    def add_stacked_linear(self, value: str, layers: Sequence[str], label: str) -> str | None:
        """Add several layers with the same input as one product; return None if their layouts differ."""
        if not all(self.is_quantized(layer) for layer in layers):
            return None
        matrices = [pack_matrix(self.quantized_weight(layer)) for layer in layers]
        if len({matrix.layout for matrix in matrices}) != 1:
            return None
        self.add_matrix(label, stack_matrices(matrices))
        return self.add_product(value, label, self.read_bias(layers))

    def read_bias(self, layers: Sequence[str], rows: Tensor | None = None) -> Tensor | None:
        """Return the concatenated biases of several layers, with zeros for missing ones; None if no layer has one."""
        if not any(self.has_tensor(f"{layer}.bias") for layer in layers):
            return None
        biases = [
            self.read_float32(f"{layer}.bias") if self.has_tensor(f"{layer}.bias") else self._zero_bias(layer)
            for layer in layers
        ]
        bias = torch.cat(biases)
        return bias if rows is None else bias[rows]

    def add_matrix(self, label: str, matrix: PackedMatrix) -> StoredMatrix:
        """Add codes, scales and zero points of a quantized weight as initializers."""
        arrays = {"codes": matrix.codes, "scales": matrix.scales, "zeros": matrix.zero_points}
        names = tuple(
            self.initializers.add(f"{label}.{key}", array) for key, array in arrays.items() if array is not None
        )
        self.matrices[label] = StoredMatrix(names, matrix.rows, matrix.columns, matrix.bits, matrix.block_size)
        return self.matrices[label]

    def add_product(self, value: str, label: str, bias: Tensor | None, name: str = "") -> str:
        """Add a product with a quantized weight that `add_matrix` has stored."""
        matrix = self.matrices[label]
        inputs = [value, *matrix.names]
        if bias is not None:
            missing_inputs = [""] * (BIAS_INPUT - len(inputs))
            inputs += [*missing_inputs, self.add_float32(f"{label}.bias", bias)]
        return self.add_node(
            "MatMulNBits",
            inputs,
            name=name or f"{label}.product",
            domain=MICROSOFT_DOMAIN,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block_size,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _zero_bias(self, layer: str) -> Tensor:
        return torch.zeros(self.quantized_weight(layer).codes.shape[0])

    def _add_float_linear(
        self, value: str, layer: str, rows: Tensor | None, name: str, is_transposed: bool = False
    ) -> str:
        bias, weight = self.read_bias([layer], rows), self.add_float_matrix(layer, rows)
        product = self.add_node(
            "FusedMatMul",
            [value, self.add_cast_to_float32(weight, weight)],
            name=f"{layer}.product" if bias is not None or not name else name,
            domain=MICROSOFT_DOMAIN,
            transB=int(not is_transposed),
        )
        if bias is None:
            return product
        return self.add_node("Add", [product, self.add_float32(f"{layer}.bias", bias)], name=name or f"{layer}.sum")
