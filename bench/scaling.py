"""How time and memory grow with the graph, the layers, the batches, the number of deployments and the checkpoint.

    python bench/scaling.py graph [--quick]
    python bench/scaling.py load [layers] [batches] [trials]
    python bench/scaling.py trials [--source OTHER/src] [--trials 1 3]
    python bench/scaling.py checkpoint [--gigabytes 3.2] [--accuracy fast|balanced]

graph: CPU time per node of conversions, matching and fusing at 1,000 and 10,000 nodes, one thread, medians of
alternating runs. The graph is a chain of conv + BN + ReLU blocks with residuals, recorded without example inputs,
because torch.export takes minutes at this size. Also the peak memory of capture, in units of the parameters, on linear
layers of 420 MB. Writes out/bench-graph.json.
load: a thousand layers, ten thousand batches, a hundred deployments in one process. Memory is what the process holds
after a collection (Linux: VmRSS), or how far it grew during a step (VmHWM). Counts open files, child processes,
threads, hooks on the model and temporary files too. Writes out/load.json.
trials: the peak memory of a deploy whose accuracy search makes one file and three files, in units of the model's
parameters (50 MB), each run in its own process, after a small deploy that imports what is needed. `--source` names the
src/ of another checkout to measure next to this one. Writes out/bench-trials.json.
checkpoint: random weights in bf16 are written to out/large shard by shard. deploy_checkpoint makes an int4 folder of
them in its own process: once whole, once killed (SIGKILL) when a third of its pieces are stored and started again with
resume=True. Prints the peak of each process's own memory (RssAnon) beyond that of a process that only imports the same
packages, and whether both folders hold the same bytes.
"""

import argparse
import gc
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, fx, nn

import scalepoint
from measure import Row, peak_extra_bytes, report, run_part
from scalepoint.graph import capture
from scalepoint.patterns import BASE_PATTERNS
from scalepoint.patterns.conversions import convert
from scalepoint.patterns.plan import make_plan
from scalepoint.quantize import calibrate, insert_qdq
from scalepoint.transformation import apply_transformation_plan, transform

OUT = Path(__file__).parent.parent / "out"
SMALL, LARGE = 1_000, 10_000
NODES_A_BLOCK = 7


