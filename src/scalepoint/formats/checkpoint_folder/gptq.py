"""GPTQ: codes of 2, 3, 4 or 8 bits in words along the inputs, as AutoGPTQ began it.

    qweight int32 (in bits / 32, out)    qzeros int32 (blocks, out bits / 32)    scales float16 (blocks, out)
    g_idx int32 (in): the block of an input                             w[k, n] = scales[g, n] (q[k, n] - z[g, n])

Symmetric folders are of the first version of the format, which stores zero points less 1; with zero points of their own
they are of the second ("gptq_v2"), which stores them as they are: the first has no room for a zero point of 0.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalepoint.checkpoints import QuantizedCheckpoint, QuantizedWeight, Source
from scalepoint.checkpoints.source import HEAD_LAYERS
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
    write_json,
)
from scalepoint.numerics import QuantizationScheme, get_format
from scalepoint.spec import QuantizationSpec

NAME = "gptq"
BITS = (2, 3, 4, 8)


def check(source: Source, weight: QuantizationSpec | None, activation: QuantizationSpec | None) -> None:
    """Refuse what the format cannot hold."""
    check_source(source, NAME)
    spec = check_integers(weight, activation, NAME, BITS)
    check_blocks(source, read_block_size(spec))
    for axis in (1, 0):
        check_words(source, axis, get_format(spec.dtype).bits, NAME)


@dataclass
class _GptqLayers:
    """What was seen of the layers."""

    source: Source
    layers: dict[str, tuple[int, int, bool]] = field(default_factory=dict)  # bits, group size, symmetric
    is_first_version: bool | None = None

    def parts(self, layer: str, packed: QuantizedWeight) -> dict[str, Tensor]:
        check_integers(packed.spec, packed.activation, NAME, BITS)
        symmetric = packed.spec.qscheme != QuantizationScheme.ASYMMETRIC
        if self.is_first_version is None:
            self.is_first_version = symmetric
        group = read_block_size(packed.spec) or -1
        self.layers[layer] = packed.bits, group, symmetric
        codes, zero = packed.to_unsigned()
        return {
            "qweight": pack_bits(codes, packed.bits).T.contiguous(),
            "qzeros": pack_bits(self._stored(layer, zero).T, packed.bits),
            "scales": to_stored_scales(packed.scale, torch.float16, layer).T.contiguous(),
            "g_idx": (torch.arange(packed.codes.shape[1]) // packed.block_size).to(torch.int32),
        }

    def _stored(self, layer: str, zero: Tensor) -> Tensor:
        if not self.is_first_version:
            return zero
        if not bool((zero > 0).all()):
            raise ExportError(
                f"{layer} has a zero point of 0, which a {NAME} folder that begins with symmetric layers cannot store: "
                "quantize all layers with zero points, or none"
            )
        return zero - 1

    def finish(self, folder: Path) -> None:
        config = build_config(self.source, self.layers, self.is_first_version is not False)
        write_config(folder, self.source, config)
        write_json(folder / "quantize_config.json", config)


def build_config(source: Source, layers: dict[str, tuple[int, int, bool]], is_first_version: bool) -> dict[str, Any]:
    """The commonest settings for all; `dynamic` names layers with others, and those that stay float."""
    usual = Counter(layers.values()).most_common(1)[0][0] if layers else (4, 128, True)
    others: dict[str, dict[str, Any]] = {
        f"+:^{re.escape(layer)}$": _layer_settings(each) for layer, each in layers.items() if each != usual
    }
    kept = [
        layer
        for layer in list_float_layers(source, layers)
        if layer.rpartition(".")[2] not in (*EMBEDDINGS, *HEAD_LAYERS)
    ]
    others |= {f"-:^{re.escape(layer)}$": {} for layer in kept}
    return {
        "quant_method": NAME,
        **_layer_settings(usual),
        "desc_act": False,
        "lm_head": any(layer.rpartition(".")[2] in HEAD_LAYERS for layer in layers),
        "checkpoint_format": "gptq" if is_first_version else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": others,
    }


def _layer_settings(found: tuple[int, int, bool]) -> dict[str, Any]:
    bits, group, symmetric = found
    return {"bits": bits, "group_size": group, "sym": symmetric}


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Weights as they come, then both configs with what was seen."""
    seen = _GptqLayers(checkpoint.source)
    write_folder(checkpoint, path, seen.parts, seen.finish)


GPTQ = CheckpointFormat(
    name=NAME,
    suffix="",
    write=write,
    check=check,
    scale_dtype=torch.float16,
    summary="a folder for vLLM, GPTQModel and others: weights of 2, 3, 4 or 8 bits, float activations",
    choose_block_size=choose_block_size,
    can_quantize=can_quantize,
    tensor_bytes=tensor_bytes,
)
