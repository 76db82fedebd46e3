"""The deployed files in their runtimes: what runs in int8, agreement, error against float, speed, size.

    python bench/deployed.py [resnet50 bert ..] [--runtime onnxruntime | openvino]

For each network one float file, ours as deploy makes it, and ONNX Runtime's own quantize_static on the same float file;
where the runtime has no VNNI kernels also the same placement with all 8 bits of the weights (which saturates), with
7-bit and with u8 weights. All of them are timed in turns in one process, one thread, medians, against the faster of the
float file and of what torch.onnx.export writes. Ours is also compared layer by layer. In OpenVINO: ours, and NNCF's own
where nncf is installed. Results are merged into out/deployed.json, with VNNI out/deployed-vnni.json, so that a part can
be run again.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

import scalepoint
from kernels import kernels_here
from networks import SUBJECTS, Subject
from onnx_files import (
    ANSWERS,
    NAIVE,
    NNCF,
    OURS,
    OURS_VNNI,
    QUANTIZE_STATIC,
    File,
    arrays,
    nncf_quantize,
    quantize_static,
    ran,
    run,
    share,
    size_of,
    speeds,
    sqnr,
    with_weights,
)
from scalepoint.formats import Writing
from scalepoint.formats.onnx import ONNX
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize import QuantConfig, coverage, quantize
from scalepoint.targets import onnxruntime_target, openvino_target
from scalepoint.verification import verify_layers
from scalepoint.verification.timing import plain_file

CPU = kernels_here()
OUT = Path(__file__).parent.parent / "out" / ("deployed.json" if CPU == "avx2" else "deployed-vnni.json")

console = Console(width=150)


@dataclass(frozen=True)
class Layers:
    """Every layer given the simulation's input for it; the worst tensor counts."""

    how: str
    tensors: int
    int8: str
    least_equal: float
    largest_codes: int
    largest_float_steps: float
    departing: int


def layer_by_layer(how: str, path: Path, quantized: fx.GraphModule, inputs: Any) -> Layers:
    found = verify_layers(path, quantized, inputs)
    numbers = (found.least_equal, found.largest_codes, found.largest_steps, len(found.departing))
    return Layers(how, len(found.layers), share(found.low_precision, found.fallbacks), *numbers)


def in_onnxruntime(subject: Subject, folder: Path, *, quick: bool) -> dict[str, Any]:
    plain, paths, simulated, layers = folder / "float.onnx", {}, {}, []
    own = OURS if CPU == "avx2" else OURS_VNNI
    config, data = QuantConfig(speed_first=True, correct_bias=True), subject.calibration
    ours = quantize(subject.model, subject.inputs, config, forward_loop=data, target=onnxruntime_target(CPU))
    for how in (own, *(() if quick or CPU == "vnni" else ANSWERS)):
        path = paths[how] = folder / f"{len(paths)}.onnx"
        quantized = ours if how == own else with_weights(ours, ANSWERS[how], data)
        scalepoint.export(quantized, path, subject.inputs, float_path=plain if how == own else None)
        simulated[how] = run(quantized, subject.held_out)
        if how in (own, NAIVE):
            layers.append(asdict(layer_by_layer(how, path, quantized, subject.inputs)))
        console.print(f"  {how} is written")
    paths[QUANTIZE_STATIC] = folder / "theirs.onnx"
    quantize_static(plain, paths[QUANTIZE_STATIC], [arrays(subject.model, batch) for batch in subject.calibration])
    files = judged(subject, plain, paths, simulated, "onnxruntime")
    files[0]["left"] = sum(row.is_for_speed for row in coverage(ours).operations)
    return {"onnxruntime": files, "layers": layers}


def in_openvino(subject: Subject, folder: Path, *, quick: bool) -> dict[str, Any]:
    own = OURS if CPU == "avx2" else OURS_VNNI
    plain, paths = folder / "float.onnx", {own: folder / "openvino.onnx"}
    config, target = QuantConfig(correct_bias=True), openvino_target(CPU)
    quantized = quantize(subject.model, subject.inputs, config, forward_loop=subject.calibration, target=target)
    scalepoint.export(quantized, paths[own], subject.inputs, float_path=plain)
    if find_spec("nncf") and not quick:
        paths[NNCF] = folder / "nncf.xml"
        batches = [arrays(subject.model, batch) for batch in subject.calibration]
        nncf_quantize(plain, paths[NNCF], batches, is_transformer=subject.is_transformer)
    return {"openvino": judged(subject, plain, paths, {own: run(quantized, subject.held_out)}, "openvino")}


def judged(
    subject: Subject, plain: Path, paths: Mapping[str, Path], simulated: Mapping[str, Tensor], runtime: str
) -> list[dict[str, Any]]:
    """What each file gives in its runtime, and how fast."""
    expected, feeds = run(subject.model, subject.held_out), arrays(subject.model, subject.held_out)
    with plain_file(subject.model, ONNX, Writing(as_inputs(subject.inputs, None), None)) as other:
        plains = [plain, *([other] if other else [])]
        found = speeds([*plains, *paths.values()], arrays(subject.model, subject.inputs), runtime)
    ratios = [each / max(found[: len(plains)]) for each in found[len(plains) :]]
    files = []
    for (how, path), ratio in zip(paths.items(), ratios, strict=True):
        output, int8 = ran(path, feeds, runtime)
        agreement = sqnr(simulated[how], output) if how in simulated else None
        size = size_of(path) / size_of(plain)
        files.append(asdict(File(how, int8, sqnr(expected, output), agreement, ratio, size)))
    return files


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


def keep(name: str, subject: Subject, found: Mapping[str, Any]) -> None:
    """Merge into what other runs found."""
    kept = json.loads(OUT.read_text()) if OUT.exists() else {}
    about = {"title": subject.title, "is_transformer": subject.is_transformer}
    kept[name] = {**kept.get(name, {}), **about, **found}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({each: kept[each] for each in SUBJECTS if each in kept}, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(SUBJECTS)}; all when none is named")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), help="both unless given")
    parser.add_argument(
        "--pictures", type=Path, help="a folder with photographs for EfficientNet-Lite0; else it has 20"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the other answers to saturation, and NNCF")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: one of {', '.join(SUBJECTS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in given.models or SUBJECTS:
        subject = SUBJECTS[name](given.pictures)
        console.print(f"[bold]{subject.title}")
        with tempfile.TemporaryDirectory() as folder:
            for runtime, measure in RUNTIMES.items():
                if given.runtime in (None, runtime):
                    keep(name, subject, found := measure(subject, Path(folder), quick=given.quick))
                    show(subject.title, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
