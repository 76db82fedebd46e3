"""Language models: from a checkpoint's folder to the file or folder that their runtimes read, block by block."""

from scalepoint.language.deploy import deploy_checkpoint
from scalepoint.language.streams import perplexity

__all__ = ["deploy_checkpoint", "perplexity"]
