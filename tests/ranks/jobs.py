"""What ranks do in tests: each job runs on all of a group, compares with what one process does alone, and tells."""

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
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 8, 8, generator=made) * (1 + index) for index in range(count)]


captured = cache(lambda: transform(net(), torch.zeros(2, 3, 8, 8)))


def inserted(config: QuantConfig | None = None) -> fx.GraphModule:
    result = captured()
    return insert_qdq(result.model, result.matches, config or QuantConfig())


def with_method(key: str) -> QuantConfig:
    spec = {"dtype": "uint8", "qscheme": "asymmetric", "qparam_calculator_cls": key}
    return QuantConfig.build({"activation": spec})


def parameters(model: nn.Module) -> dict[str, list[str]]:
    """Scales and zero points, to the last bit, and what was counted."""
    return {
        name: [float(each.scale).hex(), int(each.zero_point), int(each.calculator.observed_batches), each.enabled]
        for name, each in model.named_modules()
        if isinstance(each, QuantStub)
    }


def both(make: Callable[[], Any]) -> list[Any]:
    """The same by this process alone, and by all."""
    with distributed.single_process():
        one = make()
    return [one, make()]


def outcome(make: Callable[[], Any]) -> list[Any]:
    """What a call gives, or how it fails."""
    try:
        return ["done", make()]
    except Exception as error:
        return [type(error).__name__, str(error)]


def calibrating(folder: Path) -> Any:
    """Every calculator; every kind of data; uneven and empty shards; a limit; NaN; what is refused."""
    found: dict[str, Any] = {"methods": {}}

    def calibrated(data: Any, config: QuantConfig | None = None, **how: Any) -> Any:
        return parameters(calibrate(inserted(config), data, progress=False, **how))

    for key in METHODS:
        found["methods"][key] = both(lambda key=key: calibrated(batches(5), with_method(key)))
    smooth = QuantConfig.build({"smooth_quant": {"enabled": True}})
    found["smooth"] = both(lambda: calibrated(batches(5), smooth))
    found["migrated"] = both(lambda: calibrated(batches(5), QuantConfig(migrate=("equalize", "awq"))))
    found["one batch"] = both(lambda: calibrated(batches(1)))
    found["limit"] = both(lambda: calibrated(batches(5), max_batches=3))
    found["generator"] = both(lambda: calibrated(each for each in batches(5)))
    found["stream"] = both(lambda: calibrated(DataLoader(Stream(), batch_size=None)))
    minmax = with_method("global_minmax")  # of any order, and of samples in other batches
    found["sampler"] = [calibrated(batches(4), minmax), calibrated(_loader(), minmax)]
    found["function"] = [calibrated(batches(5)), calibrated(_own_part)]
    found["function's limit"] = [calibrated(batches(5)[:3]), calibrated(_own_part, max_batches=3)]
    found["empty"] = outcome(lambda: calibrated([]))
    found["shuffled"] = outcome(lambda: calibrated(DataLoader(TensorDataset(torch.cat(batches(4))), shuffle=True)))
    found["split"] = outcome(lambda: calibrated(_own_part, QuantConfig(migrate=("equalize",))))
    found["nan"] = outcome(lambda: calibrated(_with_nan(3, 2)))
    found["raises"] = outcome(lambda: calibrated([*batches(3), torch.zeros(2, 4, 8, 8)]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found["skipped"] = both(lambda: calibrated(_with_nan(2, 3), on_nan="skip"))
    found["heard"] = [str(each.message) for each in heard]
    found["after"] = both(lambda: calibrated(batches(2)))
    return found


def analysing(folder: Path) -> Any:
    """compare, sensitivity and histograms, of shared data and of one batch."""
    model = calibrate(inserted(), batches(3), progress=False)
    found: dict[str, Any] = {}

    def metric(run: Any) -> float:
        return -float((run(batches(1)[0]) - captured().model(batches(1)[0])).abs().max())

    def compared(count: int) -> Any:
        done = compare(net(), model, batches(count), progress=False)
        rows = [[row.name, row.sqnr_db, row.local_sqnr_db, row.used_range] for row in done.rows]
        return [done.batches, *rows, *([row.name, row.sqnr_db] for row in done.outputs), done.graph_sqnr_db]

    def ranked(**how: Any) -> Any:
        return [[row.name, row.score] for row in sensitivity(model, batches(5), progress=False, **how)]

    def drawn() -> Any:
        return [each.to_dict() for each in histograms(model, batches(5), ["fc", "conv"], progress=False)]

    found["compare"] = both(lambda: compared(5))
    found["one batch"] = both(lambda: compared(1))
    found["proxy"] = both(ranked)
    found["alone"] = both(lambda: ranked(how="one_at_a_time"))
    found["metric"] = both(lambda: ranked(how="one_at_a_time", metric=metric, limit=3))
    found["histograms"] = both(drawn)
    return found


def tuning(folder: Path) -> Any:
    """Codes as good as those of one process, the same on all ranks; also where a rank has no data; goes on alone."""
    low = QuantConfig.build({"weight": {"dtype": "int4", "granularity": {"type": "per_channel"}}})
    start = calibrate(inserted(low), batches(6), progress=False)

    def tuned(data: list[Tensor], **how: Any) -> Any:
        model = copy.deepcopy(start)
        config = TuneConfig(rows=256, iterations=8, steps=how.pop("steps", TuneConfig().steps))
        report = tune(model, data, config, progress=False, **how)
        codes = {name: each.chosen for name, each in model.named_modules() if hasattr(each, "chosen")}
        mark = hashlib.sha256(b"".join(each.numpy().tobytes() for each in codes.values() if each is not None))
        level = compare(net(), model, batches(6), progress=False).outputs[0].sqnr_db
        return [mark.hexdigest(), level, report.batches, report.samples, [row.name for row in report.layers]]

    found: dict[str, Any] = {"closed form": both(lambda: tuned(batches(6)))}
    found["gradients"] = both(lambda: tuned(batches(5), steps=("intercept", "gptq", "ranges", "clip", "sign_round")))
    found["one batch"] = both(lambda: tuned(batches(1)))
    found["shared outputs"] = [found["closed form"][0], _sharing(lambda: tuned(batches(6)))]
    with distributed.single_process():
        found["nearest"] = compare(net(), start, batches(6), progress=False).outputs[0].sqnr_db
    many = tuned(batches(6), folder=folder / "tuned")
    found["resumed"] = [many, _resumed_by_first(lambda: tuned(batches(6), folder=folder / "tuned", resume=True), many)]
    found["resumed by all"] = [many, tuned(batches(6), folder=folder / "tuned", resume=True)]
    found["nan"] = outcome(lambda: tuned(_with_nan(3)))
    return found


def _sharing(make: Callable[[], Any]) -> Any:
    """Ranks share the outputs of layers of any size."""
    least, solve.MIN_SHARED_PRODUCTS = solve.MIN_SHARED_PRODUCTS, 0
    try:
        return make()
    finally:
        solve.MIN_SHARED_PRODUCTS = least


def _resumed_by_first(again: Callable[[], Any], otherwise: Any) -> Any:
    """Without a warning: what was kept fits."""
    with distributed.phase("resuming alone"), distributed.single_process(), warnings.catch_warnings():
        warnings.simplefilter("error", ScalepointWarning)
        return again() if not torch.distributed.get_rank() else otherwise


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        yield from batches(5)


def _loader() -> Any:
    data = TensorDataset(torch.cat(batches(4)))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))


