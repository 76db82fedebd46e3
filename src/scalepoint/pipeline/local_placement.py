"""Chooses which layers run in int8 by measuring them in the runtime on this machine.

    first trial    every layer in int8; or the fastest placement of an earlier run; or, if all layers were measured
                   here in other networks, as those times say
    its profile    seconds of every layer in the float file and in the int8 file -> LocalTimes
    next trial     layers in float where that is faster: a minimum cut over the measured times
    last trial     all layers in float, if every other file is slower than that
    result         the trial with the fastest file

The times and the result are kept in the user's cache folder (targets/measurement_cache.py), so that the next deploy
needs one trial, unless its file is slower than the cache says. What a run started with is a cached stage: a resumed run
plans the same trials.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import inf, prod, sqrt
from pathlib import Path
from statistics import median

from torch import fx

from scalepoint import distributed
from scalepoint.pipeline.cache import Inputs
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.fingerprints import fingerprint, fingerprint_target
from scalepoint.pipeline.job import Job
from scalepoint.pipeline.result import Trial, TrialPlan
from scalepoint.pipeline.stages import package_version
from scalepoint.quantize import QuantConfig, record_of
from scalepoint.quantize.config import FLOAT
from scalepoint.quantize.insert import make_decisions
from scalepoint.quantize.macs import get_example_share, get_shape
from scalepoint.quantize.placement import Decision
from scalepoint.quantize.speed_placement import list_layer_keys
from scalepoint.results import PrecisionChange
from scalepoint.runtimes import find_runtime
from scalepoint.support.cpu import instruction_set
from scalepoint.support.progress import write_line
from scalepoint.targets.local_times import LocalTimes
from scalepoint.targets.measurement_cache import (
    MAX_DISAGREEMENT,
    Measurements,
    add_measurements,
    load_measurements,
    measurements_path,
)
from scalepoint.verification.layer_times import LayerTime, sum_seconds
from scalepoint.verification.result import OWN_BASELINE

CONVERSION_KINDS = {"QuantizeLinear": "quantize", "DequantizeLinear": "dequantize"}
MIN_CONVERTED_ELEMENTS = 8192  # about 1 us per conversion, as long as a call takes
MAX_TRIALS = 3  # all layers in int8, the cut over measured times, and one correction; then all layers in float
MIN_GAIN = 0.01  # a later trial must be faster by this share: less is noise
MIN_SPEED = 0.99  # below, a file is slower than float: its placement is measured again, or all layers stay float
MAX_SPEED_LOSS = 0.08  # a file that is slower than its cached speed by more, and by more than noise, is measured again
MAX_EXCUSED_LOSS = 0.5  # of speed by noise: however busy the machine is, a slower file is measured again
MAX_SPREAD = 0.3  # of the times of a file; a speed with more is not stored, because other programs disturbed it
INT8 = "int8"


def is_measured_here(job: Job) -> bool:
    """Return whether layers can be measured: the file is for this machine, and its runtime times every layer."""
    runtime = None if job.target.runtime is None else find_runtime(job.target.runtime)
    if runtime is None or not runtime.profiles or not runtime.is_installed or not job.target.is_placed_by_speed:
        return False
    is_for_this_cpu = job.target.options.get("cpu", "auto") in ("auto", instruction_set())
    return (
        job.placement == "measured"
        and bool(job.config.speed_first)
        and is_for_this_cpu
        and job.data.is_rereadable
        and not job.is_smoke
    )


def describe_prediction(job: Job) -> str:
    """Return what decides which layers stay float if they are not measured; "" if nothing does."""
    if not job.config.speed_first or not job.target.is_placed_by_speed or job.placement == "int8" or job.is_smoke:
        return ""
    cpu = job.target.options.get("cpu", "auto")
    reason = "" if cpu in ("auto", instruction_set()) else f"the file is for another CPU ({cpu}), so "
    if job.target.kernel_tables:
        return f"placement: {reason}layers stay float by shipped times ({', '.join(job.target.kernel_tables)})"
    return f"placement: {reason}no times are known: all layers that the target can run in int8 are in int8"


def search_placement(context: StageContext, run_trial: Callable[[Sequence[Trial], TrialPlan], Trial]) -> list[Trial]:
    """Make trials until measured times ask for no other placement. Returns the trials, the fastest one last."""
    config = context.job.config
    keys = list_layer_keys(context.captured.model, _decide(context, _without_speed(config), None))
    network = _fingerprint_network(context, keys)
    cached = _load_cache(context, keys.values(), network)
    times = cached.times()
    trials: list[Trial] = []
    new_times: list[LocalTimes] = []  # of undisturbed trials
    start = _choose_start(cached, keys, network)
    plan = _plan_next(context, trials, keys, times) if start is None else TrialPlan(config, local_times=start)
    while plan is not None:
        trials.append(run_trial(trials, plan))
        measured = _measure(trials[-1], _int8_keys(context, trials[-1], keys))
        if _is_undisturbed(trials[-1]) and _adds_up(trials[-1]):
            new_times.append(measured)
        is_cached = start is not None and len(trials) == 1
        if is_cached and _confirms(trials[0], measured, cached, network):
            break
        times = times.updated(measured)
        plan = _plan_next(context, trials, keys, times)
    fastest = _find_fastest(trials)
    _save_cache(context, new_times, keys, network, fastest, was_disturbed=len(new_times) < len(trials))
    return [*(trial.without_model() for trial in trials if trial is not fastest), fastest]


def _plan_next(
    context: StageContext, trials: Sequence[Trial], keys: Mapping[str, str], times: LocalTimes
) -> TrialPlan | None:
    """Return the plan of the next trial: all layers in int8, then a cut over measured times; None if both were tried.

    If all files are slower than float, the last one has every layer in float: the times of the shortest layers are too
    coarse for a cut.
    """
    config = context.job.config
    tried = [_float_layers(_decide(context, trial.config, trial.local_times)) for trial in trials]
    if len(trials) < MAX_TRIALS and frozenset() not in tried:
        changes = tuple(PrecisionChange(name, INT8) for name in keys if tried and name in tried[-1])
        start = len(trials) - 1 if trials else None
        return TrialPlan(_without_speed(config), changes, start)
    float_layers = _float_layers(_decide(context, config, times)) if times.layers else tried[-1]
    if len(trials) >= MAX_TRIALS or float_layers in tried:
        timed = [trial for trial in trials if trial.speed]
        times = replace(times, float_layers=tuple(keys))
        float_layers = _float_layers(_decide(context, config, times))
        if not timed or any(map(_is_as_fast_as_float, timed)) or float_layers in tried:
            return None
    if context.job.progress is not False:
        write_line(f"placement: {len(float_layers)} of {len(keys)} layers are faster in float on this machine")
    changes = tuple(PrecisionChange(name, FLOAT) for name in keys if name in float_layers - tried[-1])
    return TrialPlan(config, changes, len(trials) - 1, local_times=times)


def _choose_start(cached: Measurements, keys: Mapping[str, str], network: str) -> LocalTimes | None:
    """Return what decides the first file, if enough was measured here before.

    That is the placement of the fastest file of this network, else the times of its layers.
    """
    record = cached.networks.get(network)
    if record is None:
        return cached.times() if keys and cached.are_known(keys.values()) else None
    if not record.is_recent:
        return None
    names = list(keys)
    return replace(cached.times(), float_layers=tuple(names[i] for i in record.float_layers if i < len(names)))


def _confirms(trial: Trial, measured: LocalTimes, cached: Measurements, network: str) -> bool:
    """Whether a file that was placed by cached measurements is as fast as they say.

    The file of another network with these layers was never made: it must also have an int8 layer, since nothing else
    shows that int8 is slower here, and its layers must take the times that the cache has.
    """
    speed, times = trial.speed or 0.0, cached.times()
    if (record := cached.networks.get(network)) is not None:
        is_slower_than_float = bool(measured.layers) and _speed_to_fastest_float(trial) < MIN_SPEED
        is_as_fast = speed >= record.speed * (1 - min(MAX_SPEED_LOSS + _spread(trial), MAX_EXCUSED_LOSS))
        return is_as_fast and not is_slower_than_float
    known = [key for key in measured.layers if key in times.layers]
    cached_float, cached_int8 = _sum_times(times, known)
    float_seconds, int8_seconds = _sum_times(measured, known)
    if not known or min(cached_float, cached_int8, float_seconds, int8_seconds) <= 0:
        return False
    change = (int8_seconds / float_seconds) / (cached_int8 / cached_float)
    return _speed_to_fastest_float(trial) >= MIN_SPEED and 1 / MAX_DISAGREEMENT < change < MAX_DISAGREEMENT


def _sum_times(times: LocalTimes, keys: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of these layers in float and in int8, summed."""
    pairs = [times.layers[key] for key in keys]
    return sum(float_seconds for float_seconds, _ in pairs), sum(int8_seconds for _, int8_seconds in pairs)


