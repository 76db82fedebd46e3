"""Checkpoints of language models: folders that are read one tensor at a time, and their quantized weights."""

from scalepoint.checkpoints.quantized import CacheScales, QuantizedCheckpoint, QuantizedWeight
from scalepoint.checkpoints.source import Source, StoredTensor

__all__ = ["CacheScales", "QuantizedCheckpoint", "QuantizedWeight", "Source", "StoredTensor"]
