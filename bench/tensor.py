"""Speed, memory and exactness of the tensor layer on a 4096 x 4096 float32 weight, one thread.

Ratios are CPU time against torch's own fake-quantize operator in the same process, runs interleaved, medians.
`python bench/tensor.py [--quick]` prints the table and writes out/bench-tensor.json; `--small` measures only calls with
a small tensor.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from measure import Row, interleave, peak_extra_bytes, report
from scalepoint.numerics import fake_quantize
from scalepoint.spec import (
    DefaultFakeQuantize,
    PerBlockGranularity,
    PerChannelGranularity,
    PerTensorGranularity,
    QuantizationComponentFactory,
    QuantizationGranularity,
    QuantizationSpec,
)

GRANULARITIES: dict[str, QuantizationGranularity] = {
    "per tensor": PerTensorGranularity(),
    "per channel": PerChannelGranularity(axis=0),
    "block 32": PerBlockGranularity(axis=1, block_size=32),
}


def quantizer(spec: QuantizationSpec, x: Tensor, *, frozen: bool = True) -> DefaultFakeQuantize:
    """A weight quantizer that has seen x; without the eval cache, so that the arithmetic is what is measured."""
    fake_quantizer = QuantizationComponentFactory.create_fake_quantizer(spec, "weight")
    assert isinstance(fake_quantizer, DefaultFakeQuantize)
    fake_quantizer.cache_weights = False
    fake_quantizer(x)
    fake_quantizer.enable_observer(not frozen)
    return fake_quantizer


def torch_per_tensor(x: Tensor) -> Callable[[Tensor], Tensor]:
    scale, zero = x.abs().max() / 127, torch.zeros((), dtype=torch.int32)
    return lambda t: torch.fake_quantize_per_tensor_affine(t, scale, zero, -128, 127)


def torch_per_channel(x: Tensor) -> Callable[[Tensor], Tensor]:
    scale, zero = x.abs().amax(1) / 127, torch.zeros(x.shape[0], dtype=torch.int32)
    return lambda t: torch.fake_quantize_per_channel_affine(t, scale, zero, 0, -128, 127)


def forward_and_backward(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()
    return lambda: torch.autograd.grad(function(leaf), leaf, grad)


def integer_rows(x: Tensor, repeats: int) -> list[Row]:
    rows = []
    grad, output = torch.randn_like(x), torch.empty_like(x)
    ours = [
        (f"{dtype} {where} {scheme}", QuantizationSpec(dtype=dtype, qscheme=scheme, granularity=granularity))
        for dtype, scheme in (
            ("int8", "symmetric"),
            ("int8", "symmetric_with_clipping"),
            ("uint8", "asymmetric"),
            ("int4", "symmetric"),
        )
        for where, granularity in GRANULARITIES.items()
    ]
    for name, spec in ours:
        per_channel = "channel" in name
        reference = torch_per_channel(x) if per_channel else torch_per_tensor(x)
        against = "torch per channel" if per_channel else "torch per tensor"
        fq = quantizer(spec, x)
        qparams, block = fq.calculate_qparams(), spec.granularity.get_block_size(x.shape)
        seconds = interleave(
            {
                "torch": lambda run=reference: run(x),
                "fresh": lambda run=fq: run(x),
                "kept": lambda q=qparams, g=fq.grid, b=block: fake_quantize(x, q, g, b, fixed_zero=True, out=output),
                "clone": x.clone,
                "torch both": forward_and_backward(reference, x, grad),
                "both": forward_and_backward(fq, x, grad),
            },
            repeats,
        )
        clones = f"{seconds['fresh'] / seconds['clone']:.1f} clones"
        rows.append(Row(f"{name}: forward", seconds["fresh"] / seconds["torch"], 0.5, against, clones))
        clones = f"{seconds['kept'] / seconds['clone']:.1f} clones"
        rows.append(Row(f"{name}: forward, kept output", seconds["kept"] / seconds["torch"], 0.2, against, clones))
        rows.append(Row(f"{name}: forward + backward", seconds["both"] / seconds["torch both"], 0.5, against))
    return rows


def float_rows(x: Tensor, repeats: int) -> list[Row]:
    mx = PerBlockGranularity(axis=1, block_size=32)
    nv = PerBlockGranularity(axis=1, block_size=16)
    cases = {
        "fp8 e4m3 per tensor": (QuantizationSpec(dtype="float8_e4m3fn"), 1.3),
        "fp8 e5m2 per channel": (QuantizationSpec(dtype="float8_e5m2", granularity=PerChannelGranularity(axis=0)), 1.3),
        "MXFP8 e4m3 block 32": (
            QuantizationSpec(dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", granularity=mx),
            2.0,
        ),
        "MXFP4 block 32": (QuantizationSpec(dtype="float4_e2m1fn", granularity=mx), 2.0),
        "NVFP4 block 16": (QuantizationSpec(dtype="float4_e2m1fn", scale_dtype="float8_e4m3fn", granularity=nv), 2.0),
    }
    reference = torch_per_tensor(x)
    rows = []
    for name, (spec, limit) in cases.items():
        fq = quantizer(spec, x)
        seconds = interleave({"torch": lambda: reference(x), "ours": lambda run=fq: run(x)}, repeats)
        rows.append(Row(f"{name}: forward", seconds["ours"] / seconds["torch"], limit, "torch per tensor int8"))
    return rows


def observing_rows(x: Tensor, repeats: int) -> list[Row]:
    reference = torch_per_tensor(x)
    rows = []
    for where, granularity in GRANULARITIES.items():
        spec = QuantizationSpec(granularity=granularity)
        frozen, observing = quantizer(spec, x), quantizer(spec, x, frozen=False)
        seconds = interleave(
            {"torch": lambda: reference(x), "frozen": lambda f=frozen: f(x), "observing": lambda f=observing: f(x)},
            repeats,
        )
        added = (seconds["observing"] - seconds["frozen"]) / seconds["torch"]
        rows.append(Row(f"observing {where} adds", added, 0.3, "torch per tensor"))
    return rows


def memory_rows(x: Tensor) -> list[Row]:
    size = x.numel() * x.element_size()
    rows = []
    for name, spec in {
        "int8 symmetric": QuantizationSpec(),
        "uint8 asymmetric per channel": QuantizationSpec(
            dtype="uint8", qscheme="asymmetric", granularity=PerChannelGranularity(axis=0)
        ),
        "int4 block 32": QuantizationSpec(dtype="int4", granularity=GRANULARITIES["block 32"]),
        "MXFP4 block 32": QuantizationSpec(dtype="float4_e2m1fn", granularity=GRANULARITIES["block 32"]),
    }.items():
        fq = quantizer(spec, x)
        leaf = x.clone().requires_grad_()

        def both(fq: DefaultFakeQuantize = fq, leaf: Tensor = leaf) -> None:
            # As in a network: the quantized weight is gone when its gradient is made.
            fq(leaf).sum().backward()
            leaf.grad = None

        fq(x), both()
        peak = peak_extra_bytes(lambda fq=fq: fq(x))
        rows.append(Row(f"peak memory, {name}: forward", peak / size, 1.1, "the tensor"))
        rows.append(Row(f"peak memory, {name}: forward + backward", peak_extra_bytes(both) / size, 1.3, "the tensor"))
    return rows


class TorchFakeQuantize(nn.Module):
    """torch's operator in a module, with constant parameters: the least that a quantizer of torch can take."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.scale, self.zero = x.abs().max() / 127, torch.zeros((), dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, -128, 127)


