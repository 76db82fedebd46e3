"""verify: the exported file in its real runtime, against the simulation: what agrees, what really runs in int8."""

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx, nn

from scalepoint.errors import ScalepointWarning, StoreError, VerificationError
from scalepoint.formats import ExportRequest, FileInfo
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.dynamic_axes import resize_inputs
from scalepoint.graph.nodes import find_random_nodes
from scalepoint.graph.origin import get_origin
from scalepoint.quantize.record import has_record, record_of
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import ExchangeFiles, count_low_precision, exchange_files, run_task
from scalepoint.runtimes.runtime import ExecutedNodes
from scalepoint.support.cpu import instruction_set
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.formatting import one_line
from scalepoint.support.torch_state import serialized
from scalepoint.verification.agreement import Agreement, compare_outputs, describe_nothing_compared, worst_sqnr
from scalepoint.verification.benchmarking import baseline_file, benchmark, check_baseline, explain_crash
from scalepoint.verification.choices import FollowChoices, RuntimeChoice, runtime_choices
from scalepoint.verification.departure import find_departure, predict_saturation
from scalepoint.verification.file_formats import check_exists, find_file_format, read_file_info
from scalepoint.verification.layer_times import LayerTime
from scalepoint.verification.profiling import map_layer_names, profile
from scalepoint.verification.result import (
    BOUND_DB,
    OWN_BASELINE,
    SURE_DB,
    Benchmark,
    Choice,
    Departure,
    Resized,
    Verification,
)
from scalepoint.verification.simulation import build_feeds, simulate

Feeds = Mapping[str, np.ndarray]
Codes = Mapping[str, list[Tensor]]
SEARCHED_BELOW_DB = 30.0  # to write another file for the first layer that departs takes as long as the first did
EVALUATED_DB = 10.0  # of a file that is not run: its codes are compared bit by bit, narrow constants flip single ones


@serialized
def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    runtime: str | Runtime | None = None,
    float_path: str | Path | None = None,
    float_model: nn.Module | None = None,
    plain_path: str | Path | None = None,
    baseline: str | None = None,
    threads: int = 1,
    seconds: float = 600,
    memory: int | None = None,
    bound: float = BOUND_DB,
    layers: bool = True,
) -> Verification:
    """Run a file in its runtime, in a separate process, and compare it with the simulation in PyTorch.

    Args:
        path: The file.
        model: The quantized model that it was written from.
        inputs: Inputs to run.
        kwargs: Keyword inputs of the model.
        runtime: A runtime or its name; that of the model's target by default.
        float_path: The exported float model. Adds sizes and the latency ratio.
        float_model: Write a plain torch.onnx.export of this model for the measurement, if `plain_path` is not given.
        plain_path: A file that torch.onnx.export wrote. The baseline is the faster of this and `float_path`.
        baseline: Choose the baseline, "the float file" or "the plain export", so that measurements can be compared.
        threads: Threads of the runtime.
        seconds: Time limit of a run. A run that exceeds it failed; the status says so.
        memory: Memory limit in bytes; that of the machine by default.
        bound: Smallest signal-to-noise ratio, in dB, that counts as agreement.
        layers: Also search for the first tensor that departs.

    Returns:
        Agreement per output, sizes, latency and status.
    """
    check_baseline(baseline)
    path, chosen, given = check_exists(path), choose_runtime(model, runtime), as_inputs(inputs, kwargs)
    said = _read_info(path, chosen)
    found = replace(_describe_before_run(path, chosen, said, bound), differences=_compare_file(path, chosen, model))
    expected, codes = simulate(model, given)
    feeds = build_feeds(model, given)
    with exchange_files(feeds) as files:
        run = _RuntimeRun(
            chosen, path, Simulation(model, given, expected, codes), feeds, files, threads, seconds, memory, bound
        )
        answer = run.answer(executed=True)
        if answer.status != Status.OK:
            answer = explain_crash(chosen, answer, files, None if float_path is None else Path(float_path), seconds)
            return replace(found, status=answer.status, message=answer.message, is_run=not chosen.why_not_run)
        executed = list((answer.data or {})["executed"])
        compared = run.compared(answer)
        found = replace(found, optimized=compared.agreed, choices=compared.choices)
        found = replace(found, **run.run_variants(executed), resized=_verify_other_sizes(run, model, given))
        if layers and codes and said is not None and isinstance(model, fx.GraphModule):
            found = replace(
                found, departure=_find_departure(run, compared.codes, said, found, LayerOutputSource(model, given))
            )
    if chosen.why_not_run:
        limit = min(found.bound, EVALUATED_DB)
        found = replace(found, is_run=False, message=chosen.why_not_run, bound=limit)
    elif float_path is not None:
        speed = _measure_speed(run, (float_path, plain_path, baseline), float_model, given, feeds)
        found = replace(found, float_size=read_file_info(float_path, chosen).size, latency=speed)
        found = replace(found, times=_measure_layer_times(run, float_path, feeds, model))
    if found.status == Status.OK and (why := describe_nothing_compared(found.optimized)):
        found = replace(found, status=Status.NOT_VERIFIED, message=why)
    low, fallbacks = count_low_precision(executed)
    counts = dict(Counter(each["op"] for each in executed))
    return replace(found, executed=counts, low_precision=low, fallbacks=fallbacks)