class ResidualBlock(nn.Module):
    """Seven nodes, two groups: conv + BN + ReLU, and conv + BN + add + ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
        self.conv2, self.bn2 = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


def chain_of(nodes: int) -> nn.Module:
    return nn.Sequential(*(ResidualBlock() for _ in range(nodes // NODES_A_BLOCK))).eval()


def transform_graph(graph: fx.GraphModule) -> int:
    """What transform does after capture; gives the number of groups."""
    convert(graph)
    return len(apply_transformation_plan(make_plan(graph, BASE_PATTERNS)).matches)


def plan_only(graph: fx.GraphModule) -> int:
    return len(make_plan(graph, BASE_PATTERNS).matches)


def seconds_per_node(work: Callable[[fx.GraphModule], int], models: dict[int, nn.Module], repeats: int) -> list[float]:
    """Median CPU seconds a node, for each size; every run has a fresh graph over the same modules."""
    seconds_by_size: dict[int, list[float]] = {size: [] for size in models}
    for _ in range(repeats):
        for size, model in models.items():
            graph = capture(model, None, copy=False)
            count = len(graph.graph.nodes)
            gc.collect()
            gc.disable()
            start = time.process_time()
            groups = work(graph)
            seconds_by_size[size].append((time.process_time() - start) / count)
            gc.enable()
            assert groups == 2 * (size // NODES_A_BLOCK), f"{groups} groups of {count} nodes"
    return [statistics.median(times) for times in seconds_by_size.values()]


def linear_rows(small: int, large: int, repeats: int) -> list[Row]:
    models = {size: chain_of(size) for size in (small, large)}
    works: dict[str, Callable[[fx.GraphModule], int]] = {
        "transform": transform_graph,
        "plan": plan_only,
    }
    rows = []
    for name, work in works.items():
        few, many = seconds_per_node(work, models, repeats)
        note = f"{few * 1e6:.0f} and {many * 1e6:.0f} us a node, {many * large:.1f} s in all"
        rows.append(Row(f"{name}: time per node at {large:,} nodes", many / few, 1.5, f"{small:,} nodes", note))
    return rows


class Wide(nn.Module):
    """Linear layers that are nearly all of the memory; one that writes through a view is made functional by torch."""

    def __init__(self, layers: int, is_writing: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
        self.is_writing = is_writing

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.is_writing:
            x[:, 0].relu_()
        return x


def memory_rows(layers: int) -> list[Row]:
    capture(Wide(1, is_writing=True), torch.randn(1, 2048))  # what torch loads at the first export
    rows = []
    for name, is_writing in (("", False), (", a model that writes through views", True)):
        model = Wide(layers, is_writing).eval()
        size = sum(value.numel() * value.element_size() for value in model.parameters())
        for title, copy, limit in (("copies", True, 1.2), ("shares", False, 0.2)):
            peak = peak_extra_bytes(lambda model=model, copy=copy: capture(model, torch.randn(1, 2048), copy=copy))
            rows.append(Row(f"peak memory, capture that {title}{name}", peak / size, limit, "the model's parameters"))
    return rows


def graph() -> int:
    parser = argparse.ArgumentParser(description="Time to transform a graph, memory to capture a model")
    parser.add_argument("--quick", action="store_true", help="smaller graphs and fewer repeats: to see that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = memory_rows(5 if quick else 25)
    rows += linear_rows(350, 1_400, 1) if quick else linear_rows(SMALL, LARGE, 5)
    title = f"capture and transform, 1 thread, torch {torch.__version__}"
    return 0 if report(title, rows, OUT / "bench-graph.json") else 1


LOAD_FILE = OUT / "load.json"
LAYERS, BATCHES, TRIALS, WARM = (100, 1000), (100, 10_000), 100, 20
MB = 1e6
GROWTH = 1.05  # allowed of memory
SLOPE = 1.5  # allowed of the time of a layer, ten times the layers


def linear_chain(layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*parts).eval()


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()


def batches(count: int) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(8, 3, 16, 16, generator=rng)


def of_layers() -> Iterator[dict[str, Any]]:
    """Yield CPU seconds per layer of the whole pipeline for chains of layers, each ten times as long as the last."""
    seconds = {}
    for count in LAYERS:
        model, data = linear_chain(count), [torch.randn(4, 64) for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            done = scalepoint.deploy(model, data[0], data, output=folder, progress=False, force=True, strict=True)
            seconds[count] = (time.process_time() - start) / count
        verification = done.verification
        assert verification is not None
        assert verification.holds
        assert verification.low_precision == count
    few, many = LAYERS
    yield load_row(
        f"deploy: CPU of a layer at {many:,} layers, against {few}",
        f"{1e3 * seconds[few]:.0f} ms",
        f"{1e3 * seconds[many]:.0f} ms",
        seconds[many] / seconds[few] <= SLOPE,
    )


def of_batches() -> Iterator[dict[str, Any]]:
    """Calibration over a hundred times the batches: how far the process grows meanwhile."""
    peaks = []
    for count in (BATCHES[0], *BATCHES):  # the first one is to be warm
        result = transform(small_cnn(), torch.randn(8, 3, 16, 16), target="onnxruntime")
        model = insert_qdq(result.model, result.matches)
        peaks.append(peak_extra_bytes(partial(calibrate, model, batches(count), progress=False)))
    few, many = BATCHES
    grown = max(peaks[2], 1) / max(peaks[1], MB)  # less than a megabyte is noise
    yield load_row(
        f"calibrate: memory it takes over {many:,} batches, against {few}",
        f"{peaks[1] / MB:.1f} MB",
        f"{peaks[2] / MB:.1f} MB",
        grown <= GROWTH or peaks[2] < 2 * MB,
    )


def of_trials() -> Iterator[dict[str, Any]]:
    """All stages in a loop (smoke), each with its runtime in a child: what is left after the first, and after all."""
    model, data, rows = small_cnn(), list(batches(2)), []
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        for number in range(TRIALS):
            scalepoint.deploy(model, data[0], data, output=Path(folder) / "out", progress=False, force=True, smoke=True)
            if number + 1 in (WARM, TRIALS):
                rows.append(leftovers(model, Path(folder)))
        tempfile.tempdir = None
    before, after = rows
    for name, value in after.items():
        holds = value <= before[name] * GROWTH if name == "memory" else value <= before[name]
        cells = [f"{row[name] / MB:.0f} MB" if name == "memory" else str(row[name]) for row in rows]
        yield load_row(f"deploy, {TRIALS} times: {name}, against {WARM} times", *cells, holds)


def leftovers(model: nn.Module, folder: Path) -> dict[str, int]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "memory": live_bytes(),
        "open files": len(os.listdir("/proc/self/fd")),
        "child processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "threads": threading.active_count(),
        "hooks on the model": sum(len(getattr(item, name)) for item in model.modules() for name in tables),
        "temporary files": sum(item.name != "out" for item in folder.iterdir()),
    }


def live_bytes() -> int:
    gc.collect()
    CDLL("libc.so.6").malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def load_row(what: str, before: str, after: str, holds: bool) -> dict[str, Any]:
    return {"what": what, "before": before, "after": after, "holds": holds}


def load() -> int:
    parts = {"layers": of_layers, "batches": of_batches, "trials": of_trials}
    parser = argparse.ArgumentParser(description="A thousand layers, ten thousand batches, a hundred deployments")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(parts)}; all unless named")
    chosen = parser.parse_args().names or list(parts)
    torch.set_num_threads(1)
    known: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        results = list(parts[name]())
        known = {**(json.loads(LOAD_FILE.read_text()) if LOAD_FILE.is_file() else {}), name: results}
        LOAD_FILE.parent.mkdir(exist_ok=True)
        LOAD_FILE.write_text(json.dumps(known, indent=1))
    table = Table("what", "before", "after", "flat")
    rows = [row for name in chosen for row in known[name]]
    for row in rows:
        table.add_row(row["what"], row["before"], row["after"], "yes" if row["holds"] else "NO")
    Console().print(table)
    return int(not all(row["holds"] for row in rows))


# The score falls with every file, so that the search makes as many files as it may.
TRIALS_CHILD = """
import sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch, scalepoint
from torch import nn
from bench.measure import peak_extra_bytes

