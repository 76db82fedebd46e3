"""verify: the exported file in its real runtime, against the simulation: what agrees, what really runs in int8."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from scalepoint.errors import ScalepointWarning, UsageError, VerificationError
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.modes import evaluating
from scalepoint.quantize.stubs import QuantStub
from scalepoint.runtimes.process import RUNTIMES, Answer, Status, arrays, ask, exchange
from scalepoint.targets.cpu import instruction_set
from scalepoint.verification.files import existing, made_for, quantize_nodes, random_inputs, size_of

LOW = frozenset(
    (
        "QLinearConv",
        "QGemm",
        "QLinearMatMul",
        "MatMulIntegerToFloat",
        "MatMulInteger",
        "ConvInteger",
        "MatMulNBits",
        "DynamicQuantizeMatMul",
    )
)
FLOAT = frozenset(("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose"))
BOUND_DB = 20.0
SUSPICIOUS_DB = 10.0  # how much better the file may agree with the runtime's optimisations off
SURE_DB = 40.0
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}
ROUNDED = (
    "MatMulNBits rounds activations to int8 at its default accuracy level 4; "
    "session.qdq_matmulnbits_accuracy_level=1 leaves them float, and is slower"
)
SATURATION = (
    "u8 x s8 products saturate: this CPU adds them in pairs of 16 bits",
    "Export for cpu='avx2' (the pair-safe scale)",
)


@dataclass(frozen=True)
class Agreement:
    """How near one output is to the simulation's."""

    output: str
    sqnr: float
    max_difference: float
    top1: float | None

    def __str__(self) -> str:
        same = "" if self.top1 is None else f", top-1 the same in {self.top1:.1%}"
        return f"{self.output}: {self.sqnr:.1f} dB, at most {self.max_difference:.3g} apart{same}"


@dataclass(frozen=True)
class Departure:
    """The first tensor whose codes are others than the simulation's."""

    where: str
    equal: float
    largest: int
    cause: str
    way_out: str


@dataclass(frozen=True)
class Verification:
    """What the runtime says of a file."""

    path: str
    runtime: str
    status: Status
    message: str = ""
    optimized: tuple[Agreement, ...] = ()
    unoptimized: tuple[Agreement, ...] = ()
    executed: Mapping[str, int] = field(default_factory=dict)
    low_precision: int = 0
    fallbacks: tuple[str, ...] = ()
    departure: Departure | None = None
    size: int = 0
    float_size: int | None = None
    latency: "Benchmark | None" = None
    bound: float = BOUND_DB
    exact: tuple[Agreement, ...] = ()  # weight-only: with activations that the runtime does not round
    made_for: Mapping[str, str] = field(default_factory=dict)  # target and its options, as the file says
    warning: str = ""

    @property
    def sqnr(self) -> float:
        """The worst output, with the runtime's optimisations on."""
        return _worst(self.optimized)

    @property
    def holds(self) -> bool:
        """Near the simulation, and not much nearer without the runtime's optimisations."""
        best = _worst(self.exact or self.optimized)
        is_changed = _worst(self.unoptimized) > best + SUSPICIOUS_DB and best < SURE_DB
        return self.status == Status.OK and self.sqnr >= self.bound and not is_changed

    def check(self) -> None:
        """Raise VerificationError when the file does not run as the simulation says."""
        if self.holds:
            return
        if self.status != Status.OK:
            raise VerificationError(f"{self.path} in {self.runtime}: {self.status.value}: {self.message}")
        cause = (
            ""
            if self.departure is None
            else (f"; first at {self.departure.where}: {self.departure.cause}. {self.departure.way_out}")
        )
        raise VerificationError(
            f"{self.path} in {self.runtime} agrees with the simulation to {self.sqnr:.1f} dB; {self.bound:.0f} are "
            f"asked for, and about as many with its optimisations on as off{cause}"
        )

    def table(self) -> Table:
        table = Table(title=f"{Path(self.path).name} in {self.runtime}: {self.status.value}", show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        rows = [("message", self.message)] if self.message else []
        rows += [("warning", self.warning)] if self.warning else []
        rows += (
            [("made for", ", ".join(f"{key} {each}" for key, each in self.made_for.items()))] if self.made_for else []
        )
        rows += [("agreement", str(each)) for each in self.optimized]
        rows += [("accuracy level 1", str(each)) for each in self.exact]
        rows += [("accuracy level 4", ROUNDED)] if self.exact else []
        rows += [("optimisations off", str(each)) for each in self.unoptimized]
        if self.executed:
            rows.append(("in low precision", f"{self.low_precision} weighted operations"))
            rows.append(("left in float", ", ".join(self.fallbacks) or "none"))
        if self.departure:
            rows.append(("first departs", f"{self.departure.where}: {self.departure.cause}"))
            rows.append(("way out", self.departure.way_out))
        if self.float_size:
            rows.append(("size", f"{self.size / 1e6:.2f} MB, {self.size / self.float_size:.2f} of the float file"))
        if self.latency:
            rows.append(("speed", str(self.latency)))
        return rows

    def __str__(self) -> str:
        console = Console()
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value, "sqnr": self.sqnr, "holds": self.holds}


