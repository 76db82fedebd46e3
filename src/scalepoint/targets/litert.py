"""LiteRT (TensorFlow Lite) on phones and CPUs (ARM, x86): int8 activations per tensor, int8 weights per channel.

The kernels are those of XNNPACK, as for ExecuTorch, and so is the placement, except for average pools and concats. An
operator runs in int8 if its operands and its result are int8, with at most a relu between. Pools have the scale of
their input, and the inputs of a concat have the scale of its output. Linear layers that do not read convolutions are
hybrid: the kernel quantizes each row of the input with its own scale, and the output is float. 4-bit weights run only
in such layers. Scales of blocks are stored as float16, and XNNPACK rounds them to bfloat16.
"""

from dataclasses import replace

import torch
from torch import fx

from scalepoint.patterns import ConcatPattern, chain, get_kind, op
from scalepoint.patterns.language import Nodes
from scalepoint.targets.executorch import EXECUTORCH, int4_weights_with_static_scales
from scalepoint.targets.shared import INPUT_AND_OUTPUT, SAME_SCALE_KINDS, comes_from_convolution, has_parameter
from scalepoint.targets.target import OperationFacts


def joins_integers(cat: fx.Node, nodes: Nodes) -> str | None:
    """Match a concat if all its inputs come from convolutions, or from such a concat (a `Condition`).

    No input may be a parameter, such as a class token.
    """
    if has_parameter(cat):
        return "one of its inputs is a parameter"
    sources = [node for node in cat.all_input_nodes if get_kind(node) != "cat" or joins_integers(node, nodes)]
    return None if all(map(comes_from_convolution, sources)) else "not all of its inputs come from convolutions"


CONCAT = ConcatPattern(match=chain(op("cat", where=joins_integers)), qdq_points=INPUT_AND_OUTPUT)


def unsupported_convolution(facts: OperationFacts) -> str | None:
    """LiteRT has no operator for 3-d convolutions, and for transposed ones with groups or in 1-d."""
    if facts.kind in ("conv", "conv_transpose") and len(facts.weight_shape) > 4:
        return "a convolution over three axes, in any precision: use 1-d or 2-d ones, or deploy for 'onnxruntime'"
    if facts.kind == "conv_transpose" and (facts.groups > 1 or len(facts.weight_shape) == 3):
        return "a transposed convolution in groups or over one axis, in any precision: deploy for 'onnxruntime'"
    return None


LITERT = replace(
    EXECUTORCH,
    name="litert",
    summary="LiteRT (TensorFlow Lite) on phones and CPUs: int8, dynamic int8 linear layers, int4 weights",
    patterns=tuple(CONCAT if pattern.name == "ConcatPattern" else pattern for pattern in EXECUTORCH.patterns),
    refuses=(unsupported_convolution, int4_weights_with_static_scales),
    same_scale_kinds=SAME_SCALE_KINDS | {"avg_pool"},
    concat_kinds=frozenset(("cat",)),
    block_scale_dtypes=(torch.bfloat16, torch.float16),
    fixed_shapes_reason="the shapes in a .tflite file are constants, and its layouts are chosen for them",
    format="litert",
    runtime="litert",
)
