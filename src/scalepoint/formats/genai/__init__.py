"""Language models for ONNX Runtime GenAI: a folder with an ONNX graph that has a cache of keys and values."""

from scalepoint.formats.checkpoint import CheckpointFormat
from scalepoint.formats.genai.check_support import check
from scalepoint.formats.genai.layout import describe_wider_type
from scalepoint.formats.genai.write import tensor_bytes, write

ORT_GENAI = CheckpointFormat(
    name="ort-genai",
    suffix="",
    write=write,
    check=check,
    summary="A folder for ONNX Runtime GenAI: ONNX with a cache of keys and values, 2-, 4- and 8-bit weights",
    tensor_bytes=tensor_bytes,
    describe_wider_type=describe_wider_type,
)

__all__ = ["ORT_GENAI"]
