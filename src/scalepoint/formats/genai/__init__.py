"""Language models for ONNX Runtime GenAI: a folder with a graph that keeps keys and values, 4- or 8-bit weights."""

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.genai.checking import check
from scalepoint.formats.genai.layout import wider
from scalepoint.formats.genai.writing import tensor_bytes, write

ORT_GENAI = CheckpointFormat(
    name="ort-genai",
    suffix="",
    write=write,
    check=check,
    summary="A folder for ONNX Runtime GenAI: ONNX with a cache of keys and values, 2-, 4- and 8-bit weights",
    tensor_bytes=tensor_bytes,
    wider=wider,
)

__all__ = ["ORT_GENAI"]
