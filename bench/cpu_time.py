"""CPU seconds of importing scalepoint, of writing files, of smoke runs, of a first file, and of a search with trials.

    python bench/cpu_time.py import
    python bench/cpu_time.py export [--architectures] [--repeats 3]
    python bench/cpu_time.py smoke
    python bench/cpu_time.py first-file [NETWORK ...] [--repeats 3] [--before OTHER/src]
    python bench/cpu_time.py timing [NETWORK ...]
    python bench/cpu_time.py trials --before OTHER/src

import: `import scalepoint` against `import torch`, and the quick commands; medians of fresh interpreters.
export: `capture` and `export` in turn, random weights. "two files" is the quantized file and the float one, as deploy
writes them; both come from the same captured graph. The note has the time of writing the bytes of both from memory.
--architectures adds nets of timm at 64 pixels that have many branches.
smoke: the demo's deployment with `smoke=True`, with the processes of the runtime, against the full run. Without a
metric, and with the demo's, which is called as often and takes as long in both.
first-file: each way to a quantized file in a fresh interpreter, with the processes it starts, from the moment when
torch is imported and the network and its data exist: torch.onnx.export (TorchScript or dynamo) with quantize_static; a
smoke run; deploy on a machine that has measured no layer yet; deploy when the layers are in the cache of the user.
timing: the speed of ten networks in ONNX Runtime, from benchmarks that stop when the ratio is known to 2 %, next to two
benchmarks of all 50 rounds; and layer times from 7 runs next to two profiles of 20 runs.
trials: three trials of ResNet-18 with this checkout and with another one: CPU seconds and peak memory of the process,
and how often torch.export ran. Medians of three runs in turn.
"""

import argparse
import json
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

import plain_models
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
    return 0 if report("export next to capture, CPU seconds", rows, OUT / "export_time.json") else 1


def _image_size(name: str) -> dict[str, int]:
    return {"img_size": 64} if name.startswith("maxvit") else {}


SMOKE_LIMIT, JUDGED_LIMIT = 0.25, 1.0


def seconds(task: Task, *, smoke: bool, is_judged: bool) -> float:
    """Return the CPU seconds of a run in this process and in all processes that it started."""
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


FIRST_FILE = """
import os, sys, warnings
sys.path.insert(0, {bench!r})
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
import plain_models
name, way, folder = sys.argv[1:]
model, shape = plain_models.FIRST_FILE_MODELS[name]()
batches = [torch.randint(0, 1000, shape) if name == "bert6" else torch.randn(shape) for _ in range(4)]
before = sum(os.times()[:4])
if way in ("TorchScript", "dynamo"):
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    torch.onnx.export(model, (batches[0],), folder + "/float.onnx", input_names=["x"], dynamo=way == "dynamo")
    class Reader(CalibrationDataReader):
        remaining = iter(batches)
        def get_next(self):
            batch = next(self.remaining, None)
            return None if batch is None else {{"x": batch.numpy()}}
    quantize_static(folder + "/float.onnx", folder + "/int8.onnx", Reader(), per_channel=True,
                    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
else:
    import scalepoint
    options = {{"force": True, "smoke": way == "smoke", "progress": False}}
    scalepoint.deploy(model, batches[0], batches, output=folder + "/" + way, **options)
print(sum(os.times()[:4]) - before)
"""
FIRST_FILE_WAYS = ("TorchScript", "dynamo", "smoke", "first deploy", "second deploy")
SMOKE_GOAL, DEPLOY_GOAL = 1.2, 2.5  # of torch.onnx.export and quantize_static


def first_file_time() -> int:
    """CPU seconds until the first file exists."""
    parser = argparse.ArgumentParser(description="CPU seconds until the first quantized file, by the way it is made")
    parser.add_argument("networks", nargs="*", choices=[[], *plain_models.FIRST_FILE_MODELS], help="all if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the folder src of another checkout, which is measured too")
    options = parser.parse_args()
    sources = {"": Path(__file__).parent.parent / "src", **({"before: ": options.before} if options.before else {})}
    rows, seconds_rows = [], []
    for network in options.networks or plain_models.FIRST_FILE_MODELS:
        measured: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for prefix, source in sources.items():
                with tempfile.TemporaryDirectory() as folder:
                    for way in FIRST_FILE_WAYS[2 if prefix else 0 :]:
                        measured.setdefault(prefix + way, []).append(_first_file(network, way, source, folder))
        medians = {way: statistics.median(times) for way, times in measured.items()}
        seconds_rows.append({"network": network, **medians})
        Console().print(network, {way: round(time, 2) for way, time in medians.items()})
        for way, limit in zip(FIRST_FILE_WAYS[2:], (SMOKE_GOAL, DEPLOY_GOAL, DEPLOY_GOAL), strict=True):
            for base in FIRST_FILE_WAYS[:2]:
                note = f"{medians[way]:.1f} s against {medians[base]:.1f} s"
                rows.append(Row(f"{network}: {way}", medians[way] / medians[base], limit, base, note))
    OUT.mkdir(exist_ok=True)
    (OUT / "first_file.json").write_text(json.dumps(seconds_rows, indent=1))
    return 0 if report("the first file, CPU seconds", rows, OUT / "first_file_ratios.json") else 1


