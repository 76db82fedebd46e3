"""The base patterns: what compilers fuse into a convolution, a linear layer or attention, and where Q/DQ go.

    y = act(BN(conv(x, w) + b) + r)  ->  one kernel; Q/DQ on x and r, never inside the group

Norms have no Q/DQ points: int8 makes them no faster and costs accuracy. Each pattern is a class, so that matches can be
told apart with `isinstance(match.pattern, ConvBNPattern)`. Fields can be changed: `ConvBNPattern(qdq_points=())`.
"""

from dataclasses import dataclass

from torch import fx

from scalepoint.graph.kinds import ACTIVATIONS, CASTS, VALUE_PRESERVING
from scalepoint.graph.nodes import get_kind
from scalepoint.patterns.fused import (
    Fused,
    FusedAttention,
    FusedConcat,
    FusedConvBN,
    FusedConvBNAddReLU,
    FusedConvBNReLU,
    FusedConvTransposeBNReLU,
    FusedEmbedding,
    FusedGatedLinear,
    FusedHead,
    FusedLinear,
    FusedLinearReLU,
    FusedMHAInProjection,
    FusedNorm,
    FusedPool,
    FusedStemConvBNReLUMaxPool,
)
from scalepoint.patterns.language import Element, Nodes, Pattern, Point, chain, join, op, optional


def measure_depth(node: fx.Node) -> int:
    """Return the number of operations on the longest path from an input of the graph to a node."""
    depths: dict[fx.Node, int] = {}
    pending = [node]
    while pending:
        unmeasured = [source for source in pending[-1].all_input_nodes if source not in depths]
        if not unmeasured:
            current = pending.pop()
            depths[current] = 1 + max((depths[source] for source in current.all_input_nodes), default=0)
        pending += unmeasured
    return depths[node]


def is_main_branch(add: fx.Node, nodes: Nodes) -> str | None:
    """If two convolutions meet in an add, the one at the end of the longer path takes the add into its kernel."""
    last = list(nodes.values())[-1]
    other = next(arg for arg in add.args if isinstance(arg, fx.Node) and arg is not last)
    if other is last:
        return "both operands of the add are this tensor"
    if get_kind(other) in ("conv", "batch_norm") and len(other.users) == 1:
        is_first_operand = add.args[0] is last  # breaks ties
        if (measure_depth(last), is_first_operand) < (measure_depth(other), not is_first_operand):
            return f"the add belongs to the longer branch: {other.target}"
    return None


def is_first(conv: fx.Node, nodes: Nodes) -> str | None:
    """The first convolution reads the model's input."""
    return None if conv.all_input_nodes[0].op == "placeholder" else "not the first convolution"


def feeds_attention(linear: fx.Node, nodes: Nodes) -> str | None:
    """All readers, through reshapes, are attention cores."""
    pending, has_reader = [linear], False
    visited = set()
    while pending:
        node = pending.pop()
        for user in node.users:
            if get_kind(user) == "attention" or is_score_product(user) or reads_probabilities(user):
                has_reader = True
            elif get_kind(user) == "type_as" and user.args[0] is not node:
                continue  # it reads only the dtype
            elif get_kind(user) in VALUE_PRESERVING or is_scaling(user):
                if user not in visited:
                    visited.add(user)
                    pending.append(user)
            else:
                return f"also read by {user.target}"
    return None if has_reader else "feeds no attention"


def is_scaling(node: fx.Node) -> bool:
    """Whether a node multiplies or divides one tensor by a constant."""
    return get_kind(node) in ("mul", "div") and len(node.all_input_nodes) == 1


def _sole_reader(node: fx.Node, *kinds: str) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and get_kind(readers[0]) in kinds else None


def is_score_product(node: fx.Node) -> bool:
    """Whether a matrix product is followed, through scaling and a mask, by a softmax."""
    following: fx.Node | None = node if get_kind(node) == "matmul" else None
    while following is not None and get_kind(following) != "softmax":
        following = _sole_reader(following, "mul", "div", "add", "masked_fill", "reshape", "softmax", *CASTS)
    return following is not None


def reads_probabilities(node: fx.Node) -> bool:
    """Whether a matrix product takes a softmax, through dropout, as its first operand."""
    if get_kind(node) != "matmul" or not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    while get_kind(source) in ("dropout", *CASTS):
        source = source.all_input_nodes[0]
    return get_kind(source) == "softmax"


def takes_probabilities(matmul: fx.Node, nodes: Nodes) -> str | None:
    """The first operand is a softmax."""
    return None if reads_probabilities(matmul) else "the softmax is not its first operand"


def has_one_operand(node: fx.Node, nodes: Nodes) -> str | None:
    """The other operand is a constant."""
    return None if len(node.all_input_nodes) == 1 else "not an operation with a constant"


