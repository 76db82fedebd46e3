"""Tuned weights below 8 bits: scores, other tools on the same data, and what tuning costs.

    python bench/tuning.py accuracy                 ResNet-8, a ViT (both need npm), MiniLM, a small Llama, SmolLM2-135M
    python bench/tuning.py accuracy --photographs FOLDER also EfficientNet-Lite0: labels.csv, the first 128 calibrate
    python bench/tuning.py accuracy --cifar FOLDER       also cifar_resnet20 / 56.safetensors of that folder
    python bench/tuning.py accuracy --only MiniLM --again                     measure these rows again
    python bench/tuning.py accuracy --only SmolLM2 --rows int3 --how best     rows of some precisions, one way

    python -m venv PEERS; PEERS/bin/pip install -c constraints.txt torch brevitas nncf h5py pillow safetensors
    python bench/tuning.py peers --python PEERS/bin/python [--photographs FOLDER]
    python -m venv PEER; PEER/bin/pip install torch==2.13.0 auto-round
    python bench/tuning.py language-peers --python PEER/bin/python [--only auto-round]

    python bench/tuning.py cost                          seconds per layer and batch, and peak memory

accuracy: weights per channel or in blocks; activations asymmetric, 8 bits by min-max, 4 bits by least squared error.
peers: weights 4 bits per channel, activations 8 bits asymmetric per tensor; Lite0 with 8 bits at both ends.
language-peers: weights only, symmetric in groups of 64, embedding and head float, 16 texts of 512 tokens; the
dequantized weights of each tool are put into the same model, which reads the same 12 texts; the score is perplexity.
Calibration data is never judged. Each tool runs as its documentation advises, in its own process. Seconds are CPU time
of one thread. +- is the standard error of the difference to float.
"""

# ruff: noqa: PLC0415  # the networks bring their data along, which takes long
import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from measure import Row as RatioRow
from measure import interleave, peak_extra_bytes, publish, report, run_part
from scalepoint.quantize import QuantConfig, TensorQuantConfig, quantize
from scalepoint.support.cpu import child_environment
from scalepoint.tuning import TuneConfig, tune
from smollm import folder as smollm
from tuning_cases import (
    BALANCED,
    NEAREST,
    Limit,
    Plain,
    Row,
    RowStore,
    Subject,
    error,
    prepared,
    rows,
    rows_table,
    score,
    score_run,
    with_limits,
)

OUT = Path(__file__).parents[1] / "out"
ACCURACY_FILE = OUT / "tuning.json"


def networks_by_name(photographs: Path | None, cifar: Path | None) -> dict[str, Callable[[], Subject]]:
    """Networks by name, each made when its turn comes."""
    import trained_networks as networks

    makers: dict[str, Callable[[], Subject]] = {"ResNet-8": networks.resnet8}
    if cifar:
        makers |= {f"CIFAR ResNet-{depth}": partial(networks.cifar, cifar, depth) for depth in (20, 56)}
    if photographs:
        makers["EfficientNet-Lite0"] = partial(networks.lite0, photographs)
    makers |= {"ViT, CIFAR-10": networks.vit, "MiniLM": networks.minilm}
    return makers | {"Llama, 3 M, trained here": networks.small_llama, "SmolLM2-135M": networks.smollm}


