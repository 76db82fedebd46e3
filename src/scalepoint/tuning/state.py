"""Copies of what tuning changes: the state of quantized layers and activation quantizers, by module path."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

States = dict[str, dict[str, Tensor]]  # module path -> its state_dict


def copy_states(modules: Mapping[str, nn.Module]) -> States:
    states: States = {}
    for path, module in modules.items():
        states[path] = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return states


def restore_states(modules: Mapping[str, nn.Module], states: States) -> None:
    with torch.inference_mode(False):
        for path, module in modules.items():
            module.load_state_dict(states[path])