def _worst(agreements: Sequence[Agreement]) -> float:
    return min((each.sqnr for each in agreements), default=-inf)


@dataclass(frozen=True)
class Benchmark:
    """Two files in one process, in turns."""

    ratio: float  # float time / quantized time: above 1 is faster
    seconds: tuple[float, float]
    threads: int
    repeats: int
    runtime: str

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}x of the float file's speed ({self.runtime}, {self.threads} threads, medians of "
            f"{self.repeats} interleaved runs)"
        )


class _Again:
    """A file that runs: in the same way with other options of the runtime, against the same simulation."""

    def __init__(self, request: dict[str, Any], expected: list[Tensor], files: dict[str, str], seconds: float) -> None:
        self.request = {name: value for name, value in request.items() if name != "compiled"}
        self.expected, self.files, self.seconds = expected, files, seconds

    def with_options(self, **options: Any) -> tuple[Agreement, ...]:
        answer = ask({**self.request, **options}, seconds=self.seconds)
        return _agreements(self.expected, outputs_of(answer, self.files)) if answer.status == Status.OK else ()


def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    runtime: str = "onnxruntime",
    float_path: str | Path | None = None,
    threads: int = 1,
    seconds: float = 600,
    bound: float = BOUND_DB,
    layers: bool = True,
) -> Verification:
    """Run the file in its runtime, in a process of its own, and compare with the simulation in PyTorch.

    `float_path`, the float export, adds sizes and the latency ratio. layers=False leaves out the search for the first
    tensor that departs.
    """
    path = existing(path)
    if runtime not in RUNTIMES:
        raise UsageError(f"runtime={runtime!r}: one of {', '.join(RUNTIMES)}")
    found = _expected(path, runtime, bound)
    expected, codes = simulate(model, as_inputs(inputs, kwargs))
    feeds = feeds_of(model, as_inputs(inputs, kwargs))
    request = {"task": "run", "runtime": runtime, "path": str(path), "threads": threads}
    with exchange(feeds) as files:
        answer = ask({**request, **files}, seconds=seconds)
        if answer.status != Status.OK:
            answer = _blamed(answer, {**request, **files}, float_path, seconds)
            return replace(found, status=answer.status, message=answer.message)
        on = _agreements(expected, outputs_of(answer, files))
        executed = list((answer.data or {})["executed"])
        if runtime == "onnxruntime":
            again = _Again({**request, **files}, expected, files, seconds)
            off = again.with_options(optimize=False)
            has_levels = any(each["op"] == "MatMulNBits" for each in executed)
            found = replace(found, unoptimized=off, exact=again.with_options(session=EXACT) if has_levels else ())
            if layers and codes and isinstance(model, fx.GraphModule):
                found = replace(found, departure=_departure(again.request, codes, files, on, off, seconds))
    if float_path is not None:
        speed = benchmark(float_path, path, feeds, runtime=runtime, threads=threads)
        found = replace(found, float_size=size_of(float_path), latency=speed)
    low, fallbacks = precision(executed)
    counts = dict(Counter(each["op"] for each in executed))
    return replace(found, optimized=on, executed=counts, low_precision=low, fallbacks=fallbacks, size=size_of(path))


