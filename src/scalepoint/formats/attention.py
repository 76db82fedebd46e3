"""Rewrites of attention before export.

scale_before_quantizing moves the scaling of the query before its quantizer, where compilers expect it:

    softmax(c Q(q) K^T) V  =  softmax(Q'(c q) K^T) V,    Q' has the scale c s_q: same codes, and no Mul after DQ

copy_after_masked_attention makes the output of masked attention contiguous.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.nodes import get_fake_tensor, inherit_meta
from scalepoint.graph.operations import Slot
from scalepoint.patterns import Fused
from scalepoint.quantize.quantizers import QuantStub

_TENSOR_ARGUMENTS = ("query", "key", "value")


class PlainAttention(nn.Module):
    """Attention without scaling: its query is already scaled."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1), -1) @ value


def copy_after_masked_attention(model: fx.GraphModule) -> None:
    """Insert a contiguous copy after attention with a mask, and replace views by reshapes, in place.

    torch's kernel for masked attention returns another memory layout. For that layout torch.export turns a reshape into
    a view and drops `contiguous`. The attention that is written to ONNX has a contiguous output, and the view fails on
    it. The copy becomes an Identity in the ONNX file, and is removed there.
    """
    calls = [node for node in model.graph.nodes if node.op == "call_module"]
    masked_calls = [node for node in calls if _is_masked_attention(model.get_submodule(str(node.target)))]
    for node in masked_calls:
        with model.graph.inserting_after(node):
            clone = model.graph.call_function(torch.clone, (node,), {"memory_format": torch.contiguous_format})
        inherit_meta(clone, node, kind="clone")
        node.replace_all_uses_with(clone, lambda user, clone=clone: user is not clone)
    if masked_calls:
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        model.recompile()


def _is_masked_attention(module: nn.Module) -> bool:
    # The last part of a fused module computes its output, whose layout is the problem.
    last_part = list(module.parts.values())[-1] if isinstance(module, Fused) else module
    if not isinstance(last_part, Operation) or last_part.kind != "attention":
        return False
    return last_part.arguments.get("attn_mask") is not None


def scale_before_quantizing(model: fx.GraphModule) -> dict[str, float]:
    """Move the scaling of each attention whose query is quantized before the quantizer, in place.

    Returns:
        Name of a quantizer -> factor. The caller must multiply the scale of each quantizer by its factor.
    """
    call_counts = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
    factors: dict[str, float] = {}
    for node in list(model.graph.nodes):
        factor = _find_scale_factor(model, node)
        stub = node.args[0] if node.args else None
        if factor is None or not isinstance(stub, fx.Node) or not _is_private_stub(model, stub, call_counts):
            continue
        with model.graph.inserting_before(stub):
            scaled = model.graph.call_function(operator.mul, (stub.args[0], factor))
        inherit_meta(scaled, stub, kind="mul")
        stub.args = (scaled,)
        fused = model.get_submodule(str(node.target))
        assert isinstance(fused, Fused)  # noqa: S101  # only Fused modules have a factor
        fused.parts = {role: PlainAttention() for role in fused.parts}
        factors[str(stub.target)] = factor
    if factors:
        model.recompile()
    return factors


def _find_scale_factor(model: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the scaling factor of an attention without a mask, or None for other nodes and kinds of attention."""
    fused = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(fused, Fused) or len(fused.parts) != 1:
        return None
    if fused.wiring != [[0, 1, 2]]:  # the only part reads inputs 0, 1 and 2 of the fused module: query, key, value
        return None
    part = next(iter(fused.parts.values()))
    if not isinstance(part, Operation) or part.kind != "attention":
        return None
    arguments = part.arguments
    is_masked = arguments.get("is_causal") or arguments.get("attn_mask") is not None
    has_plain_inputs = [arguments.get(name) for name in _TENSOR_ARGUMENTS] == [Slot(0), Slot(1), Slot(2)]
    if is_masked or arguments.get("enable_gqa") or not has_plain_inputs:
        return None
    scale = arguments.get("scale")
    if isinstance(scale, int | float):
        return float(scale)
    query = get_fake_tensor(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    width = None if query is None else query.shape[-1]
    return 1 / sqrt(width) if isinstance(width, int) else None


def _is_private_stub(model: fx.GraphModule, stub: fx.Node, call_counts: Mapping[str, int]) -> bool:
    """Whether a node is the only call of an enabled quantizer, with one reader."""
    if stub.op != "call_module" or call_counts[str(stub.target)] != 1 or len(stub.users) != 1:
        return False
    module = model.get_submodule(str(stub.target))
    return isinstance(module, QuantStub) and module.enabled
