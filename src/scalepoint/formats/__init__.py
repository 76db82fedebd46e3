"""File formats, one room each: how a quantized model is written for the runtimes that read it."""

from scalepoint.formats.onnx.writing import export

__all__ = ["export"]
