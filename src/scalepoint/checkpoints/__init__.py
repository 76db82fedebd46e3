"""Checkpoints of language models: folders that are read a tensor at a time, and what quantization made of them."""

from scalepoint.checkpoints.quantized import CacheScales, QuantizedCheckpoint, QuantizedWeight
from scalepoint.checkpoints.source import Source, StoredTensor

__all__ = ["CacheScales", "QuantizedCheckpoint", "QuantizedWeight", "Source", "StoredTensor"]