def chain(width, layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))).eval()

def run(model, width, trials):
    data, scores = [torch.randn(4, width) for _ in range(2)], iter(range(100, 0, -1))
    with tempfile.TemporaryDirectory() as folder:
        done = scalepoint.deploy(
            model, data[0], data, output=folder, evaluate=lambda run: float(next(scores)), max_drop=0.0,
            max_trials=trials, progress=False,
        )
        return len(done.trials)

trials = int(sys.argv[1])
run(chain(64, 4), 64, trials)
model, made = chain(1024, 12), []
peak = peak_extra_bytes(lambda: made.append(run(model, 1024, trials)))
print(made[0], peak, sum(weight.nbytes for weight in model.parameters()))
"""


def trials() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of a search with several files")
    parser.add_argument("--source", type=Path, help="src/ of another checkout")
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 3])
    options = parser.parse_args()
    here = Path(__file__).parents[1] / "src"
    rows = []
    for name, source in {"here": here, **({"other": options.source.resolve()} if options.source else {})}.items():
        for count in options.trials:
            environment = {
                **os.environ,
                "PYTHONPATH": f"{source}{os.pathsep}{here.parent}",
                "SCALEPOINT_PLACEMENT": "predicted",
            }
            run = subprocess.run(
                [sys.executable, "-c", TRIALS_CHILD, str(count)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            trial_count, peak, size = map(int, run.stdout.split()[-3:])
            rows.append({"source": name, "trials": trial_count, "peak": peak / size})
            figures = f"peak {peak / 1e6:.0f} MB, {peak / size:.2f} x the parameters"
            print(f"{name:6} {trial_count} trials: {figures}", flush=True)
    (OUT / "bench-trials.json").write_text(json.dumps(rows, indent=1))
    return 0


HIDDEN, MLP, HEADS, WORDS = 1536, 4096, 12, 4096
CHECKPOINTS = OUT / "large"
# Scales are those of the largest weight: a search over them would take most of the time.
CHILD = """
import sys, torch, scalepoint, transformers
from scalepoint import deploy_checkpoint
from scalepoint.quantize import QuantConfig
source, output, accuracy, resume = sys.argv[1:5]
if source:
    torch.manual_seed(0)
    tokens = [torch.randint(0, {words}, (1, 128)) for _ in range(8)]
    config = QuantConfig(weight=dict(n_bits=4, block_size=128))
    deploy_checkpoint(source, output, target="compressed-tensors", config=config, accuracy=accuracy, data=tokens[:7],
                      judge=tokens[7:], verify=False, memory="200MB", resume=bool(resume), progress=True)
