"""Networks for LiteRT: our .tflite file beside our float one, and beside what ai-edge-quantizer makes of the float one.

    python bench/litert.py [resnet18 mobilenet squeezenet lite0 minilm small_vit]

One thread, all files interleaved in one process, speeds against our float .tflite. "integer" is the share of the
operators that compute with integers, "XNNPACK" of those that its delegate runs, in so many pieces. Networks of random
weights are judged on 32 random pictures that nothing was calibrated with. "balanced" is ours with accuracy="balanced".
The other quantizer runs where AI_EDGE_QUANTIZER names the Python of an environment that has it (pip install
ai-edge-quantizer), on the same calibration data. Needs `pip install scalepoint[litert]`.
Results go to out/litert.json, network by network.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from networks import SUBJECTS, Subject
from scalepoint.formats import export
from scalepoint.graph.export import quiet
from scalepoint.pipeline.accuracy import PRESETS
from scalepoint.quantize import quantize
from scalepoint.runtimes import find_runtime
from scalepoint.runtimes.process import ask, exchange
from scalepoint.tuning import tune
from scalepoint.verification import RuntimeModel
from scalepoint.verification.simulation import feeds_of
from xnnpack import called, pieces_of, sqnr

OUT = Path(__file__).parent.parent / "out" / "litert.json"
NAMES = ("resnet18", "mobilenet", "squeezenet", "lite0", "minilm", "small_vit")
RUNTIME = find_runtime("litert")
OWN = " (own kernel)"
# Its algorithms: the default, and of the others the one that did best among those that leave no more layers float. Its
# GPTQ and OSCAR leave all convolutions float; its MSE is behind its default on every network here.
DEFAULT = ("MIN_MAX_UNIFORM_QUANT", "ai-edge-quantizer")
FURTHER = {False: ("OCTAV", "ai-edge-quantizer, OCTAV"), True: ("GPTQ", "ai-edge-quantizer, GPTQ")}
THEIRS = """
import json, sys
import numpy as np
from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe
source, data, target, is_dynamic, algorithm = sys.argv[1:]
key = algorithm_manager.AlgorithmName[algorithm]
made = quantizer.Quantizer(source)
held = np.load(data)
count = len({name.split(".", 1)[0] for name in held.files})
batches = [{n.split(".", 1)[1]: held[n] for n in held.files if n.startswith(f"{at}.")} for at in range(count)]
if is_dynamic == "1":
    made.load_quantization_recipe(recipe.dynamic_wi8_afp32(key))
else:
    made.load_quantization_recipe(recipe.static_wi8_ai8(key))
    for name in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):  # as the model has them, like ours
        made.update_quantization_recipe(".*", name, algorithm_key="no_quantize")
