"""What tuning changes, as values: the state of quantized layers and activation quantizers by their names."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

States = dict[str, dict[str, Tensor]]


def copy_states(modules: Mapping[str, nn.Module]) -> States:
    """A copy of what the modules hold now."""
    return {
        name: {key: value.detach().clone() for key, value in module.state_dict().items()}
        for name, module in modules.items()
    }


def restore_states(modules: Mapping[str, nn.Module], states: States) -> None:
    """Make it what they hold."""
    with torch.inference_mode(False):
        for name, module in modules.items():
            module.load_state_dict(states[name])
