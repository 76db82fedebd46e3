"""Reads ONNX files as modules of torch: `load_onnx`."""

from scalepoint.onnx_reader.example import TensorInfo
from scalepoint.onnx_reader.load import load_onnx
from scalepoint.onnx_reader.model import OnnxModel

__all__ = ["OnnxModel", "TensorInfo", "load_onnx"]
