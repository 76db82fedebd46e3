"""Real architectures through the whole pipeline: captured, quantized, exported, run in ONNX Runtime, compared.

`python bench/coverage.py [tests|further|more] [NAME ...]` takes the 111 architectures of the tests and the two lists of
bench/library_models.py, each architecture in its own process with a time limit, and adds a row for each to
out/coverage-tests.json and so on. A stopped run continues where it was; --again repeats the rows that do not hold.
--target chooses another runtime, and the rows go to out/coverage-more-openvino.json.
bench/write_page.py makes the tables.

An architecture runs (its file agrees with the simulation), is refused (before any work, with the reason), departs
(runs, but not as the simulation), or fails at a stage; a failure that is no ScalepointError is called foreign.
"""

import argparse
import copy
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the tests own the list
from architectures import ARCHITECTURES, Architecture, Inputs, torchvision_models
from library_models import FURTHER, MORE
from scalepoint.errors import ScalepointError
from scalepoint.formats import ExportRequest, export, find_format
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.inline_blocks import autocast_off
from scalepoint.graph.origin import get_origin
from scalepoint.quantize import calibrate, coverage, freeze, insert_qdq
from scalepoint.support.cpu import probe_amx_once
from scalepoint.targets import Target, find_target
from scalepoint.transformation import transform
from scalepoint.verification import Status, verify
from weighted import batch, relative_difference, run

OUT = Path(__file__).parent.parent / "out"
LISTS = {"tests": ARCHITECTURES, "further": FURTHER, "more": MORE}
EARLY = ("capture", "insert")  # stages that refuse before any work
PARITY = 1e-4
SECONDS = 400.0
LONGEST = 400  # of what is kept of a message


@dataclass
class Row:
    """What became of one architecture; `stage` is the last that was begun."""

    name: str
    outcome: str = "fails"
    stage: str = "build"
    foreign: bool = False
    reason: str = ""
    parity: float | None = None
    quantized: float | None = None  # share of the MACs
    low: int | None = None  # weighted operations that the runtime runs in low precision
    sqnr: float | None = None  # dB to the simulation, the worst output
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class StageRecorder:
    """Records the stages of one architecture in its row.

    The parent process gets the row at the start of every stage, so that it is known where a crash happened.
    """

    row: Row
    listener: Connection

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        self.row.stage = stage
        self.listener.send(self.row)
        start = time.process_time()
        yield
        self.row.seconds[stage] = round(time.process_time() - start, 2)


def run_stages(stages: StageRecorder, architecture: Architecture, target: Target, folder: Path) -> None:
    """Run all stages. An exception ends them; the row then has the name of the stage that raised it."""
    row, form = stages.row, find_format(target.format)
    path = folder / f"model{form.suffix}"
    with stages.at("build"):
        model, inputs = architecture.build()
    data = [batch(inputs, [0, 1]), batch(inputs, [1, 0])]
    with stages.at("capture"):
        result = transform(model, inputs, target=target)
        if form.check is not None:
            form.check(result.model, ExportRequest(as_inputs(inputs, None), target))
        row.parity = parity(model, result.model, inputs)
    with stages.at("insert"):
        quantized = insert_qdq(result.model, result.matches, copy=False)
    with stages.at("calibrate"):
        calibrate(quantized, data, progress=False)
    with stages.at("freeze"):
        freeze(quantized)
        shares = coverage(quantized).share_of_macs()
        row.quantized = None if shares is None else 1 - shares.get("float", 0.0)
    with stages.at("export"):
        export(quantized, path, inputs)
    with stages.at("run"):
        verification = verify(path, quantized, inputs, layers=False)
        if verification.status != Status.OK:
            row.reason = f"{verification.status.value}: {verification.message}"
            return
    row.stage, row.sqnr, row.low = "agree", verification.sqnr, verification.low_precision
    if row.parity > PARITY:
        row.outcome, row.reason = "departs", f"the float graph is {row.parity:.1e} off the model"
    else:
        row.outcome = "runs" if verification.holds else "departs"


