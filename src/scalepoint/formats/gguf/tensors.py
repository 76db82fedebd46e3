"""The tensors of a GGUF file: under its names, in its order of rows, each made when it is written.

weights of one expert each  ->  one tensor (experts, out, in)
tied heads                  ->  the embedding alone, or again where llama.cpp wants a head
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
from scalepoint.formats.gguf.block_types import BlockType, choose_block_type, pack_weight
from scalepoint.formats.gguf.layer_types import Bytes
from scalepoint.formats.gguf.metadata import count_blocks, rope_factors

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SKIPPED = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")
FLOAT32_TENSORS = re.compile(r"_norm\.weight$|\.ffn_gate_inp|^position_embd")  # float32 in llama.cpp
FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file."""

    name: str
    type: str  # as the gguf package has it
    shape: tuple[int, ...]  # of values
    make: Callable[[], Bytes]  # bytes of rows where it is quantized


def list_entries(checkpoint: QuantizedCheckpoint) -> list[TensorEntry]:
    """All tensors, in the order of the source; a name that llama.cpp does not know is refused."""
    config = checkpoint.source.config
    architecture = find_architecture(config)
    names = _name_translator(architecture, count_blocks(config))
    found: list[TensorEntry] = []
    for key, sources in _group_sources(checkpoint).items():
        name = names(key)
        if name == "output.weight" and architecture.is_tied:
            continue
        found.append(_make_entry(checkpoint, architecture, name, sources))
    written = {each.name: each for each in found}
    if architecture.is_tied is False and "output.weight" not in written:
        found.append(replace(written["token_embd.weight"], name="output.weight"))
    for name, value in rope_factors(config).items():
        found.append(TensorEntry(name, "F32", tuple(value.shape), value.numpy))
    return found


def _name_translator(architecture: Architecture, blocks: int) -> Callable[[str], str]:
    from gguf import MODEL_ARCH, get_tensor_name_map  # noqa: PLC0415  # an extra

    table = get_tensor_name_map(MODEL_ARCH[architecture.name], blocks)

    def name(key: str) -> str:
        found: str | None = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ExportError(f"{key}: llama.cpp knows no such tensor of {architecture.name}")
        return found

    return name


def _group_sources(checkpoint: QuantizedCheckpoint) -> dict[str, list[str]]:
    """A name as the table of gguf has it -> the tensors of the source that it takes, experts in their order."""
    every = {*checkpoint.source.tensors, *checkpoint.quantized, *checkpoint.changed}
    order = [*checkpoint.source.tensors, *sorted(every - checkpoint.source.tensors.keys())]
    found: dict[str, list[tuple[int, str]]] = {}
    for name in order:
        if SKIPPED.search(name):
            continue
        match = EXPERT.fullmatch(name)
        if match is None:
            found.setdefault(name, []).append((0, name))
            continue
        layer, number, rest = match.groups()
        kind, _, end = rest.partition(".")
        layer = layer.replace(".block_sparse_moe.", ".mlp.")
        found.setdefault(f"{layer}.{MIXTRAL.get(kind, kind)}.{end}", []).append((int(number), name))
    return {key: [name for _, name in sorted(each)] for key, each in found.items()}


def _make_entry(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, sources: Sequence[str]
) -> TensorEntry:
    quantized = [each in checkpoint.quantized for each in sources]
    if any(quantized) and not all(quantized):
        raise ExportError(f"{sources[quantized.index(False)]} is float, other experts of its layer are quantized: "
                          "a GGUF file has one type for all")  # fmt: skip
    if not any(quantized):
        return _make_float_entry(checkpoint, architecture, name, sources)
    kind = choose_block_type((checkpoint.quantized[each] for each in sources), sources[0])
    rows, columns = checkpoint.quantized[sources[0]].codes.shape
    shape = (rows, columns) if len(sources) == 1 else (len(sources), rows, columns)
    return TensorEntry(name, kind.name, shape, lambda: _pack_sources(checkpoint, architecture, sources, kind))


def _pack_sources(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, sources: Sequence[str], kind: BlockType
) -> Bytes:
    parts = []
    for each in sources:
        packed = checkpoint.quantized[each]
        order = _row_order(checkpoint, architecture, each, packed.codes.shape[0])
        parts.append(pack_weight(packed if order is None else _reorder_rows(packed, order), kind))
    return parts[0] if len(parts) == 1 else np.stack(parts)


def _reorder_rows(packed: QuantizedWeight, order: Tensor) -> QuantizedWeight:
    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[order]

    return replace(
        packed,
        codes=packed.codes[order],
        scale=packed.scale[order],
        zero_point=rows(packed.zero_point),
        minval=rows(packed.minval),
    )


def _row_order(checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, rows: int) -> Tensor | None:
    layer = name.rpartition(".")[0].rpartition(".")[2]
    order = architecture.rows.get(layer)
    return None if order is None else order(checkpoint.source.config, rows)


def _make_float_entry(
    checkpoint: QuantizedCheckpoint, architecture: Architecture, name: str, sources: Sequence[str]
) -> TensorEntry:
    """As the source has it; norms, biases and routers in float32."""
    stored = checkpoint.source.tensors.get(sources[0])
    first = checkpoint.tensor(sources[0]) if sources[0] in checkpoint.changed or stored is None else None
    shape, dtype = (stored.shape, stored.dtype) if first is None and stored else (first.shape, first.dtype)  # type: ignore[union-attr]
    is_wide = len(shape) == 1 or FLOAT32_TENSORS.search(name) is not None or dtype not in FLOAT_TYPES
    layer = sources[0].rpartition(".")[0].rpartition(".")[2]
    is_turned = layer in architecture.transposed and len(shape) == 2
    shape = tuple(shape[::-1]) if is_turned else tuple(shape)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        shape = shape[-1:]
    kind = torch.float32 if is_wide else dtype

    def make() -> Bytes:
        parts = []
        for each in sources:
            value = checkpoint.tensor(each)
            order = _row_order(checkpoint, architecture, each, value.shape[0])
            value = value if order is None else value[order]
            parts.append(value.T if is_turned else value)
        value = torch.stack(parts) if len(parts) > 1 else parts[0].reshape(shape)
        value = value.to(torch.float32) + architecture.norm_shift if name.endswith("_norm.weight") else value.to(kind)
        whole = value.contiguous()
        return whole.view(torch.uint8).numpy() if kind is torch.bfloat16 else whole.numpy()

    return TensorEntry(name, FLOAT_TYPES[kind], (len(sources), *shape) if len(sources) > 1 else shape, make)
