"""The formats by name: our own, and those that other packages bring through the entry point "scalepoint.formats"."""

from scalepoint.errors import UsageError
from scalepoint.extensions import Extensions
from scalepoint.formats.format import FileFormat
from scalepoint.formats.onnx import ONNX

_ALL = Extensions(FileFormat, "scalepoint.formats", (ONNX,), UsageError)


def list_formats() -> list[str]:
    """All names, ours first; nothing of another package is imported."""
    return _ALL.names()


def find_format(name: str | FileFormat) -> FileFormat:
    """A format from itself or from its name."""
    return _ALL.find(name)
