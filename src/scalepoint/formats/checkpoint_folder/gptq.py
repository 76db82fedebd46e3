"""Write GPTQ folders, the format of AutoGPTQ: codes of 2, 3, 4 or 8 bits, packed into words along the inputs.

    qweight int32 (in bits / 32, out)    qzeros int32 (blocks, out bits / 32)    scales float16 (blocks, out)
    g_idx int32 (in): the block of an input                             w[k, n] = scales[g, n] (q[k, n] - z[g, n])

The first version of the format stores zero points minus 1, so it cannot store a zero point of 0. It is used for
symmetric weights. Weights with zero points use the second version ("gptq_v2"), which stores them unchanged.
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
    """Raise TargetError if the format cannot store this model or precision."""
    check_source(source, NAME)
    spec = check_integers(weight, activation, NAME, BITS)
    check_blocks(source, read_block_size(spec))
    for axis in (1, 0):
        check_words(source, axis, get_format(spec.dtype).bits, NAME)


@dataclass(frozen=True)
class GptqSettings:
    """The settings of a layer."""

    bits: int
    group_size: int  # -1: one scale per row
    is_symmetric: bool

    def to_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size, "sym": self.is_symmetric}


@dataclass
class _GptqFolder:
    """Converts the weights of a folder, and collects their settings for the config."""

    source: Source
    layers: dict[str, GptqSettings] = field(default_factory=dict)
    is_first_version: bool | None = None  # decided by the first layer

    def convert_layer(self, layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
        check_integers(weight.spec, weight.activation, NAME, BITS)
        is_symmetric = weight.spec.qscheme != QuantizationScheme.ASYMMETRIC
        if self.is_first_version is None:
            self.is_first_version = is_symmetric
        self.layers[layer] = GptqSettings(weight.bits, read_block_size(weight.spec) or -1, is_symmetric)
        codes, zero_point = weight.to_unsigned()
        return {
            "qweight": pack_bits(codes, weight.bits).T.contiguous(),
            "qzeros": pack_bits(self._to_stored_zero_point(layer, zero_point).T, weight.bits),
            "scales": to_stored_scales(weight.scale, torch.float16, layer).T.contiguous(),
            "g_idx": (torch.arange(weight.codes.shape[1]) // weight.block_size).to(torch.int32),
        }

    def _to_stored_zero_point(self, layer: str, zero_point: Tensor) -> Tensor:
        if not self.is_first_version:
            return zero_point
        if not bool((zero_point > 0).all()):
            raise ExportError(
                f"{layer} has a zero point of 0, which a {NAME} folder that starts with symmetric layers cannot store: "
                "quantize all layers with zero points, or none"
            )
        return zero_point - 1

    def write_configs(self, folder: Path) -> None:
        config = build_config(self.source, self.layers, self.is_first_version is not False)
        write_config(folder, self.source, config)
        write_json(folder / "quantize_config.json", config)


def build_config(source: Source, layers: dict[str, GptqSettings], is_first_version: bool) -> dict[str, Any]:
    """Build quantization_config: the most common settings; `dynamic` lists layers that differ or stay float."""
    common = Counter(layers.values()).most_common(1)[0][0] if layers else GptqSettings(4, 128, True)
    dynamic: dict[str, dict[str, Any]] = {
        f"+:^{re.escape(layer)}$": settings.to_dict() for layer, settings in layers.items() if settings != common
    }
    for layer in list_float_layers(source, layers):
        if layer.rpartition(".")[2] not in (*EMBEDDINGS, *HEAD_LAYERS):
            dynamic[f"-:^{re.escape(layer)}$"] = {}
    return {
        "quant_method": NAME,
        **common.to_dict(),
        "desc_act": False,
        "lm_head": any(layer.rpartition(".")[2] in HEAD_LAYERS for layer in layers),
        "checkpoint_format": "gptq" if is_first_version else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": dynamic,
    }


def write(checkpoint: QuantizedCheckpoint, path: Path) -> None:
    """Write the weights one by one, then both configs."""
    folder = _GptqFolder(checkpoint.source)
    write_folder(checkpoint, path, folder.convert_layer, folder.write_configs)


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
