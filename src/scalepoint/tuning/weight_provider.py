"""Weights that are lent a piece at a time, where the whole model does not fit into memory."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.walk import StreamWalk


class WeightProvider(Protocol):
    """Who has the weights of a model that is larger than memory."""

    @property
    def mark(self) -> str:
        """What tells these weights from others."""
        ...

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Write the values of parameters into them."""
        ...

    def drop(self) -> None:
        """Take the memory of all back."""
        ...


def load_weights(walk: StreamWalk, piece: Piece, lender: WeightProvider) -> None:
    """Load the weights of a piece, also those that the graph names before it."""
    nodes = [*piece.nodes, *(node for node in piece.entries if node.op == "get_attr")]
    lender.load(tensor for node in nodes for tensor in walk.get_parameters(node))


def release_weights(walk: StreamWalk, piece: Piece, lender: WeightProvider) -> None:
    """Neither its weights nor what was made of them is here any more."""
    for node in piece.nodes:
        for layer in walk.get_quantized_layers(node):
            for name in (walk.names[id(each)] for each in layer.sharing_layers):
                for owner in (walk.quantized_model, walk.float_model):
                    kept = owner.get_submodule(name)
                    assert isinstance(kept, QuantizedLayer)  # noqa: S101  # the same place in both
                    kept.discard_codes()
    lender.drop()