def _own_part(model: nn.Module) -> None:
    for batch in distributed.shard(batches(5)):
        model(batch)


def _with_nan(*places: int) -> list[Tensor]:
    data = batches(5)
    for place in places:
        data[place][0, 0, 0, 0] = float("nan")
    return data


def dying(folder: Path) -> Any:
    """The last rank is killed in the middle of calibration; DIES=stop leaves it there, without a sign of life."""

    def fatal(model: nn.Module) -> None:
        model(batches(1)[0])
        if distributed.rank() == int(os.environ["DIES"]):
            os.kill(os.getpid(), signal.SIGKILL)

    return outcome(lambda: parameters(calibrate(inserted(), fatal, progress=False)))


def interrupted(folder: Path) -> Any:
    """Rank 0 is stopped by Ctrl-C while it waits for the other, which comes later."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def met() -> None:
        with distributed.phase("waiting"):
            if distributed.rank():
                while not (folder / "stopped").exists():
                    time.sleep(0.05)

    if distributed.rank():
        return outcome(met)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        met()
    except KeyboardInterrupt:
        (folder / "stopped").touch()
        while not (folder / "result-1.json").exists():  # the store of a file has no holder, but a group has an end
            time.sleep(0.05)
    return None


def meeting(folder: Path) -> Any:
    """The functions of `scalepoint.distributed` by themselves."""
    rank, found = distributed.rank(), {}
    with distributed.participating():
        own = {"a": torch.full((2, rank), float(rank)), f"only {rank}": torch.tensor(rank, dtype=torch.int16)}
        found["gathered"] = [
            {name: [str(each.dtype), each.tolist()] for name, each in part.items()}
            for part in distributed.gather_tensors(own)
        ]
        total = torch.tensor([0.1 * (rank + 1), 1.0], dtype=torch.float64)
        distributed.all_reduce_sum([total])
        found["sum"] = [each.hex() for each in total.tolist()]
        found["told"] = distributed.run_on_main(
            "asking", lambda: {"rank": distributed.rank(), "size": distributed.world_size()}, dict[str, int]
        )
        found["shapes"] = outcome(lambda: distributed.all_reduce_sum([torch.zeros(rank + 1)]))
    found["other calls"] = outcome(lambda: _phase("calibrating" if rank else "comparing"))
    found["left"] = outcome(_leaving)
    found["of its own kind"] = outcome(_strange)
    found["first of two"] = outcome(_two_errors)
    found["afterwards"] = outcome(lambda: _phase("ending"))
    return found


def _phase(name: str) -> Any:
    return distributed.gather_values(name, distributed.rank())


@distributed.participating()
def _leaving() -> Any:
    """An error between two phases, on one rank."""
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
    """Several jobs by one group: it takes seconds to start one."""
    return {job.__name__: job(folder) for job in (calibrating, meeting, deploying, analysing, tuning)}


def deploying(folder: Path) -> Any:
    """The same file as by one process; scores, reports and errors are the same on all ranks."""
    data, found = batches(5), {}

    def evaluate(run: Any) -> float:
        return float(run(data[0]).abs().mean())

    def deployed(name: str, **how: Any) -> Any:
        done = deploy(
            net(), data[0], data, output=folder / name, evaluate=evaluate, progress=False, allow_departure=True, **how
        )
        return [done.path.name, done.score, done.verification.sqnr, done.report.accuracy[0].float_value, str(done.path)]

    distributed.run_on_main("alone", lambda: deployed("one"), list[Any])
    found["done"] = deployed("many")
    found["bytes"] = _same_bytes(folder / "one", folder / "many")
    found["files"] = sorted(each.name for each in (folder / "many").iterdir())
    found["again"] = outcome(lambda: deployed("many"))
    found["strict"] = outcome(lambda: deployed("strict", strict=True, leave=("conv",)))
    found["other model"] = outcome(_deploy_another)
    return found


def searching(folder: Path) -> Any:
    """Budgets, trials and sweeps: what is decided by numbers is decided alike."""
    data = batches(5)

    def evaluate(run: Any) -> float:
        return -float((run(data[0]) - net()(data[0])).abs().mean())

    def deployed(name: str, **how: Any) -> Any:
        done = deploy(net(), data[0], data, output=folder / name, progress=False, allow_departure=True, **how)
        chosen = {} if done.allocation is None else {each.name: each.chosen for each in done.allocation.layers}
        return [[str(each.config.overrides) for each in done.trials], chosen]

    def swept(name: str, **how: Any) -> Any:
        grid = {"target": ["onnxruntime", "nowhere", "reference"]}
        done = sweep(net(), data[0], data, grid=grid, output=folder / name, progress=False, smoke=True, **how)
        return [[row.name, row.status, row.message] for row in done.rows]

    found: dict[str, Any] = {"budget": _both(deployed, "budget", budget={"bits": 7.0}, choices=("int8", "int4"))}
    found["drop"] = _both(deployed, "drop", evaluate=evaluate, max_drop=0.0, max_trials=2)
    found["sweep"] = _both(swept, "sweep")
    found["again"] = outcome(lambda: swept("sweep-many"))
    found["resumed"] = swept("sweep-many", resume=True)
    found["split"] = outcome(lambda: sweep(net(), data[0], _loader(), grid={"threads": [1]}, output=folder / "never"))
    distributed.wait_for_all("all is there")
    found["files"] = sorted(each.name for each in (folder / "sweep-many").iterdir())
    return found


def _both(make: Callable[..., Any], name: str, **how: Any) -> list[Any]:
    """By the first rank alone, and by all."""
    one = distributed.run_on_main("alone", lambda: make(f"{name}-one", **how), Any)
    return [one, make(f"{name}-many", **how)]


def _same_bytes(one: Path, other: Path) -> bool:
    distributed.wait_for_all("both are there")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ("model.onnx", "float.onnx"))


def _deploy_another() -> Any:
    torch.manual_seed(distributed.rank())
    return deploy(Net().eval(), batches(1)[0], batches(2), output="never", progress=False)


def killed(folder: Path) -> Any:
    """DIES=rank at STEP=calibrate, tune, export, verify, build_report: there that rank is killed, the first time."""
    step, dies = os.environ["STEP"], int(os.environ["DIES"])
    if step and distributed.rank() == dies:
        modules = (stages, import_module("scalepoint.pipeline.deploy"))
        module = next(module for module in modules if hasattr(module, step))
        setattr(module, step, lambda *args, **how: os.kill(os.getpid(), signal.SIGKILL))
    data = batches(5)
    is_tuned, resume = "tune" in (step, os.environ.get("ACCURACY")), os.environ["RESUME"] == "yes"
    return outcome(
        lambda: deploy(
            net(), data[0], data, output=folder / "out", progress=False, allow_departure=True, resume=resume,
            accuracy="balanced" if is_tuned else None,
        ).path.name
    )  # fmt: skip
