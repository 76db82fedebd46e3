"""GGUF, the files of llama.cpp: our codes and scales in its block types, with the tokenizer and all metadata."""

import torch

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.gguf.block_types import (
    describe_wider_type,
    plan_block_type,
    round_scales,
    round_scales_and_minima,
    round_to_block_type,
)
from scalepoint.formats.gguf.write import can_quantize, check, tensor_bytes, write

GGUF = CheckpointFormat(
    name="gguf",
    suffix=".gguf",
    write=write,
    check=check,
    scale_dtype=torch.float16,
    round_scales=round_scales,
    round_scales_and_minima=round_scales_and_minima,
    can_quantize=can_quantize,
    tensor_bytes=tensor_bytes,
    describe_wider_type=describe_wider_type,
    summary="GGUF, for llama.cpp and programs built on it",
)

__all__ = ["GGUF", "plan_block_type", "round_to_block_type"]