def is_square(node: fx.Node, nodes: Nodes) -> str | None:
    """The exponent is 2."""
    return None if 2 in node.args[1:] else "not a square"


def is_normalized_input(mul: fx.Node, nodes: Nodes) -> str | None:
    """In x * rsqrt(mean(x^2)), the other operand is the tensor that was squared."""
    squared = nodes["square"].all_input_nodes[0]
    return None if squared in mul.all_input_nodes else "multiplies another tensor"


NORM_STAYS_FLOAT = "a norm has little to win in low precision, and accuracy to lose"

CONV = op("conv")
BATCH_NORM = op("batch_norm")
ACTIVATION = op("activation", *ACTIVATIONS)
LINEAR = op("linear")


@dataclass(frozen=True)
class StemConvBNReLUMaxPoolPattern(Pattern):
    """The first convolution, batch norm, activation, max pool."""

    name: str = "StemConvBNReLUMaxPoolPattern"
    match: tuple[Element, ...] = chain(op("conv", where=is_first), optional(BATCH_NORM), ACTIVATION, op("max_pool"))
    make: type[Fused] = FusedStemConvBNReLUMaxPool
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class ConvBNAddReLUPattern(Pattern):
    """A convolution, optional batch norm, an add with a residual, optional activation."""

    name: str = "ConvBNAddReLUPattern"
    match: tuple[Element, ...] = chain(
        CONV, optional(BATCH_NORM), join("add", where=is_main_branch), optional(ACTIVATION)
    )
    make: type[Fused] = FusedConvBNAddReLU
    qdq_points: tuple[Point, ...] = (Point.INPUT, Point.RESIDUAL_INPUT)


@dataclass(frozen=True)
class ConvBNReLUPattern(Pattern):
    """A convolution, optional batch norm, activation."""

    name: str = "ConvBNReLUPattern"
    match: tuple[Element, ...] = chain(CONV, optional(BATCH_NORM), ACTIVATION)
    make: type[Fused] = FusedConvBNReLU
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class ConvBNPattern(Pattern):
    """A convolution, optional batch norm."""

    name: str = "ConvBNPattern"
    match: tuple[Element, ...] = chain(CONV, optional(BATCH_NORM))
    make: type[Fused] = FusedConvBN
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class ConvTransposeBNReLUPattern(Pattern):
    """A transposed convolution, optional batch norm, optional activation."""

    name: str = "ConvTransposeBNReLUPattern"
    match: tuple[Element, ...] = chain(op("conv_transpose"), optional(BATCH_NORM), optional(ACTIVATION))
    make: type[Fused] = FusedConvTransposeBNReLU
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class MHAInProjectionPattern(Pattern):
    """A linear layer whose readers are attention cores."""

    name: str = "MHAInProjectionPattern"
    match: tuple[Element, ...] = chain(op("linear", where=feeds_attention))
    make: type[Fused] = FusedMHAInProjection
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class LinearReLUPattern(Pattern):
    """A linear layer, activation."""

    name: str = "LinearReLUPattern"
    match: tuple[Element, ...] = chain(LINEAR, ACTIVATION)
    make: type[Fused] = FusedLinearReLU
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class LinearPattern(Pattern):
    """A linear layer."""

    name: str = "LinearPattern"
    match: tuple[Element, ...] = chain(LINEAR)
    make: type[Fused] = FusedLinear
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class ScaledDotProductAttentionPattern(Pattern):
    """A call of scaled dot product attention."""

    name: str = "ScaledDotProductAttentionPattern"
    match: tuple[Element, ...] = chain(op("attention"))
    make: type[Fused] = FusedAttention
    qdq_points: tuple[Point, ...] = (Point.INPUT, Point.KEY_INPUT, Point.VALUE_INPUT)


@dataclass(frozen=True)
class AdaptiveAvgPoolPattern(Pattern):
    """An adaptive or global average pool."""

    name: str = "AdaptiveAvgPoolPattern"
    match: tuple[Element, ...] = chain(op("adaptive_avg_pool"))
    make: type[Fused] = FusedPool
    qdq_points: tuple[Point, ...] = (Point.INPUT, Point.OUTPUT)


@dataclass(frozen=True)
class AttentionSpelledOutPattern(Pattern):
    """Attention written as matrix products and a softmax."""

    name: str = "AttentionSpelledOutPattern"
    match: tuple[Element, ...] = chain(
        op("scores", "matmul"),
        optional(op("scale", "mul", "div")),
        optional(join("bias", "add")),
        optional(op("windows", "reshape")),  # gives windows their own axis, to add one mask for each window
        optional(join("mask", "add")),
        optional(join("mask_again", "add")),
        optional(op("whole", "reshape")),
        optional(op("fill", "masked_fill")),
        optional(op("cast", *CASTS)),
        op("softmax"),
        optional(op("cast_back", *CASTS)),
        optional(op("dropout")),
        join("context", "matmul", where=takes_probabilities),
    )
    make: type[Fused] = FusedAttention
    qdq_points: tuple[Point, ...] = (Point.INPUT, Point.KEY_INPUT, Point.VALUE_INPUT)


