"""File formats, one room each: how a quantized model is written for the runtimes that read it."""

from scalepoint.formats.export import export
from scalepoint.formats.format import About, FileFormat, FileInput, Writing
from scalepoint.formats.registry import find_format, list_formats

__all__ = ["About", "FileFormat", "FileInput", "Writing", "export", "find_format", "list_formats"]
