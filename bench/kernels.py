"""The tables of kernel times that decide where int8 pays: src/scalepoint/targets/measured/onnxruntime-*.json.

Layers of many shapes stand side by side in one network a picture size, each between two 1x1 convolutions; the float and
the int8 file are profiled in turns by ONNX Runtime itself, one thread, batch 1, medians. It makes the table of the
kernels that this runtime takes, which one product tells: those without VNNI add in pairs that saturate.

    python bench/kernels.py [--cpu amd | intel] [part ..]

`--cpu` says whose CPU with VNNI this is: each has a table. Parts (`2d 32`, `1d 200`, `linear 16`, ..; all unless named)
are kept in out/, and the table is written when all are there.

ONNX Runtime has no switch for its instruction set. Without a CPU that lacks VNNI, the AVX2 kernels were measured on a
CPU with VNNI, with a copy of ONNX Runtime whose test for AVX-512 always fails.

Convolutions over one axis and three were measured on a busy CPU with AVX2 alone, for 4 to 5 seconds a network, and one
row was left out (five taps, 128 channels, 1,000 positions: three times what its neighbours say). The table of the AMD
with VNNI has the same rows, marked as of avx2: which of two kernels wins there is taken over, not measured. That of the
Intel CPU is measured whole.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import scalepoint
from scalepoint.quantize import QuantConfig, quantize
from scalepoint.targets import Target, onnxruntime_target
from scalepoint.verification import profile
from scalepoint.verification.profiling import map_layer_names

TABLES = Path(__file__).parent.parent / "src" / "scalepoint" / "targets" / "measured"
PROFILES_FOLDER = Path(__file__).parent.parent / "out" / "kernels"
PIXELS = (4, 8, 16, 32, 64, 112)
BETWEEN = 8  # channels around a layer
SECONDS = 12.0
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS: dict[int, type[Convolution]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FURTHER = {1: (50, 200, 1000), 3: (4, 8, 16)}  # extents of an axis, by how many axes there are
MOST = 1 << 20  # values of all windows of a layer: more are written to fresh memory, which takes longer than the layer


class Between(nn.Module):
    """A layer whose neighbours are quantized too, so that its own kernel alone is measured."""

    def __init__(self, layer: Convolution) -> None:
        super().__init__()
        kind = type(layer)
        self.before, self.layer = kind(BETWEEN, layer.in_channels, 1), layer
        self.after = kind(layer.out_channels, BETWEEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.relu(self.layer(torch.relu(self.before(x)))))
        return y


class Layers(nn.Module):
    """All layers of one picture size, an add, a pool and a linear layer."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        widths = [width for width in (8, 16, 32, 64, 128, 256) if width * pixels <= 4096]
        dense = [nn.Conv2d(width, width, 3, padding=1) for width in widths if width <= 128]
        dense += [nn.Conv2d(width, width, 5, padding=2) for width in widths if width <= 32]
        points = [nn.Conv2d(width, 2 * width, 1) for width in widths] + [
            nn.Conv2d(4 * width, width, 1) for width in widths[:4]
        ]
        depth = [nn.Conv2d(width, width, k, padding=k // 2, groups=width) for width in widths for k in (3, 5)]
        self.branches = nn.ModuleList(map(Between, (*dense, *points, *depth)))
        kernels = [(width, 3) for width in (8, 16, 32, 64)] + [(width, k) for width in (16, 64) for k in (5, 7)]
        stems = [nn.Conv2d(3, width, k, padding=k // 2) for width, k in kernels]
        self.stems = nn.ModuleList(stems if pixels >= 16 else [])
        self.one, self.two = nn.Conv2d(BETWEEN, 64, 1), nn.Conv2d(BETWEEN, 64, 1)

    def forward(self, x: Tensor, picture: Tensor) -> list[Tensor]:
        outputs = [branch(x) for branch in self.branches] + [torch.relu(stem(picture)) for stem in self.stems]
        return [*outputs, torch.relu(self.one(x) + self.two(x))]


class FurtherLayers(nn.Module):
    """Convolutions over one axis, or three."""

    def __init__(self, rank: int, pixels: int) -> None:
        super().__init__()
        kind = CONVOLUTIONS[rank]
        widths = [(width, k) for width in (16, 64, 128) for k in (1, 3, 5) if width * (k * pixels) ** rank <= MOST]
        sizes = [(width, k, groups) for width, k in widths for groups in ((1, width) if k == 3 else (1,))]
        layers = [kind(width, width, k, padding=k // 2, groups=groups) for width, k, groups in sizes]
        self.branches = nn.ModuleList(Between(layer) for layer in layers)
        self.stems = nn.ModuleList(kind(channels, width, 3, padding=1) for channels in (1, 3) for width in (16, 64))

    def forward(self, x: Tensor, picture: Tensor) -> list[Tensor]:
        outputs = [branch(x) for branch in self.branches]
        return outputs + [torch.relu(stem(picture[:, : stem.in_channels])) for stem in self.stems]  # type: ignore[misc, index]


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((16, 16), (64, 64), (64, 10), (256, 64), (400, 120), (256, 256), (512, 1024), (1024, 256))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x[:, : layer.in_features]) for layer in self.layers]  # type: ignore[misc, index]


def kernels_here() -> str:
    """Which int8 kernels this runtime takes on this machine: 255 x 127 added in pairs is more than 16 bits hold."""
    a, y = helper.make_tensor_value_info("a", 2, [4, 64]), helper.make_tensor_value_info("y", 6, [4, 16])
    b = numpy_helper.from_array(np.full((64, 16), 127, np.int8), "b")
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], "product", [a], [y], [b])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    product = session.run(None, {"a": np.full((4, 64), 255, np.uint8)})[0]
    return "vnni" if (product == 255 * 127 * 64).all() else "avx2"


def profiled(model: nn.Module, inputs: tuple[Tensor, ...], target: Target) -> dict[str, Any]:
    config = QuantConfig(speed_first=False)
    quantized = quantize(model, inputs, config, forward_loop=[inputs], target=target, freeze_weights=True)
    with tempfile.TemporaryDirectory() as text:
        plain, quantized_file = Path(text) / "float.onnx", Path(text) / "m.onnx"
        scalepoint.export(quantized, quantized_file, inputs, float_path=plain)
        feeds = dict(zip(("x", "picture"), (tensor.numpy() for tensor in inputs), strict=False))
        rows = profile(plain, quantized_file, feeds, names=map_layer_names(quantized), seconds=SECONDS)
    return {row.name: row for row in rows}


def micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def of_convolution(layer: Convolution, pixels: int, row: Any) -> dict[str, Any]:
    rank = len(layer.kernel_size)
    shape = {"in": layer.in_channels, "out": layer.out_channels, "kernel": layer.kernel_size[0], "groups": layer.groups}
    shape |= {"pixels": pixels**rank} | ({} if rank == 2 else {"rank": rank})
    return {"kind": "conv", **shape, "float": micro(row.float_seconds), "int8": micro(row.seconds)}


def of_all(model: Layers | FurtherLayers, pixels: int, rows: dict[str, Any]) -> list[dict[str, Any]]:
    layers: dict[str, Any] = {f"branches.{i}.layer": part.layer for i, part in enumerate(model.branches)}
    layers |= {f"stems.{i}": part for i, part in enumerate(model.stems)}
    return [of_convolution(layer, pixels, rows[name]) for name, layer in layers.items() if name in rows]


def of_pictures(pixels: int, target: Target) -> list[dict[str, Any]]:
    """Layers of one picture size, and what conversions and an add take there."""
    model = Layers(pixels).eval()
    inputs = (torch.randn(1, BETWEEN, pixels, pixels), torch.randn(1, 3, pixels, pixels))
    rows = profiled(model, inputs, target)
    table = of_all(model, pixels, rows)
    for name, row in rows.items():
        kind = {("QuantizeLinear",): "quantize", ("DequantizeLinear",): "dequantize"}.get(row.kernels)
        channels = {"x_quant": BETWEEN, "picture_quant": 3}.get(name, BETWEEN)
        if kind and (name in ("x_quant", "picture_quant") or name.endswith(".after_quant")):
            table.append({"kind": kind, "elements": channels * pixels * pixels, "int8": micro(row.seconds)})
    add = next((row for row in rows.values() if "QLinearAdd" in row.kernels), None)
    if add is not None:
        table.append({"kind": "add", "elements": 64 * pixels * pixels, "int8": micro(add.seconds)})
    return table


def of_further(rank: int, pixels: int, target: Target) -> list[dict[str, Any]]:
    """Convolutions over one axis, or three."""
    model, axes = FurtherLayers(rank, pixels).eval(), [pixels] * rank
    return of_all(model, pixels, profiled(model, (torch.randn(1, BETWEEN, *axes), torch.randn(1, 3, *axes)), target))


def of_linears(rows_in: int, target: Target) -> list[dict[str, Any]]:
    linears, table = Linears().eval(), []
    profile = profiled(linears, (torch.randn(rows_in, 1024),), target)
    for index, layer in enumerate(linears.layers):
        row = profile.get(f"layers.{index}")
        if row is not None:
            shape = {"in": layer.in_features, "out": layer.out_features, "pixels": rows_in}
            table.append({"kind": "linear", **shape, "float": micro(row.float_seconds), "int8": micro(row.seconds)})
    return table


PARTS: dict[str, Callable[[Target], list[dict[str, Any]]]] = {
    **{f"2d {pixels}": partial(of_pictures, pixels) for pixels in PIXELS},
    **{
        f"{rank}d {pixels}": partial(of_further, rank, pixels)
        for rank, pixel_counts in FURTHER.items()
        for pixels in pixel_counts
    },
    **{f"linear {rows}": partial(of_linears, rows) for rows in (1, 16, 128)},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; all unless named")
    parser.add_argument("--cpu", choices=("amd", "intel"), help="whose CPU with VNNI this is")
    options = parser.parse_args()
    if unknown := [part for part in options.part if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: one of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    kind = kernels_here()
    if kind == "vnni" and not options.cpu:
        parser.error("a CPU with VNNI needs its manufacturer: pass --cpu amd or --cpu intel")
    name = f"onnxruntime-{kind}" + (f"-{options.cpu}" if kind == "vnni" else "")
    folder, target = PROFILES_FOLDER / name, onnxruntime_target(kind)
    folder.mkdir(parents=True, exist_ok=True)
    for part in options.part or PARTS:
        rows = PARTS[part](target)
        (folder / f"{part}.json").write_text(json.dumps(rows))
        print(f"{part}: {len(rows)} rows", file=sys.stderr)
    missing = [part for part in PARTS if not (folder / f"{part}.json").exists()]
    if missing:
        print(f"the table is written when there are also: {', '.join(missing)}")
        return 0
    table = [row for part in PARTS for row in json.loads((folder / f"{part}.json").read_text())]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    (TABLES / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    print(f"{len(table)} rows written to {TABLES / name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
