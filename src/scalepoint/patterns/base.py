"""The base set: what compilers fold into a convolution, a linear layer and attention, and where Q/DQ stand.

    y = act(BN(conv(x, w) + b) + r)  ->  one kernel; Q/DQ on x and r, never in between.

Layer norm has no points: no latency to win, accuracy to lose.
"""

from torch import fx

from scalepoint.graph.kinds import ACTIVATIONS
from scalepoint.patterns.fused import (
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
from scalepoint.patterns.language import Nodes, Pattern, Point, chain, join, kind_of, op, optional

MOVES = ("reshape", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "clone", "expand", "flatten")
PICKS = ("select", "unflatten", "getitem", "split", "split_with_sizes", "chunk", "slice", "unbind")
SHAPES = frozenset((*MOVES, *PICKS))
CASTS = ("to", "_to_copy", "type_as", "float")


def depth(node: fx.Node) -> int:
    """How many operations the longest way from an input takes."""
    known: dict[fx.Node, int] = {}
    pending = [node]
    while pending:
        unknown = [source for source in pending[-1].all_input_nodes if source not in known]
        if not unknown:
            each = pending.pop()
            known[each] = 1 + max((known[source] for source in each.all_input_nodes), default=0)
        pending += unknown
    return known[node]


def is_main_branch(add: fx.Node, nodes: Nodes) -> str | None:
    """Of two convolutions that meet in an add, the one at the end of the longer way takes the add into its kernel."""
    own = list(nodes.values())[-1]
    other = next(arg for arg in add.args if isinstance(arg, fx.Node) and arg is not own)
    if other is own:
        return "both operands of the add are this tensor"
    if kind_of(other) in ("conv", "batch_norm") and len(other.users) == 1:
        first = add.args[0] is own
        if (depth(own), first) < (depth(other), not first):
            return f"the add belongs to the longer branch: {other.target}"
    return None


def is_first(conv: fx.Node, nodes: Nodes) -> str | None:
    """The stem reads the model's input."""
    return None if conv.all_input_nodes[0].op == "placeholder" else "not the first convolution"


def feeds_attention(linear: fx.Node, nodes: Nodes) -> str | None:
    """All readers, through reshapes, are attention cores."""
    open_nodes, found = [linear], False
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        for user in node.users:
            if kind_of(user) == "attention" or is_scores(user) or reads_probabilities(user):
                found = True
            elif kind_of(user) == "type_as" and user.args[0] is not node:
                continue  # reads its type alone
            elif kind_of(user) in SHAPES or (kind_of(user) in ("mul", "div") and len(user.all_input_nodes) == 1):
                if user not in seen:
                    seen.add(user)
                    open_nodes.append(user)
            else:
                return f"also read by {user.target}"
    return None if found else "feeds no attention"


def _sole_reader(node: fx.Node, *kinds: str) -> fx.Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and kind_of(readers[0]) in kinds else None


def is_scores(node: fx.Node) -> bool:
    """Whether a matrix product is followed, through scaling and a mask, by a softmax."""
    following: fx.Node | None = node if kind_of(node) == "matmul" else None
    while following is not None and kind_of(following) != "softmax":
        following = _sole_reader(following, "mul", "div", "add", "masked_fill", "reshape", "softmax", *CASTS)
    return following is not None


def reads_probabilities(node: fx.Node) -> bool:
    """Whether a matrix product takes a softmax, through dropout, as its first operand."""
    if kind_of(node) != "matmul" or not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    while kind_of(source) in ("dropout", *CASTS):
        source = source.all_input_nodes[0]
    return kind_of(source) == "softmax"


def takes_probabilities(matmul: fx.Node, nodes: Nodes) -> str | None:
    return None if reads_probabilities(matmul) else "the softmax is not its first operand"


def is_scaling(node: fx.Node, nodes: Nodes) -> str | None:
    return None if len(node.all_input_nodes) == 1 else "not a multiplication by a constant"


def is_square(node: fx.Node, nodes: Nodes) -> str | None:
    return None if 2 in node.args[1:] else "not a square"


def is_normalized_input(mul: fx.Node, nodes: Nodes) -> str | None:
    """x * rsqrt(mean(x^2)): the other operand is what was squared."""
    squared = nodes["square"].all_input_nodes[0]
    return None if squared in mul.all_input_nodes else "multiplies another tensor"


NORM = "a norm has little to win in low precision, and accuracy to lose"

CONV = op("conv")
BATCH_NORM = op("batch_norm")
ACTIVATION = op("activation", *ACTIVATIONS)
LINEAR = op("linear")

STEM = Pattern(
    "StemConvBNReLUMaxPoolPattern",
    chain(op("conv", where=is_first), optional(BATCH_NORM), ACTIVATION, op("max_pool")),
    FusedStemConvBNReLUMaxPool,
    (Point.INPUT,),
)
CONV_BN_ADD_RELU = Pattern(
    "ConvBNAddReLUPattern",
    chain(CONV, optional(BATCH_NORM), join("add", where=is_main_branch), optional(ACTIVATION)),
    FusedConvBNAddReLU,
    (Point.INPUT, Point.RESIDUAL_INPUT),
)
CONV_BN_RELU = Pattern(
    "ConvBNReLUPattern", chain(CONV, optional(BATCH_NORM), ACTIVATION), FusedConvBNReLU, (Point.INPUT,)
)
CONV_BN = Pattern("ConvBNPattern", chain(CONV, optional(BATCH_NORM)), FusedConvBN, (Point.INPUT,))
CONV_TRANSPOSE = Pattern(
    "ConvTransposeBNReLUPattern",
    chain(op("conv_transpose"), optional(BATCH_NORM), optional(ACTIVATION)),
    FusedConvTransposeBNReLU,
    (Point.INPUT,),
)
MHA_IN_PROJECTION = Pattern(
    "MHAInProjectionPattern", chain(op("linear", where=feeds_attention)), FusedMHAInProjection, (Point.INPUT,)
)
LINEAR_RELU = Pattern("LinearReLUPattern", chain(LINEAR, ACTIVATION), FusedLinearReLU, (Point.INPUT,))
LINEAR_ONLY = Pattern("LinearPattern", chain(LINEAR), FusedLinear, (Point.INPUT,))
ATTENTION = Pattern(
    "ScaledDotProductAttentionPattern",
    chain(op("attention")),
    FusedAttention,
    (Point.INPUT, Point.KEY_INPUT, Point.VALUE_INPUT),
)
ADAPTIVE_AVG_POOL = Pattern(
    "AdaptiveAvgPoolPattern", chain(op("adaptive_avg_pool")), FusedPool, (Point.INPUT, Point.OUTPUT)
)
ATTENTION_SPELLED_OUT = Pattern(
    "AttentionSpelledOutPattern",
    chain(
        op("scores", "matmul"),
        optional(op("scale", "mul", "div")),
        optional(join("bias", "add")),
        optional(op("windows", "reshape")),  # a mask for each window is added with the windows on an axis of their own
        optional(join("mask", "add")),
        optional(join("mask_again", "add")),
        optional(op("whole", "reshape")),
        optional(op("fill", "masked_fill")),
        optional(op("cast", *CASTS)),
        op("softmax"),
        optional(op("cast_back", *CASTS)),
        optional(op("dropout")),
        join("context", "matmul", where=takes_probabilities),
    ),
    FusedAttention,
    (Point.INPUT, Point.KEY_INPUT, Point.VALUE_INPUT),
)
GATED_LINEAR = Pattern(
    "GatedLinearPattern", chain(LINEAR, ACTIVATION, join("gate", "mul")), FusedGatedLinear, (Point.INPUT,)
)
RMS_NORM_SPELLED_OUT = Pattern(
    "RMSNormSpelledOutPattern",
    chain(
        op("square", "pow", where=is_square),
        op("mean"),
        op("eps", "add", where=is_scaling),
        op("rsqrt"),
        join("normalize", "mul", where=is_normalized_input),
        optional(op("cast", *CASTS)),
        op("weight", "mul", where=is_scaling),
    ),
    FusedNorm,
    why_float=NORM,
)
HEAD = Pattern("HeadPattern", chain(op("head")), FusedHead, (Point.INPUT,))
CONCAT = Pattern("ConcatPattern", chain(op("cat")), FusedConcat)
LAYER_NORM = Pattern("LayerNormPattern", chain(op("layer_norm")), FusedNorm, why_float=NORM)
RMS_NORM = Pattern("RMSNormPattern", chain(op("rms_norm")), FusedNorm, why_float=NORM)
GROUP_NORM = Pattern("GroupNormPattern", chain(op("norm", "group_norm", "instance_norm")), FusedNorm, why_float=NORM)
EMBEDDING = Pattern(
    "EmbeddingPattern",
    chain(op("embedding", "embedding", "embedding_bag")),
    FusedEmbedding,
    why_float="it looks rows up and multiplies nothing",
)

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
