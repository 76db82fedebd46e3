"""The deployed files in their runtimes: what runs in int8, agreement, error against float, speed, size.

    python bench/deployed.py [resnet50 bert ..] [--runtime onnxruntime | openvino]

For each network one float file, ours, the same placement with all 8 bits of the weights (which saturates on CPUs
without VNNI), with 7-bit and with u8 weights, and ONNX Runtime's own quantize_static on the same float file. All of
them are timed in turns in one process, one thread, medians. Ours is also compared layer by layer. In OpenVINO: ours,
and NNCF's own where nncf is installed. Results are merged into out/deployed.json, so that a part can be run again.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

import scalepoint
from files import File, share, speeds
from in_openvino import in_openvino
from scalepoint.quantize import quantize
from scalepoint.verification import verify_layers
from scalepoint.verification.runner import RuntimeModel
from subjects import SUBJECTS, Subject
from ways import NAIVE, OURS, THEIRS, arrays, quantize_static, targets

OUT = Path(__file__).parent.parent / "out" / "deployed.json"
LAYERS = (OURS, NAIVE)

console = Console(width=150)


@dataclass(frozen=True)
class Layers:
    """Every layer given the simulation's input for it."""

    how: str
    tensors: int
    int8: str
    least_equal: float
    largest_codes: int
    largest_float_steps: float
    departing: int


def sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found).double().square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@torch.no_grad()
def run(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(**batch) if isinstance(batch, dict) else model(batch)
    return result


def layer_by_layer(how: str, path: Path, quantized: fx.GraphModule, inputs: Any) -> Layers:
    found = verify_layers(path, quantized, inputs)
    numbers = (found.least_equal, found.largest_codes, found.largest_steps, len(found.departing))
    return Layers(how, len(found.layers), share(found.low_precision, found.fallbacks), *numbers)


def in_onnxruntime(subject: Subject, folder: Path) -> dict[str, Any]:
    plain, paths, agreements, layers = folder / "float.onnx", {}, {}, []
    for how, target in targets().items():
        path = paths[how] = folder / f"{len(paths)}.onnx"
        quantized = quantize(subject.model, subject.inputs, forward_loop=subject.calibration, target=target)
        scalepoint.export(quantized, path, subject.inputs, float_path=None if plain.exists() else plain)
        agreements[how] = sqnr(run(quantized, subject.inputs), run(RuntimeModel(path, threads=1), subject.inputs))
        if how in LAYERS:
            layers.append(asdict(layer_by_layer(how, path, quantized, subject.inputs)))
        console.print(f"  {how}: {agreements[how]:.1f} dB to the simulation")
    paths[THEIRS] = folder / "theirs.onnx"
    quantize_static(plain, paths[THEIRS], [arrays(subject.model, batch) for batch in subject.calibration])
    ratios = speeds([plain, *paths.values()], arrays(subject.model, subject.inputs))[1:]
    files = []
    for (how, path), ratio in zip(paths.items(), ratios, strict=True):
        found = scalepoint.verify(path, subject.model, subject.inputs, layers=False)
        size = path.stat().st_size / plain.stat().st_size
        int8 = share(found.low_precision, found.fallbacks)
        files.append(asdict(File(how, int8, found.sqnr, agreements.get(how), ratio, size)))
    return {"onnxruntime": files, "layers": layers}


RUNTIMES = {"onnxruntime": in_onnxruntime, "openvino": in_openvino}


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def show(title: str, found: Mapping[str, Any]) -> None:
    for runtime in RUNTIMES:
        if runtime not in found:
            continue
        table = Table(
            "how", "int8", "dB against float", "dB to simulation", "speed", "size", title=f"{title} in {runtime}"
        )
        for row in found[runtime]:
            numbers = (number(row["against_float"], ".1f"), number(row["agreement"], ".1f"))
            table.add_row(row["how"], row["int8"], *numbers, f"{row['speed']:.2f}x", f"{row['size']:.2f}x")
        console.print(table)
    if "layers" in found:
        table = Table(
            "how", "tensors", "int8", "equal codes", "largest", "float32 steps", "depart", title="layer by layer"
        )
        for row in found["layers"]:
            codes = (f"{row['least_equal']:.4%}", str(row["largest_codes"]), f"{row['largest_float_steps']:.3g}")
            table.add_row(row["how"], str(row["tensors"]), row["int8"], *codes, str(row["departing"]))
        console.print(table)


def keep(name: str, title: str, found: Mapping[str, Any]) -> None:
    """Merge into what other runs found."""
    kept = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept[name] = {**kept.get(name, {}), "title": title, **found}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({each: kept[each] for each in SUBJECTS if each in kept}, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(SUBJECTS)}; all when none is named")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), help="both unless given")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: one of {', '.join(SUBJECTS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in given.models or SUBJECTS:
        subject = SUBJECTS[name]()
        console.print(f"[bold]{subject.title}")
        with tempfile.TemporaryDirectory() as folder:
            for runtime, measure in RUNTIMES.items():
                if given.runtime in (None, runtime):
                    keep(name, subject.title, found := measure(subject, Path(folder)))
                    show(subject.title, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
