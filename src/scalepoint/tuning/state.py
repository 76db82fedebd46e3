"""Copies of what tuning changes: the state of quantized layers and activation quantizers, by module path."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

States = dict[str, dict[str, Tensor]]  # module path -> its state_dict


def copy_states(modules: Mapping[str, nn.Module]) -> States:
    return {path: _copy_state(module) for path, module in modules.items()}


def _copy_state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def restore_states(modules: Mapping[str, nn.Module], states: States) -> None:
    with torch.inference_mode(False):
        for path, module in modules.items():
            module.load_state_dict(states[path])
