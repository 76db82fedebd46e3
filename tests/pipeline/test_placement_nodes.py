"""The placement graph: layers under their own names, each in the precision that it runs in."""

import torch
from torch import nn

from scalepoint.pipeline.placement_nodes import build_placement_nodes
from scalepoint.quantize import QuantConfig, calibrate, coverage, insert_qdq
from scalepoint.transformation import transform


class Encoder(nn.Module):
    """Attention and moves as functions, so that most nodes have no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.norm(self.words(tokens))
        q, k, v = (
            projection(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.head(x + mixed)


def quantized(model, x):
    result = transform(model.eval(), x, target="onnxruntime")
    model_with_stubs = insert_qdq(result.model, result.matches, QuantConfig())
    return calibrate(model_with_stubs, [x], progress=False)


def test_quantized_layers_are_not_called_float(model, data):
    quantized_model = quantized(model, data[0])
    nodes = {node.name: node for node in build_placement_nodes(quantized_model)}
    for row in coverage(quantized_model).operations:
        assert nodes[row.name].precision == row.precision
    assert not any("quant" in node.kind for node in nodes.values())


def test_moves_and_stubs_are_not_shown_and_edges_pass_through_them():
    quantized_model = quantized(Encoder(), torch.randint(0, 20, (2, 6)))
    nodes = {node.name: node for node in build_placement_nodes(quantized_model)}
    assert list(nodes) == ["tokens", "words", "norm", "query", "key", "value", "attention", "add", "head"]
    assert nodes["query"].codes == nodes["query"].inputs == ("norm",)
    assert set(nodes["attention"].inputs) == {"query", "key", "value"}
    assert (nodes["attention"].codes, nodes["attention"].precision) == ((), "float")
    assert nodes["head"].kind == "linear"


def test_reasons_are_readable_sentences():
    rows = coverage(quantized(Encoder(), torch.randint(0, 20, (2, 6)))).operations
    reasons = {row.name: row.reason for row in rows if row.precision == "float"}
    assert set(reasons) == {"words", "norm", "attention"}
    assert not any("Pattern" in reason or "Q/DQ" in reason for reason in reasons.values())
    assert not any(row.is_asked for row in rows)
    assert all(row.is_meant for row in rows if row.name in reasons)
