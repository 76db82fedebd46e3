"""Small quantized models for Core ML and Core AI, whose tests need coremltools or coreai-torch."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from scalepoint.quantize import QuantConfig
from scalepoint.quantize.quantize_model import quantize

NEEDS_COREMLTOOLS = pytest.mark.skipif(find_spec("coremltools") is None, reason="pip install scalepoint[coreml]")
NEEDS_COREAI = pytest.mark.skipif(find_spec("coreai_torch") is None, reason="pip install scalepoint[coreai]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(NEEDS_COREAI if "coreai" in item.path.name else NEEDS_COREMLTOOLS)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24),
    ).eval()  # fmt: skip


def pictures() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


CONFIGS = {
    "int8": QuantConfig(),
    "int8 activations": QuantConfig(activation={"n_bits": 8, "symmetric": True}),
    "weights int8": QuantConfig.weight_only("int8", None),
    "weights int4 per channel": QuantConfig.weight_only("int4", None),
    "weights uint4 per channel": QuantConfig.weight_only("uint4", None),
    "weights int8, 2:4": QuantConfig(activation="float", weight={"n_bits": 8, "per_channel": True, "sparsity": "2:4"}),
    "palettes of 1 bit": QuantConfig.palettes(1),
    "palettes of 3 bits per group": QuantConfig.palettes(3, group_size=8),
    "palettes of 6 bits": QuantConfig.palettes(6),
    "palettes of vectors": QuantConfig.palettes(4, group_size=8, cluster_dim=2),
    "weights int4 in blocks": QuantConfig(
        activation="float", overrides=[{"type": "Linear", "weight": {"n_bits": 4, "block_size": 8}}]
    ),
}


def quantized(config: str = "int8", model: nn.Module | None = None, target: str = "coreml") -> torch.fx.GraphModule:
    x = pictures()
    return quantize(model or net(), x, CONFIGS[config], forward_loop=[x], target=target, freeze_weights=True).eval()
