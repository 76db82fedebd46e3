"""Language models as folders with packed weights, which vLLM and transformers load: compressed-tensors, gptq, awq."""

from scalepoint.formats.checkpoint_folder.awq import AWQ
from scalepoint.formats.checkpoint_folder.compressed_tensors import COMPRESSED_TENSORS
from scalepoint.formats.checkpoint_folder.folder import attention_layers
from scalepoint.formats.checkpoint_folder.gptq import GPTQ

__all__ = ["AWQ", "COMPRESSED_TENSORS", "GPTQ", "attention_layers"]
