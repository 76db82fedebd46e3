"""Chooses which layers run in int8 by measuring them in the runtime on this machine.

    first trial    every layer in int8; if all its layers were measured here before, as those times say
    its profile    seconds of every layer in the float file and in the int8 file -> LocalTimes
    next trial     layers in float where that is faster: a minimum cut over the measured times
    result         the trial with the fastest file

The times are kept in the user's cache folder, so that the next deploy of such layers needs one trial. The times that a
run started with are a cached stage: a resumed run plans the same trials.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median

from torch import fx

from scalepoint import distributed
from scalepoint.operation_coverage import Coverage
from scalepoint.pipeline.cache import Inputs
from scalepoint.pipeline.fingerprints import fingerprint
from scalepoint.pipeline.job import Job
from scalepoint.pipeline.result import Trial, TrialPlan
from scalepoint.pipeline.stages import StageContext, package_version
from scalepoint.quantize import QuantConfig, coverage, record_of
from scalepoint.quantize.config import FLOAT
from scalepoint.quantize.insert import make_decisions
from scalepoint.quantize.macs import get_example_share, get_shape
from scalepoint.quantize.placement import Decision
from scalepoint.quantize.speed_placement import list_layer_keys
from scalepoint.results import PrecisionChange
from scalepoint.runtimes import find_runtime
from scalepoint.support.cpu import instruction_set
from scalepoint.support.progress import write_line
from scalepoint.targets.local_times import LocalTimes, load_local_times, local_times_path, save_local_times
from scalepoint.verification.layer_times import LayerTime

CONVERSION_KINDS = {"QuantizeLinear": "quantize", "DequantizeLinear": "dequantize"}
MIN_CONVERTED_ELEMENTS = 8192  # about 1 us per conversion, as long as a call takes
MAX_TRIALS = 3  # all layers in int8, the cut over measured times, and one correction
MIN_GAIN = 0.01  # a later trial must be faster by this share: less is noise
MIN_SPEED = 0.99  # below, a placement from cached times is slower than float here and is measured again


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


def search_placement(context: StageContext, run_trial: Callable[[Sequence[Trial], TrialPlan], Trial]) -> list[Trial]:
    """Make trials until measured times ask for no other placement. Returns the trials, the fastest one last."""
    config = context.job.config
    keys = list_layer_keys(context.captured.model, _decide(context, _without_speed(config), LocalTimes())[0])
    times = _load_times(context, keys.values())
    is_known = all(key in times.layers for key in keys.values())
    first = TrialPlan(config, local_times=times) if is_known else TrialPlan(_without_speed(config))
    trials = [run_trial([], first)]
    while len(trials) < MAX_TRIALS and keys and not (is_known and (trials[-1].speed or 0.0) >= MIN_SPEED):
        is_known = False
        measured = _measure(trials[-1], keys)
        if not measured.layers:
            break
        times = times.updated(measured)
        _save_times(context, measured)
        float_layers = _float_layers(_decide(context, config, times)[1])
        previous = [_float_layers(coverage(trial.model)) for trial in trials]
        if float_layers in previous:
            break
        if context.job.progress is not False:
            write_line(f"placement: {len(float_layers)} of {len(keys)} layers are faster in float on this machine")
        changes = tuple(PrecisionChange(name, FLOAT) for name in keys if name in float_layers - previous[-1])
        plan = TrialPlan(config, changes, len(trials) - 1, local_times=times)
        trials.append(run_trial(trials, plan))
    fastest = _find_fastest(trials)
    return [*(trial.without_model() for trial in trials if trial is not fastest), fastest]


def _without_speed(config: QuantConfig) -> QuantConfig:
    """Return the config with every layer in int8."""
    return config.model_copy(update={"speed_first": False})


def _decide(context: StageContext, config: QuantConfig, times: LocalTimes) -> tuple[Sequence[Decision], Coverage]:
    captured = context.captured
    decisions, _, coverage = make_decisions(captured.model, captured.matches, config, context.job.target, times)
    return decisions, coverage


def _float_layers(operations: Coverage) -> frozenset[str]:
    """Return the names of the layers that stay float because that is faster."""
    return frozenset(row.name for row in operations.operations if row.is_for_speed)


def _measure(trial: Trial, keys: Mapping[str, str]) -> LocalTimes:
    """Return the times of the layers that ran in int8, and of conversions, from the profile of both files.

    Layers with one key have one time: the median. A layer that is fused into its neighbour in one of the files takes no
    time of its own there. What an operation between two layers (SiLU, ...) takes more or less than in the float file
    counts for the layer before it: int8 tensors keep the runtime from fusing it, or let it run in int8.
    """
    rows: Sequence[LayerTime] = () if trial.verification is None else trial.verification.times
    int8_layers = keys.keys() - _float_layers(coverage(trial.model))
    owners = _find_owners(trial.model, int8_layers)
    extra_seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if not row.is_conversion and row.name not in int8_layers and row.name in owners:
            extra_seconds[owners[row.name]] += row.loss
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.name in int8_layers:
            int8_seconds = max((row.seconds or 0.0) + extra_seconds[row.name], 0.0)
            seconds[keys[row.name]].append((row.float_seconds or 0.0, int8_seconds))
    layers = {
        key: (median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)) for key, pairs in seconds.items()
    }
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


def _times_path(context: StageContext) -> Path:
    runtime = find_runtime(str(context.job.target.runtime))
    version = package_version(runtime.package) or "unknown"
    return local_times_path(runtime.name, version, context.job.options.threads)


def _load_times(context: StageContext, keys: Collection[str]) -> LocalTimes:
    """Return the times of these layers that this run starts with. A resumed run finds them in its own cache."""
    path = _times_path(context)
    inputs: Inputs = {"the machine": fingerprint(path.name)}
    with context.workspace.cache.stage("local times", lambda: inputs) as stage:
        times = stage.load(LocalTimes.from_dict)
        if times is None:
            times = distributed.run_on_main(
                "reading local times", lambda: load_local_times(path).restricted(keys), LocalTimes
            )
            stage.store(times.to_dict())
    return times


def _save_times(context: StageContext, times: LocalTimes) -> None:
    path = _times_path(context)
    if distributed.is_main() and not save_local_times(path, times):
        write_line(f"placement: the measured times are not kept, because {path.parent} cannot be written")