def _blamed(answer: Answer, request: Mapping[str, Any], float_path: str | Path | None, seconds: float) -> Answer:
    """A crash, and whether the float file crashes too: then it is the runtime on this machine, not what we wrote."""
    if answer.status != Status.CRASHED or float_path is None:
        return answer
    plain = ask({**request, "task": "run", "path": str(float_path)}, seconds=seconds)
    said = {
        Status.OK: "the float file runs",
        Status.CRASHED: f"the float file too ({plain.message}), so it is not the quantization",
    }
    return replace(answer, message=f"{answer.message}; {said.get(plain.status, f'the float file: {plain.message}')}")


def _expected(path: Path, runtime: str, bound: float) -> Verification:
    """What the file itself says, before it runs."""
    origin = made_for(path)
    warning = _foreseen(origin, path)
    if warning:
        warnings.warn(ScalepointWarning(warning), stacklevel=3)
    return Verification(str(path), runtime, Status.OK, bound=bound, made_for=origin, warning=warning)


def _foreseen(origin: Mapping[str, str], path: Path) -> str:
    """What will go wrong on this CPU, by what the file was made for; weights alone never saturate."""
    if origin.get("cpu") == "vnni" and instruction_set() != "vnni" and quantize_nodes(path):
        return f"{path.name} was made for a CPU with VNNI, this one has none: {SATURATION[0]}. {SATURATION[1]}"
    return ""


def benchmark(
    float_path: str | Path,
    quantized_path: str | Path,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    runtime: str = "onnxruntime",
    threads: int = 1,
    repeats: int = 50,
    seconds: float = 20,
) -> Benchmark:
    """The speed of one file against another in one process, interleaved; without inputs, random ones of their shape."""
    paths = [existing(float_path), existing(quantized_path)]
    feeds = dict(inputs) if inputs is not None else random_inputs(paths[0])
    with exchange(feeds) as files:
        request = {"task": "benchmark", "runtime": runtime, "paths": [str(path) for path in paths], "threads": threads}
        answer = ask({**request, **files, "repeats": repeats, "seconds": seconds}, seconds=seconds * 10 + 300)
        answer = _blamed(answer, {**request, **files}, paths[0], seconds * 10 + 300)
    if answer.status != Status.OK or answer.data is None:
        raise VerificationError(f"{runtime} could not run the files: {answer.status.value}: {answer.message}")
    first, second = answer.data["medians"]
    return Benchmark(first / second, (first, second), threads, int(answer.data["repeats"]), runtime)


