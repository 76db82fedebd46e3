"""The translated graph without what a translation leaves behind: constants worked out, nodes that do nothing gone.

The passes are those of onnxscript.optimizer.optimize, in its order. Two of them do only what can matter: a rule is
asked about a node if its pattern ends in that operator, and shapes are inferred where the translation gave none.
"""

from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter._pattern_ir import NodeOutputPattern

STEPS = 2  # what a rule has made may be folded once more
LARGEST_READ, LARGEST_MADE = 8192, 512 * 512  # elements of constants that are folded


def simplify(model: Any) -> None:
    """In place."""
    rules: Any = [_Rule(rule) for rule in rewriter._DEFAULT_REWRITE_RULES]
    repeated = (
        _Fold(shape_inference=True, input_size_limit=LARGEST_READ, output_size_limit=LARGEST_MADE),
        rewriter.RewritePass(rules),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        common.InlinePass(),
        ir.passes.PassManager(repeated, steps=STEPS, early_stop=True),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


class _Rule:
    """A rule of onnxscript that looks at the operator of a node, and of those that make its inputs, before anything
    else."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        ends: Any = getattr(getattr(rule, "_target_pattern", None), "output_nodes", ())
        self.operator = _operator(ends[0]) if ends else None
        inputs: Any = () if self.operator is None else ends[0].inputs
        self.makers = [
            (at, maker)
            for at, value in enumerate(inputs)
            if isinstance(value, NodeOutputPattern) and (maker := _operator(value.producer())) is not None
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def try_rewrite(self, model: Any, graph: Any, node: Any, **said: Any) -> Any:
        if self.operator is not None and node.op_type != self.operator:
            return None
        for at, operator in self.makers:
            value = node.inputs[at] if at < len(node.inputs) else None
            maker = None if value is None else value.producer()
            if maker is None or maker.op_type != operator:
                return None
        return self.rule.try_rewrite(model, graph, node, **said)


def _operator(pattern: Any) -> str | None:
    """The one operator that a node of a pattern has, if there is one; a pattern with its operands swapped keeps it."""
    identifier = pattern.op_identifier()
    name = getattr(pattern.op, "_value", None) if identifier is None else identifier[1]
    return name if isinstance(name, str) else None


class _Fold(FoldConstantsPass):
    """Folding that infers no shape which is there already."""

    def _do_inference(self, node: Any) -> None:
        if any(value.type is None or value.shape is None for value in node.outputs):
            super()._do_inference(node)
