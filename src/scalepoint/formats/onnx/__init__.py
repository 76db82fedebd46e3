"""ONNX: real integer weights, activations between QuantizeLinear and DequantizeLinear."""
