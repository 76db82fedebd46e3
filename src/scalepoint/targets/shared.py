"""Parts that several targets share: default specs, kinds of operations, conditions of patterns, and cost rules."""

from math import prod

from torch import fx

from scalepoint.graph.kinds import VALUE_PRESERVING
from scalepoint.graph.operations import Operation
from scalepoint.patterns import Point, get_kind, op
from scalepoint.patterns.language import Nodes
from scalepoint.spec import PerChannelGranularity, QuantizationScheme, QuantizationSpec
from scalepoint.targets.target import OperationFacts

SYMMETRIC = (QuantizationScheme.SYMMETRIC, QuantizationScheme.SYMMETRIC_WITH_CLIPPING)
# One scale per output channel of a weight, or per row of an embedding table; codes from -127 to 127.
INT8_PER_CHANNEL = QuantizationSpec(
    qscheme="symmetric_with_clipping", granularity=PerChannelGranularity(), qparam_calculator_cls="static"
)
UINT8_ASYMMETRIC = QuantizationSpec(dtype="uint8", qscheme="asymmetric", qparam_calculator_cls="global_minmax")
INPUT_AND_OUTPUT = (Point.INPUT, Point.OUTPUT)
FOLDED_ACTIVATION = op("activation", "relu", "relu6")  # those that a clamp of the int8 output computes
SAME_SCALE_KINDS = frozenset(
    ("max_pool", "upsample_nearest2d", "identity", "dropout", "pad", "constant_pad_nd", *VALUE_PRESERVING)
)
# Operations that read only the sizes and the dtype of their inputs, or of all inputs but the first.
SIZE_READERS = frozenset(
    ("sym_size", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
FIRST_VALUE_READERS = frozenset(("type_as", "expand_as", "view_as", "reshape_as"))
MIN_TABLE_VALUES = 16_384  # 64 KB in float


# Conditions of patterns: None means that the operation matches, a text says why it does not.


def joins_convolutions(add: fx.Node, nodes: Nodes) -> str | None:
    """Match an add whose operands are computed from the inputs, one of them by a convolution."""
    operands = add.all_input_nodes
    if len(operands) != 2:
        return "does not join two tensors"
    if not any(map(comes_from_convolution, operands)):
        return "no operand comes from a convolution"
    if not all(comes_from_convolution(operand) or _depends_on_inputs(operand) for operand in operands):
        return "one operand depends on sizes only, such as the grid of a detector"
    return None


def _depends_on_inputs(node: fx.Node) -> bool:
    """Whether a tensor depends on values of an input, and not only on its sizes or its dtype."""
    pending, visited = [node], set()
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current in visited or get_kind(current) in SIZE_READERS:
            continue
        visited.add(current)
        sources = current.all_input_nodes
        pending += sources[:1] if get_kind(current) in FIRST_VALUE_READERS else sources
    return False


def comes_from_convolution(node: fx.Node) -> bool:
    """Whether a tensor comes, through norms, activations and moves, from a convolution or an add that reads one."""
    source = _skip_moves(node)
    if get_kind(source) == "add":
        return any(get_kind(_skip_moves(operand)) == "conv" for operand in source.all_input_nodes)
    return get_kind(source) == "conv"


def _skip_moves(node: fx.Node) -> fx.Node:
    """Follow the first input through batch norms, fused activations and operations that only move values."""
    while get_kind(node) in ("batch_norm", "relu", "relu6", *SAME_SCALE_KINDS) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def reads_convolution(node: fx.Node, nodes: Nodes) -> str | None:
    """Match an operation if all its inputs come from convolutions, and none is a parameter such as a class token."""
    if has_parameter(node):
        return "one of its inputs is a parameter"
    if node.all_input_nodes and all(map(comes_from_convolution, node.all_input_nodes)):
        return None
    return "not all of its inputs come from convolutions"


def has_parameter(node: fx.Node) -> bool:
    """Whether an operation reads parameters: they are references of its module, not inputs of the node."""
    modules = node.graph.owning_module
    part = None if modules is None or node.op != "call_module" else modules.get_submodule(str(node.target))
    return isinstance(part, Operation) and bool(part.references())


# Cost rules: a text is the reason why an operation is better left float.


def small_embedding_table(facts: OperationFacts) -> str | None:
    """A small embedding table stays float: int8 saves few bytes and needs two more operations."""
    if facts.kind == "embedding" and prod(facts.weight_shape) < MIN_TABLE_VALUES:
        return f"its table has only {prod(facts.weight_shape):,} values"
    return None


def weight_only_outside_linear(facts: OperationFacts) -> str | None:
    """Only linear layers have weight-only kernels; other weights would be dequantized in each call."""
    if facts.is_weight_only and facts.kind not in ("linear", "embedding"):
        return f"no kernel for {facts.kind} with integer weights and float activations"
    return None
