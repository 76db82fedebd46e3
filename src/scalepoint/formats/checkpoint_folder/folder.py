"""Write folders that transformers reads: weights in shards, config.json with quantization_config, tokenizer files.

The formats of packed weights share this module: which weights of a source can be packed, the checks of specs and
shapes, and how the folder is written.
"""

import json
import math
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
MAX_PARTS = 6  # tensors of one packed weight
MAX_PART_NAME = 20  # characters of the name of such a tensor
CONV1D_MODELS = ("gpt2", "openai-gpt")  # their layers store weights as (in, out)
EMBEDDINGS = (*TOKEN_EMBEDDINGS, "embed_positions", "wpe", "position_embeddings", "positions_embed")
ROUTERS = ("gate", "router", "shared_expert_gate")  # small, and loaders do not handle them as layers
BLOCK_SIZES = (256, 128, 64, 32, 16)  # common sizes of blocks

# (layer, weight) -> the stored tensors, by the last part of their names
ConvertLayer = Callable[[str, QuantizedWeight], Mapping[str, Tensor]]


def write_folder(
    checkpoint: QuantizedCheckpoint, path: Path, convert_layer: ConvertLayer, write_configs: Callable[[Path], None]
) -> None:
    """Write the folder with one weight in memory at a time; a failed write leaves nothing behind.

    Args:
        checkpoint: The quantized checkpoint.
        path: The folder.
        convert_layer: Returns the stored tensors of a quantized layer.
        write_configs: Writes the configs to a folder. Called last, because they depend on all layers.
    """
    source = checkpoint.source

    def fill(folder: Path) -> None:
        shards = ShardWriter(folder, _max_header_bytes(checkpoint))
        try:
            for name in _iterate_names(checkpoint):
                for stored_name, tensor in _convert_tensor(checkpoint, name, convert_layer):
                    shards.add(stored_name, tensor)
            shards.finish()
        finally:
            shards.abort()
        for file in source.tokenizer_files:
            shutil.copyfile(file, folder / file.name)
        write_configs(folder)

    replace_folder(path, fill)


def tensor_bytes(path: Path) -> int:
    """Return the size in bytes of all tensors of the model: its shards without their headers."""
    total = 0
    for shard in path.glob("model*.safetensors"):  # a folder may contain other files, such as adapters
        total += shard.stat().st_size - 8 - int.from_bytes(read_head(shard, 8), "little")
    return total


def attention_layers(source: Source) -> list[str]:
    """Return the paths of the attention modules in order; loaders expect the scales of the cache there."""
    matches = (ATTENTION.match(name) for name in source.tensors)
    return sorted({match[0] for match in matches if match}, key=lambda path: int(path.split(".")[-2]))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(json.dumps(value, indent=2).encode() + b"\n")


def write_config(folder: Path, source: Source, quantization: Mapping[str, Any]) -> None:
    write_json(folder / "config.json", {**source.config, "quantization_config": dict(quantization)})


def _iterate_names(checkpoint: QuantizedCheckpoint) -> Iterable[str]:
    """Yield the names of the source's tensors, then those of new tensors."""
    yield from checkpoint.source.tensors
    for name in (*checkpoint.quantized, *checkpoint.changed):
        if name not in checkpoint.source.tensors:
            yield name


def _convert_tensor(
    checkpoint: QuantizedCheckpoint, name: str, convert_layer: ConvertLayer
) -> Iterable[tuple[str, Tensor]]:
    """Return the stored tensors of a tensor of the checkpoint, with their names."""
    if name not in checkpoint.quantized:
        return [(name, checkpoint.tensor(name))]
    layer = find_layer(name, checkpoint.source)
    return [(f"{layer}.{part}", tensor) for part, tensor in convert_layer(layer, checkpoint.quantized[name]).items()]


