"""verify: runs an exported file in its runtime and compares it with the simulation.

`verify` takes these steps, and adds the result of each to a `Verification`:

    read the file -> simulate -> run and compare (runtime_run.py) -> run with other settings, at other sizes
    -> find the first layer that departs -> measure the speed
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import fx, nn

from scalepoint.errors import ScalepointError, ScalepointWarning, StoreError, VerificationError
from scalepoint.formats import ExportRequest, FileInfo
from scalepoint.graph.capture import as_inputs
from scalepoint.graph.constant_nodes import find_random_nodes
from scalepoint.graph.dynamic_axes import resize_inputs
from scalepoint.graph.origin import get_origin
from scalepoint.quantize.record import has_record, record_of
from scalepoint.runtimes import Runtime, Status, find_runtime
from scalepoint.runtimes.process import TaskResult, children_reused, count_low_precision, exchange_files
from scalepoint.support.cpu import instruction_set
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.formatting import format_decibels, to_one_line
from scalepoint.support.torch_state import serialized
from scalepoint.targets.target import parse_float_dtype
from scalepoint.verification.agreement import describe_nothing_compared, worst_sqnr
from scalepoint.verification.benchmarking import baseline_file, benchmark, check_baseline, explain_crash
from scalepoint.verification.departure import find_departure, find_product_departure, predict_saturation
from scalepoint.verification.file_formats import check_exists, find_file_format, read_file_info
from scalepoint.verification.layer_times import LayerTime
from scalepoint.verification.products import match_products, simulate_products
from scalepoint.verification.profiling import map_layer_names, profile
from scalepoint.verification.result import BOUND_DB, OWN_BASELINE, Benchmark, Departure, Resized, Verification
from scalepoint.verification.runtime_run import Codes, RuntimeRun, Simulation
from scalepoint.verification.simulation import build_feeds, simulate
from scalepoint.verification.smaller_inputs import describe_sizes, is_cropped, shrink_inputs

# Below this SQNR a second file with layer outputs is written to find the first layer that departs. It takes as long as
# the first export, so it is not worth it for a file that agrees.
SEARCHED_BELOW_DB = 30.0
# Bound for a file that was evaluated without its runtime. Its codes are compared bit by bit anyway, and constants in
# float16 change single codes of activations.
EVALUATED_DB = 10.0


@serialized
@children_reused()
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
    plain_inputs: Mapping[str, np.ndarray] | None = None,
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
        model: The quantized model that the file was written from.
        inputs: Inputs to run.
        kwargs: Keyword inputs of the model.
        runtime: A runtime or its name. Default: the runtime of the model's target.
        float_path: The exported float model. With it, sizes and latency are compared.
        float_model: Write a plain torch.onnx.export of this model for the measurement, if `plain_path` is not given.
        plain_path: A file that torch.onnx.export wrote. The baseline is the faster of this and `float_path`.
        plain_inputs: Arrays of inputs that only `plain_path` has, by name.
        baseline: Always use this baseline, "the float file" or "the plain export", so that several measurements can be
            compared with each other.
        threads: Threads of the runtime.
        seconds: Time limit of a run. A run that exceeds it ends with the status "timeout".
        memory: Memory limit in bytes; the memory of the machine by default.
        bound: Smallest signal-to-noise ratio, in dB, that counts as agreement.
        layers: Also search for the first tensor that departs.

    Returns:
        Agreement per output, sizes, latency and status. A file that does not agree is not an exception: call
        `check()` of the result to raise one.

    Raises:
        StoreError: The file does not exist.
        UsageError: The runtime is unknown, or the model does not take the inputs.

    Example:
        print(verify("model.onnx", quantized_model, example_inputs, float_path="float.onnx"))
    """
    check_baseline(baseline)
    path, runtime, model_inputs = check_exists(path), choose_runtime(model, runtime), as_inputs(inputs, kwargs)
    info = _read_info(path, runtime)
    result = _describe_before_run(path, runtime, info, bound)
    result = replace(result, differences=_compare_stored_values(path, runtime, model))
    simulation = Simulation(model, model_inputs, *simulate(model, model_inputs))
    feeds = build_feeds(model, model_inputs)
    with exchange_files(feeds) as files:
        run = RuntimeRun(
            runtime=runtime,
            path=path,
            simulation=simulation,
            feeds=feeds,
            files=files,
            threads=threads,
            seconds=seconds,
            memory=memory,
            bound=bound,
        )
        answer = run.run_file(executed=True)
        if answer.status == Status.NOT_VERIFIED and runtime.retries_smaller and isinstance(model, fx.GraphModule):
            float_size = None if float_path is None else read_file_info(float_path, runtime).size
            result = replace(result, message=answer.message, float_size=float_size)
            return _verify_with_smaller_inputs(run, model, result, info, layers=layers)
        if answer.status != Status.OK:
            answer = explain_crash(runtime, answer, files, None if float_path is None else Path(float_path), seconds)
            return replace(result, status=answer.status, message=answer.message, is_run=not runtime.why_not_run)
        data = answer.data or {}
        executed = list(data["executed"])
        compared = run.compare(answer)
        result = replace(result, optimized=compared.agreements, choices=compared.choices)
        result = replace(result, **run.run_variants(executed))  # `unoptimized`, `exact` and `rounded`
        result = replace(result, resized=_verify_other_sizes(run))
        has_layers = bool(simulation.codes) or runtime.shows_products
        if layers and has_layers and info is not None and isinstance(model, fx.GraphModule):
            result = replace(result, departure=_find_departure(run, model, compared.codes, info, result))
    if runtime.why_not_run:  # another program evaluated the file, so its speed says nothing
        result = replace(result, is_run=False, message=runtime.why_not_run, bound=min(result.bound, EVALUATED_DB))
    elif runtime.no_speed_reason:
        float_size = None if float_path is None else read_file_info(float_path, runtime).size
        message = "; ".join(filter(None, (runtime.no_speed_reason, data["note"])))
        result = replace(result, message=message, float_size=float_size)
    elif float_path is not None:
        latency = _measure_speed(run, _BaselineFiles(float_path, plain_path, plain_inputs, baseline), float_model)
        result = replace(result, float_size=read_file_info(float_path, runtime).size, latency=latency)
        result = replace(result, times=_measure_layer_times(run, float_path))
    if result.status == Status.OK and (reason := describe_nothing_compared(result.optimized)):
        result = replace(result, status=Status.NOT_VERIFIED, message=reason)
    low_precision, fallbacks = count_low_precision(executed)
    counts = dict(Counter(node["op"] for node in executed))
    return replace(result, executed=counts, low_precision=low_precision, fallbacks=fallbacks)