def _first_file(network: str, way: str, source: Path, folder: str) -> float:
    program = FIRST_FILE.format(bench=str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "SCALEPOINT_CACHE": f"{folder}/cache"}
    command = [sys.executable, "-c", program, network, way, folder]
    run = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    return float(run.stdout.split()[-1])


TIMING_NETWORKS = ("yolo", "lstm", "cnn28", "mlp256", "encoder64", "conv1d")  # of placement.py, after those above
FULL_RUNS, LARGE_SHARE = 20, 0.02  # of a profile; of the time of a file


def timing() -> int:
    """How far results of fewer rounds are from those of all rounds, and those of all rounds from each other."""
    from placement import SMALL  # noqa: PLC0415

    models = {**plain_models.FIRST_FILE_MODELS, **{name: SMALL[name] for name in TIMING_NETWORKS}}
    parser = argparse.ArgumentParser(description="speed and layer times from fewer rounds, next to all rounds")
    parser.add_argument("networks", nargs="*", choices=[[], *models], help="all if not given")
    networks = parser.parse_args().networks or models
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in networks:
        with tempfile.TemporaryDirectory() as folder:
            float_path, path, inputs = _write_files(name, models[name](), Path(folder))
            rows.append({"network": name, **_time_file(float_path, path, inputs)})
        Console().print(rows[-1])
    OUT.mkdir(exist_ok=True)
    (OUT / "timing.json").write_text(json.dumps(rows, indent=1))
    return 0


def _write_files(name: str, network: Any, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Write the float and the int8 file of a network."""
    from scalepoint.formats.export import export  # noqa: PLC0415
    from scalepoint.quantize import quantize  # noqa: PLC0415
    from scalepoint.verification.simulation import build_feeds  # noqa: PLC0415

    if isinstance(network, tuple):
        model, shape = network
        inputs = torch.randint(0, 1000, shape) if name == "bert6" else torch.randn(shape)
    else:
        model, inputs = network.model, network.inputs
    quantized = quantize(model, inputs, forward_loop=[inputs], target="onnxruntime", progress=False)
    float_path, path = folder / "float.onnx", folder / "model.onnx"
    export(quantized, path, inputs, float_path=float_path)
    return float_path, path, build_feeds(quantized, ((inputs,), {}))


def _time_file(float_path: Path, path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    from scalepoint.runtimes.process import children_reused  # noqa: PLC0415
    from scalepoint.verification import benchmark, profile, profiling  # noqa: PLC0415

    with children_reused():
        first, adaptive, second = (benchmark(float_path, path, inputs, precision=share) for share in (0, 0.02, 0))
        fewer_runs = profiling.MAX_RUNS
        profiles = []
        for runs in (FULL_RUNS, fewer_runs, FULL_RUNS):
            profiling.MAX_RUNS = runs
            profiles.append({row.name: row.seconds or 0.0 for row in profile(float_path, path, inputs)})
        profiling.MAX_RUNS = fewer_runs
    return {
        "speed": first.ratio,
        "rounds": adaptive.repeats,
        "speed in fewer rounds": adaptive.ratio,
        "difference": f"{adaptive.ratio / first.ratio - 1:+.1%}",
        "of two full measurements": f"{second.ratio / first.ratio - 1:+.1%}",
        "quartiles": f"{max(first.spread):.0%}",
        "rank correlation of layers": _rank_correlation(profiles[0], profiles[1]),
        "of two full profiles": _rank_correlation(profiles[0], profiles[2]),
    }


def _rank_correlation(first: dict[str, float], second: dict[str, float]) -> float:
    """Spearman's correlation of the layers that take at least 2 % of the time; 1.0 for fewer than three layers."""
    total = sum(first.values())
    names = [name for name, seconds in first.items() if seconds >= LARGE_SHARE * total and name in second]
    if len(names) < 3:
        return 1.0
    ranks = [[sorted(names, key=lambda name: row[name]).index(name) for name in names] for row in (first, second)]
    return statistics.correlation(*ranks)


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


PARTS = {
    "import": import_time,
    "export": export_time,
    "smoke": smoke_time,
    "first-file": first_file_time,
    "timing": timing,
    "trials": trials_time,
}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
