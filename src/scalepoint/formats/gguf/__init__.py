"""GGUF, the files of llama.cpp: our own codes and scales in its block types, with the tokenizer and all metadata."""

import torch

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.gguf.block_types import planned, snap, snap_minima, snapped, wider
from scalepoint.formats.gguf.write import check, holds, tensor_bytes, write

GGUF = CheckpointFormat(
    name="gguf",
    suffix=".gguf",
    write=write,
    check=check,
    scale_dtype=torch.float16,
    round_scales=snap,
    round_scales_and_minima=snap_minima,
    holds=holds,
    tensor_bytes=tensor_bytes,
    describe_wider_type=wider,
    summary="GGUF, for llama.cpp and what is built on it",
)

__all__ = ["GGUF", "planned", "snapped"]
