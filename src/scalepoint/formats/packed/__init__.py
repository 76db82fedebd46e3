"""Folders of packed weights for language models: compressed-tensors, gptq, awq."""

from scalepoint.formats.packed.awq import AWQ
from scalepoint.formats.packed.compressed import COMPRESSED_TENSORS
from scalepoint.formats.packed.folder import attention_layers
from scalepoint.formats.packed.gptq import GPTQ

__all__ = ["AWQ", "COMPRESSED_TENSORS", "GPTQ", "attention_layers"]
