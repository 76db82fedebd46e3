"""Casts around operators that take or return float32 only, in files of a 16-bit type."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from scalepoint.formats.onnx.precision import convert_floats
from tests.onnx_reader.graphs import model_of, random


def test_a_float32_reader_behind_a_float32_result_gets_a_cast():
    text = """net (float[2, 4] x) => (float[2, 4] y, float[2, 4] values) {
        [first] codes = QuantizeLinear(x, s, z)
        [second] values = DequantizeLinear(codes, s, z)
        [third] again = QuantizeLinear(values, s, z)
        [fourth] real = DequantizeLinear(again, s, z)
        [fifth] y = Relu(real)
    }"""
    original = model_of(text, opset=13, s=np.float32(0.5), z=np.uint8(3))  # opset 13 quantizes float32 only
    model = ir.from_proto(onnx.shape_inference.infer_shapes(original))
    convert_floats(model, "float16")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"x": random(2, 4)}
    outputs, expected = (
        onnxruntime.InferenceSession(file.SerializeToString()).run(None, feeds) for file in (proto, original)
    )
    for output, array in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, array, atol=0.5)
