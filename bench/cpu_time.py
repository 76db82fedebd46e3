"""CPU seconds of importing scalepoint, of writing files, of a smoke run, and of a search with several trials.

    python bench/cpu_time.py import
    python bench/cpu_time.py export [--architectures] [--repeats 3]
    python bench/cpu_time.py smoke
    python bench/cpu_time.py trials --before OTHER/src

import: `import scalepoint` against `import torch`, and the quick commands; medians of fresh interpreters.
export: `capture` and `export` in turn, random weights. "two files" is the quantized file and the float one, as deploy
writes them; both come from the same captured graph. The note has the time of writing the bytes of both from memory.
--architectures adds nets of timm at 64 pixels that have many branches.
smoke: the demo's deployment with `smoke=True`, with the processes of the runtime, against the full run. Without a
metric, and with the demo's, which is called as often and takes as long in both.
trials: three trials of ResNet-18 with this checkout and with another one: CPU seconds and peak memory of the process,
and how often torch.export ran. Medians of three runs in turn.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from measure import Row, interleave, report, run_part

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests know how these are imported
sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))

from architectures import timm_models, torchvision_models
from sentences import Task, prepared

OUT = Path(__file__).parent.parent / "out"
REPEATS = 7
QUICK = ("targets", "targets tensorrt", "doctor", "config schema", "report FOLDER")  # at most one CPU-second each


def cpu_seconds(statement: str) -> float:
    """User and system time of a fresh interpreter that runs one statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def command(line: str) -> str:
    return f"from scalepoint.cli.app import run; raise SystemExit(run({line.split()!r}))"