def _verify_with_smaller_inputs(
    run: RuntimeRun, model: fx.GraphModule, result: Verification, info: FileInfo | None, *, layers: bool
) -> Verification:
    """Verify a file of the same model that is written for smaller inputs, because this file takes too long to run.

    The codes, scales and tables of both files are compared with those of the model. The result is not that of a run of
    this file: `is_run` is False, and the message names the inputs.

    A smaller file that does not run says nothing about this file, so the next size is tried. Agreement and disagreement
    have the same rule and bound as those of any file (`Verification.holds`). The first size that agrees is the result.
    A disagreement counts if stored values differ, or if the inputs are one whole sample. On cropped inputs the outputs
    may be so close to zero that rounding alone gives a low SQNR, so a low SQNR counts only if at least two sizes run
    and all of them disagree. In all other cases the file is not verified, and the message has the reason for each size.
    """
    reasons: list[str] = []
    disagreeing: list[Verification] = []
    for inputs in shrink_inputs(run.simulation.inputs):
        sizes = describe_sizes(inputs)
        try:
            smaller = _verify_smaller_file(run, model, inputs, info, layers=layers)
        except (ScalepointError, RuntimeError, IndexError) as error:  # the model is not one for inputs of other sizes
            reasons.append(f"{sizes}: {to_one_line(str(error))}")
            continue
        if smaller.status != Status.OK:
            status = "" if smaller.status == Status.NOT_VERIFIED else f"{smaller.status.value}: "
            reasons.append(f"{sizes}: {status}{smaller.message}")
            continue
        ran = f"the file was not run: {result.message}. A file of the same model for smaller inputs ({sizes}) was run"
        smaller = replace(
            smaller,
            path=result.path,
            size=result.size,
            float_size=result.float_size,
            made_for=result.made_for,
            message=f"{ran}; {smaller.message}",
            differences=tuple(dict.fromkeys((*result.differences, *smaller.differences))),
            is_run=False,
        )
        is_whole_sample = not is_cropped(run.simulation.inputs, inputs)
        if smaller.differences or is_whole_sample or (smaller.holds and not disagreeing):
            return smaller
        reasons.append(f"{sizes}: it agrees with the simulation to {format_decibels(smaller.sqnr)} dB")
        if smaller.holds:
            break
        disagreeing.append(smaller)
    else:
        if len(disagreeing) > 1:
            return disagreeing[0]
    tried = f"; nor was it verified by a file for smaller inputs ({'; '.join(reasons)})" if reasons else ""
    return replace(
        result, status=Status.NOT_VERIFIED, message=result.message + tried, is_run=not run.runtime.why_not_run
    )


