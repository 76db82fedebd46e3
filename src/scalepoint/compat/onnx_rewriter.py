"""Simplifies a translated ONNX graph: folds constants, applies rewrite rules, removes unused nodes.

The passes are those of onnxscript.optimizer.optimize (onnxscript 0.7), in the same order. Two of them do less work: a
rewrite rule is tried on a node only if its pattern can end in that node, and the shapes of a node are inferred once for
all nodes with the same operator, attributes and inputs, because the blocks of a network repeat. The graph is the same.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter._pattern_ir import NodeOutputPattern

from scalepoint.compat import patches_enabled

# The defaults of onnxscript.optimizer.optimize
MAX_ITERATIONS = 2
MAX_FOLDED_INPUT, MAX_FOLDED_OUTPUT = 8192, 512 * 512  # elements of constants that are folded
MAX_KEY_ELEMENTS = 20  # onnxscript passes constants up to this size to shape inference

MAX_CACHED_CASES = 10_000
_INFERENCE_CACHE: dict[Any, list[tuple[Any, Any]]] = {}  # key of a node -> dtypes and shapes of its outputs
_HASHABLE_ATTRIBUTES = (
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
)


def simplify(model: ir.Model) -> None:
    """Simplify a model in place."""
    if not patches_enabled():
        optimizer.optimize(model)
        return
    rules: Any = [_IndexedRules(rewriter._DEFAULT_REWRITE_RULES)]
    repeated = (
        _CachedFolding(shape_inference=True, input_size_limit=MAX_FOLDED_INPUT, output_size_limit=MAX_FOLDED_OUTPUT),
        rewriter.RewritePass(rules),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        common.InlinePass(),
        ir.passes.PassManager(repeated, steps=MAX_ITERATIONS, early_stop=True),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


class _IndexedRules:
    """Many rewrite rules as one rule, which tries on a node only the rules whose pattern can end in it, in their order.

    After a rewrite onnxscript reads attributes of the rule (its name, whether to remove nodes). They are those of the
    rule that was applied last, and before the first rewrite those of a rule that does not remove nodes.
    """

    def __init__(self, rules: Sequence[Any]) -> None:
        self.rules = rules
        self.last_applied = next((rule for rule in rules if not rule.remove_nodes), rules[0])
        ends = [_PatternEnd(rule) for rule in rules]
        self.for_any_operator = [end for end in ends if end.operator is None]
        self.by_operator: dict[str | None, list[_PatternEnd]] = {}  # each list in the order of the rules
        for operator in {end.operator for end in ends}:
            self.by_operator[operator] = [end for end in ends if end.operator in (operator, None)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.last_applied, name)

    def graph_pre_visitor(self) -> None:
        for rule in self.rules:
            if rule.graph_pre_visitor:
                rule.graph_pre_visitor()

    def graph_post_visitor(self) -> None:
        for rule in self.rules:
            if rule.graph_post_visitor:
                rule.graph_post_visitor()

    def try_rewrite(self, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        for end in self.by_operator.get(node.op_type, self.for_any_operator):
            rewrite = end.rule.try_rewrite(model, graph, node, **options) if end.can_match(node) else None
            if rewrite is not None:
                self.last_applied = end.rule
                return rewrite
        return None


class _PatternEnd:
    """The last node of the pattern of a rule: its operator, and the operators that compute its inputs, by index."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        output_nodes: Any = getattr(getattr(rule, "_target_pattern", None), "output_nodes", ())
        self.operator = _pattern_operator(output_nodes[0]) if output_nodes else None
        inputs: Any = () if self.operator is None else output_nodes[0].inputs
        self.input_operators = []
        for index, value in enumerate(inputs):
            operator = _pattern_operator(value.producer()) if isinstance(value, NodeOutputPattern) else None
            if operator is not None:
                self.input_operators.append((index, operator))
        self.is_slices_split = rule.name == "SlicesSplit"

    def can_match(self, node: Any) -> bool:
        for index, operator in self.input_operators:
            value = node.inputs[index] if index < len(node.inputs) else None
            producer = None if value is None else value.producer()
            if producer is None or producer.op_type != operator:
                return False
        return not self.is_slices_split or _is_slice_from_zero(node)


def _is_slice_from_zero(node: Any) -> bool:
    """Whether a Slice starts at 0 of the last axis, so that it can be the first half of a Split.

    The rule SlicesSplit checks that too, but only after it has searched all nodes of the graph for the other half.
    """
    if len(node.inputs) < 4 or any(value is None for value in node.inputs[:4]) or node.inputs[0].shape is None:
        return False
    start, axes = node.inputs[1].const_value, node.inputs[3].const_value
    if start is None or axes is None or start.numpy().tolist() != [0]:
        return False
    return axes.numpy().tolist() in ([-1], [len(node.inputs[0].shape) - 1])


def _pattern_operator(pattern: Any) -> str | None:
    """Return the operator of a node of a pattern; None if it matches several.

    Patterns with swapped operands have no identifier, only the operator.
    """
    identifier = pattern.op_identifier()
    name = getattr(pattern.op, "_value", None) if identifier is None else identifier[1]
    return name if isinstance(name, str) else None


class _CachedFolding(FoldConstantsPass):
    """Constant folding that infers no shape that is known already, and none twice."""

    def _do_inference(self, node: Any) -> None:
        if not any(value.type is None or value.shape is None for value in node.outputs):
            return
        key = _inference_key(node, self._opset_imports.get(node.domain))
        if key is None:
            super()._do_inference(node)
            return
        if key not in _INFERENCE_CACHE:
            super()._do_inference(node)
            if len(_INFERENCE_CACHE) >= MAX_CACHED_CASES:
                _INFERENCE_CACHE.clear()
            _INFERENCE_CACHE[key] = [_dtype_and_shape(value) for value in node.outputs]
            return
        for value, (dtype, shape) in zip(node.outputs, _INFERENCE_CACHE[key], strict=True):
            value.type = None if dtype is None else ir.TensorType(dtype)
            value.shape = None if shape is None else ir.Shape(shape)


def _inference_key(node: Any, opset_version: int | None) -> Any:
    """Return everything the output shapes of a node depend on; None if that cannot be compared."""
    attributes = node.attributes.values()
    values = (*node.inputs, *node.outputs)
    if any(attribute.is_ref() or attribute.type not in _HASHABLE_ATTRIBUTES for attribute in attributes):
        return None
    if any(value is not None and type(value.type) not in (NoneType, ir.TensorType) for value in values):
        return None
    return (
        node.domain,
        node.op_type,
        opset_version,
        tuple((attribute.name, attribute.type, _hashable(attribute.value)) for attribute in attributes),
        tuple(
            None if value is None else (*_dtype_and_shape(value), _small_constant_bytes(value)) for value in node.inputs
        ),
        tuple(_dtype_and_shape(value) for value in node.outputs),
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _dtype_and_shape(value: Any) -> tuple[Any, tuple[Any, ...] | None]:
    return value.dtype, None if value.shape is None else value.shape.dims


def _small_constant_bytes(value: Any) -> bytes | None:
    """Return the data of a small constant, on which output shapes may depend."""
    tensor = value.const_value
    return None if tensor is None or tensor.size > MAX_KEY_ELEMENTS else tensor.tobytes()