def _measure_speed(
    run: "_RuntimeRun",
    floats: tuple[str | Path, str | Path | None, str | None],
    float_model: nn.Module | None,
    inputs: tuple[Any, Any],
    feeds: Feeds,
) -> Benchmark:
    """Against the faster of the float files, or of ours and of what torch.onnx.export makes of the float model."""
    own, plain, baseline = floats
    measure = partial(
        benchmark, own, run.path, feeds,
        runtime=run.runtime, threads=run.threads, memory=run.memory, baseline=baseline,
    )  # fmt: skip
    if plain is not None or float_model is None:
        return measure(plain_path=plain)
    form = find_file_format(run.path, run.runtime)
    with baseline_file(float_model, form, ExportRequest(inputs, names=tuple(feeds))) as written:
        found = measure(plain_path=written)
    return found if found.baseline == OWN_BASELINE else replace(found, baseline_file="")  # it is gone by now


def _measure_layer_times(
    run: "_RuntimeRun", float_path: str | Path, feeds: Feeds, model: nn.Module
) -> tuple[LayerTime, ...]:
    """By layer, where the runtime tells; a profiler that fails is no fault of the file."""
    if not run.runtime.profiles:
        return ()
    limits: dict[str, Any] = {"runtime": run.runtime, "threads": run.threads, "memory": run.memory}
    with suppress(VerificationError):
        return profile(float_path, run.path, feeds, names=map_layer_names(model), **limits)
    return ()


def choose_runtime(model: nn.Module, runtime: str | Runtime | None) -> Runtime:
    """What was given, else that of the model's target, else ONNX Runtime."""
    if runtime is None:
        target = record_of(model).target if has_record(model) else None
        runtime = None if target is None else target.runtime
    return find_runtime(runtime or "onnxruntime")


class Simulation(NamedTuple):
    """The simulation of a model on its inputs."""

    model: nn.Module
    inputs: tuple[Any, Any]
    expected: list[Tensor]
    codes: Codes


class ComparedRun(NamedTuple):
    """A run against the simulation: where the runtime chose otherwise among equal scores, given the same choices."""

    agreed: tuple[Agreement, ...]
    codes: Codes  # of that simulation
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class _RuntimeRun:
    """A file in its runtime, in one way or another, against the same simulation."""

    runtime: Runtime
    path: Path
    simulated: Simulation
    feeds: Feeds
    files: ExchangeFiles
    threads: int
    seconds: float
    memory: int | None
    bound: float

    def answer(self, *, executed: bool = False, **options: Any) -> Any:
        request = {"task": "run", "path": str(self.path), "options": {"threads": self.threads, **options}}
        asked = {**request, **self.files.files, "executed": executed}
        return run_task(self.runtime, asked, seconds=self.seconds, memory=self.memory)

    def run_variants(self, executed: ExecutedNodes) -> dict[str, Any]:
        """How near the file is in the other ways to run it, and what the runtime does unless it is run so."""
        variants = [each for each in self.runtime.variants if each.applies(executed)]
        found: dict[str, Any] = {each.name: self.agreements(**each.options) for each in variants}
        return found | {"rounded": " ".join(each.why for each in variants if each.why)}

    def agreements(self, **options: Any) -> tuple[Agreement, ...]:
        answer = self.answer(**options)
        return self.compared(answer, **options).agreed if answer.status == Status.OK else ()

    def compared(self, answer: Any, **options: Any) -> ComparedRun:
        """The outputs of a run that went well, against the simulation's."""
        outputs = self.files.outputs(answer)
        own = ComparedRun(compare_outputs(self.simulated.expected, outputs, self.feeds), self.simulated.codes)
        if worst_sqnr(own.agreed) >= SURE_DB:
            return own
        follow = FollowChoices(self._choices(**options), self.bound)
        if not follow.choices:
            return own
        with follow:
            expected, codes = simulate(self.simulated.model, self.simulated.inputs)
        agreed = compare_outputs(expected, outputs, self.feeds)
        is_explained = (
            follow.followed and worst_sqnr(agreed) >= self.bound and worst_sqnr(agreed) > worst_sqnr(own.agreed)
        )
        return ComparedRun(agreed, codes, follow.followed) if is_explained else own

    def _choices(self, **options: Any) -> list[RuntimeChoice]:
        """What the runtime chooses by which scores, if the format can show it."""
        show = find_file_format(self.path, self.runtime).show_choices
        if show is None:
            return []
        with TemporaryFolder() as folder:
            copy = folder / self.path.name
            shown = show(self.path, copy)
            answer = None if shown is None else replace(self, path=copy).answer(**options)
            if shown is None or answer is None or answer.status != Status.OK:
                return []
            return runtime_choices(shown, self.files.outputs(answer))


