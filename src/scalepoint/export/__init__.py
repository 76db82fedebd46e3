"""Export: the quantized model as the file that its target runs."""

from scalepoint.export.onnx_file import export

__all__ = ["export"]
