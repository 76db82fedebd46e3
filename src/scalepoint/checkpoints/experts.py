"""Experts as layers of their own: what transformers keeps in one stack is taken apart, as checkpoints store it.

    y = sum_e  share_e(x) * down_e(act(gate_e(x_e)) * up_e(x_e)),    x_e = x where expert e is chosen, else 0

A row of zeros gives zero and adds nothing to any sum, so an expert's statistics are of the tokens sent to it; the graph
has one shape whatever the router does. All experts are computed for all tokens: right for calibration, not for serving.
"""

from typing import Any

import torch
from torch import Tensor, nn


class GatedExpert(nn.Module):
    """One gated network."""

    def __init__(self, hidden: int, inner: int, act: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return found


class ExpertList(nn.Module):
    """All experts of a block, by number."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        gate_up, down = (getattr(stacked, name) for name in ("gate_up_proj", "down_proj"))
        for number in range(gate_up.shape[0]):
            self.add_module(str(number), GatedExpert(gate_up.shape[2], down.shape[2], getattr(stacked, "act_fn")))  # noqa: B009

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for name, expert in self.named_children():
            is_sent = (top_k_index == int(name)).to(hidden_states.dtype)
            share = (top_k_weights * is_sent).sum(-1, keepdim=True)
            total = total + share * expert(hidden_states * is_sent.amax(-1, keepdim=True))
        return total


def is_expert_stack(module: nn.Module) -> bool:
    """Whether it is a stack of gated experts."""
    wide, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(wide, Tensor) and isinstance(down, Tensor) and wide.ndim == down.ndim == 3):
        return False
    return wide.shape[1] == 2 * down.shape[2] and wide.shape[2] == down.shape[1] and hasattr(module, "act_fn")


def split_experts(model: nn.Module) -> None:
    """Every stack of a model becomes experts by number."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_expert_stack(child):
                setattr(module, name, ExpertList(child))
