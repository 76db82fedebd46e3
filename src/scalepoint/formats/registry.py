"""Finds file formats by name. The package of a format is imported when the format is used.

Other packages add formats through the entry points "scalepoint.formats" (models) and "scalepoint.checkpoint_formats"
(language models).
"""

from scalepoint.errors import UsageError
from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.format import FileFormat
from scalepoint.support.plugins import PluginRegistry

_FILE_FORMATS = PluginRegistry(
    FileFormat,
    "scalepoint.formats",
    {
        "onnx": "scalepoint.formats.onnx:ONNX",
        "executorch": "scalepoint.formats.executorch:EXECUTORCH",
        "litert": "scalepoint.formats.litert:LITERT",
        "coreml": "scalepoint.formats.apple.coreml:COREML",
        "coreai": "scalepoint.formats.apple.coreai:COREAI",
    },
    UsageError,
)
_CHECKPOINT_FORMATS = PluginRegistry(
    CheckpointFormat,
    "scalepoint.checkpoint_formats",
    {
        "compressed-tensors": "scalepoint.formats.checkpoint_folder:COMPRESSED_TENSORS",
        "gptq": "scalepoint.formats.checkpoint_folder:GPTQ",
        "awq": "scalepoint.formats.checkpoint_folder:AWQ",
        "ort-genai": "scalepoint.formats.genai:ORT_GENAI",
        "gguf": "scalepoint.formats.gguf:GGUF",
    },
    UsageError,
)


def list_formats() -> list[str]:
    """Return the names of the file formats, the built-in ones first. No format is imported."""
    return _FILE_FORMATS.names()


def find_format(name: str | FileFormat) -> FileFormat:
    """Return a file format by its name.

    Args:
        name: The name, or the format itself.
    """
    if isinstance(name, str) and name not in _FILE_FORMATS.builtin and name in _CHECKPOINT_FORMATS.names():
        raise UsageError(f"{name!r} is a format of language models: deploy_checkpoint writes it, from a folder")
    return _FILE_FORMATS.find(name)


def list_checkpoint_formats() -> list[str]:
    """Return the names of the formats of language models, the built-in ones first. No format is imported."""
    return _CHECKPOINT_FORMATS.names()


def find_checkpoint_format(name: str | CheckpointFormat) -> CheckpointFormat:
    """Return a format of language models by its name.

    Args:
        name: The name, or the format itself.
    """
    return _CHECKPOINT_FORMATS.find(name)
