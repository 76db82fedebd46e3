"""verify: the exported file in its real runtime, against the simulation: what agrees, what really runs in int8."""

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx, nn

from scalepoint.errors import ScalepointWarning, StoreError, VerificationError
from scalepoint.files import TemporaryFolder
from scalepoint.formats import About, Writing
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.free import resized
from scalepoint.graph.nodes import drawing
from scalepoint.graph.origin import origin_of
from scalepoint.quantize.record import has_record, record_of
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import Exchange, ask, exchange, precision
from scalepoint.runtimes.runtime import Executed
from scalepoint.turns import in_turn
from scalepoint.verification.agreement import Agreement, agreements, worst
from scalepoint.verification.departure import departure, foreseen
from scalepoint.verification.files import about_file, existing, format_of
from scalepoint.verification.profiling import layer_names, profile
from scalepoint.verification.result import BOUND_DB, Benchmark, Departure, Resized, Verification
from scalepoint.verification.simulation import feeds_of, simulate
from scalepoint.verification.times import LayerTime
from scalepoint.verification.timing import benchmark, blamed, plain_file
from scalepoint.words import one_line

Feeds = Mapping[str, np.ndarray]
SEARCHED_BELOW_DB = 30.0  # to write another file for the first layer that departs takes as long as the first did
EVALUATED_DB = 10.0  # of a file that is not run: its codes are compared bit by bit, narrow constants flip single ones


@in_turn
def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    runtime: str | Runtime | None = None,
    float_path: str | Path | None = None,
    float_model: nn.Module | None = None,
    threads: int = 1,
    seconds: float = 600,
    memory: int | None = None,
    bound: float = BOUND_DB,
    layers: bool = True,
) -> Verification:
    """Run the file in its runtime, in a process of its own, and compare with the simulation in PyTorch.

    `runtime` is that of the model's target unless given. `float_path`, the float export, adds sizes and the latency
    ratio; with `float_model` its baseline is the faster of that file and of what torch.onnx.export makes of the model.
    A run has `seconds` and `memory` (bytes; all of this machine's unless given): beyond them it failed, which the
    status says. layers=False leaves out the search for the first tensor that departs.
    """
    path, chosen, given = existing(path), runtime_of(model, runtime), as_inputs(inputs, kwargs)
    said = _about(path, chosen)
    found = replace(_expected(path, chosen, said, bound), differences=_differences(path, chosen, model))
    expected, codes = simulate(model, given)
    feeds = feeds_of(model, given)
    with exchange(feeds) as files:
        run = _Run(chosen, path, expected, files, threads, seconds, memory)
        answer = run.answer(executed=True)
        if answer.status != Status.OK:
            answer = blamed(chosen, answer, files, None if float_path is None else Path(float_path), seconds)
            return replace(found, status=answer.status, message=answer.message)
        executed = list((answer.data or {})["executed"])
        found = replace(found, optimized=agreements(expected, files.outputs(answer)))
        found = replace(found, **run.otherwise(executed), resized=_resized(run, model, given))
        if layers and codes and said is not None and isinstance(model, fx.GraphModule):
            found = replace(found, departure=_departure(run, codes, said, found, Shown(model, given)))
    if chosen.why_not_run:
        limit = min(found.bound, EVALUATED_DB)
        found = replace(found, is_run=False, message=chosen.why_not_run, bound=limit)
    elif float_path is not None:
        speed = _speed(run, float_path, float_model, given, feeds)
        found = replace(found, float_size=about_file(float_path, chosen).size, latency=speed)
        found = replace(found, times=_times(run, float_path, feeds, model))
    low, fallbacks = precision(executed)
    counts = dict(Counter(each["op"] for each in executed))
    return replace(found, executed=counts, low_precision=low, fallbacks=fallbacks)


def _speed(
    run: "_Run", float_path: str | Path, float_model: nn.Module | None, inputs: tuple[Any, Any], feeds: Feeds
) -> Benchmark:
    """Against the float file, and what torch.onnx.export makes of the float model where it is given."""
    limits: dict[str, Any] = {"runtime": run.runtime, "threads": run.threads, "memory": run.memory}
    if float_model is None:
        return benchmark(float_path, run.path, feeds, **limits)
    with plain_file(float_model, format_of(run.path, run.runtime), Writing(inputs, names=tuple(feeds))) as plain:
        return benchmark(float_path, run.path, feeds, plain_path=plain, **limits)


def _times(run: "_Run", float_path: str | Path, feeds: Feeds, model: nn.Module) -> tuple[LayerTime, ...]:
    """By layer, where the runtime tells; a profiler that fails is no fault of the file."""
    if not run.runtime.profiles:
        return ()
    limits: dict[str, Any] = {"runtime": run.runtime, "threads": run.threads, "memory": run.memory}
    with suppress(VerificationError):
        return profile(float_path, run.path, feeds, names=layer_names(model), **limits)
    return ()


