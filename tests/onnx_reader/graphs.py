"""Small ONNX models, written as text."""

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser


def model_of(text: str, opset: int = 18, domains: tuple[str, ...] = (), **constants: np.ndarray) -> ModelProto:
    """Parse `name (inputs) => (outputs) { nodes }` and add initializers."""
    imports = ", ".join([f'"": {opset}', *(f'"{domain}": 1' for domain in domains)])
    model = parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\n{text}")
    for name, values in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name.replace("__", ".")))
    return model


def save(model: ModelProto, path) -> str:
    onnx.save(model, str(path))
    return str(path)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
