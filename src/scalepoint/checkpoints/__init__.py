"""Checkpoints of language models: folders that are read a tensor at a time, and what quantization made of them."""

from scalepoint.checkpoints.packed import Packed, QuantizedCheckpoint
from scalepoint.checkpoints.source import Source, Stored

__all__ = ["Packed", "QuantizedCheckpoint", "Source", "Stored"]
