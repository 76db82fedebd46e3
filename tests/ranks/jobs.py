"""Jobs of ranks: each runs on all ranks of a group and returns its results next to those of one process."""

import copy
import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from scalepoint import deploy, distributed, sweep
from scalepoint.analysis import compare, histograms, sensitivity
from scalepoint.errors import ScalepointWarning
from scalepoint.pipeline import stages
from scalepoint.quantize import QuantConfig, QuantStub, calibrate, insert_qdq
from scalepoint.transformation import transform
from scalepoint.tuning import TuneConfig, solve, tune

METHODS = ("global_minmax", "moving_average", "histogram_percentile", "histogram_mse", "histogram_entropy", "learned")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.fc, self.head = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)).relu().mean((2, 3))
        return self.head(self.fc(self.norm(x)).relu())


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def batches(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 8, 8, generator=generator) * (1 + index) for index in range(count)]


transform_net = cache(lambda: transform(net(), torch.zeros(2, 3, 8, 8)))


def quantized_net(config: QuantConfig | None = None) -> fx.GraphModule:
    result = transform_net()
    return insert_qdq(result.model, result.matches, config or QuantConfig())


def with_method(key: str) -> QuantConfig:
    spec = {"dtype": "uint8", "qscheme": "asymmetric", "qparam_calculator_cls": key}
    return QuantConfig.build({"activation": spec})


def parameters(model: nn.Module) -> dict[str, list[str]]:
    """Scales and zero points to the last bit, and counters."""
    return {
        name: [float(stub.scale).hex(), int(stub.zero_point), int(stub.calculator.observed_batches), stub.enabled]
        for name, stub in model.named_modules()
        if isinstance(stub, QuantStub)
    }


def run_alone_and_shared(function: Callable[[], Any]) -> list[Any]:
    """Run a function on this process alone, then on all ranks."""
    with distributed.single_process():
        one = function()
    return [one, function()]


def result_or_error(function: Callable[[], Any]) -> list[Any]:
    """Return the result of a call, or its error."""
    try:
        return ["done", function()]
    except Exception as error:
        return [type(error).__name__, str(error)]


def calibrating(folder: Path) -> Any:
    """Calibrate with every calculator and kind of data, uneven and empty shards, a limit, NaN, and errors."""
    results: dict[str, Any] = {"methods": {}}

    def run_calibration(data: Any, config: QuantConfig | None = None, **options: Any) -> Any:
        return parameters(calibrate(quantized_net(config), data, progress=False, **options))

    for key in METHODS:
        results["methods"][key] = run_alone_and_shared(lambda key=key: run_calibration(batches(5), with_method(key)))
    smooth = QuantConfig.build({"smooth_quant": {"enabled": True}})
    results["smooth"] = run_alone_and_shared(lambda: run_calibration(batches(5), smooth))
    results["migrated"] = run_alone_and_shared(
        lambda: run_calibration(batches(5), QuantConfig(migrate=("equalize", "awq")))
    )
    results["one batch"] = run_alone_and_shared(lambda: run_calibration(batches(1)))
    results["limit"] = run_alone_and_shared(lambda: run_calibration(batches(5), max_batches=3))
    results["generator"] = run_alone_and_shared(lambda: run_calibration(batch for batch in batches(5)))
    results["stream"] = run_alone_and_shared(lambda: run_calibration(DataLoader(Stream(), batch_size=None)))
    minmax = with_method("global_minmax")  # does not depend on the order and on the batches
    results["sampler"] = [run_calibration(batches(4), minmax), run_calibration(_loader(), minmax)]
    results["function"] = [run_calibration(batches(5)), run_calibration(_run_shard)]
    results["function's limit"] = [run_calibration(batches(5)[:3]), run_calibration(_run_shard, max_batches=3)]
    results["empty"] = result_or_error(lambda: run_calibration([]))
    results["shuffled"] = result_or_error(
        lambda: run_calibration(DataLoader(TensorDataset(torch.cat(batches(4))), shuffle=True))
    )
    results["split"] = result_or_error(lambda: run_calibration(_run_shard, QuantConfig(migrate=("equalize",))))
    results["nan"] = result_or_error(lambda: run_calibration(_with_nan(3, 2)))
    results["raises"] = result_or_error(lambda: run_calibration([*batches(3), torch.zeros(2, 4, 8, 8)]))
    with warnings.catch_warnings(record=True) as shown_warnings:
        warnings.simplefilter("always")
        results["skipped"] = run_alone_and_shared(lambda: run_calibration(_with_nan(2, 3), on_nan="skip"))
    results["warnings"] = [str(warning.message) for warning in shown_warnings]
    results["after"] = run_alone_and_shared(lambda: run_calibration(batches(2)))
    return results