def _speed_to_fastest_float(trial: Trial) -> float:
    """Return the speed relative to the fastest float file; 0 if it was not measured.

    `Trial.speed` of a model that was read from an .onnx file is relative to that file. Our float file may be faster.
    """
    latency = None if trial.verification is None else trial.verification.latency
    return 0.0 if latency is None else latency.ratio_to_fastest


def _is_as_fast_as_float(trial: Trial) -> bool:
    """Whether a file is not slower than the fastest float file, also if its speed was overestimated."""
    latency = None if trial.verification is None else trial.verification.latency
    error = 0.0 if latency is None else max(latency.spread) / sqrt(latency.repeats)  # about that of a median
    return _speed_to_fastest_float(trial) >= MIN_SPEED * (1 + error)


def _is_undisturbed(trial: Trial) -> bool:
    """Whether the runs of the timed files took about the same time, so that no other program disturbed them."""
    return _spread(trial) <= MAX_SPREAD


def _spread(trial: Trial) -> float:
    """Return the larger interquartile range of the times of both files, as a share of their medians."""
    latency = None if trial.verification is None else trial.verification.latency
    return inf if latency is None else max(latency.spread)


def _adds_up(trial: Trial) -> bool:
    """Whether the layers of both files add up to the measured speed. Otherwise something disturbed the profile."""
    verification = trial.verification
    if verification is None or verification.latency is None:
        return False
    float_seconds, seconds = sum_seconds(verification.times)
    latency = verification.latency
    timed_seconds = latency.float_seconds.get(OWN_BASELINE, latency.seconds[0])  # of the file that was profiled
    if not (float_seconds and seconds and timed_seconds):
        return False
    return 1 / MAX_DISAGREEMENT < (float_seconds / seconds) / (timed_seconds / latency.seconds[1]) < MAX_DISAGREEMENT