def get_report_folder() -> Path:
    """A folder with the report of a deployment."""
    folder = OUT / "bench-import"
    if not (folder / "report.json").is_file():
        program = (
            "import torch, scalepoint; x = torch.randn(8, 64); "
            f"scalepoint.deploy(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), x, [x], output={str(folder)!r})"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
    return folder


def import_time() -> int:
    imports = ("import torch", "import scalepoint", "import scalepoint.spec")
    folder = get_report_folder()
    commands = {f"scalepoint {line}": command(line.replace("FOLDER", str(folder))) for line in QUICK}
    statements = (*imports, *commands.values())
    seconds_by_statement: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(REPEATS):
        for statement in statements:
            seconds_by_statement[statement].append(cpu_seconds(statement))
    median = {statement: statistics.median(times) for statement, times in seconds_by_statement.items()}
    base = median["import torch"]
    rows = [Row(name, median[name] / base, 1.15, "import torch") for name in imports[1:]]
    rows += [Row(f"{name}, CPU-seconds", median[run], 1.0, "one CPU-second") for name, run in commands.items()]
    return 0 if report("import cost", rows, OUT / "bench-import.json") else 1


ALWAYS = {"ResNet-50": "resnet50", "ViT-B/16": "vit_b_16", "MobileNetV2": "mobilenet_v2"}
BRANCHY = ("mobileone_s0", "repvit_m0_9", "maxvit_tiny_rw_224")
EXPORT_LIMIT = 1.0


def export_rows(title: str, model: nn.Module, side: int, repeats: int) -> list[Row]:
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
        contents = [file.read_bytes() for file in (path, beside)]
        copies = [Path(folder, f"copy{number}.onnx") for number in range(len(contents))]
        runs["bytes"] = lambda: [
            replace_file(copy, lambda new_file, data=data: new_file.write_bytes(data))  # type: ignore[misc]
            for copy, data in zip(copies, contents, strict=True)
        ]
        medians = interleave(runs, repeats)
    base = medians["capture"]
    notes = {"one file": "", "two files": f", {medians['bytes']:.2f} s for the bytes alone"}
    return [
        Row(
            f"{title}: {what}",
            medians[what] / base,
            EXPORT_LIMIT,
            "capture",
            f"{medians[what]:.1f} s against {base:.1f} s{note}",
        )
        for what, note in notes.items()
    ]


def export_time() -> int:
    parser = argparse.ArgumentParser(description="CPU seconds of export against capture")
    parser.add_argument("--architectures", action="store_true", help="also nets of timm")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = [(title, torchvision_models().get_model(name, weights=None).eval(), 224) for title, name in ALWAYS.items()]
    if options.architectures:
        models += [
            (name, timm_models().create_model(name, pretrained=False, **_image_size(name)).eval(), 64)
            for name in BRANCHY
        ]
    rows = []
    for model_row in models:
        rows += export_rows(*model_row, options.repeats)
        Console().print(*(f"{row.name} {row.ratio:.2f} ({row.note})" for row in rows[-2:]), sep="\n")
    return 0 if report("export beside capture, CPU seconds", rows, OUT / "export_time.json") else 1


def _image_size(name: str) -> dict[str, int]:
    return {"img_size": 64} if name.startswith("maxvit") else {}


SMOKE_LIMIT, JUDGED_LIMIT = 0.25, 1.0


def seconds(task: Task, *, smoke: bool, is_judged: bool) -> float:
    """Of this process and all that it started."""
    import scalepoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        before = sum(os.times()[:4])
        scalepoint.deploy(
            task.model,
            task.calibration[0],
            task.calibration,
            output=folder,
            force=True,
            evaluate=task.accuracy if is_judged else None,
            smoke=smoke,
            progress=False,
        )
        return sum(os.times()[:4]) - before


def smoke_time() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = prepared()
    seconds(task, smoke=True, is_judged=False)  # imports, and torch's first times
    rows = []
    for name, is_judged, limit in (
        ("smoke=True of the demo", False, SMOKE_LIMIT),
        ("with its metric", True, JUDGED_LIMIT),
    ):
        rounds = [[seconds(task, smoke=smoke, is_judged=is_judged) for smoke in (True, False)] for _ in range(2)]
        fast, full = (min(times) for times in zip(*rounds, strict=True))
        rows.append(Row(name, fast / full, limit, "the full run", f"{fast:.1f} s against {full:.1f} s"))
    return 0 if report("a smoke run, CPU seconds", rows, OUT / "smoke.json") else 1


TRIALS = """
import resource, sys, tempfile, warnings
sys.path.insert(0, {bench!r})
warnings.simplefilter("ignore")
import torch
from plain_models import resnet18
import scalepoint
torch.set_num_threads(1)
exports = 0
original = torch.export.export
def counted(*inputs, **options):
    global exports
    exports += 1
    return original(*inputs, **options)
torch.export.export = counted
torch.manual_seed(0)
data = [torch.randn(4, 3, 96, 96) for _ in range(4)]
scores = iter([1.0] + [0.0] * 9)  # the float model's score, then files that never hold it
with tempfile.TemporaryDirectory() as folder:
    done = scalepoint.deploy(resnet18(), data[0], data, output=folder + "/out", evaluate=lambda run: next(scores),
                             max_drop=0.1, max_trials=3, progress=False)
own = resource.getrusage(resource.RUSAGE_SELF)
print(own.ru_utime + own.ru_stime, own.ru_maxrss / 1024, exports, len(done.trials))
"""


def trials_time() -> int:
    """Three trials by this checkout and by another one."""
    parser = argparse.ArgumentParser(description="three trials of ResNet-18, against another checkout")
    parser.add_argument("--before", type=Path, required=True, help="the folder src of the other checkout")
    here = Path(__file__).parent
    program = TRIALS.format(bench=str(here))
    sources = {"before": parser.parse_args().before.resolve(), "now": here.parent / "src"}
    measured: dict[str, list[list[float]]] = {name: [] for name in sources}
    for _ in range(3):
        for name, source in sources.items():
            environment = {**os.environ, "PYTHONPATH": str(source)}
            run = subprocess.run(
                [sys.executable, "-c", program], check=True, text=True, capture_output=True, env=environment
            )
            measured[name].append([float(value) for value in run.stdout.split()[-4:]])
    before, now = ([statistics.median(values) for values in zip(*measured[name], strict=True)] for name in sources)
    rows = [
        Row("CPU seconds", now[0] / before[0], 1.0, "before", f"{now[0]:.1f} s against {before[0]:.1f} s"),
        Row("peak memory", now[1] / before[1], 1.0, "before", f"{now[1]:.0f} MB against {before[1]:.0f} MB"),
    ]
    Console().print(
        f"torch.export ran {now[2]:.0f} times for {now[3]:.0f} trials, before {before[2]:.0f} for {before[3]:.0f}"
    )
    return 0 if report("three trials of ResNet-18", rows, OUT / "trials.json") else 1


PARTS = {"import": import_time, "export": export_time, "smoke": smoke_time, "trials": trials_time}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
