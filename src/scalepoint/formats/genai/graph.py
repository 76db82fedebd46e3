"""The graph as it grows: nodes and constants, and the weights of a checkpoint as products and look-ups."""

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

MICROSOFT = "com.microsoft"
FLOAT = 1  # as ONNX numbers types
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: the fast kernels
PREFIXES = ("", "model.", "transformer.")  # with which a folder may name the same tensor


def find_tensor_name(tensor: str, is_there: Callable[[str], bool]) -> str | None:
    """A tensor's name as a folder spells it; None: it is not there."""
    names = [name for prefix in PREFIXES for name in (f"{prefix}{tensor}", tensor.removeprefix(prefix))]
    return next((name for name in names if is_there(name)), None)


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized weight in the store."""

    names: tuple[str, ...]  # codes, scales and, where there are any, zero points
    rows: int
    columns: int
    bits: int
    block: int


class GraphBuilder:
    """Nodes in order; every method adds some and gives the name of what they make."""

    def __init__(self, checkpoint: QuantizedCheckpoint, store: InitializerFile) -> None:
        self.checkpoint, self.store = checkpoint, store
        self.nodes: list[Any] = []
        self.stored: dict[str, StoredMatrix] = {}  # by layer, or by what layers were stacked to
        self._constants: dict[tuple[Any, ...], str] = {}

    def node(self, kind: str, inputs: Sequence[str], *, name: str = "", domain: str = "", **attributes: Any) -> str:
        """One with one output, which has its name."""
        return self.node_of(kind, inputs, [name or f"{kind}_{len(self.nodes)}"], domain=domain, **attributes)[0]

    def node_of(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> list[str]:
        from onnx import helper  # noqa: PLC0415  # only an export needs it

        name = f"/{outputs[0]}"
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=name, domain=domain, **attributes))
        return list(outputs)

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Equal ones are one."""
        array = np.asarray(values, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.store.add(f"constant.{len(self._constants)}", array)
        return self._constants[key]

    def name_of(self, tensor: str) -> str:
        """As the folder calls it."""
        name = find_tensor_name(tensor, self.is_there)
        if name is None:
            known = [*self.checkpoint.source.tensors]
            raise ExportError(
                f"{self.checkpoint.source.folder} has no tensor {tensor!r}: {did_you_mean(tensor, known)}"
            )
        return name

    def has(self, tensor: str) -> bool:
        return find_tensor_name(tensor, self.is_there) is not None

    def is_there(self, name: str) -> bool:
        found = self.checkpoint
        return name in found.source.tensors or name in found.changed or name in found.quantized

    def values(self, tensor: str) -> Tensor:
        """A float tensor, in float32."""
        return self.checkpoint.tensor(self.name_of(tensor)).float()

    def floats(self, tensor: str, values: Tensor | None = None) -> str:
        """An initializer of a float tensor, or of what was made of it."""
        if tensor in self.store.tensors:
            return tensor
        return self.store.add(tensor, to_array(self.values(tensor) if values is None else values))

    def table(self, layer: str, rows: Tensor | None = None) -> str:
        """An initializer of a float matrix, in 16 bits where the checkpoint has it in 16 bits."""
        name = f"{layer}.weight"
        if name not in self.store.tensors:
            found = self.checkpoint.tensor(self.name_of(name))
            found = found if found.dtype in (torch.float16, torch.bfloat16) else found.float()
            self.store.add(name, to_array(found if rows is None else found[rows]))
        return name

    def to_float32(self, value: str, table: str) -> str:
        """What comes from a table, or the table itself, in float32."""
        return value if self.store.tensors[table].data_type == FLOAT else self.node("Cast", [value], to=FLOAT)

    def is_packed(self, layer: str) -> bool:
        name = f"{layer}.weight"
        return self.has(name) and self.name_of(name) in self.checkpoint.quantized

    def packed(self, layer: str) -> QuantizedWeight:
        return self.checkpoint.quantized[self.name_of(f"{layer}.weight")]

    def linear(self, value: str, layer: str, *, rows: Tensor | None = None, name: str = "", **kind: bool) -> str:
        """value W^T + b of one layer, quantized or float; its outputs in the order of `rows`."""
        if not self.is_packed(layer):
            return self._float_linear(value, layer, rows, name, **kind)
        if layer not in self.stored:
            found = pack_matrix(self.packed(layer))
            self.store_matrix(layer, found if rows is None else found.select_rows(rows.numpy()))
        return self.product(value, layer, self.bias([layer], rows), name)

    def stack(self, value: str, layers: Sequence[str], label: str) -> str | None:
        """Several layers of one input as one product, where their codes have one layout; else None."""
        if not all(self.is_packed(each) for each in layers):
            return None
        matrices = [pack_matrix(self.packed(each)) for each in layers]
        if len({each.kind for each in matrices}) != 1:
            return None
        self.store_matrix(label, stack_matrices(matrices))
        return self.product(value, label, self.bias(layers))

    def bias(self, layers: Sequence[str], rows: Tensor | None = None) -> Tensor | None:
        """Of one product of several layers; None where none of them has one."""
        if not any(self.has(f"{each}.bias") for each in layers):
            return None
        found = [self.values(f"{each}.bias") if self.has(f"{each}.bias") else self._none(each) for each in layers]
        together = torch.cat(found)
        return together if rows is None else together[rows]

    def store_matrix(self, label: str, weight: PackedMatrix) -> StoredMatrix:
        """Codes, scales and zero points as initializers."""
        arrays = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros}
        names = tuple(self.store.add(f"{label}.{key}", each) for key, each in arrays.items() if each is not None)
        self.stored[label] = StoredMatrix(names, weight.rows, weight.columns, weight.bits, weight.block)
        return self.stored[label]

    def product(self, value: str, label: str, bias: Tensor | None, name: str = "") -> str:
        kept = self.stored[label]
        inputs = [value, *kept.names]
        if bias is not None:
            inputs += [""] * (5 - len(inputs)) + [self.floats(f"{label}.bias", bias)]
        return self.node(
            "MatMulNBits",
            inputs,
            name=name or f"{label}.product",
            domain=MICROSOFT,
            K=kept.columns,
            N=kept.rows,
            bits=kept.bits,
            block_size=kept.block,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def _none(self, layer: str) -> Tensor:
        return torch.zeros(self.packed(layer).codes.shape[0])

    def _float_linear(self, value: str, layer: str, rows: Tensor | None, name: str, is_transposed: bool = False) -> str:
        bias, table = self.bias([layer], rows), self.table(layer, rows)
        made = self.node(
            "FusedMatMul",
            [value, self.to_float32(table, table)],
            name=f"{layer}.product" if bias is not None or not name else name,
            domain=MICROSOFT,
            transB=int(not is_transposed),
        )
        if bias is None:
            return made
        return self.node("Add", [made, self.floats(f"{layer}.bias", bias)], name=name or f"{layer}.sum")