def analysing(folder: Path) -> Any:
    """compare, sensitivity and histograms, with shared data and with one batch."""
    model = calibrate(quantized_net(), batches(3), progress=False)
    results: dict[str, Any] = {}

    def metric(run: Any) -> float:
        return -float((run(batches(1)[0]) - transform_net().model(batches(1)[0])).abs().max())

    def run_compare(count: int) -> Any:
        result = compare(net(), model, batches(count), progress=False)
        rows = [[row.name, row.sqnr_db, row.local_sqnr_db, row.used_range] for row in result.rows]
        return [result.batches, *rows, *([row.name, row.sqnr_db] for row in result.outputs), result.graph_sqnr_db]

    def run_sensitivity(**options: Any) -> Any:
        return [[row.name, row.score] for row in sensitivity(model, batches(5), progress=False, **options)]

    def run_histograms() -> Any:
        return [histogram.to_dict() for histogram in histograms(model, batches(5), ["fc", "conv"], progress=False)]

    results["compare"] = run_alone_and_shared(lambda: run_compare(5))
    results["one batch"] = run_alone_and_shared(lambda: run_compare(1))
    results["proxy"] = run_alone_and_shared(run_sensitivity)
    results["alone"] = run_alone_and_shared(lambda: run_sensitivity(how="one_at_a_time"))
    results["metric"] = run_alone_and_shared(lambda: run_sensitivity(how="one_at_a_time", metric=metric, limit=3))
    results["histograms"] = run_alone_and_shared(run_histograms)
    return results


def tuning(folder: Path) -> Any:
    """Tune, also with a rank without data, and resume with one process."""
    low = QuantConfig.build({"weight": {"dtype": "int4", "granularity": {"type": "per_channel"}}})
    start = calibrate(quantized_net(low), batches(6), progress=False)

    def run_tune(data: list[Tensor], **options: Any) -> Any:
        model = copy.deepcopy(start)
        config = TuneConfig(rows=256, iterations=8, steps=options.pop("steps", TuneConfig().steps))
        report = tune(model, data, config, progress=False, **options)
        codes = {
            name: codes_of_layer.chosen
            for name, codes_of_layer in model.named_modules()
            if hasattr(codes_of_layer, "chosen")
        }
        digest = hashlib.sha256(
            b"".join(
                codes_of_layer.numpy().tobytes() for codes_of_layer in codes.values() if codes_of_layer is not None
            )
        )
        sqnr = compare(net(), model, batches(6), progress=False).outputs[0].sqnr_db
        return [digest.hexdigest(), sqnr, report.batches, report.samples, [row.name for row in report.layers]]

    results: dict[str, Any] = {"closed form": run_alone_and_shared(lambda: run_tune(batches(6)))}
    results["gradients"] = run_alone_and_shared(
        lambda: run_tune(batches(5), steps=("intercept", "gptq", "ranges", "clip", "sign_round"))
    )
    results["one batch"] = run_alone_and_shared(lambda: run_tune(batches(1)))
    results["shared outputs"] = [results["closed form"][0], _with_shared_outputs(lambda: run_tune(batches(6)))]
    with distributed.single_process():
        results["nearest"] = compare(net(), start, batches(6), progress=False).outputs[0].sqnr_db
    many = run_tune(batches(6), folder=folder / "tuned")
    results["resumed"] = [
        many,
        _resume_on_first_rank(lambda: run_tune(batches(6), folder=folder / "tuned", resume=True), many),
    ]
    results["resumed by all"] = [many, run_tune(batches(6), folder=folder / "tuned", resume=True)]
    results["nan"] = result_or_error(lambda: run_tune(_with_nan(3)))
    return results


