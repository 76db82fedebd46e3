"""File formats: each subpackage writes quantized models for the runtimes that read its format."""

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.export import export
from scalepoint.formats.format import ChoiceOutputs, ExportRequest, FileFormat, FileInfo, FileInput
from scalepoint.formats.metadata import check_metadata, read_value
from scalepoint.formats.registry import find_checkpoint_format, find_format, list_checkpoint_formats, list_formats

__all__ = [
    "CheckpointFormat",
    "ChoiceOutputs",
    "ExportRequest",
    "FileFormat",
    "FileInfo",
    "FileInput",
    "check_metadata",
    "export",
    "find_checkpoint_format",
    "find_format",
    "list_checkpoint_formats",
    "list_formats",
    "read_value",
]
