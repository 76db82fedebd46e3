"""Export: the quantized model as the file that its target runs."""

from scalepoint.exporting.onnx_file import export

__all__ = ["export"]
