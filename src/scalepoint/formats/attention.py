"""Quantized attention with its scaling before the quantizer, where compilers look for it.

softmax(c Q(q) K^T) V  =  softmax(Q'(c q) K^T) V,    Q' with the scale c s_q: the same codes, and no Mul after DQ
"""

import operator
from math import sqrt

import torch
from torch import Tensor, fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.nodes import get_fake_tensor, inherit_meta
from scalepoint.graph.operations import Slot
from scalepoint.patterns import Fused
from scalepoint.quantize.stubs import QuantStub

_INPUTS = ("query", "key", "value")


class PlainAttention(nn.Module):
    """Attention whose query is scaled already."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1), -1) @ value


def copy_after_masked_attention(model: fx.GraphModule) -> None:
    """After attention with a mask, a copy in the layout that its shape says, and reshapes that do not ask for another.

    torch's kernel gives another layout, in which torch.export takes a reshape for a view and leaves `contiguous` away;
    that fails in the form that ONNX gets. The copy is an Identity there, and gone.
    """
    calls = [node for node in model.graph.nodes if node.op == "call_module"]
    masked = [node for node in calls if _is_masked(model.get_submodule(str(node.target)))]
    for node in masked:
        with model.graph.inserting_after(node):
            copied = model.graph.call_function(torch.clone, (node,), {"memory_format": torch.contiguous_format})
        inherit_meta(copied, node, kind="clone")
        node.replace_all_uses_with(copied, lambda user, copied=copied: user is not copied)
    if not masked:
        return
    for node in model.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    model.recompile()


def _is_masked(module: nn.Module) -> bool:
    part = next(reversed(module.parts.values())) if isinstance(module, Fused) else module
    return isinstance(part, Operation) and part.kind == "attention" and part.arguments.get("attn_mask") is not None


def scale_before_quantizing(model: fx.GraphModule) -> dict[str, float]:
    """Move the scaling of each attention whose query is quantized; the factors by the names of the stubs."""
    calls: dict[str, int] = {}
    for node in model.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    factors: dict[str, float] = {}
    for node in list(model.graph.nodes):
        factor = _find_scale_factor(model, node)
        stub = node.args[0] if node.args else None
        if factor is None or not isinstance(stub, fx.Node) or not _is_private_stub(model, stub, calls):
            continue
        with model.graph.inserting_before(stub):
            scaled = model.graph.call_function(operator.mul, (stub.args[0], factor))
        inherit_meta(scaled, stub, kind="mul")
        stub.args = (scaled,)
        fused = model.get_submodule(str(node.target))
        assert isinstance(fused, Fused)  # noqa: S101  # only those have a factor
        fused.parts = {role: PlainAttention() for role in fused.parts}
        factors[str(stub.target)] = factor
    if factors:
        model.recompile()
    return factors


def _find_scale_factor(model: fx.GraphModule, node: fx.Node) -> float | None:
    """The scaling of a plain attention group; None for other groups, masks, causal and grouped-query attention."""
    fused = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(fused, Fused) or len(fused.parts) != 1 or fused.wiring != [[0, 1, 2]]:
        return None
    part = next(iter(fused.parts.values()))
    if not isinstance(part, Operation) or part.kind != "attention":
        return None
    others = {name: value for name, value in part.arguments.items() if name not in _INPUTS}
    slots = [part.arguments.get(name) for name in _INPUTS]
    if slots != [Slot(0), Slot(1), Slot(2)] or others.get("is_causal") or others.get("enable_gqa"):
        return None
    if others.get("attn_mask") is not None:
        return None
    scale, query = others.get("scale"), get_fake_tensor(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if isinstance(scale, int | float):
        return float(scale)
    return None if query is None or not isinstance(query.shape[-1], int) else 1 / sqrt(query.shape[-1])


def _is_private_stub(model: fx.GraphModule, stub: fx.Node, calls: dict[str, int]) -> bool:
    """Whether a node is a stub that nobody else reads or calls."""
    if stub.op != "call_module" or calls[str(stub.target)] != 1 or len(stub.users) != 1:
        return False
    module = model.get_submodule(str(stub.target))
    return isinstance(module, QuantStub) and module.enabled