def _verify_smaller_file(
    run: RuntimeRun, model: fx.GraphModule, inputs: tuple[Any, Any], info: FileInfo | None, *, layers: bool
) -> Verification:
    """Write a temporary file of the model for these inputs, and verify it."""
    file_format = find_file_format(run.path, run.runtime)
    metadata = {} if info is None else info.metadata
    float_dtype = parse_float_dtype(metadata.get("scalepoint.float_dtype"))
    with TemporaryFolder() as folder:
        path = folder / run.path.name
        file_format.write(model, path, ExportRequest(inputs, float_dtype=float_dtype, metadata=metadata))
        return verify(
            path, model, inputs[0], kwargs=inputs[1], runtime=replace(run.runtime, retries_smaller=False),
            threads=run.threads, seconds=run.seconds, memory=run.memory, bound=run.bound, layers=layers,
        )  # fmt: skip


class _BaselineFiles(NamedTuple):
    """The float files that the speed is compared with, and the name of the one to use; None: the faster one."""

    float_path: str | Path
    plain_path: str | Path | None
    plain_inputs: Mapping[str, np.ndarray] | None
    chosen: str | None


def _measure_speed(run: RuntimeRun, baselines: _BaselineFiles, float_model: nn.Module | None) -> Benchmark:
    """Compare the speed with the baseline. A missing plain export is written temporarily from `float_model`."""
    measure = partial(
        benchmark,
        baselines.float_path,
        run.path,
        run.feeds,
        runtime=run.runtime,
        threads=run.threads,
        memory=run.memory,
        baseline=baselines.chosen,
    )
    if baselines.plain_path is not None or float_model is None:
        return measure(plain_path=baselines.plain_path, plain_inputs=baselines.plain_inputs)
    file_format = find_file_format(run.path, run.runtime)
    free_axes = read_file_info(baselines.float_path, run.runtime).free_axes
    request = ExportRequest(run.simulation.inputs, names=tuple(run.feeds), free_axes=free_axes)
    with baseline_file(float_model, file_format, request) as temporary_path:
        latency = measure(plain_path=temporary_path)
    return latency if latency.baseline == OWN_BASELINE else replace(latency, baseline_file="")  # deleted by now


def _measure_layer_times(run: RuntimeRun, float_path: str | Path) -> tuple[LayerTime, ...]:
    """Measure the time of every layer; () if the runtime has no profiler, or if its profiler fails."""
    if not run.runtime.profiles:
        return ()
    names = map_layer_names(run.simulation.model)
    with suppress(VerificationError):
        return profile(
            float_path, run.path, run.feeds, runtime=run.runtime, threads=run.threads, memory=run.memory, names=names
        )
    return ()


def choose_runtime(model: nn.Module, runtime: str | Runtime | None) -> Runtime:
    """Return the runtime: the argument, else the runtime of the model's target, else ONNX Runtime."""
    if runtime is None:
        target = record_of(model).target if has_record(model) else None
        runtime = None if target is None else target.runtime
    return find_runtime(runtime or "onnxruntime")