def _max_header_bytes(checkpoint: QuantizedCheckpoint) -> int:
    """Return an upper bound for the header of one file with all tensors."""
    packed = sum(MAX_PARTS * (len(json.dumps(name)) + MAX_PART_NAME + ENTRY_BYTES) for name in checkpoint.quantized)
    return packed + sum(len(json.dumps(name)) + ENTRY_BYTES for name in checkpoint.float_names)


def find_layer(name: str, source: Source) -> str:
    """Return the layer that a weight belongs to; raise ExportError for a tensor that cannot be packed."""
    layer = name.removesuffix(WEIGHT)
    if layer == name:
        raise ExportError(f"{name} is not the weight of a layer (its name does not end with {WEIGHT}): leave it float")
    last = layer.rpartition(".")[2]
    if last in EMBEDDINGS:
        raise ExportError(f"{name} is an embedding, which this format cannot quantize: leave it float")
    if last in ROUTERS:
        raise ExportError(f"{name} routes tokens to experts, which this format cannot quantize: leave it float")
    if last in HEAD_LAYERS and is_tied(source):
        raise ExportError(f"{name} is tied to the embedding, which stays float: leave it float, or untie the two")
    return layer


def can_quantize(source: Source, name: str) -> bool:
    """Whether packed formats can quantize a tensor of the source."""
    stored = source.tensors.get(name)
    if stored is None or len(stored.shape) != 2 or not stored.dtype.is_floating_point or not name.endswith(WEIGHT):
        return False
    last = name.removesuffix(WEIGHT).rpartition(".")[2]
    return last not in (*EMBEDDINGS, *ROUTERS) and not (last in HEAD_LAYERS and is_tied(source))


def is_tied(source: Source) -> bool:
    """Whether the head has no weight of its own."""
    has_head = any(name.removesuffix(WEIGHT).rpartition(".")[2] in HEAD_LAYERS for name in source.tensors)
    return bool(source.config.get("tie_word_embeddings", False)) or not has_head


def list_matrices(source: Source) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every layer whose weight is a matrix."""
    has_conv1d = source.model_type in CONV1D_MODELS
    shapes: dict[str, tuple[int, int]] = {}
    for name, stored in source.tensors.items():
        if name.endswith(WEIGHT) and len(stored.shape) == 2 and stored.dtype.is_floating_point:
            layer = name.removesuffix(WEIGHT)
            rows, columns = stored.shape
            is_transposed = has_conv1d and layer.rpartition(".")[2] not in (*EMBEDDINGS, *HEAD_LAYERS)
            shapes[layer] = (columns, rows) if is_transposed else (rows, columns)
    return shapes


def list_quantizable(source: Source) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every layer that packed formats can quantize: no embeddings, routers and tied heads."""
    return {layer: shape for layer, shape in list_matrices(source).items() if can_quantize(source, layer + WEIGHT)}


def list_float_layers(source: Source, quantized_layers: Iterable[str]) -> list[str]:
    """Return the layers with a matrix that stay float, and all names of a float head.

    A tied head is not stored, and a loader may use another name than the source (embed_out of GPT-NeoX is lm_head in
    transformers 5).
    """
    quantized = set(quantized_layers)
    float_layers = [layer for layer in list_matrices(source) if layer not in quantized]
    if any(layer.rpartition(".")[2] in HEAD_LAYERS for layer in quantized):
        return float_layers
    return float_layers + [head for head in HEAD_LAYERS if head not in float_layers]


def check_source(source: Source, format_name: str) -> None:
    """Raise TargetError if the source is already quantized, or has nothing to quantize."""
    if "quantization_config" in source.config:
        raise TargetError(f"{source.folder} is already quantized (quantization_config): pass the float checkpoint")
    if not list_quantizable(source):
        raise TargetError(
            f"{source.folder} has no layer whose weight is a matrix named *{WEIGHT}, so {format_name} has nothing to "
            "quantize"
        )


