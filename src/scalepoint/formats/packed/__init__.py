"""Folders of packed weights for language models: compressed-tensors, gptq, awq."""

from scalepoint.formats.packed.compressed import COMPRESSED_TENSORS

__all__ = ["COMPRESSED_TENSORS"]