def parity(model: nn.Module, graph: nn.Module, inputs: Inputs) -> float:
    """Return the largest max |difference| / max |output| between the model and its float graph.

    The batch sizes are 1 and 3, or the size that the graph is fixed at.
    """
    is_fixed = bool(get_origin(graph).fixed_batch)
    batches = [inputs] if is_fixed else [batch(inputs, samples) for samples in ([0], [0, 1, 0])]
    with torch.no_grad(), autocast_off():  # as it was captured
        return max(
            relative_difference(run(fresh(model), batch_inputs), run(fresh(graph).eval(), batch_inputs))
            for batch_inputs in batches
        )


def measure(architecture: Architecture, target: Target, row: Row, listener: Connection) -> None:
    """In a process of its own: the row, sent whole at the end."""
    os.setsid()  # so that what it started ends with it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the models' libraries, at import and in forward
    try:
        with TemporaryDirectory() as folder:
            run_stages(StageRecorder(row, listener), architecture, target, Path(folder))
    except ScalepointError as error:
        row.outcome = "refused" if row.stage in EARLY else "fails"
        row.reason = str(error)
    except Exception as error:  # each kind is a row of the table
        row.foreign, row.reason = True, f"{type(error).__name__}: {error}"
    row.reason = " ".join(row.reason.split())[:LONGEST]
    listener.send(row)


def in_child(architecture: Architecture, target: Target, limit: float) -> Row:
    """The row of one architecture, whatever becomes of the process that makes it."""
    context = multiprocessing.get_context("fork")  # the libraries are imported once
    receiver, sender = context.Pipe(duplex=False)
    row = Row(architecture.name)
    child = context.Process(target=measure, args=(architecture, target, row, sender))
    child.start()
    sender.close()
    deadline = time.monotonic() + limit
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            row = receiver.recv()
    except EOFError:  # it has ended
        child.join()
        if child.exitcode:
            row.foreign, row.reason = True, f"the process ended with {child.exitcode}"
        return row
    with suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    row.reason = f"not done in {limit:.0f} s"
    return row


def fresh(model: nn.Module) -> nn.Module:
    """A copy, as some write to themselves; those that cannot be copied, themselves."""
    try:
        return copy.deepcopy(model)
    except RuntimeError:
        return model


def import_libraries() -> None:
    """Before the children fork."""
    torchvision_models()
    for name in ("timm", "transformers", "onnxscript", "torch.onnx", "onnx"):
        import_module(name)


def survey(kind: str, target: Target, names: list[str], again: bool, limit: float) -> list[Row]:
    """The rows of one list, those that are there and those that are made now."""
    path = OUT / (f"coverage-{kind}.json" if target.name == "onnxruntime" else f"coverage-{kind}-{target.name}.json")
    rows = {name: Row(**row) for name, row in (json.loads(path.read_text()) if path.exists() else {}).items()}
    done = {name for name, row in rows.items() if not (again and row.outcome in ("fails", "departs"))}
    for name, architecture in LISTS[kind].items():
        if name in names or (not names and name not in done):
            rows[name] = row = in_child(architecture, target, limit)
            path.write_text(json.dumps({name: asdict(rows[name]) for name in LISTS[kind] if name in rows}, indent=1))
            print(f"{name}: {row.outcome} at {row.stage}, {sum(row.seconds.values()):.0f} s {row.reason}", flush=True)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", nargs="?", choices=list(LISTS), help="only this list")
    parser.add_argument("names", nargs="*", help="only these of it")
    parser.add_argument("--target", default="onnxruntime", help="the runtime")
    parser.add_argument("--again", action="store_true", help="also those that are there already but do not hold")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_libraries()
    probe_amx_once()  # the child processes inherit the result
    OUT.mkdir(exist_ok=True)
    has_foreign = False
    for kind in [options.list] if options.list else LISTS:
        rows = survey(kind, find_target(options.target), options.names, options.again, options.seconds)
        print(kind, dict(Counter(row.outcome for row in rows)))
        has_foreign |= any(row.foreign for row in rows)
    return 1 if has_foreign else 0


if __name__ == "__main__":
    sys.exit(main())