def read_block_size(weight: QuantizationSpec) -> int | None:
    """Return the block size along the inputs; None for scales per row or per tensor."""
    granularity = weight.granularity
    if not isinstance(granularity, PerBlockGranularity):
        return None
    size = granularity.block_size
    if granularity.pad or granularity.axis == 0 or not isinstance(size, int):
        raise TargetError(
            f"packed formats need blocks of one size along the inputs, got {granularity}: use "
            "PerBlockGranularity(axis=1, block_size=128)"
        )
    return size


def check_integers(
    weight: QuantizationSpec | None, activation: QuantizationSpec | None, format_name: str, bits: tuple[int, ...]
) -> QuantizationSpec:
    """Return the weight's spec; raise TargetError unless it has integers of these widths and the input is float."""
    if weight is None:
        raise TargetError(f"{format_name} stores quantized weights: pass a spec for weights")
    if activation is not None:
        raise TargetError(
            f"{format_name} needs float activations, got {dtype_name(activation.dtype)}: omit activation=, or use the "
            "target compressed-tensors"
        )
    number_format = get_format(weight.dtype)
    if number_format.is_float or number_format.bits not in bits:
        raise TargetError(
            f"{format_name} has no {number_format.name} weights: use integers of {', '.join(map(str, bits))} bits, or "
            "the target compressed-tensors"
        )
    if weight.qformulation != QuantizationFormulation.ZP:
        raise TargetError(f"{format_name} does not support qformulation={weight.qformulation}: use qformulation='zp'")
    granularity = weight.granularity
    is_per_row = isinstance(granularity, PerChannelGranularity) and granularity.axis in (None, 0, -2)
    if read_block_size(weight) is None and not is_per_row:
        raise TargetError(f"{format_name} needs scales per block along the inputs or per row, got {granularity}")
    return weight


def choose_block_size(source: Source, max_size: int) -> int:
    """Return the largest common block size up to `max_size` that divides the inputs of every layer, or `max_size`."""
    inputs = {columns for _, columns in list_quantizable(source).values()}
    for size in BLOCK_SIZES:
        if size <= max_size and not any(columns % size for columns in inputs):
            return size
    return max_size


def check_blocks(source: Source, block_size: int | None) -> None:
    """Raise TargetError if blocks do not divide the inputs of a layer."""
    if block_size is None:
        return
    inputs = {layer: columns for layer, (_, columns) in list_quantizable(source).items()}
    not_divided = {layer: columns for layer, columns in inputs.items() if columns % block_size}
    if not_divided:
        layer, columns = next(iter(not_divided.items()))
        sizes = [size for size in BLOCK_SIZES if not any(columns % size for columns in inputs.values())]
        hint = f"use blocks of {', '.join(map(str, sizes))}" if sizes else "use per_channel, as no common size does"
        raise TargetError(
            f"blocks of {block_size} do not divide the {columns} inputs of {layer} ({len(not_divided)} such layers): "
            f"{hint}"
        )


def check_words(source: Source, axis: int, bits: int, format_name: str) -> None:
    """Raise TargetError unless the codes fill whole 32-bit words along the outputs (axis 0) or inputs (axis 1)."""
    for layer, shape in list_quantizable(source).items():
        if shape[axis] * bits % 32:
            raise TargetError(
                f"{layer} has {shape[axis]} {('outputs', 'inputs')[axis]}: {format_name} packs {bits}-bit codes into "
                f"32-bit words along them, so their number must be a multiple of {math.lcm(bits, 32) // bits}. Use "
                "another format (gguf, onnx), or 8 bits"
            )


def to_stored_scales(scale: Tensor, dtype: torch.dtype, layer: str) -> Tensor:
    """Convert scales to the dtype that the format stores; raise ExportError if this would round them."""
    narrow = scale.to(dtype)
    if not torch.equal(narrow.to(torch.float32), scale.to(torch.float32)):
        raise ExportError(
            f"{layer}: its scales are not exact in {dtype_name(dtype)}, which the format stores: round them before "
            "codes are chosen"
        )
    return narrow