def _verify_other_sizes(run: _RuntimeRun, model: nn.Module, inputs: tuple[Any, Any]) -> Resized | None:
    """With the sizes that capture tried, where axes are free by name."""
    origin = get_origin(model)
    if not origin.compared_sizes:
        return None
    found = Resized(dict(origin.compared_sizes), steps=dict(origin.size_steps))
    others = resize_inputs(model, inputs, origin.axes, origin.compared_sizes)
    try:
        simulated = Simulation(model, others, *simulate(model, others))
    except RuntimeError as error:  # the float graph ran there
        return replace(found, message=f"the simulation fails: {one_line(str(error))}")
    feeds = build_feeds(model, others)
    with exchange_files(feeds) as files:
        other = replace(run, simulated=simulated, feeds=feeds, files=files)
        answer = other.answer()
        if answer.status != Status.OK:
            return replace(found, message=f"{answer.status.value}: {answer.message}")
        return replace(found, agreed=other.compared(answer).agreed)


def _read_info(path: Path, runtime: Runtime) -> FileInfo | None:
    try:
        return read_file_info(path, runtime)
    except StoreError:  # the runtime will say so
        return None


def _compare_file(path: Path, runtime: Runtime, model: nn.Module) -> tuple[str, ...]:
    """What a file holds that the model does not, for formats that can be compared bit by bit."""
    compare = find_file_format(path, runtime).compare
    return () if compare is None or not isinstance(model, fx.GraphModule) else tuple(compare(path, model))


def _describe_before_run(path: Path, runtime: Runtime, said: FileInfo | None, bound: float) -> Verification:
    """What the file itself says, before it runs."""
    found = Verification(str(path), runtime.name, Status.OK, bound=bound, machine_cpu=instruction_set())
    if said is None:
        return found
    warning = predict_saturation(said.made_for, path, bool(said.quantizers))
    if warning:
        warnings.warn(ScalepointWarning(warning), stacklevel=3)
    return replace(found, made_for=dict(said.made_for), warning=warning, size=said.size)


class LayerOutputSource(NamedTuple):
    """What a file is made from that shows the codes at its quantizers."""

    model: fx.GraphModule
    inputs: tuple[Any, Any]


def _find_departure(
    run: _RuntimeRun, codes: Codes, said: FileInfo, found: Verification, shown: LayerOutputSource
) -> Departure | None:
    """By the runtime where it shows codes; else by a file that does, which is written only where outputs disagree."""
    if run.runtime.shows_codes:
        answer, quantizers = run.answer(expose=True), said.quantizers
    else:
        answer, quantizers = (
            _run_with_layer_outputs(run, shown) if worst_sqnr(found.optimized) < SEARCHED_BELOW_DB else (None, {})
        )
    if answer is None or answer.status != Status.OK:
        return None
    agreed = (found.optimized, found.unoptimized)
    return find_departure(codes, quantizers, run.files.outputs(answer), *agreed, drawn=find_random_nodes(shown.model))


def _run_with_layer_outputs(run: _RuntimeRun, shown: LayerOutputSource) -> tuple[Any, Mapping[str, str]]:
    form = find_file_format(run.path, run.runtime)
    if form.write_with_layer_outputs is None:
        return None, {}
    with TemporaryFolder() as folder:
        path = folder / f"exposed{form.suffix}"
        form.write_with_layer_outputs(shown.model, path, ExportRequest(shown.inputs))
        return replace(run, path=path).answer(), form.about(path).quantizers
