"""The formats by name: our own, and those that other packages bring through the entry points "scalepoint.formats" (of
models) and "scalepoint.checkpoint_formats" (of language models)."""

from scalepoint.errors import UsageError
from scalepoint.extensions import Extensions
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.coreml import COREML
from scalepoint.formats.executorch import EXECUTORCH
from scalepoint.formats.format import FileFormat
from scalepoint.formats.genai import ORT_GENAI
from scalepoint.formats.gguf import GGUF
from scalepoint.formats.litert import LITERT
from scalepoint.formats.onnx import ONNX
from scalepoint.formats.packed import AWQ, COMPRESSED_TENSORS, GPTQ

_ALL = Extensions(FileFormat, "scalepoint.formats", (ONNX, EXECUTORCH, LITERT, COREML), UsageError)
_OF_CHECKPOINTS = Extensions(
    CheckpointFormat,
    "scalepoint.checkpoint_formats",
    (COMPRESSED_TENSORS, GPTQ, AWQ, ORT_GENAI, GGUF),
    UsageError,
)


def list_formats() -> list[str]:
    """All names, ours first; nothing of another package is imported."""
    return _ALL.names()


def find_format(name: str | FileFormat) -> FileFormat:
    """A format from itself or from its name."""
    if name in _OF_CHECKPOINTS.names():
        raise UsageError(f"{name!r} is a format of language models: deploy_checkpoint writes it, from a folder")
    return _ALL.find(name)


def list_checkpoint_formats() -> list[str]:
    """The names of the formats of language models, ours first."""
    return _OF_CHECKPOINTS.names()


def find_checkpoint_format(name: str | CheckpointFormat) -> CheckpointFormat:
    """A format of language models from itself or from its name."""
    return _OF_CHECKPOINTS.find(name)
