"""A folder as transformers reads it: weights in shards, config.json with quantization_config, the tokenizer as it was.

What the formats of packed weights share: which weights of a source can be packed, and how the folder is filled.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.checkpoints.source import HEAD_LAYERS, TOKEN_EMBEDDINGS
from scalepoint.errors import ExportError, TargetError
from scalepoint.formats.checkpoint_folder.shards import ENTRY_BYTES, ShardWriter
from scalepoint.numerics import QuantizationFormulation, dtype_name, get_format
from scalepoint.spec import PerBlockGranularity, PerChannelGranularity, QuantizationSpec
from scalepoint.support.files import replace_folder
from scalepoint.support.untrusted import read_head

WEIGHT = ".weight"
ATTENTION = re.compile(r".*\.layers\.\d+\.self_attn(?=\.)")
MAX_PARTS = 6  # of one packed weight at most
MAX_PART_NAME = 20
CONV1D = ("gpt2", "openai-gpt")  # whose layers keep weights as (in, out)
EMBEDDINGS = (*TOKEN_EMBEDDINGS, "embed_positions", "wpe", "position_embeddings", "positions_embed")
ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts: small, and no layer of their own to loaders
BLOCK_SIZES = (256, 128, 64, 32, 16)  # of blocks, as people choose them

StoreLayer = Callable[
    [str, QuantizedWeight], Mapping[str, Tensor]
]  # the layer, its weight -> tensors by the last word of their names


def write_folder(
    checkpoint: QuantizedCheckpoint, path: Path, parts: StoreLayer, finish: Callable[[Path], None]
) -> None:
    """Fill the folder a tensor at a time; `finish` writes the configs, when all layers were seen."""
    source = checkpoint.source

    def fill(folder: Path) -> None:
        shards = ShardWriter(folder, _max_header_bytes(checkpoint))
        try:
            for name in _list_names(checkpoint):
                for full, tensor in _iterate_stored(checkpoint, name, parts):
                    shards.add(full, tensor)
            shards.finish()
        finally:
            shards.abort()
        for file in source.tokenizer_files:
            shutil.copyfile(file, folder / file.name)
        finish(folder)

    replace_folder(path, fill)


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of the model in a folder: its shards without their headers."""
    total = 0
    for shard in path.glob("model*.safetensors"):  # a folder may contain others, such as adapters
        total += shard.stat().st_size - 8 - int.from_bytes(read_head(shard, 8), "little")
    return total


def attention_layers(source: Source) -> list[str]:
    """Where loaders look for what belongs to the keys and values of each block."""
    found = (ATTENTION.match(name) for name in source.tensors)
    return sorted({each[0] for each in found if each}, key=lambda name: int(name.split(".")[-2]))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_config(folder: Path, source: Source, quantization: Mapping[str, Any]) -> None:
    write_json(folder / "config.json", {**source.config, "quantization_config": dict(quantization)})


def _list_names(checkpoint: QuantizedCheckpoint) -> Iterable[str]:
    """As the source has them; then what it has not."""
    yield from checkpoint.source.tensors
    for name in (*checkpoint.quantized, *checkpoint.changed):
        if name not in checkpoint.source.tensors:
            yield name


def _iterate_stored(checkpoint: QuantizedCheckpoint, name: str, parts: StoreLayer) -> Iterable[tuple[str, Tensor]]:
    if name not in checkpoint.quantized:
        return [(name, checkpoint.tensor(name))]
    layer = find_layer(name, checkpoint.source)
    return [(f"{layer}.{part}", tensor) for part, tensor in parts(layer, checkpoint.quantized[name]).items()]


def _max_header_bytes(checkpoint: QuantizedCheckpoint) -> int:
    """What the header of one file for all would take at most."""
    packed = sum(MAX_PARTS * (len(json.dumps(name)) + MAX_PART_NAME + ENTRY_BYTES) for name in checkpoint.quantized)
    return packed + sum(len(json.dumps(name)) + ENTRY_BYTES for name in checkpoint.float_names)


def find_layer(name: str, source: Source) -> str:
    """The layer whose weight this is; ExportError for a tensor that no packed format can hold."""
    layer = name.removesuffix(WEIGHT)
    if layer == name:
        raise ExportError(f"{name} is not the weight of a layer (its name ends otherwise): leave it float")
    last = layer.rpartition(".")[2]
    if last in EMBEDDINGS:
        raise ExportError(f"{name} is an embedding, which this format keeps float: leave it float")
    if last in ROUTERS:
        raise ExportError(f"{name} routes to experts, which this format keeps float: leave it float")
    if last in HEAD_LAYERS and is_tied(source):
        raise ExportError(f"{name} is tied to the embedding, which stays float: leave it float, or untie the two")
    return layer


def can_quantize(source: Source, name: str) -> bool:
    """Whether a tensor of the source is one that packed formats take."""
    stored = source.tensors.get(name)
    last = name.removesuffix(WEIGHT).rpartition(".")[2]
    is_matrix = stored is not None and len(stored.shape) == 2 and stored.dtype.is_floating_point
    is_taken = last not in (*EMBEDDINGS, *ROUTERS) and not (last in HEAD_LAYERS and is_tied(source))
    return is_matrix and name.endswith(WEIGHT) and is_taken


def is_tied(source: Source) -> bool:
    """Whether the head has no weight of its own."""
    own = any(name.removesuffix(WEIGHT).rpartition(".")[2] in HEAD_LAYERS for name in source.tensors)
    return bool(source.config.get("tie_word_embeddings", False)) or not own


