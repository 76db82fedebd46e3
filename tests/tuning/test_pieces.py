"""Pieces come from the graph: whole residual blocks, a few layers of a chain, and masks do not prevent a cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scalepoint.quantize import quantize
from scalepoint.tuning.pieces import cut_into_pieces
from scalepoint.tuning.walk import StreamWalk


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3), Block(), Block()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.two(self.one(F.relu(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, mask):
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2) + mask
        x = x + self.o(torch.softmax(scores, -1) @ self.v(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = nn.Linear(16, 16), Attention(), Attention()

    def forward(self, x, mask):
        x = self.stem(x)
        mask = (1.0 - mask[:, None, :]) * -10.0
        return self.two(self.one(x, mask), mask)


def layers(model, inputs, unit, **options):
    quantized = quantize(model.eval(), inputs, forward_loop=[inputs], progress=False, **options)
    walk = StreamWalk(quantized, memory=10**8)
    pieces = cut_into_pieces(walk.graph, walk.same_nodes, lambda node: walk.get_layer(node) is not None, unit)
    nodes = [node for piece in pieces for node in piece.nodes]
    assert nodes == [node for node in walk.graph.nodes if node.op not in ("placeholder", "output")]
    return [
        [walk.get_layer(node).path.rsplit(".", 1)[0] for node in piece.nodes if walk.get_layer(node)]
        for piece in pieces
    ]


@pytest.mark.parametrize("target", [None, "onnxruntime"])
def test_a_residual_block_is_one_piece(target):
    pieces = layers(Residual(), torch.randn(2, 3, 10, 10), "block", target=target)
    assert [len(piece) for piece in pieces] == [3, 2, 1]


def test_attention_and_mlp_are_pieces_and_a_mask_may_cross_the_cut():
    inputs = (torch.randn(2, 5, 16), torch.ones(2, 5))
    pieces = layers(Encoder(), inputs, "block", target="onnxruntime")
    assert [len(piece) for piece in pieces] == [5, 2, 4, 2]


def test_unit_layer_has_one_layer_per_piece_and_unit_model_one_piece():
    inputs = torch.randn(2, 3, 10, 10)
    assert [len(piece) for piece in layers(Residual(), inputs, "layer")] == [1] * 6
    assert [len(piece) for piece in layers(Residual(), inputs, "model")] == [6]
