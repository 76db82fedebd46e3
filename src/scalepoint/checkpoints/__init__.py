"""Checkpoints of language models: folders that are read a tensor at a time, and what quantization made of them."""

from scalepoint.checkpoints.packed import Cache, Packed, QuantizedCheckpoint
from scalepoint.checkpoints.source import Source, Stored

__all__ = ["Cache", "Packed", "QuantizedCheckpoint", "Source", "Stored"]