def list_matrices(source: Source) -> dict[str, tuple[int, int]]:
    """Every layer with a matrix, and its (out, in)."""
    turned = source.model_type in CONV1D
    found: dict[str, tuple[int, int]] = {}
    for name, stored in source.tensors.items():
        if name.endswith(WEIGHT) and len(stored.shape) == 2 and stored.dtype.is_floating_point:
            layer = name.removesuffix(WEIGHT)
            rows, columns = stored.shape
            is_turned = turned and layer.rpartition(".")[2] not in (*EMBEDDINGS, *HEAD_LAYERS)
            found[layer] = (columns, rows) if is_turned else (rows, columns)
    return found


def list_quantizable(source: Source) -> dict[str, tuple[int, int]]:
    """The layers that a packed format takes, with (out, in): no embeddings, no head that is tied to one."""
    return {layer: shape for layer, shape in list_matrices(source).items() if can_quantize(source, layer + WEIGHT)}


def list_float_layers(source: Source, packed: Iterable[str]) -> list[str]:
    """Layers with a matrix that stay float. A float head is named in all ways: a tied one is not stored, and a loader
    may call it otherwise than the source does (embed_out of GPT-NeoX is lm_head in transformers 5)."""
    taken = set(packed)
    kept = [layer for layer in list_matrices(source) if layer not in taken]
    is_float = not any(layer.rpartition(".")[2] in HEAD_LAYERS for layer in taken)
    return kept + [head for head in HEAD_LAYERS if is_float and head not in kept]


def check_source(source: Source, name: str) -> None:
    if "quantization_config" in source.config:
        raise TargetError(f"{source.folder} is quantized already (it has a quantization_config): give the float one")
    if not list_quantizable(source):
        raise TargetError(f"{source.folder} has no layer with a matrix in a tensor named *{WEIGHT}: {name} packs those")


def read_block_size(weight: QuantizationSpec) -> int | None:
    """The block size along the inputs; None for a scale a row or for all."""
    granularity = weight.granularity
    if not isinstance(granularity, PerBlockGranularity):
        return None
    size = granularity.block_size
    if granularity.pad or granularity.axis == 0 or not isinstance(size, int):
        raise TargetError(
            f"blocks of {granularity}: packed formats have blocks of one size along the inputs: "
            "PerBlockGranularity(axis=1, block_size=128)"
        )
    return size


def check_integers(
    weight: QuantizationSpec | None, activation: QuantizationSpec | None, name: str, bits: tuple[int, ...]
) -> QuantizationSpec:
    """Weights of these widths alone, with blocks or a scale a row."""
    if weight is None:
        raise TargetError(f"{name} stores quantized weights: give a spec for them")
    if activation is not None:
        raise TargetError(
            f"{name} has float activations, not {dtype_name(activation.dtype)}: leave them away, or use the target "
            "compressed-tensors"
        )
    row = get_format(weight.dtype)
    if row.is_float or row.bits not in bits:
        raise TargetError(
            f"{name} has no {row.name} weights: integers of {', '.join(map(str, bits))} bits it has; others are in "
            "compressed-tensors"
        )
    if weight.qformulation != QuantizationFormulation.ZP:
        raise TargetError(f"{name} has zero points, not {weight.qformulation}: use qformulation='zp'")
    granularity = weight.granularity
    is_row = isinstance(granularity, PerChannelGranularity) and granularity.axis in (None, 0, -2)
    if read_block_size(weight) is None and not is_row:
        raise TargetError(f"{name} has blocks along the inputs or a scale a row, not {granularity}")
    return weight


def choose_block_size(source: Source, most: int) -> int:
    """The largest size of blocks up to `most` that divides the inputs of every layer; `most` itself where none does."""
    inputs = {columns for _, columns in list_quantizable(source).values()}
    return next((size for size in BLOCK_SIZES if size <= most and not any(each % size for each in inputs)), most)


def check_blocks(source: Source, block: int | None) -> None:
    """Blocks must divide the inputs of every layer."""
    if block is None:
        return
    inputs = {layer: columns for layer, (_, columns) in list_quantizable(source).items()}
    wrong = {layer: columns for layer, columns in inputs.items() if columns % block}
    if wrong:
        layer, columns = next(iter(wrong.items()))
        fits = [size for size in BLOCK_SIZES if not any(columns % size for columns in inputs.values())]
        allowed = f"blocks of {', '.join(map(str, fits))} do" if fits else "no common size does: use per_channel"
        raise TargetError(
            f"blocks of {block} do not divide the {columns} inputs of {layer} ({len(wrong)} such layers): {allowed}"
        )


def check_words(source: Source, axis: int, bits: int, format_name: str) -> None:
    """Whole 32-bit words along the outputs (axis 0) or the inputs (1) of every layer."""
    for layer, shape in list_quantizable(source).items():
        if shape[axis] * bits % 32:
            raise TargetError(
                f"{layer} has {shape[axis]} {('outputs', 'inputs')[axis]}: {format_name} packs {bits}-bit codes in "
                f"32-bit words along them, so their number must be a multiple of {_min_columns(bits)}. Leave it "
                "to another format (gguf, onnx), or choose 8 bits"
            )


def _min_columns(bits: int) -> int:
    count = 1
    while count * bits % 32:
        count += 1
    return count


def to_stored_scales(scale: Tensor, dtype: torch.dtype, layer: str) -> Tensor:
    """Scales in the type that the format stores; they must have been rounded to it before codes were chosen."""
    narrow = scale.to(dtype)
    if not torch.equal(narrow.to(torch.float32), scale.to(torch.float32)):
        raise ExportError(
            f"{layer}: its scales are no {dtype_name(dtype)} numbers, which is what the format stores: "
            "round them first, a format rounds nothing"
        )
    return narrow
