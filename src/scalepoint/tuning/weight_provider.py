"""Weights that are loaded one piece at a time, for models that do not fit into memory."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.walk import StreamWalk


class WeightProvider(Protocol):
    """Has the weights of a model whose parameters have no values yet."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights."""
        ...

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Write the values of these parameters into them."""
        ...

    def drop(self) -> None:
        """Release the memory of all loaded parameters."""
        ...


def load_weights(walk: StreamWalk, piece: Piece, provider: WeightProvider) -> None:
    """Load the weights of a piece, including those that `get_attr` nodes before it refer to."""
    nodes = [*piece.nodes, *(node for node in piece.entries if node.op == "get_attr")]
    provider.load(tensor for node in nodes for tensor in walk.get_parameters(node))


def release_weights(walk: StreamWalk, piece: Piece, provider: WeightProvider) -> None:
    """Drop all loaded weights, and everything that the layers of this piece computed from them.

    The float model of the walk is a copy of the quantized model with its quantizers disabled: it has the same layers.
    """
    for node in piece.nodes:
        for layer in walk.get_quantized_layers(node):
            for path in (walk.names[id(sharing)] for sharing in layer.sharing_layers):
                for model in (walk.quantized_model, walk.float_model):
                    module = model.get_submodule(path)
                    assert isinstance(module, QuantizedLayer)  # noqa: S101  # both models have the same modules
                    module.reset()
    provider.drop()
