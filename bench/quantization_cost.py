"""CPU seconds and peak memory of post-training quantization and of a step of quantization-aware training.

    python bench/quantization_cost.py ptq [resnet18 minilm ..] [--pictures FOLDER] [--python nncf=PATH]
    python bench/quantization_cost.py qat

ptq: scalepoint and other tools, each in its own process, one thread. "quantizing" starts with the tool's input (a model
or a file) and ends after calibration; "to a file" is the way from the PyTorch model to the int8 file. Importing and
building the model are not counted. --python names an environment that has nncf or modelopt; a tool that is not
installed is reported so. Then calibration only, as a multiple of the float forwards over the same batches in the same
process: min-max (the default), and ranges searched in a histogram.
qat: ResNet-18, batch 8 of 3 x 112 x 112, forward, backward and SGD, one thread, against the float step and against
torchao's PT2E, interleaved in one process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.export does in its first call; importing is not counted
from rich.console import Console
from rich.table import Table
from torch import nn

from measure import Row, interleave, peak_extra_bytes, report, run_part
from networks import SUBJECTS, Subject, vision
from onnx_files import arrays, nncf_quantized, quantize_static
from plain_models import resnet18
from scalepoint.quantize import QuantConfig, TensorQuantConfig, prepare_qat, quantize

OUT = Path(__file__).parent.parent / "out"
SKIPPED = 3
CALIBRATION = "calibration alone"
LIMITS = {"min-max": 1.3, "least squared error": 1.8}
NETWORKS = ("resnet18", "resnet50", "minilm", "lite0")


class Steps(NamedTuple):
    """What a tool does, in order; `before` and `after` quantizing are what its user needs to come to a file."""

    quantizing: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] | None = None


def random_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 3, 224, 224, generator=generator) for _ in range(4)]


def subject_of(name: str, pictures: Path | None) -> Subject:
    """Of the deployed ones; the ResNets with 4 batches of 8."""
    if name == "resnet18":
        return Subject(
            "ResNet-18 @224, 4 batches of 8", resnet18().eval(), random_batches()[0][:2], random_batches(), None
        )
    if name == "resnet50":
        return Subject(
            "ResNet-50 @224, 4 batches of 8", vision("resnet50").eval(), random_batches()[0][:2], random_batches(), None
        )
    subject = SUBJECTS[name](pictures)
    batch_size = len(next(iter(arrays(subject.model, subject.calibration[0]).values())))
    description = f"{len(subject.calibration)} batches of {batch_size}"
    return Subject(
        f"{subject.title}, {description}", subject.model, subject.inputs, subject.calibration, subject.held_out
    )


def scalepoint(subject: Subject, folder: Path, config: Any = None) -> Steps:
    from scalepoint import export  # noqa: PLC0415
    from scalepoint.quantize import QuantConfig, quantize  # noqa: PLC0415

    results: list[Any] = []
    config = config or QuantConfig(correct_bias=True, speed_first=True)  # as deploy does
    options = {"forward_loop": subject.calibration, "target": "onnxruntime", "freeze_weights": True}
    return Steps(
        lambda: results.append(quantize(subject.model, subject.inputs, config, **options)),
        after=lambda: export(results[0], folder / "int8.onnx", subject.inputs),
    )


def scalepoint_searched(subject: Subject, folder: Path) -> Steps:
    from scalepoint.quantize import CalibrationMethod, QuantConfig, TensorQuantConfig  # noqa: PLC0415

    activation = TensorQuantConfig(symmetric=False, calibration_method=CalibrationMethod.MSE)
    return scalepoint(subject, folder, QuantConfig(activation=activation))


def exported(subject: Subject, model: torch.nn.Module, path: Path) -> None:
    """By torch's quicker exporter, with free axes."""
    inputs = subject.inputs
    names = list(inputs) if isinstance(inputs, dict) else ["x"]
    args = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
    axes = {name: {0: "batch", **({1: "length"} if isinstance(inputs, dict) else {})} for name in names}
    with torch.no_grad():
        torch.onnx.export(model, args, str(path), input_names=names, dynamic_axes=axes, dynamo=False)


def onnxruntime(subject: Subject, folder: Path) -> Steps:
    import onnxruntime.quantization  # noqa: F401, PLC0415

    plain, batches = folder / "float.onnx", [arrays(subject.model, batch) for batch in subject.calibration]
    return Steps(
        lambda: quantize_static(plain, folder / "int8.onnx", batches),
        before=lambda: exported(subject, subject.model, plain),
        after=lambda: None,
    )


def nncf(subject: Subject, folder: Path) -> Steps:
    import nncf  # noqa: F401, PLC0415
    import openvino  # noqa: PLC0415

    plain, batches = folder / "float.onnx", [arrays(subject.model, batch) for batch in subject.calibration]
    results: list[Any] = []
    return Steps(
        lambda: results.append(nncf_quantized(plain, batches, is_transformer=subject.is_transformer)),
        before=lambda: exported(subject, subject.model, plain),
        after=lambda: openvino.save_model(results[0], folder / "int8.xml", compress_to_fp16=False),
    )


