"""Saved files have the bytes that protobuf would write, for all kinds of tensors."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.onnx._internal.exporter._core import TorchTensor

from scalepoint.errors import ExportError
from scalepoint.formats.onnx import save

LARGE = 2000  # elements: more bytes than the checker sees


def documented(tensor):
    tensor.doc_string = "of the last layer"
    return tensor


def noted(tensor):
    tensor.metadata_props["from"] = "a test"
    return tensor


RANDOM = np.random.default_rng(0)
TENSORS = {
    "small": ir.tensor(np.arange(4, dtype=np.float32)),
    "float": ir.tensor(RANDOM.standard_normal((20, LARGE // 20)).astype(np.float32)),
    "transposed": ir.Tensor(RANDOM.standard_normal((40, LARGE // 20)).astype(np.float32).T),
    "codes": ir.tensor(RANDOM.integers(-128, 128, (3, LARGE)).astype(np.int8)),
    "int4": ir.Tensor(RANDOM.integers(-8, 8, 2 * LARGE + 1).astype(ml_dtypes.int4), dtype=ir.DataType.INT4),
    "of torch": TorchTensor(torch.randn(30, LARGE // 10)),
    "of torch, not contiguous": TorchTensor(torch.randn(30, LARGE // 10).t()),
    "bfloat16": TorchTensor(torch.randn(LARGE).to(torch.bfloat16)),
    "a scalar of a row": ir.tensor(np.ones((1, 1, LARGE), dtype=np.float64)),
    "documented": documented(ir.Tensor(np.ones(LARGE, dtype=np.float32))),
    "noted": noted(ir.Tensor(np.ones(LARGE, dtype=np.float32))),
    "of a message": ir.serde.TensorProtoTensor(onnx.numpy_helper.from_array(np.ones(LARGE, dtype=np.float32), "it")),
}


def model_of(*names):
    """One Identity per tensor, with metadata and a description, which follow the graph in the file."""
    values = [
        ir.Value(
            name=name, type=ir.TensorType(TENSORS[name].dtype), shape=TENSORS[name].shape, const_value=TENSORS[name]
        )
        for name in names
    ]
    nodes = [ir.node("Identity", [value], name=f"of {value.name}") for value in values]
    for node in nodes:
        node.outputs[0].name = f"{node.name}, given"
        node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 22}, name="g", doc_string="of g")
    return ir.Model(graph, ir_version=10, producer_name="a test", doc_string="of m", metadata_props={"a": "b"})


@pytest.mark.parametrize("names", [*((name,) for name in TENSORS), tuple(TENSORS)], ids="+".join)
def test_the_file_equals_the_serialized_message(names, tmp_path):
    path = tmp_path / "m.onnx"
    save.save_graph(model_of(*names), path)
    message = onnx.load(path)
    assert path.read_bytes() == message.SerializeToString(deterministic=True)
    assert (message.doc_string, message.graph.doc_string, message.metadata_props[0].key) == ("of m", "of g", "a")
    tensors = {tensor.name: tensor for tensor in message.graph.initializer}
    assert set(tensors) == set(names)
    for name, tensor in tensors.items():
        assert ir.serde.deserialize_tensor(tensor).tobytes() == TENSORS[name].tobytes()
        assert tensor.doc_string == (TENSORS[name].doc_string or "")


def test_a_weight_that_writes_too_few_bytes_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(TENSORS["float"], "tofile", lambda file: file.write(b"few"), raising=False)
    with pytest.raises(ExportError, match="float has 3 bytes"):
        save.save_graph(model_of("float"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