def _without_speed(config: QuantConfig) -> QuantConfig:
    """Return the config with every layer in int8."""
    return config.model_copy(update={"speed_first": False})


def _decide(context: StageContext, config: QuantConfig, times: LocalTimes | None) -> Sequence[Decision]:
    captured = context.captured
    return make_decisions(captured.model, captured.matches, config, context.job.target, times)[0]


def _float_layers(decisions: Sequence[Decision]) -> frozenset[str]:
    """Return the names of the layers that stay float because that is faster."""
    return frozenset(decision.site.name for decision in decisions if decision.float_saves_seconds is not None)


def _int8_keys(context: StageContext, trial: Trial, keys: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of the layers that run in int8 in the file of a trial."""
    float_layers = _float_layers(_decide(context, trial.config, trial.local_times))
    return {name: key for name, key in keys.items() if name not in float_layers}


def _measure(trial: Trial, keys: Mapping[str, str]) -> LocalTimes:
    """Return the times of layers that ran in int8, and of conversions, from the profile of both files.

    Layers with one key have one time: the median. A layer that is fused into its neighbour in one of the files takes no
    time of its own there. What an operation between two layers (SiLU, ...) takes more or less than in the float file
    counts for the layer before it: int8 tensors keep the runtime from fusing it, or let it run in int8.
    """
    rows: Sequence[LayerTime] = () if trial.verification is None else trial.verification.times
    owners = _find_owners(trial.model, keys)
    extra_seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if not row.is_conversion and row.name not in keys and row.name in owners:
            extra_seconds[owners[row.name]] += row.loss
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.name in keys:
            int8_seconds = max((row.seconds or 0.0) + extra_seconds[row.name], 0.0)
            seconds[keys[row.name]].append((row.float_seconds or 0.0, int8_seconds))
    layers: dict[str, tuple[float, float]] = {}
    for key, pairs in seconds.items():
        all_float_seconds, all_int8_seconds = zip(*pairs, strict=True)
        layers[key] = (median(all_float_seconds), median(all_int8_seconds))
    return LocalTimes(layers, _measure_conversions(trial.model, rows))


def _find_owners(model: fx.GraphModule, layers: Collection[str]) -> dict[str, str]:
    """Return, for every operation between layers, the name of the layer that its first input comes from."""
    names = record_of(model).names
    owners: dict[fx.Node, str] = {}
    for node in model.graph.nodes:
        name = names.get(node.name, "")
        sources = node.all_input_nodes
        if name in layers:
            owners[node] = name
        elif sources and sources[0] in owners:
            owners[node] = owners[sources[0]]
    return {names.get(node.name, str(node.target)): owner for node, owner in owners.items()}


def _measure_conversions(model: fx.GraphModule, rows: Sequence[LayerTime]) -> dict[str, float]:
    """Return seconds per element of QuantizeLinear and DequantizeLinear.

    Small tensors are left out: the time of the call itself would be taken for that of their few elements.
    """
    stubs = {str(node.target): node for node in model.graph.nodes if node.op == "call_module"}
    share = get_example_share(model)
    seconds: dict[str, float] = defaultdict(float)
    elements: dict[str, float] = defaultdict(float)
    for row in rows:
        kind = CONVERSION_KINDS.get(row.kernels[0]) if len(row.kernels) == 1 else None
        node = stubs.get(row.name)
        shape = get_shape(node.all_input_nodes[0]) if node is not None and node.all_input_nodes else None
        if kind is not None and shape is not None and prod(shape) >= MIN_CONVERTED_ELEMENTS:
            seconds[kind] += row.seconds or 0.0
            elements[kind] += prod(shape) * share
    return {kind: seconds[kind] / elements[kind] for kind in seconds if elements[kind]}


def _find_fastest(trials: Sequence[Trial]) -> Trial:
    fastest = trials[0]
    for trial in trials[1:]:
        if (trial.speed or 0.0) > (fastest.speed or 0.0) * (1 + MIN_GAIN):
            fastest = trial
    return fastest


def _fingerprint_network(context: StageContext, keys: Mapping[str, str]) -> str:
    """Return the digest of all that the speed of a file depends on."""
    job = context.job
    options = (job.options.fixed_sizes, job.options.float_dtype)
    return fingerprint(list(keys.items()), job.config.to_dict(), fingerprint_target(job.target), options)


def _cache_path(context: StageContext) -> Path:
    runtime = find_runtime(str(context.job.target.runtime))
    version = package_version(runtime.package) or "unknown"
    return measurements_path(runtime.name, version, context.job.options.threads)


def _load_cache(context: StageContext, keys: Collection[str], network: str) -> Measurements:
    """Return the measurements that this run starts with. A resumed run finds them in its own cache."""
    path = _cache_path(context)
    inputs: Inputs = {"the machine": fingerprint(path.name), "the network": network}
    with context.workspace.cache.stage("local times", lambda: inputs) as stage:
        cached = stage.load(Measurements.from_dict)
        if cached is None:
            cached = distributed.run_on_main(
                "reading local times", lambda: load_measurements(path).restricted(keys, network), Measurements
            )
            stage.store(cached.to_dict())
    return cached


def _save_cache(
    context: StageContext,
    new_times: Sequence[LocalTimes],
    keys: Mapping[str, str],
    network: str,
    fastest: Trial,
    *,
    was_disturbed: bool,
) -> None:
    """Store the placement of the fastest file, and one sample of each layer, of the last file that had it in int8."""
    times = reduce(LocalTimes.updated, new_times, LocalTimes())
    record = None
    if keys and fastest.speed and _is_undisturbed(fastest):
        float_layers = _float_layers(_decide(context, fastest.config, fastest.local_times))
        record = (network, tuple(i for i, name in enumerate(keys) if name in float_layers), fastest.speed)
    path = _cache_path(context)
    if distributed.is_main() and not add_measurements(path, times, record, was_disturbed=was_disturbed):
        write_line(f"placement: the measured times are not kept, because {path.parent} cannot be written")
