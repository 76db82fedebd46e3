"""Write AWQ folders: 4-bit codes, packed into words along the outputs in the order of AWQ's matrix products ("gemm").

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
NIBBLE_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Raise TargetError if the format cannot store this model or precision."""
    check_source(source, NAME)
    spec = check_integers(weight, activation, NAME, BITS)
    check_blocks(source, read_block_size(spec))
    check_words(source, 0, 4, NAME)


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Write the weights one by one, then the config."""
    group_sizes: dict[str, int] = {}

    def convert_layer(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        check_integers(weight.spec, weight.activation, NAME, BITS)
        group_sizes[layer] = group_size = read_block_size(weight.spec) or -1
        first_layer, first_size = next(iter(group_sizes.items()))
        if group_size != first_size:
            raise ExportError(
                f"{first_layer} has blocks of {first_size}, {layer} of {group_size}: {NAME} has one size for all layers"
            )
        codes, zero_point = weight.to_unsigned()
        return {
            "qweight": _pack_nibbles(codes.T),
            "qzeros": _pack_nibbles(zero_point.T),
            "scales": to_stored_scales(weight.scale, torch.float16, layer).T.contiguous(),
        }

    def write_awq_config(folder: Path) -> None:
        float_layers = list_float_layers(checkpoint.source, group_sizes)
        config = {
            "quant_method": NAME,
            "bits": 4,
            "group_size": next(iter(group_sizes.values()), 128),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [layer for layer in float_layers if layer.rpartition(".")[2] not in EMBEDDINGS],
        }
        write_config(folder, checkpoint.source, config)

    write_folder(checkpoint, path, convert_layer, write_awq_config)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Pack rows of 4-bit codes, each eight in the order of the format."""
    rows, columns = codes.shape
    return pack_bits(codes.reshape(rows, columns // 8, 8)[..., NIBBLE_ORDER].reshape(rows, columns), 4)


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