def _verify_other_sizes(run: RuntimeRun) -> Resized | None:
    """Verify the file at the other sizes that capture tried; None if the model has no named free axes."""
    model = run.simulation.model
    origin = get_origin(model)
    if not origin.compared_sizes:
        return None
    result = Resized(dict(origin.compared_sizes), steps=dict(origin.size_steps))
    resized_inputs = resize_inputs(model, run.simulation.inputs, origin.axes, origin.compared_sizes)
    try:
        simulation = Simulation(model, resized_inputs, *simulate(model, resized_inputs))
    except RuntimeError as error:  # capture ran the float graph at these sizes, but not the quantized graph
        return replace(result, message=f"the simulation fails: {to_one_line(str(error))}")
    feeds = build_feeds(model, resized_inputs)
    with exchange_files(feeds) as files:
        resized_run = replace(run, simulation=simulation, feeds=feeds, files=files)
        answer = resized_run.run_file()
        if answer.status != Status.OK:
            return replace(result, message=f"{answer.status.value}: {answer.message}")
        return replace(result, agreed=resized_run.compare(answer).agreements)


def _read_info(path: Path, runtime: Runtime) -> FileInfo | None:
    try:
        return read_file_info(path, runtime)
    except StoreError:  # an unreadable file: the error of the runtime says more
        return None


def _compare_stored_values(path: Path, runtime: Runtime, model: nn.Module) -> tuple[str, ...]:
    """List the values of the file that differ from the model, for formats that can be read back bit by bit."""
    compare = find_file_format(path, runtime).compare
    return () if compare is None or not isinstance(model, fx.GraphModule) else tuple(compare(path, model))


def _describe_before_run(path: Path, runtime: Runtime, info: FileInfo | None, bound: float) -> Verification:
    """Start the result with what is known before the file runs, and warn if it was made for another CPU."""
    result = Verification(str(path), runtime.name, Status.OK, bound=bound, machine_cpu=instruction_set())
    if info is None:
        return result
    warning = predict_saturation(info.made_for, path, bool(info.quantizers))
    if warning:
        warnings.warn(ScalepointWarning(warning), stacklevel=3)
    return replace(result, made_for=dict(info.made_for), warning=warning, size=info.size)


def _find_departure(
    run: RuntimeRun, model: fx.GraphModule, codes: Codes, info: FileInfo, result: Verification
) -> Departure | None:
    """Find the first stub whose codes in the runtime differ from the simulation.

    A runtime that can expose the codes runs the same file again. For other runtimes a second file with the codes as
    outputs is written, but only if the outputs disagree.
    """
    if run.runtime.shows_products and not codes:  # weight-only
        return _find_product_departure(run, model, result)
    answer: TaskResult | None = None
    quantizers: Mapping[str, str] = {}
    if run.runtime.shows_codes:
        answer, quantizers = run.run_file(expose=True), info.quantizers
    elif worst_sqnr(result.optimized) < SEARCHED_BELOW_DB:
        answer, quantizers = _run_with_layer_outputs(run, model)
    if answer is None or answer.status != Status.OK:
        return None
    return find_departure(
        codes,
        quantizers,
        run.files.outputs(answer),
        result.optimized,
        result.unoptimized,
        random_nodes=find_random_nodes(model),
    )


def _find_product_departure(run: RuntimeRun, model: fx.GraphModule, result: Verification) -> Departure | None:
    """Find the first layer of a weight-only file whose product differs from the simulation."""
    expected = simulate_products(model, run.simulation.inputs)
    answer = run.run_file(expose=True) if expected else None
    if answer is None or answer.status != Status.OK:
        return None
    pairs = match_products(expected, run.files.outputs(answer))
    return find_product_departure(pairs, result.optimized, result.unoptimized, find_random_nodes(model))


def _run_with_layer_outputs(run: RuntimeRun, model: fx.GraphModule) -> tuple[TaskResult | None, Mapping[str, str]]:
    """Write a file with the codes as outputs and run it. Return the result and the quantizers of that file."""
    file_format = find_file_format(run.path, run.runtime)
    if file_format.write_with_layer_outputs is None:
        return None, {}
    with TemporaryFolder() as folder:
        path = folder / f"exposed{file_format.suffix}"
        file_format.write_with_layer_outputs(model, path, ExportRequest(run.simulation.inputs))
        return replace(run, path=path).run_file(), file_format.about(path).quantizers