def runtime_of(model: nn.Module, runtime: str | Runtime | None) -> Runtime:
    """What was given, else that of the model's target, else ONNX Runtime."""
    if runtime is None:
        target = record_of(model).target if has_record(model) else None
        runtime = None if target is None else target.runtime
    return find_runtime(runtime or "onnxruntime")


@dataclass(frozen=True)
class _Run:
    """A file in its runtime, in one way or another, against the same simulation."""

    runtime: Runtime
    path: Path
    expected: list[Tensor]
    files: Exchange
    threads: int
    seconds: float
    memory: int | None

    def answer(self, *, executed: bool = False, **options: Any) -> Any:
        request = {"task": "run", "path": str(self.path), "options": {"threads": self.threads, **options}}
        asked = {**request, **self.files.files, "executed": executed}
        return ask(self.runtime, asked, seconds=self.seconds, memory=self.memory)

    def otherwise(self, executed: Executed) -> dict[str, Any]:
        """How near the file is in the other ways to run it, and what the runtime does unless it is run so."""
        variants = [each for each in self.runtime.variants if each.applies(executed)]
        found: dict[str, Any] = {each.name: self.agreements(**each.options) for each in variants}
        return found | {"rounded": " ".join(each.why for each in variants if each.why)}

    def agreements(self, **options: Any) -> tuple[Agreement, ...]:
        answer = self.answer(**options)
        return agreements(self.expected, self.files.outputs(answer)) if answer.status == Status.OK else ()


def _resized(run: _Run, model: nn.Module, inputs: tuple[Any, Any]) -> Resized | None:
    """With the sizes that capture tried, where axes are free by name."""
    origin = origin_of(model)
    if not origin.tried:
        return None
    found = Resized(dict(origin.tried), steps=dict(origin.steps))
    others = resized(model, inputs, origin.axes, origin.tried)
    try:
        expected, _ = simulate(model, others)
    except RuntimeError as error:  # the float graph ran there
        return replace(found, message=f"the simulation fails: {one_line(str(error))}")
    with exchange(feeds_of(model, others)) as files:
        answer = replace(run, expected=expected, files=files).answer()
        if answer.status != Status.OK:
            return replace(found, message=f"{answer.status.value}: {answer.message}")
        return replace(found, agreed=agreements(expected, files.outputs(answer)))


def _about(path: Path, runtime: Runtime) -> About | None:
    try:
        return about_file(path, runtime)
    except StoreError:  # the runtime will say so
        return None


def _differences(path: Path, runtime: Runtime, model: nn.Module) -> tuple[str, ...]:
    """What a file holds that the model does not, for formats that can be compared bit by bit."""
    compare = format_of(path, runtime).compare
    return () if compare is None or not isinstance(model, fx.GraphModule) else tuple(compare(path, model))


def _expected(path: Path, runtime: Runtime, said: About | None, bound: float) -> Verification:
    """What the file itself says, before it runs."""
    found = Verification(str(path), runtime.name, Status.OK, bound=bound)
    if said is None:
        return found
    warning = foreseen(said.made_for, path, bool(said.quantizers))
    if warning:
        warnings.warn(ScalepointWarning(warning), stacklevel=3)
    return replace(found, made_for=dict(said.made_for), warning=warning, size=said.size)


class Shown(NamedTuple):
    """What a file is made from that shows the codes at its quantizers."""

    model: fx.GraphModule
    inputs: tuple[Any, Any]


def _departure(
    run: _Run, codes: Mapping[str, list[Tensor]], said: About, found: Verification, shown: Shown
) -> Departure | None:
    """By the runtime where it shows codes; else by a file that does, which is written only where outputs disagree."""
    if run.runtime.shows_codes:
        answer, quantizers = run.answer(expose=True), said.quantizers
    else:
        answer, quantizers = _exposed(run, shown) if worst(found.optimized) < SEARCHED_BELOW_DB else (None, {})
    if answer is None or answer.status != Status.OK:
        return None
    agreed = (found.optimized, found.unoptimized)
    return departure(codes, quantizers, run.files.outputs(answer), *agreed, drawn=drawing(shown.model))


def _exposed(run: _Run, shown: Shown) -> tuple[Any, Mapping[str, str]]:
    form = format_of(run.path, run.runtime)
    if form.exposed is None:
        return None, {}
    with TemporaryFolder() as folder:
        path = folder / f"exposed{form.suffix}"
        form.exposed(shown.model, path, Writing(shown.inputs))
        return replace(run, path=path).answer(), form.about(path).quantizers