def accuracy() -> int:
    parser = argparse.ArgumentParser(description="Scores of trained networks below 8 bits")
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--only", default="", help="a part of the network's name")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--rows", default="", help="a part of the precision's name")
    parser.add_argument("--how", action="append", default=[], help="a way, as often as wanted; without one all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = RowStore(ACCURACY_FILE)
    for name, make in networks_by_name(options.photographs, options.cifar).items():
        if options.only in name:
            if options.again:
                store.forget(name)
            for row in rows(make(), store, options.rows, options.how):
                print(row, flush=True)
    ordered_rows = store.ordered()
    return int(not publish(rows_table(ordered_rows), ordered_rows, ACCURACY_FILE))


PEER_TOOLS = Path(__file__).parent / "peer_tools.py"
PEERS = {
    "Brevitas GPTQ + bias correction": "brevitas:gptq",
    "Brevitas Qronos + bias correction": "brevitas:qronos",
    "NNCF fast bias correction": "nncf:",
}


def run_peer(how: str, network: str, python: str, data: Path) -> tuple[Tensor, float] | None:
    """Return the outputs on the test images and the seconds of quantizing, or None if the tool refuses.

    The result of an earlier run is used again.
    """
    output = data.with_name(f"{data.stem}-{how.replace(':', '-')}.safetensors")
    if not output.exists():
        command = [python, str(PEER_TOOLS), "vision", how, network, str(data), str(output)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{how} on {network}: {run.stderr.strip().splitlines()[-1]}", flush=True)
            return None
    tensors = load_file(output)
    return tensors["outputs"], float(tensors["seconds"])


def peer_row(subject: Subject, how: str, plain: Plain, run: object, seconds: float) -> Row:
    scores, level = score_run(subject, run, plain)  # type: ignore[arg-type]
    reached, apart = score(subject, scores.marks), error(subject, scores.marks, plain.marks)
    return Row(subject.name, "W4A8", how, reached, apart, level, seconds)


def compare_peers(subject: Subject, network: str, python: str, store: RowStore) -> None:
    data = OUT / "peers" / f"{network}.safetensors"
    data.parent.mkdir(parents=True, exist_ok=True)
    test = torch.cat([images for images, _ in subject.judging()])
    save_file({"calibration": torch.cat(list(subject.calibration)), "test": test}, data)
    plain, _ = score_run(subject, subject.model)
    store.add(Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0))
    for name, how in PEERS.items():
        if (subject.name, "W4A8", name) in store.rows:
            continue
        outputs = run_peer(how, network, python, data)
        if outputs is not None:
            parts = iter(outputs[0].split([len(answers) for _, answers in subject.judging()]))
            store.add(peer_row(subject, name, plain, lambda _, parts=parts: next(parts), outputs[1]))
    for how in (NEAREST, BALANCED):
        model, seconds = prepared(subject, "W4A8", how)
        store.add(peer_row(subject, f"scalepoint, {how}", plain, model, seconds))
    ours = store.rows[subject.name, "W4A8", f"scalepoint, {BALANCED}"]
    limits = [Limit("decibels", 0.0, name) for name in PEERS if (subject.name, "W4A8", name) in store.rows]
    judgement = with_limits(ours, limits, list(store.rows.values()))
    store.add(replace(judgement, limits="dB ahead of each"))


def peers() -> int:
    import trained_networks as networks

    parser = argparse.ArgumentParser(description="4-bit weights of CNNs by other tools")
    parser.add_argument("--python", required=True, help="of an environment with brevitas and nncf")
    parser.add_argument("--photographs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = RowStore(OUT / "tuning-peers.json")
    compare_peers(networks.resnet8(), "resnet8", options.python, store)
    if options.photographs:
        compare_peers(networks.lite0(options.photographs), "lite0", options.python, store)
    rows = store.ordered()
    return int(not publish(rows_table(rows), rows, OUT / "tuning-peers.json"))


LANGUAGE_PEERS = {"auto-round": "auto-round, 50 iterations", "nncf": "NNCF, AWQ and scale estimation"}
PRECISION = "int4 blocks of 64"


def run_language_peer(subject: Subject, how: str, python: str) -> float | None:
    """The model with what a tool's codes stand for, and the seconds that it took; None where it refuses."""
    data, output = OUT / "peers" / "smollm.safetensors", OUT / "peers" / f"smollm-{how}.safetensors"
    data.parent.mkdir(parents=True, exist_ok=True)
    save_file({"calibration": torch.cat(list(subject.calibration))}, data)
    if not output.exists():
        command = [python, str(PEER_TOOLS), "language", how, str(smollm()), str(data), "4", str(output)]
        run = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{how}: {(run.stderr.strip().splitlines() or ['it ended'])[-1][-300:]}", flush=True)
            return None
    tensors = load_file(output)
    seconds = float(tensors.pop("seconds"))
    for name, weight in tensors.items():
        name_in_subject = name.replace("model.layers.", "blocks.").replace("self_attn", "attention")
        subject.model.get_parameter(f"{name_in_subject}.weight").data.copy_(weight)
    return seconds


def language_row(subject: Subject, how: str, run: torch.nn.Module, plain: Plain, seconds: float) -> Row:
    scores, level = score_run(subject, run, plain)
    reached, apart = score(subject, scores.marks), error(subject, scores.marks, plain.marks)
    return Row(subject.name, PRECISION, how, reached, apart, level, seconds, is_perplexity=True)


def language_peers() -> int:
    parser = argparse.ArgumentParser(description="SmolLM2-135M in 4 bits by other tools")
    parser.add_argument("--python", required=True, help="of an environment that has the tool")
    parser.add_argument("--only", default="", help="a tool; without one both, and ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import trained_networks as networks

    subject, store = networks.smollm(), RowStore(OUT / "language-peers.json")
    plain, _ = score_run(subject, subject.model)
    store.add(Row(subject.name, "float", "float", score(subject, plain.marks), 0.0, None, 0.0, is_perplexity=True))
    for how in (NEAREST, BALANCED):
        name = f"scalepoint, {how}"
        if (subject.name, PRECISION, name) not in store.rows:
            model, seconds = prepared(subject, PRECISION, how)
            store.add(language_row(subject, name, model, plain, seconds))
    for how, name in LANGUAGE_PEERS.items():
        if options.only in how and (seconds := run_language_peer(subject, how, options.python)) is not None:
            store.add(language_row(subject, name, subject.model, plain, seconds))
    rows = store.ordered()
    return int(not publish(rows_table(rows), rows, OUT / "language-peers.json"))


WIDTH, PIXELS, BATCH, REPEATS = 32, 16, 32, 3
MEMORY = "--memory"  # measure that alone
CONFIG = QuantConfig(
    activation=TensorQuantConfig(symmetric=False), weight=TensorQuantConfig(n_bits=4, per_channel=True)
)


class Stream:
    """`count` batches, each made when it is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            yield torch.randn(BATCH, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(index))


def make_chain(layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU()]
    for _ in range(layers - 1):
        parts += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*parts).eval()


def make_tuning(layers: int, batches: int, memory: str = "2GB") -> Callable[[], object]:
    """Return a function that quantizes and tunes a new model in every call. Tuning takes most of its time."""
    model, settings = make_chain(layers), TuneConfig(memory=memory, rows=2048)  # type: ignore[arg-type]

    def run() -> object:
        quantized: Any = quantize(model, next(iter(Stream(1))), CONFIG, forward_loop=Stream(2), progress=False)
        assert isinstance(quantized, fx.GraphModule)
        return tune(quantized, Stream(batches), settings, progress=False)

    return run


def peaks_of_memory() -> dict[int, int]:
    """Return the peak of additional memory by the number of batches."""
    make_tuning(4, 2)()  # modules that are imported at the first use do not count
    return {count: peak_extra_bytes(make_tuning(6, count, "4MB")) for count in (4, 8, 16, 32)}


def measured_apart() -> dict[int, int]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, __file__, "cost", MEMORY]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(count): peak for count, peak in json.loads(process.stdout).items()}


def cost() -> int:
    """Seconds per layer and batch, and peak memory.

    A ratio of 1 is linear time; memory is limited to 4 MB for values between layers, and measured in a process that
    gives freed memory back at once (MALLOC_MMAP_THRESHOLD_).
    """
    torch.set_num_threads(1)
    if MEMORY in sys.argv:
        print(json.dumps(peaks_of_memory()))
        return 0
    by_layers = interleave({str(count): make_tuning(count, 4) for count in (4, 16)}, REPEATS)
    by_batches = interleave({str(count): make_tuning(6, count) for count in (4, 16)}, REPEATS)
    peaks = measured_apart()
    value = BATCH * WIDTH * PIXELS**2 * 4
    rows = [RatioRow("seconds a layer, 16 layers", by_layers["16"] / 4 / by_layers["4"], 1.25, "4 layers")]
    rows += [RatioRow("seconds a batch, 16 batches", by_batches["16"] / 4 / by_batches["4"], 1.25, "4 batches")]
    for count in (8, 16, 32):
        note = f"{peaks[count] / 1e6:.0f} MB; the values between two layers are {2 * count * value / 1e6:.0f} MB"
        rows.append(RatioRow(f"peak memory, {count} batches", peaks[count] / peaks[4], 1.25, "4 batches", note))
    path = OUT / "tuning-cost.json"
    return int(not report("what tuning costs", rows, path))


PARTS = {"accuracy": accuracy, "peers": peers, "language-peers": language_peers, "cost": cost}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