def _with_shared_outputs(function: Callable[[], Any]) -> Any:
    """Let ranks share the outputs of layers of any size."""
    original, solve.MIN_SHARED_PRODUCTS = solve.MIN_SHARED_PRODUCTS, 0
    try:
        return function()
    finally:
        solve.MIN_SHARED_PRODUCTS = original


def _resume_on_first_rank(again: Callable[[], Any], otherwise: Any) -> Any:
    """Resume on rank 0 without warnings: stored results can be used."""
    with distributed.phase("resuming alone"), distributed.single_process(), warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        return again() if not torch.distributed.get_rank() else otherwise


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        yield from batches(5)


def _loader() -> Any:
    data = TensorDataset(torch.cat(batches(4)))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))


def _run_shard(model: nn.Module) -> None:
    for batch in distributed.shard(batches(5)):
        model(batch)


def _with_nan(*indices: int) -> list[Tensor]:
    data = batches(5)
    for index in indices:
        data[index][0, 0, 0, 0] = float("nan")
    return data


def dying(folder: Path) -> Any:
    """Rank DIES is killed during calibration."""

    def fatal(model: nn.Module) -> None:
        model(batches(1)[0])
        if distributed.rank() == int(os.environ["DIES"]):
            os.kill(os.getpid(), signal.SIGKILL)

    return result_or_error(lambda: parameters(calibrate(quantized_net(), fatal, progress=False)))