"""


def write_checkpoint(folder: Path, layers: int) -> None:
    """The checkpoint, a shard a block."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": WORDS,
        "intermediate_size": MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    file_by_tensor: dict[str, str] = {}
    for block in range(layers + 1):
        shapes = _block(block) if block < layers else _ends()
        generator = torch.Generator().manual_seed(block)
        tensors = {
            name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for name, shape in shapes.items()
        }
        file = f"model-{block:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_by_tensor |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_by_tensor}))


def _block(index: int) -> dict[str, tuple[int, ...]]:
    name = f"model.layers.{index}"
    square = {f"{name}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
    wide = {f"{name}.mlp.{part}_proj.weight": (MLP, HIDDEN) for part in ("gate", "up")}
    norms = {f"{name}.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    return {**square, **wide, f"{name}.mlp.down_proj.weight": (HIDDEN, MLP), **norms}


def _ends() -> dict[str, tuple[int, ...]]:
    tables = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (WORDS, HIDDEN))
    return {**tables, "model.norm.weight": (HIDDEN,)}


def run_child(source: str, output: str, accuracy: str, resume: str = "", kill_after: int = 0) -> tuple[int, float, int]:
    """Run a child process; return the peak of its own memory in bytes, its CPU seconds and its exit code.

    With `kill_after` the child is killed once it has stored this many pieces.
    """
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(words=WORDS), source, output, accuracy, resume])
    output_path = Path(output or "none")
    tuning_folder = output_path.with_name(f".{output_path.name}.work") / "tuning"
    peak, seconds = 0, 0.0
    while child.poll() is None:
        peak, seconds = max(peak, _own_memory(child.pid)), max(seconds, _cpu(child.pid))
        if kill_after and len(list(tuning_folder.glob("piece-*.safetensors"))) >= kill_after:
            os.kill(child.pid, signal.SIGKILL)
            kill_after = 0
        time.sleep(0.02)
    return peak, seconds, child.returncode


def _own_memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def digest(folder: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()


def checkpoint() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint larger than the memory it may use")
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--accuracy", default="fast")
    options = parser.parse_args()
    one = sum(torch.Size(shape).numel() for shape in _block(0).values()) * 2
    layers = max(1, round(options.gigabytes * 1e9 / one))
    source = CHECKPOINTS / f"source-{layers}"
    if not (source / "model.safetensors.index.json").exists():
        write_checkpoint(source, layers)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    empty, _, _ = run_child("", "", "")
    full_peak, seconds, code = run_child(str(source), str(CHECKPOINTS / "whole"), options.accuracy)
    killed, _, signal_code = run_child(
        str(source), str(CHECKPOINTS / "again"), options.accuracy, kill_after=2 * layers // 3
    )
    resumed, _, again_code = run_child(str(source), str(CHECKPOINTS / "again"), options.accuracy, "resume")
    peaks = [(peak - empty) / 1e9 for peak in (full_peak, killed, resumed)]
    is_same = code == again_code == 0 and digest(CHECKPOINTS / "whole") == digest(CHECKPOINTS / "again")
    print(f"{size / 1e9:.2f} GB in bf16, {layers} blocks, accuracy={options.accuracy}, {seconds:.0f} CPU-s")
    print(f"peak beyond an interpreter that imports the same ({empty / 1e9:.2f} GB):", end=" ")
    print(f"whole {peaks[0]:.2f} GB, killed (exit {signal_code}) {peaks[1]:.2f} GB, resumed {peaks[2]:.2f} GB")
    print(f"same bytes: {is_same}")
    result = {"gigabytes": size / 1e9, "blocks": layers, "accuracy": options.accuracy, "cpu_seconds": seconds}
    result |= {"peak_gigabytes": max(peaks), "same_bytes": is_same}
    (OUT / f"large-{options.accuracy}.json").write_text(json.dumps(result, indent=1))
    return 0 if is_same and max(peaks) < 1.5 else 1


PARTS = {"graph": graph, "load": load, "trials": trials, "checkpoint": checkpoint}

if __name__ == "__main__":
    sys.exit(run_part(__doc__, PARTS))
