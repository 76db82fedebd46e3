"""LiteRT (TensorFlow Lite) on phones and other ARM or x86 CPUs: signed int8, one scale a tensor, s8 weights a channel.

An operator is an integer one when its operands and its result are int8, after a relu at most; pools have the scale of
their input, the inputs of a concat that of its output (what others read too is brought to it). So inputs and outputs of
what follows convolutions are quantized. Other linear layers take their rows in int8 with a scale that the kernel finds
anew for each (hybrid): norms, attention and residuals of a transformer stay float, and nothing is rounded on the way
out. 4-bit weights run so alone; scales of blocks stand in the file as float16, and XNNPACK multiplies by them as
bfloat16. Its kernels on CPUs are XNNPACK's, as ExecuTorch's are, and the placement is that of `executorch` but for
average pools and concats.
"""

from dataclasses import replace

import torch
from torch import fx

from scalepoint.patterns import ConcatPattern, chain, get_kind, op
from scalepoint.patterns.fused import FusedConcat
from scalepoint.patterns.language import Nodes
from scalepoint.targets.executorch import BOTH, EXECUTORCH
from scalepoint.targets.onnxruntime import COPIES, from_convolution
from scalepoint.targets.target import OperationFacts


def joins_integers(cat: fx.Node, nodes: Nodes) -> str | None:
    """All that it joins comes from convolutions, or from such a concat."""
    sources = [each for each in cat.all_input_nodes if get_kind(each) != "cat" or joins_integers(each, nodes)]
    return None if all(map(from_convolution, sources)) else "not all of its inputs come from convolutions"


CONCAT = ConcatPattern(match=chain(op("cat", where=joins_integers)), make=FusedConcat, qdq_points=BOTH)


def of_other_axes(facts: OperationFacts) -> str | None:
    """Convolutions over three axes, and transposed ones in groups or over one axis, have no operator."""
    if facts.kind in ("conv", "conv_transpose") and len(facts.weight_shape) > 4:
        return "a convolution over three axes, in any precision: convolve over one or two, or deploy for 'onnxruntime'"
    if facts.kind == "conv_transpose" and (facts.groups > 1 or len(facts.weight_shape) == 3):
        return "a transposed convolution in groups or over one axis, in any precision: deploy for 'onnxruntime'"
    return None


LITERT = replace(
    EXECUTORCH,
    name="litert",
    summary="LiteRT (TensorFlow Lite) on phones and CPUs: int8, dynamic int8 linear layers, int4 weights",
    patterns=tuple(CONCAT if each.name == "ConcatPattern" else each for each in EXECUTORCH.patterns),
    refuses=(of_other_axes, *EXECUTORCH.refuses[1:]),
    same_scale_kinds=COPIES | {"avg_pool"},
    concat_kinds=frozenset(("cat",)),
    block_scale_dtypes=(torch.bfloat16, torch.float16),
    fixed_shapes_reason="shapes of a .tflite file are planned, and layouts inside are made for them",
    format="litert",
    runtime="litert",
)
