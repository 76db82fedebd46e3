"""What writing a file costs beside capturing the model: CPU seconds of `capture` and of `export`, taken in turn.

Random weights: the time is that of graphs. "two files" is the quantized file with the float one beside it, as deploy
writes them; both come from the same captured graph. What writing the bytes of both alone takes, from memory, is told
beside. `--architectures` adds nets of timm at 64 pixels that have many branches.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from measure import Row, interleave, report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests know how these are imported
from architectures import timm_models, torchvision_models

OUT = Path(__file__).parent.parent / "out"
ALWAYS = {"ResNet-50": "resnet50", "ViT-B/16": "vit_b_16", "MobileNetV2": "mobilenet_v2"}
BRANCHY = ("mobileone_s0", "repvit_m0_9", "maxvit_tiny_rw_224")
LIMIT = 1.0


def rows(title: str, model: nn.Module, side: int, repeats: int) -> list[Row]:
    """Export as a multiple of capture."""
    from scalepoint.formats.export import export  # noqa: PLC0415
    from scalepoint.graph.capture import capture  # noqa: PLC0415
    from scalepoint.quantize import quantize  # noqa: PLC0415
    from scalepoint.support.files import replace_file  # noqa: PLC0415

    torch.manual_seed(0)
    inputs = torch.randn(2, 3, side, side)
    quantized = quantize(model, inputs, forward_loop=[inputs], target="onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        path, beside = Path(folder, "model.onnx"), Path(folder, "float.onnx")
        runs: dict[str, Any] = {
            "capture": lambda: capture(model, inputs),
            "one file": lambda: export(quantized, path, inputs),
            "two files": lambda: export(quantized, path, inputs, float_path=beside),
        }
        runs["two files"]()
        held = [each.read_bytes() for each in (path, beside)]
        copies = [Path(folder, f"copy{number}.onnx") for number in range(len(held))]
        runs["bytes"] = lambda: [
            replace_file(copy, lambda made, data=data: made.write_bytes(data))  # type: ignore[misc]
            for copy, data in zip(copies, held, strict=True)
        ]
        taken = interleave(runs, repeats)
    base = taken["capture"]
    notes = {"one file": "", "two files": f", {taken['bytes']:.2f} s for the bytes alone"}
    return [
        Row(f"{title}: {what}", taken[what] / base, LIMIT, "capture", f"{taken[what]:.1f} s against {base:.1f} s{note}")
        for what, note in notes.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", action="store_true", help="also nets of timm")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made = [(title, torchvision_models().get_model(name, weights=None).eval(), 224) for title, name in ALWAYS.items()]
    if options.architectures:
        made += [
            (name, timm_models().create_model(name, pretrained=False, **_size(name)).eval(), 64) for name in BRANCHY
        ]
    found = []
    for each in made:
        found += rows(*each, options.repeats)
        Console().print(*(f"{row.name} {row.ratio:.2f} ({row.note})" for row in found[-2:]), sep="\n")
    return 0 if report("export beside capture, CPU seconds", found, OUT / "export_time.json") else 1


def _size(name: str) -> dict[str, int]:
    return {"img_size": 64} if name.startswith("maxvit") else {}


if __name__ == "__main__":
    sys.exit(main())