@dataclass(frozen=True)
class GatedLinearPattern(Pattern):
    """A linear layer, activation, a product with another tensor."""

    name: str = "GatedLinearPattern"
    match: tuple[Element, ...] = chain(LINEAR, ACTIVATION, join("gate", "mul"))
    make: type[Fused] = FusedGatedLinear
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class RMSNormSpelledOutPattern(Pattern):
    """An RMS norm written as single operations."""

    name: str = "RMSNormSpelledOutPattern"
    match: tuple[Element, ...] = chain(
        op("square", "pow", where=is_square),
        op("mean"),
        op("eps", "add", where=has_one_operand),
        op("rsqrt"),
        join("normalize", "mul", where=is_normalized_input),
        optional(op("cast", *CASTS)),
        op("weight", "mul", where=has_one_operand),
    )
    make: type[Fused] = FusedNorm
    why_float: str = NORM_STAYS_FLOAT


@dataclass(frozen=True)
class HeadPattern(Pattern):
    """A flatten and a linear layer, as a 1x1 convolution."""

    name: str = "HeadPattern"
    match: tuple[Element, ...] = chain(op("head"))
    make: type[Fused] = FusedHead
    qdq_points: tuple[Point, ...] = (Point.INPUT,)


@dataclass(frozen=True)
class ConcatPattern(Pattern):
    """A concatenation."""

    name: str = "ConcatPattern"
    match: tuple[Element, ...] = chain(op("cat"))
    make: type[Fused] = FusedConcat


@dataclass(frozen=True)
class LayerNormPattern(Pattern):
    """A layer norm."""

    name: str = "LayerNormPattern"
    match: tuple[Element, ...] = chain(op("layer_norm"))
    make: type[Fused] = FusedNorm
    why_float: str = NORM_STAYS_FLOAT


@dataclass(frozen=True)
class RMSNormPattern(Pattern):
    """An RMS norm."""

    name: str = "RMSNormPattern"
    match: tuple[Element, ...] = chain(op("rms_norm"))
    make: type[Fused] = FusedNorm
    why_float: str = NORM_STAYS_FLOAT


@dataclass(frozen=True)
class GroupNormPattern(Pattern):
    """A group norm or an instance norm."""

    name: str = "GroupNormPattern"
    match: tuple[Element, ...] = chain(op("norm", "group_norm", "instance_norm"))
    make: type[Fused] = FusedNorm
    why_float: str = NORM_STAYS_FLOAT


@dataclass(frozen=True)
class EmbeddingPattern(Pattern):
    """A lookup of rows."""

    name: str = "EmbeddingPattern"
    match: tuple[Element, ...] = chain(op("embedding", "embedding", "embedding_bag"))
    make: type[Fused] = FusedEmbedding
    why_float: str = "it looks rows up and multiplies nothing"


STEM = StemConvBNReLUMaxPoolPattern()
CONV_BN_ADD_RELU = ConvBNAddReLUPattern()
CONV_BN_RELU = ConvBNReLUPattern()
CONV_BN = ConvBNPattern()
CONV_TRANSPOSE = ConvTransposeBNReLUPattern()
MHA_IN_PROJECTION = MHAInProjectionPattern()
LINEAR_RELU = LinearReLUPattern()
LINEAR_ONLY = LinearPattern()
ATTENTION = ScaledDotProductAttentionPattern()
ADAPTIVE_AVG_POOL = AdaptiveAvgPoolPattern()
ATTENTION_SPELLED_OUT = AttentionSpelledOutPattern()
GATED_LINEAR = GatedLinearPattern()
RMS_NORM_SPELLED_OUT = RMSNormSpelledOutPattern()
HEAD = HeadPattern()
CONCAT = ConcatPattern()
LAYER_NORM = LayerNormPattern()
RMS_NORM = RMSNormPattern()
GROUP_NORM = GroupNormPattern()
EMBEDDING = EmbeddingPattern()

BASE_PATTERNS = (
    STEM,
    CONV_BN_ADD_RELU,
    CONV_BN_RELU,
    CONV_TRANSPOSE,
    CONV_BN,
    MHA_IN_PROJECTION,
    GATED_LINEAR,
    LINEAR_RELU,
    LINEAR_ONLY,
    ATTENTION,
    ATTENTION_SPELLED_OUT,
    ADAPTIVE_AVG_POOL,
    LAYER_NORM,
    RMS_NORM,
    RMS_NORM_SPELLED_OUT,
    GROUP_NORM,
    EMBEDDING,
    CONCAT,
    HEAD,
)
