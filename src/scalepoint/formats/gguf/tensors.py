"""List the tensors of a GGUF file: names, types and shapes first; values are computed when they are written.

The weights of single experts become one tensor (experts, out, in). A tied head is omitted, or written as a copy of the
embedding if llama.cpp needs a head.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight
from scalepoint.errors import ExportError
from scalepoint.formats.gguf.architectures import Architecture, find_architecture
from scalepoint.formats.gguf.block_codes import Bytes
from scalepoint.formats.gguf.block_types import BlockType, choose_block_type, pack_weight
from scalepoint.formats.gguf.metadata import count_blocks, rope_factors

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SKIPPED = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")
FLOAT32_TENSORS = re.compile(r"_norm\.weight$|\.ffn_gate_inp|^position_embd")  # llama.cpp needs these in float32
FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file.

    Attributes:
        name: The name in the file.
        type: The name of the type in the gguf package.
        shape: The shape of the values.
        compute: Returns the values, or the packed bytes of rows for a quantized tensor.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    compute: Callable[[], Bytes]


def list_entries(checkpoint: QuantizedCheckpoint) -> list[TensorEntry]:
    """List all tensors in the order of the source; raise ExportError for one that llama.cpp does not have."""
    config = checkpoint.source.config
    architecture = find_architecture(config)
    to_gguf_name = _name_translator(architecture, count_blocks(config))
    entries: list[TensorEntry] = []
    for key, source_names in _group_source_names(checkpoint).items():
        name = to_gguf_name(key)
        if name == "output.weight" and architecture.is_tied:
            continue
        entries.append(_make_entry(checkpoint, architecture, name, source_names))
    by_name = {entry.name: entry for entry in entries}
    if architecture.is_tied is False and "output.weight" not in by_name:
        entries.append(replace(by_name["token_embd.weight"], name="output.weight"))
    for name, value in rope_factors(config).items():
        entries.append(TensorEntry(name, "F32", tuple(value.shape), value.numpy))
    return entries


def _name_translator(architecture: Architecture, blocks: int) -> Callable[[str], str]:
    from gguf import MODEL_ARCH, get_tensor_name_map  # noqa: PLC0415  # an extra

    table = get_tensor_name_map(MODEL_ARCH[architecture.name], blocks)

    def to_gguf_name(key: str) -> str:
        name: str | None = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ExportError(f"{key}: llama.cpp has no such tensor in the architecture {architecture.name}")
        return name

    return to_gguf_name


def _group_source_names(checkpoint: QuantizedCheckpoint) -> dict[str, list[str]]:
    """Map names that the gguf package can translate to tensors of the source: one, or those of all experts in order."""
    all_names = {*checkpoint.source.tensors, *checkpoint.quantized, *checkpoint.changed}
    ordered_names = [*checkpoint.source.tensors, *sorted(all_names - checkpoint.source.tensors.keys())]
    groups: dict[str, list[tuple[int, str]]] = {}  # (expert, name)
    for name in ordered_names:
        if SKIPPED.search(name):
            continue
        match = EXPERT.fullmatch(name)
        if match is None:
            groups.setdefault(name, []).append((0, name))
            continue
        prefix, expert, rest = match.groups()
        layer, _, suffix = rest.partition(".")
        prefix = prefix.replace(".block_sparse_moe.", ".mlp.")
        groups.setdefault(f"{prefix}.{MIXTRAL.get(layer, layer)}.{suffix}", []).append((int(expert), name))
    return {key: [name for _, name in sorted(members)] for key, members in groups.items()}


def _make_entry(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, source_names: Sequence[str]
) -> TensorEntry:
    is_quantized = [source_name in checkpoint.quantized for source_name in source_names]
    if any(is_quantized) and not all(is_quantized):
        raise ExportError(
            f"{source_names[is_quantized.index(False)]} is float, other experts of its layer are quantized: a GGUF "
            "file has one type for all of them"
        )
    if not any(is_quantized):
        return _make_float_entry(checkpoint, architecture, name, source_names)
    block_type = choose_block_type(checkpoint.quantized, source_names)
    rows, columns = checkpoint.quantized[source_names[0]].codes.shape
    shape = (rows, columns) if len(source_names) == 1 else (len(source_names), rows, columns)

    def compute() -> Bytes:
        return _pack_weights(checkpoint, architecture, source_names, block_type)

    return TensorEntry(name, block_type.name, shape, compute)


def _pack_weights(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, source_names: Sequence[str], block_type: BlockType
) -> Bytes:
    packed = []
    for source_name in source_names:
        weight = checkpoint.quantized[source_name]
        order = _row_order(checkpoint, architecture, source_name, weight.codes.shape[0])
        packed.append(pack_weight(weight if order is None else _reorder_rows(weight, order), block_type))
    return packed[0] if len(packed) == 1 else np.stack(packed)


def _reorder_rows(weight: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    return replace(
        weight,
        codes=weight.codes[order],
        scale=weight.scale[order],
        zero_point=None if weight.zero_point is None else weight.zero_point[order],
        minval=None if weight.minval is None else weight.minval[order],
    )


def _row_order(checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, rows: int) -> Tensor | None:
    order_rows = architecture.row_orders.get(_layer_name(name))
    return None if order_rows is None else order_rows(checkpoint.source.config, rows)


def _layer_name(tensor: str) -> str:
    """Return the last part of a layer's path: q_proj for model.layers.0.self_attn.q_proj.weight."""
    return tensor.rpartition(".")[0].rpartition(".")[2]


def _make_float_entry(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, source_names: Sequence[str]
) -> TensorEntry:
    """Describe a float tensor, in the dtype of the source; norms, biases and routers in float32."""
    shape, source_dtype = _shape_and_dtype(checkpoint, source_names[0])
    needs_float32 = len(shape) == 1 or FLOAT32_TENSORS.search(name) is not None or source_dtype not in FLOAT_TYPES
    dtype = torch.float32 if needs_float32 else source_dtype
    is_transposed = _layer_name(source_names[0]) in architecture.transposed and len(shape) == 2
    if is_transposed:
        shape = shape[::-1]
    if name.endswith("ffn_gate_inp_shexp.weight"):  # llama.cpp has this gate as a vector
        shape = shape[-1:]

    def read_part(source_name: str) -> Tensor:
        part = checkpoint.tensor(source_name)
        order = _row_order(checkpoint, architecture, source_name, part.shape[0])
        part = part if order is None else part[order]
        return part.T if is_transposed else part

    def compute() -> Bytes:
        parts = [read_part(source_name) for source_name in source_names]
        value = torch.stack(parts) if len(parts) > 1 else parts[0].reshape(shape)
        if name.endswith("_norm.weight"):
            value = value.to(torch.float32) + architecture.norm_offset
        value = value.to(dtype).contiguous()
        return value.view(torch.uint8).numpy() if dtype is torch.bfloat16 else value.numpy()  # numpy has no bfloat16

    file_shape = (len(source_names), *shape) if len(source_names) > 1 else shape
    return TensorEntry(name, FLOAT_TYPES[dtype], file_shape, compute)


def _shape_and_dtype(checkpoint: QuantizedCheckpoint, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a float tensor; one that is not changed is not read for that."""
    stored = checkpoint.source.tensors.get(name)
    tensor = checkpoint.tensor(name) if stored is None or name in checkpoint.changed else stored
    return tuple(tensor.shape), tensor.dtype
