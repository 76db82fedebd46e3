"""GGUF, the files of llama.cpp: our own codes and scales in its block types, with the tokenizer and all metadata."""

import torch

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.gguf.kinds import planned, snap, snap_minima, snapped, wider
from scalepoint.formats.gguf.writing import check, holds, tensor_bytes, write

GGUF = CheckpointFormat(
    name="gguf",
    suffix=".gguf",
    write=write,
    check=check,
    scale_dtype=torch.float16,
    snap=snap,
    snap_minima=snap_minima,
    holds=holds,
    tensor_bytes=tensor_bytes,
    wider=wider,
    summary="GGUF, for llama.cpp and what is built on it",
)

__all__ = ["GGUF", "planned", "snapped"]