def torchao(subject: Subject, folder: Path) -> Steps:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # noqa: PLC0415
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: PLC0415

    def run() -> Any:
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        args, kwargs = called(subject.calibration[0])
        prepared = prepare_pt2e(torch.export.export(subject.model, args, kwargs).module(), quantizer)
        with torch.no_grad():
            for batch in subject.calibration:
                args, kwargs = called(batch)
                prepared(*args, **kwargs)
        return convert_pt2e(prepared)

    return Steps(run)


def called(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), batch) if isinstance(batch, dict) else ((batch,), {})


def modelopt(subject: Subject, folder: Path) -> Steps:
    import modelopt.torch.quantization as mtq  # noqa: PLC0415

    results: list[Any] = []

    def loop(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in subject.calibration:
                args, kwargs = called(batch)
                model(*args, **kwargs)

    return Steps(
        lambda: results.append(mtq.quantize(subject.model, mtq.INT8_DEFAULT_CFG, loop)),
        after=lambda: exported(subject, results[0], folder / "int8.onnx"),
    )


TOOLS: dict[str, Callable[[Subject, Path], Steps]] = {
    "scalepoint, min-max (default)": scalepoint,
    "scalepoint, least squared error": scalepoint_searched,
    "ONNX Runtime quantize_static, min-max": onnxruntime,
    "NNCF quantize": nncf,
    "torchao PT2E, histogram": torchao,
    "ModelOpt, max": modelopt,
}
HOMES = {"NNCF quantize": "nncf", "ModelOpt, max": "modelopt"}  # which may have an environment of their own


def measure_tool(tool: str, network: str, pictures: Path | None) -> int:
    """In the child process: prepare the tool, then run it once and say what it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    subject = subject_of(network, pictures)
    with tempfile.TemporaryDirectory() as folder:
        try:
            steps = TOOLS[tool](subject, Path(folder))
        except ImportError as error:
            print(error, file=sys.stderr)
            return SKIPPED
        before, _ = timed(steps.before)
        quantizing, peak = timed(steps.quantizing)
        row = {"network": subject.title, "quantizing": quantizing, "bytes": peak}
        try:
            after = timed(steps.after)[0] if steps.after else None
        except Exception as error:
            row["note"] = f"no file: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
            after = None
        print(json.dumps({**row, "to a file": None if after is None else before + quantizing + after}))
    return 0


def timed(run: Callable[[], Any]) -> tuple[float, int]:
    """CPU seconds, and bytes beyond what the process held."""
    start = time.process_time()
    peak = peak_extra_bytes(run)
    return time.process_time() - start, peak


def calibration() -> int:
    """Measure, in the child process, calibration and the float forwards that it needs."""
    from scalepoint import transform  # noqa: PLC0415
    from scalepoint.quantize import (  # noqa: PLC0415
        CalibrationMethod,
        QuantConfig,
        TensorQuantConfig,
        calibrate,
        insert_qdq,
    )

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, batches = resnet18(), random_batches()
    result = transform(model, batches[0][:2], target="tensorrt")
    activation = TensorQuantConfig(calibration_method=CalibrationMethod.MSE)
    searched = QuantConfig(activation=activation, weight=TensorQuantConfig(per_channel=True))
    plain, histogram = (insert_qdq(result.model, result.matches, config) for config in (None, searched))

    def forwards() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    seconds = interleave(
        {
            "forwards": forwards,
            "min-max": lambda: calibrate(plain, batches, progress=False),
            "least squared error": lambda: calibrate(histogram, batches, progress=False),
        },
        repeats=5,
    )
    print(json.dumps({name: seconds[name] / seconds["forwards"] for name in LIMITS}))
    return 0


def run_tool(python: str, *words: str) -> tuple[dict[str, Any] | None, str]:
    """What a child printed last, or why it did not."""
    where = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, where))}
    done = subprocess.run(
        [python, __file__, "ptq", *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["it died"])[-1]
        return None, ("not installed: " if done.returncode == SKIPPED else "failed: ") + line[:160]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="from a float model to int8, one thread, CPU seconds")
    for column in ("network", "tool", "quantizing", "to a file", "peak memory", "note"):
        table.add_column(column, justify="left" if column in ("network", "tool", "note") else "right")
    for row in rows:
        seconds = ("" if row[name] is None else f"{row[name]:.1f}" for name in ("quantizing", "to a file"))
        size = "" if row["MB"] is None else f"{row['MB']:.0f} MB"
        table.add_row(row["network"], row["tool"], *seconds, size, row["note"])
    return table


def ptq() -> int:
    parser = argparse.ArgumentParser(description="Cost of post-training quantization")
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all when none is named")
    parser.add_argument(
        "--pictures", type=Path, help="a folder with photographs for EfficientNet-Lite0; else it has 20"
    )
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PATH", help="nncf or modelopt")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == CALIBRATION:
        return calibration()
    if options.child:
        return measure_tool(options.child, options.networks[0], options.pictures)
    homes = dict(home.split("=", 1) for home in options.python)
    more = [] if options.pictures is None else ["--pictures", str(options.pictures)]
    path = OUT / "ptq_time.json"
    chosen = options.networks or list(NETWORKS)
    known_rows = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in known_rows if row.get("key") not in chosen]
    for network in chosen:
        for tool in TOOLS:
            python = homes.get(HOMES.get(tool, ""), sys.executable)
            result, why = run_tool(python, network, "--child", tool, *more)
            table_row = {
                "key": network,
                "tool": tool,
                "quantizing": None,
                "to a file": None,
                "note": why,
                **(result or {}),
            }
            size = table_row.pop("bytes", None)
            rows.append({"network": network, **table_row, "MB": size and size / 2**20})
            Console(width=150).print(rows[-1])
    rows.sort(key=lambda row: NETWORKS.index(row["key"]))
    Console(width=150).print(table_of(rows))
    OUT.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=2))
    ratios, why = run_tool(sys.executable, "--child", CALIBRATION)
    if ratios is None:
        raise SystemExit(why)
    limits = [Row(name, ratios[name], limit, "the float forwards") for name, limit in LIMITS.items()]
    return 0 if report("Calibrating ResNet-18", limits, OUT / "calibration_time.json") else 1


MEMORY = "--memory"
TRAINING_BATCH = torch.randn(8, 3, 112, 112)
QAT_CONFIG = QuantConfig(activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(per_channel=True))


def stepper(model: nn.Module) -> Callable[[], object]:
    """One training step of a model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(TRAINING_BATCH).square().mean().backward()
        optimizer.step()

    return step


def prepared_for_qat(*, observe: bool, learn: bool = False) -> nn.Module:
    quantized = quantize(
        resnet18(), TRAINING_BATCH[:2], QAT_CONFIG, forward_loop=[TRAINING_BATCH], freeze_weights=False
    )
    return prepare_qat(quantized, learn_scales=learn, observe=None if learn else observe)


def torchao_pt2e() -> nn.Module | None:
    """torchao's way, or None when it is not installed."""
    try:
        from torchao.quantization.pt2e import move_exported_model_to_train  # noqa: PLC0415
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e  # noqa: PLC0415
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack  # noqa: PLC0415
    except ImportError as error:
        print(f"torchao is left out: {error}")
        return None
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    exported = torch.export.export(resnet18().train(), (TRAINING_BATCH,)).module()
    prepared = prepare_qat_pt2e(exported, quantizer)
    move_exported_model_to_train(prepared)
    return prepared


def step_peaks() -> dict[str, float]:
    """Return the peak memory of each step, measured in a process of its own.

    There, malloc returns large blocks to the system when they are freed, so fragmentation does not count. That is slow,
    so times are measured in the parent process.
    """
    setting = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    child = subprocess.run(  # this file
        [sys.executable, __file__, "qat", MEMORY], env=os.environ | setting, check=True, capture_output=True, text=True
    )
    peaks: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return peaks


def qat() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models = {
        "float": resnet18().train(),
        "ours, ranges held": prepared_for_qat(observe=False),
        "ours, observing": prepared_for_qat(observe=True),
        "ours, learned scales": prepared_for_qat(observe=False, learn=True),
    }
    theirs = torchao_pt2e()
    if theirs is not None:
        models["torchao PT2E"] = theirs
    steps = {name: stepper(model) for name, model in models.items()}
    if MEMORY in sys.argv:
        peaks = {name: statistics.median(peak_extra_bytes(step) for _ in range(5)) for name, step in steps.items()}
        print(json.dumps(peaks))
        return 0
    times, memory = interleave(steps, repeats=7), step_peaks()
    rows = []
    for name in list(models)[1:]:
        is_ours = name.startswith("ours")
        base = "the float step"
        rows.append(Row(f"{name}: time", times[name] / times["float"], 1.4 if is_ours else 99.0, base))
        rows.append(Row(f"{name}: peak memory", memory[name] / memory["float"], 1.35 if is_ours else 99.0, base))
    if theirs is not None:
        for name in ("ours, observing",):
            rows.append(Row(f"{name}: time", times[name] / times["torchao PT2E"], 1.0, "torchao PT2E"))
            rows.append(Row(f"{name}: peak memory", memory[name] / memory["torchao PT2E"], 1.0, "torchao PT2E"))
    return 0 if report("QAT step", rows, OUT / "qat.json") else 1


PARTS = {"ptq": ptq, "qat": qat}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