def interrupted(folder: Path) -> Any:
    """Rank 0 is interrupted by Ctrl-C while it waits for the other rank."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def wait_together() -> None:
        with distributed.phase("waiting"):
            if distributed.rank():
                while not (folder / "stopped").exists():
                    time.sleep(0.05)

    if distributed.rank():
        return result_or_error(wait_together)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        wait_together()
    except KeyboardInterrupt:
        (folder / "stopped").touch()
        while not (folder / "result-1.json").exists():  # a file store needs no process, but the group must not end
            time.sleep(0.05)
    return None


def meeting(folder: Path) -> Any:
    """The functions of `scalepoint.distributed`."""
    rank, results = distributed.rank(), {}
    with distributed.participating():
        tensors = {"a": torch.full((2, rank), float(rank)), f"only {rank}": torch.tensor(rank, dtype=torch.int16)}
        results["gathered"] = [
            {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in part.items()}
            for part in distributed.gather_tensors(tensors)
        ]
        total = torch.tensor([0.1 * (rank + 1), 1.0], dtype=torch.float64)
        distributed.all_reduce_sum([total])
        results["sum"] = [value.hex() for value in total.tolist()]
        results["on main"] = distributed.run_on_main(
            "asking", lambda: {"rank": distributed.rank(), "size": distributed.world_size()}, dict[str, int]
        )
        results["shapes"] = result_or_error(lambda: distributed.all_reduce_sum([torch.zeros(rank + 1)]))
    results["other calls"] = result_or_error(lambda: _phase("calibrating" if rank else "comparing"))
    results["left"] = result_or_error(_leaving)
    results["of its own kind"] = result_or_error(_strange)
    results["first of two"] = result_or_error(_two_errors)
    results["afterwards"] = result_or_error(lambda: _phase("ending"))
    return results


def _phase(name: str) -> Any:
    return distributed.gather_values(name, distributed.rank())


@distributed.participating()
def _leaving() -> Any:
    """One rank raises an error between two phases."""
    if distributed.rank() == 1:
        raise KeyError("no such thing")
    return _phase("a phase")


class StrangeError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def _strange() -> Any:
    with distributed.phase("a phase"):
        if distributed.rank() == 1:
            raise StrangeError(1, 2)


def _two_errors() -> Any:
    with distributed.phase("a phase") as step:
        step.position = [5, 3][distributed.rank()] if distributed.rank() < 2 else 9
        raise ValueError(f"at {step.position:g}")


def first(folder: Path) -> Any:
    """Run several jobs in one group, because starting a group takes seconds."""
    return {job.__name__: job(folder) for job in (calibrating, meeting, deploying, analysing, tuning)}


def deploying(folder: Path) -> Any:
    """Deploy, and compare the file with that of one process."""
    data, results = batches(5), {}

    def evaluate(run: Any) -> float:
        return float(run(data[0]).abs().mean())

    def run_deploy(name: str, **options: Any) -> Any:
        result = deploy(
            net(),
            data[0],
            data,
            output=folder / name,
            evaluate=evaluate,
            progress=False,
            allow_departure=True,
            **options,
        )
        return [
            result.path.name,
            result.score,
            result.verification.sqnr,
            result.report.accuracy[0].float_value,
            str(result.path),
        ]

    distributed.run_on_main("alone", lambda: run_deploy("one"), list[Any])
    results["done"] = run_deploy("many")
    results["bytes"] = _has_same_bytes(folder / "one", folder / "many")
    results["files"] = sorted(path.name for path in (folder / "many").iterdir())
    results["again"] = result_or_error(lambda: run_deploy("many"))
    results["strict"] = result_or_error(lambda: run_deploy("strict", strict=True, leave=("conv",)))
    results["other model"] = result_or_error(_deploy_another_model)
    return results


def searching(folder: Path) -> Any:
    """Budgets, trials and sweeps."""
    data = batches(5)

    def evaluate(run: Any) -> float:
        return -float((run(data[0]) - net()(data[0])).abs().mean())

    def run_deploy(name: str, **options: Any) -> Any:
        result = deploy(net(), data[0], data, output=folder / name, progress=False, allow_departure=True, **options)
        precisions = (
            {} if result.allocation is None else {layer.name: layer.chosen for layer in result.allocation.layers}
        )
        return [[str(trial.config.overrides) for trial in result.trials], precisions]

    def run_sweep(name: str, **options: Any) -> Any:
        unknown_layer = {"overrides": [{"name": "no such layer", "weight": "float"}]}
        grid = {"config": [{}, unknown_layer, {"correct_bias": False}]}
        result = sweep(net(), data[0], data, grid=grid, output=folder / name, progress=False, smoke=True, **options)
        return [[row.name, row.status, row.message] for row in result.rows]

    results: dict[str, Any] = {
        "budget": _run_on_main_and_all(run_deploy, "budget", budget={"bits": 7.0}, choices=("int8", "int4"))
    }
    results["drop"] = _run_on_main_and_all(run_deploy, "drop", evaluate=evaluate, max_drop=0.0, max_trials=2)
    results["sweep"] = _run_on_main_and_all(run_sweep, "sweep")
    results["again"] = result_or_error(lambda: run_sweep("sweep-many"))
    results["resumed"] = run_sweep("sweep-many", resume=True)
    results["split"] = result_or_error(
        lambda: sweep(net(), data[0], _loader(), grid={"threads": [1]}, output=folder / "never")
    )
    distributed.wait_for_all("all is there")
    results["files"] = sorted(path.name for path in (folder / "sweep-many").iterdir())
    return results


def _run_on_main_and_all(function: Callable[..., Any], name: str, **options: Any) -> list[Any]:
    """Run a function on rank 0 alone, then on all ranks."""
    one = distributed.run_on_main("alone", lambda: function(f"{name}-one", **options), Any)
    return [one, function(f"{name}-many", **options)]


def _has_same_bytes(one: Path, other: Path) -> bool:
    distributed.wait_for_all("both are there")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ("model.onnx", "float.onnx"))


def _deploy_another_model() -> Any:
    torch.manual_seed(distributed.rank())
    return deploy(Net().eval(), batches(1)[0], batches(2), output="never", progress=False)


def killed(folder: Path) -> Any:
    """Kill rank DIES at STEP: calibrate, tune, export, verify or build_report."""
    step, dies = os.environ["STEP"], int(os.environ["DIES"])
    if step and distributed.rank() == dies:
        modules = (stages, import_module("scalepoint.pipeline.deploy"))
        module = next(module for module in modules if hasattr(module, step))
        setattr(module, step, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
    data = batches(5)
    is_tuned, resume = "tune" in (step, os.environ.get("ACCURACY")), os.environ["RESUME"] == "yes"
    return result_or_error(
        lambda: deploy(
            net(), data[0], data, output=folder / "out", progress=False, allow_departure=True, resume=resume,
            accuracy="balanced" if is_tuned else None,
        ).path.name
    )  # fmt: skip