result = made.quantize(made.calibrate({"serving_default": batches}) if made.need_calibration else None)
result.export_model(target, overwrite=True)
"""


@dataclass(frozen=True)
class Result:
    network: str
    how: str
    pieces: int  # of the graph that XNNPACK runs
    delegated: float
    integer: float
    low: int  # operations with weights that run in integers
    size: float  # of the float file's
    speed: float  # of the float file's
    simulation: float | None  # dB
    against_float: float  # dB, on held-out data
    top1: float  # the same as the float model's, on held-out data


def run(path: Path, feeds: Mapping[str, Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    with exchange(feeds) as files:
        asked = {"task": "run", "path": str(path), "options": {"threads": 1}, "executed": True}
        answer = ask(RUNTIME, {**asked, **files.files})
        if answer.data is None:
            raise SystemExit(f"{path.name}: {answer.status.value}: {answer.message}")
        return [torch.from_numpy(each) for each in files.outputs(answer).values()], list(answer.data["executed"])


def speeds(paths: list[Path], feeds: Mapping[str, Any]) -> list[float]:
    """Against the first."""
    with exchange(feeds) as files:
        request = {"task": "benchmark", "paths": list(map(str, paths)), "options": {"threads": 1}}
        answer = ask(RUNTIME, {**request, "repeats": 40, "seconds": 30, **files.files})
        assert answer.data is not None, answer.message
        medians = [quarters[1] for quarters in answer.data["quartiles"]]
    return [medians[0] / each for each in medians]


def their_file(subject: Subject, source: Path, target: Path, names: list[str], algorithm: str) -> bool:
    """Whether ai-edge-quantizer is here: int8 throughout for CNNs, dynamic for transformers, as its recipes have it."""
    python = os.environ.get("AI_EDGE_QUANTIZER")
    if not python:
        return False
    batches = [piece for batch in subject.calibration for piece in pieces_of(batch, subject.inputs)]
    held = {
        f"{at}.{name}": value.numpy()
        for at, piece in enumerate(batches)
        for name, value in zip(names, piece.values() if isinstance(piece, Mapping) else [piece], strict=True)
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, **held)
        how = str(int(subject.is_transformer))
        asked = [python, "-c", THEIRS, str(source), str(data), str(target), how, algorithm]
        done = subprocess.run(asked, check=False, capture_output=True)
        if done.returncode:
            raise SystemExit(f"ai-edge-quantizer: {done.stderr.decode()[-2000:]}")
    return True


def judged_by_more(subject: Subject) -> Subject:
    """Random pictures cost nothing: 32 that were not seen."""
    if subject.held_out is not subject.inputs or isinstance(subject.inputs, Mapping):
        return subject
    pictures = torch.randn(32, *subject.inputs.shape[1:], generator=torch.Generator().manual_seed(32))
    return replace(subject, held_out=pictures)


def measured(subject: Subject, folder: Path) -> list[Result]:
    ours, tuned, plain = (folder / f"{name}.tflite" for name in ("ours", "tuned", "float"))
    inputs = subject.inputs
    with quiet():
        model = quantize(subject.model, inputs, None, forward_loop=subject.calibration, target="litert")
        given = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
        feeds = feeds_of(model, given)
    export(model, ours, inputs, float_path=plain)
    files: list[tuple[str, Path, Tensor | None]] = [("scalepoint", ours, called(model, inputs))]
    for algorithm, how in (DEFAULT, FURTHER[subject.is_transformer]):
        path = folder / f"{algorithm}.tflite"
        if their_file(subject, plain, path, list(feeds), algorithm):
            files.append((how, path, None))
    with quiet():
        tune(model, subject.calibration, PRESETS["balanced"])
    export(model, tuned, inputs)
    files.insert(1, ("scalepoint, balanced", tuned, called(model, inputs)))
    ratios = speeds([plain, *(path for _, path, _ in files)], feeds)[1:]
    wanted = torch.cat([called(subject.model, each) for each in pieces_of(subject.held_out, inputs)])
    return [_result(subject, each, ratio, plain, (feeds, wanted)) for each, ratio in zip(files, ratios, strict=True)]


def _result(subject: Subject, file: tuple[str, Path, Tensor | None], ratio: float, plain: Path, judged: Any) -> Result:
    how, path, simulated = file
    feeds, wanted = judged
    outputs, executed = run(path, feeds)
    held_out = _held_out(path, subject)
    kernels = [each["op"] for each in executed if each["op"] != "XNNPACK"]
    return Result(
        subject.title,
        how,
        len(executed) - len(kernels),
        sum(not op.endswith(OWN) for op in kernels) / len(kernels),
        sum("int8" in op or "int4" in op for op in kernels) / len(kernels),
        sum(each["low"] is True for each in executed),
        path.stat().st_size / plain.stat().st_size,
        ratio,
        None if simulated is None else sqnr(simulated, outputs[0]),
        sqnr(wanted, held_out),
        float((wanted.argmax(-1) == held_out.argmax(-1)).float().mean()),
    )


def _held_out(path: Path, subject: Subject) -> Tensor:
    """In pieces of the shape that every file takes."""
    with RuntimeModel(path, runtime="litert", threads=1) as runner:
        pieces = pieces_of(subject.held_out, subject.inputs)
        return torch.cat([runner(*(each.values() if isinstance(each, Mapping) else [each])) for each in pieces])


def show(rows: list[Result]) -> None:
    table = Table(
        "network", "how", "pieces", "XNNPACK", "integer", "low", "size", "speed", "dB sim", "dB float", "top-1"
    )
    for row in rows:
        simulation = "" if row.simulation is None else f"{row.simulation:.1f}"
        table.add_row(
            row.network, row.how, str(row.pieces), f"{row.delegated:.0%}", f"{row.integer:.0%}", str(row.low),
            f"{row.size:.3f}", f"{row.speed:.2f}", simulation, f"{row.against_float:.1f}", f"{row.top1:.0%}",
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    for name in sys.argv[1:] or list(NAMES):
        with tempfile.TemporaryDirectory(prefix="litert-") as folder:
            rows = measured(judged_by_more(SUBJECTS[name](None)), Path(folder))
        show(rows)
        known = [Result(**each) for each in json.loads(OUT.read_text())] if OUT.is_file() else []
        kept = [each for each in known if each.network != rows[0].network]
        OUT.write_text(json.dumps([asdict(each) for each in (*kept, *rows)], indent=1))


if __name__ == "__main__":
    main()