def simulate(model: nn.Module, inputs: tuple[Any, Any]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The outputs of the simulation, and the codes at every stub, call by call."""
    codes: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(_recorder(codes.setdefault(name, [])))
        for name, module in model.named_modules()
        if isinstance(module, QuantStub) and module.enabled
    ]
    try:
        with evaluating(model), torch.no_grad():
            outputs = pytree.tree_leaves(model(*inputs[0], **inputs[1]))
    finally:
        for handle in handles:
            handle.remove()
    return [value for value in outputs if isinstance(value, Tensor)], codes


def _recorder(kept: list[Tensor]) -> Any:
    def record(stub: QuantStub, inputs: Any, output: Tensor) -> None:
        if not stub.quantizer.grid.format.is_float and stub.scale.ndim == 0:
            kept.append(((output / stub.scale).round() + stub.zero_point).to(torch.int32))

    return record


def feeds_of(model: nn.Module, inputs: tuple[Any, Any]) -> dict[str, np.ndarray]:
    """The tensors among the inputs by the names that torch.export gives them; other values are constants of a file."""
    placeholders = (
        [node.name for node in model.graph.nodes if node.op == "placeholder"]
        if isinstance(model, fx.GraphModule)
        else []
    )
    leaves = pytree.tree_leaves(inputs[0])
    names = placeholders if len(placeholders) >= len(leaves) else map(str, range(len(leaves)))
    named = dict(zip(names, leaves, strict=False))
    for path, leaf in pytree.tree_flatten_with_path(inputs[1])[0]:
        named["_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)] = leaf
    return {name: leaf.detach().cpu().numpy() for name, leaf in named.items() if isinstance(leaf, Tensor)}


def outputs_of(answer: Answer, files: Mapping[str, str]) -> dict[str, np.ndarray]:
    return arrays(files["outputs"], list((answer.data or {})["names"]))


def _agreements(expected: Sequence[Tensor], found: Mapping[str, np.ndarray]) -> tuple[Agreement, ...]:
    pairs = zip(found.items(), expected, strict=False)
    return tuple(_agreement(name, value.detach().cpu().numpy(), array) for (name, array), value in pairs)


def _agreement(name: str, expected: np.ndarray, found: np.ndarray) -> Agreement:
    if expected.shape != found.shape:
        return Agreement(name, -inf, inf, None)
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    noise, signal = float(np.square(wide - other).sum()), float(np.square(wide).sum())
    sqnr = inf if noise == 0 else 10 * log10(signal / noise) if signal else -inf
    classes = wide.ndim >= 2 and wide.shape[-1] > 1
    top1 = float((wide.argmax(-1) == other.argmax(-1)).mean()) if classes else None
    return Agreement(name, sqnr, float(np.abs(wide - other).max(initial=0.0)), top1)


def precision(executed: Sequence[Mapping[str, Any]]) -> tuple[int, tuple[str, ...]]:
    """How many weighted operations run in low precision, and which do not."""
    low, left = 0, []
    for each in executed:
        op = str(each["op"])
        kind, _, primitive = op.partition(" ")
        if primitive:  # OpenVINO: what the primitive says counts
            if each["weighted"]:
                is_low = primitive.lower().endswith(("_i8", "_u8")) or bool(each["narrow"])
                low += is_low
                left += [] if is_low else [f"{each['name']} ({op})"]
        elif kind in LOW:
            low += 1
        elif kind in FLOAT and each["weighted"]:
            left.append(f"{each['name']} ({op}: {each['why']})")
    return low, tuple(left)


def _departure(
    request: Mapping[str, Any],
    codes: Mapping[str, list[Tensor]],
    files: Mapping[str, str],
    on: Sequence[Agreement],
    off: Sequence[Agreement],
    seconds: float,
) -> Departure | None:
    """The first stub whose codes differ in more than one of a hundred values, or by more than two steps in many."""
    answer = ask({**request, "expose": True}, seconds=seconds)
    if answer.status != Status.OK:
        return None
    found = outputs_of(answer, files)
    names = quantize_nodes(Path(request["path"]))
    for name, values in codes.items():
        for index, value in enumerate(values):
            tensor = names.get(f"{name}/QuantizeLinear" + (f"_{index}" if index else ""))
            if tensor not in found:
                continue
            apart = np.abs(found[tensor].astype(np.int32) - value.cpu().numpy())
            equal = float((apart == 0).mean())
            if equal < 0.9 and float((apart > 2).mean()) > 0.02:
                cause, way_out = _cause(on, off)
                return Departure(name, equal, int(apart.max()), cause, way_out)
    return None


def _cause(on: Sequence[Agreement], off: Sequence[Agreement]) -> tuple[str, str]:
    worst_on, worst_off = _worst(on), _worst(off)
    if worst_off > worst_on + 6 and instruction_set() == "avx2":
        return SATURATION
    if worst_off > worst_on + 6:
        return "an optimisation of the runtime changes the result", "report it with the file"
    return "rounding differences that grow from layer to layer", "none needed if accuracy holds"
