"""AWQ: 4-bit codes in words along the outputs, in the order that its matrix products want ("gemm").

qweight int32 (in, out / 8)    qzeros int32 (blocks, out / 8)    scales float16 (blocks, out)
nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of its eight    w[k, n] = scales[g, n] (q[k, n] - z[g, n])
"""

from pathlib import Path

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.errors import ExportError
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.checkpoint_folder.bit_packing import pack_bits
from scalepoint.formats.checkpoint_folder.folder import (
    EMBEDDINGS,
    can_quantize,
    check_blocks,
    check_integers,
    check_source,
    check_words,
    choose_block_size,
    list_float_layers,
    read_block_size,
    tensor_bytes,
    to_stored_scales,
    write_config,
    write_folder,
)
from scalepoint.spec import QuantizationSpec

NAME = "awq"
BITS = (4,)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Refuse what the format cannot hold."""
    check_source(source, NAME)
    spec = check_integers(weight, activation, NAME, BITS)
    check_blocks(source, read_block_size(spec))
    check_words(source, 0, 4, NAME)


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Weights as they come, then the config."""
    groups: dict[str, int] = {}

    def parts(layer: str, packed: QuantizedWeight) -> dict[str, Tensor]:
        check_integers(packed.spec, packed.activation, NAME, BITS)
        groups[layer] = group = read_block_size(packed.spec) or -1
        first, usual = next(iter(groups.items()))
        if group != usual:
            raise ExportError(f"{first} has blocks of {usual}, {layer} of {group}: {NAME} has one size for all layers")
        codes, zero = packed.to_unsigned()
        return {
            "qweight": _pack_nibbles(codes.T),
            "qzeros": _pack_nibbles(zero.T),
            "scales": to_stored_scales(packed.scale, torch.float16, layer).T.contiguous(),
        }

    def finish(folder: Path) -> None:
        kept = list_float_layers(checkpoint.source, groups)
        config = {
            "quant_method": NAME,
            "bits": 4,
            "group_size": next(iter(groups.values()), 128),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [layer for layer in kept if layer.rpartition(".")[2] not in EMBEDDINGS],
        }
        write_config(folder, checkpoint.source, config)

    write_folder(checkpoint, path, parts, finish)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Rows of nibbles, eight by eight in the order of the format."""
    rows, columns = codes.shape
    return pack_bits(codes.reshape(rows, columns // 8, 8)[..., ORDER].reshape(rows, columns), 4)


AWQ = CheckpointFormat(
    name=NAME,
    suffix="",
    write=write,
    check=check,
    scale_dtype=torch.float16,
    summary="a folder for vLLM, AutoAWQ and others: 4-bit weights with zero points, float activations",
    choose_block_size=choose_block_size,
    can_quantize=can_quantize,
    tensor_bytes=tensor_bytes,
)
