"""The translated graph without what a translation leaves behind: constants worked out, nodes that do nothing gone.

The passes are those of onnxscript.optimizer.optimize, in its order. Two of them do only what can matter: a rule is
asked about a node if its pattern ends in that operator, and shapes are inferred where the translation gave none, once
for all nodes with the same operator, settings and inputs: blocks of a network repeat.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter._pattern_ir import NodeOutputPattern

MAX_STEPS = 2  # what a rule has made may be folded once more
MAX_FOLDED_INPUT, MAX_FOLDED_OUTPUT = 8192, 512 * 512  # elements of constants that are folded
MAX_KEY_ELEMENTS = 20  # elements of a constant that sizes may depend on, as onnxscript has it
MAX_CACHED_CASES = 10_000
_INFERENCE_CACHE: dict[Any, list[tuple[Any, Any]]] = {}  # of nodes: types and sizes of their outputs
_HASHABLE_ATTRIBUTES = (
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
    ir.AttributeType.STRINGS,
)


def simplify(model: Any) -> None:
    """In place."""
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
        ir.passes.PassManager(repeated, steps=MAX_STEPS, early_stop=True),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


class _IndexedRules:
    """Rules of onnxscript as one: a node is shown, in their order, to those that can end in it. What is asked after a
    rewrite (a name, whether nodes are to be removed) is answered by the rule that made it; before the first one, by a
    rule that may leave nodes behind."""

    def __init__(self, rules: Sequence[Any]) -> None:
        self.rules = rules
        self.last = next((rule for rule in rules if not rule.remove_nodes), rules[0])
        ends = [_PatternEnd(rule) for rule in rules]
        self.others = [end for end in ends if end.operator is None]
        self.ending = {each.operator: [end for end in ends if end.operator in (each.operator, None)] for each in ends}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.last, name)

    def graph_pre_visitor(self) -> None:
        for rule in self.rules:
            if rule.graph_pre_visitor:
                rule.graph_pre_visitor()

    def graph_post_visitor(self) -> None:
        for rule in self.rules:
            if rule.graph_post_visitor:
                rule.graph_post_visitor()

    def try_rewrite(self, model: Any, graph: Any, node: Any, **said: Any) -> Any:
        for end in self.ending.get(node.op_type, self.others):
            made = end.rule.try_rewrite(model, graph, node, **said) if end.may_be(node) else None
            if made is not None:
                self.last = end.rule
                return made
        return None


class _PatternEnd:
    """What the pattern of a rule says of the node that it ends in: its operator, and those that make its inputs, by
    place."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        ends: Any = getattr(getattr(rule, "_target_pattern", None), "output_nodes", ())
        self.operator = _pattern_operator(ends[0]) if ends else None
        inputs: Any = () if self.operator is None else ends[0].inputs
        self.makers = [
            (at, maker)
            for at, value in enumerate(inputs)
            if isinstance(value, NodeOutputPattern) and (maker := _pattern_operator(value.producer())) is not None
        ]
        self.is_half = rule.name == "SlicesSplit"

    def may_be(self, node: Any) -> bool:
        for at, operator in self.makers:
            value = node.inputs[at] if at < len(node.inputs) else None
            maker = None if value is None else value.producer()
            if maker is None or maker.op_type != operator:
                return False
        return not self.is_half or _is_first_of_last_axis(node)


def _is_first_of_last_axis(node: Any) -> bool:
    """Whether a Slice can be the first half of a Split, which its rule looks for among all nodes of the graph before it
    asks this."""
    if len(node.inputs) < 4 or any(value is None for value in node.inputs[:4]) or node.inputs[0].shape is None:
        return False
    start, axes = node.inputs[1].const_value, node.inputs[3].const_value
    if start is None or axes is None or start.numpy().tolist() != [0]:
        return False
    return axes.numpy().tolist() in ([-1], [len(node.inputs[0].shape) - 1])


def _pattern_operator(pattern: Any) -> str | None:
    """The one operator that a node of a pattern has, if there is one; a pattern with its operands swapped keeps it."""
    identifier = pattern.op_identifier()
    name = getattr(pattern.op, "_value", None) if identifier is None else identifier[1]
    return name if isinstance(name, str) else None


class _CachedFolding(FoldConstantsPass):
    """Folding that infers no shape which is there already, and none twice."""

    def _do_inference(self, node: Any) -> None:
        if not any(value.type is None or value.shape is None for value in node.outputs):
            return
        case = _inference_key(node, self._opset_imports.get(node.domain))
        if case is None:
            super()._do_inference(node)
            return
        if case not in _INFERENCE_CACHE:
            super()._do_inference(node)
            if len(_INFERENCE_CACHE) >= MAX_CACHED_CASES:
                _INFERENCE_CACHE.clear()
            _INFERENCE_CACHE[case] = [_type_and_shape(value) for value in node.outputs]
            return
        for value, (kind, shape) in zip(node.outputs, _INFERENCE_CACHE[case], strict=True):
            value.type = None if kind is None else ir.TensorType(kind)
            value.shape = None if shape is None else ir.Shape(shape)


def _inference_key(node: Any, version: int | None) -> Any:
    """All that the types and sizes of a node's outputs depend on; None where that is more than can be compared."""
    settings, values = node.attributes.values(), (*node.inputs, *node.outputs)
    if any(each.is_ref() or each.type not in _HASHABLE_ATTRIBUTES for each in settings):
        return None
    if any(value is not None and type(value.type) not in (NoneType, ir.TensorType) for value in values):
        return None
    said = tuple((each.name, each.type, _hashable_attribute(each.value)) for each in settings)
    inputs = tuple(
        None if value is None else (*_type_and_shape(value), _small_constant_bytes(value)) for value in node.inputs
    )
    return (node.domain, node.op_type, version, said, inputs, tuple(map(_type_and_shape, node.outputs)))


def _hashable_attribute(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _type_and_shape(value: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Type and sizes, as they are compared."""
    return value.dtype, None if value.shape is None else value.shape.dims


def _small_constant_bytes(value: Any) -> bytes | None:
    """The values of a small constant."""
    tensor = value.const_value
    return None if tensor is None or tensor.size > MAX_KEY_ELEMENTS else tensor.tobytes()
