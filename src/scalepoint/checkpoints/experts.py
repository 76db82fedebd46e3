"""Replace transformers' stacked experts by one module per expert, the way checkpoints store them.

    y = sum_e  share_e(x) * down_e(act(gate_e(x_e)) * up_e(x_e)),    x_e = x where expert e is chosen, else 0

A row of zeros gives zero and adds nothing to any sum, so each expert's statistics cover only the tokens that the router
sends to it, and the graph does not depend on the router. Every expert runs on every token: right for calibration, too
slow for serving.

Weights are not copied from the stack: the checkpoint is loaded into the new modules afterwards. Axes of a stack:
    gate_up_proj    (experts, 2 * inner size, hidden size), the rows of gate before those of up
    down_proj       (experts, hidden size, inner size)
"""

from typing import Any

import torch
from torch import Tensor, nn


class GatedExpert(nn.Module):
    """A gated feed-forward network: down(act(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, inner_size: int, act: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return y


class ExpertList(nn.Module):
    """All experts of a block, as submodules "0", "1", ..."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        gate_up, down, act = (getattr(stack, name) for name in ("gate_up_proj", "down_proj", "act_fn"))
        expert_count, _, hidden_size = gate_up.shape
        for index in range(expert_count):
            self.add_module(str(index), GatedExpert(hidden_size, inner_size=down.shape[2], act=act))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Called like the stack: the router chose the experts `top_k_index`, with shares `top_k_weights`, per token."""
        total = torch.zeros_like(hidden_states)
        for name, expert in self.named_children():
            is_chosen = (top_k_index == int(name)).to(hidden_states.dtype)
            share = (top_k_weights * is_chosen).sum(-1, keepdim=True)
            total = total + share * expert(hidden_states * is_chosen.amax(-1, keepdim=True))
        return total


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module of transformers stores the gate_up weights of all experts in one tensor, and down in another."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.ndim == down.ndim == 3):
        return False
    return gate_up.shape[1] == 2 * down.shape[2] and gate_up.shape[2] == down.shape[1] and hasattr(module, "act_fn")


def split_experts(model: nn.Module) -> None:
    """Replace every stack of experts in a model by an ExpertList with weights that are not loaded yet, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_expert_stack(child):
                setattr(module, name, ExpertList(child))