def small_rows(repeats: int) -> list[Row]:
    x = torch.randn(4, 64)
    fp4_block = GRANULARITIES["block 32"]
    cases = {
        "int8 symmetric": (QuantizationSpec(), 1.7),
        "uint8 asymmetric": (QuantizationSpec(dtype="uint8", qscheme="asymmetric"), 2.0),
        "int8 per channel": (QuantizationSpec(granularity=PerChannelGranularity(axis=0)), 1.7),
        "int4 block 32": (QuantizationSpec(dtype="int4", granularity=fp4_block), 1.7),
        "fp8 e4m3": (QuantizationSpec(dtype="float8_e4m3fn"), 2.4),
        "MXFP4 block 32": (QuantizationSpec(dtype="float4_e2m1fn", granularity=fp4_block), 3.1),
    }
    calls: dict[str, DefaultFakeQuantize] = {}
    for name, (spec, _) in cases.items():
        calls[name] = quantizer(spec, x).eval()
        calls[name].quantization_target = type(calls[name].quantization_target)("activation")
    cached = quantizer(QuantizationSpec(), x).eval()
    cached.cache_weights = True
    runs = {name: lambda call=call: call(x) for name, call in {**calls, "cached": cached}.items()}
    reference = TorchFakeQuantize(x)
    seconds = interleave({"torch": lambda: reference(x), **runs}, repeats, inner=2000)

    def row(name: str, key: str, limit: float) -> Row:
        microseconds = (
            f"torch's operator in a module ({1e6 * seconds['torch']:.1f} us; ours {1e6 * seconds[key]:.1f} us)"
        )
        return Row(f"4 x 64, {name}", seconds[key] / seconds["torch"], limit, microseconds)

    rows = [row(f"one frozen call, {name}", name, limit) for name, (_, limit) in cases.items()]
    return [*rows, row("cached weight in eval", "cached", 2.5)]


def runtime_rows(values: int) -> list[Row]:
    """Codes that differ from ONNX Runtime's QuantizeLinear, over random values: none may."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from onnx_quantize import ONNX_TYPES, differing_codes  # noqa: PLC0415  # the tests own the ONNX side

    generator = np.random.default_rng(0)
    return [
        Row(f"{name}: codes unlike ONNX Runtime's", differing_codes(name, values, generator), 0, f"{values:.0e} values")
        for name in ONNX_TYPES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller tensor and fewer repeats: to see that it runs")
    parser.add_argument("--small", action="store_true", help="only the calls with a small tensor")
    options = parser.parse_args()
    quick = options.quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.small:
        title = f"calls with a 4 x 64 tensor, 1 thread, torch {torch.__version__}"
        return 0 if report(title, small_rows(15), Path("out/bench-tensor-small.json")) else 1
    side, repeats = (1024, 3) if quick else (4096, 9)
    x = torch.randn(side, side)
    rows = [
        *integer_rows(x, repeats),
        *float_rows(x, repeats),
        *observing_rows(x, repeats),
        *memory_rows(x),
        *small_rows(repeats),
        *runtime_rows(100_000 if quick else 10_000_000),
    ]
    title = f"tensor layer, {side} x {side} float32, 1 thread, torch {torch.__version__}"
    return 0 if report(title, rows, Path("out/bench-tensor.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
