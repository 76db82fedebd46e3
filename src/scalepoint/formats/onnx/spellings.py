"""Other words for the same operation, where a target's compiler does better with them.

sum_before_layer_norm    Add -> LayerNormalization  becomes  Sum -> LayerNormalization

A target names the rules that it wants, each with its reason; the values are the same bit for bit.
"""

from collections.abc import Callable, Iterable
from typing import Any

from scalepoint.errors import ExportError, nearest
from scalepoint.targets.target import Spelling


def respell(model: Any, spellings: Iterable[Spelling]) -> None:
    """Apply the rules to the graph, in place."""
    for spelling in spellings:
        if spelling.name not in RULES:
            raise ExportError(f"spelling {spelling.name!r}: ONNX files have {nearest(spelling.name, RULES)}")
        RULES[spelling.name](model)


def sum_before_layer_norm(model: Any) -> None:
    """The add of two tensors that a layer norm reads, be it a residual or an embedding."""
    for norm in model.graph:
        source = norm.inputs[0].producer() if norm.op_type == "LayerNormalization" and norm.inputs[0] else None
        if source is not None and source.op_type == "Add" and source.domain == "":
            source.op_type = "Sum"


RULES: dict[str, Callable[[Any], None]] = {"sum_before_layer_norm": sum_before_layer_norm}
