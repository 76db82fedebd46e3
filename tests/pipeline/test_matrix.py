"""Pairs of options of `deploy`: every combination ends in a file that its runtime verifies, or in a predicted refusal.

Tests of single options do not find faults that two options cause together.
"""

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import scalepoint
from scalepoint.errors import CoverageError, ScalepointError, UsageError
from scalepoint.formats import find_format
from scalepoint.quantize import QuantConfig
from scalepoint.runtimes import find_runtime
from scalepoint.targets import find_target
from scalepoint.verification import Status
from tests.pairwise import Case, as_parameters, contents, pairwise

FACTORS = {
    "net": ("convolution", "linear"),
    "target": ("onnxruntime", "openvino", "executorch", "litert", "coreml", "coreai", "tensorrt", "reference"),
    "data": ("list", "iterator", "loader", "function"),
    "goal": ("nothing", "fast", "balanced", "best", "max_drop", "min_speed", "size=0.9", "bits=16", "speed=1.05"),
    "inputs": ("positional", "keywords", "both"),
    "outputs": ("tensor", "dict"),
    "run": ("new", "resume", "force", "smoke"),
    "config": ("default", "float head", "histogram", "weights only"),
}
LAYER_TIMES = ("onnxruntime", "openvino")  # targets whose runtime measures the time of every layer
NO_RUNTIME = ("tensorrt", "reference")
# Targets that have no kernel for quantized weights with float activations.
NO_WEIGHTS_ONLY = {
    "convolution": ("onnxruntime", "openvino", "executorch", "litert", "tensorrt"),
    "linear": ("executorch", "litert"),
}
COSTLY = ("executorch", "coreml", "coreai", "best")
FOREIGN = ("notes.txt", "quantized/notes.txt")  # files of the user in the output folder


def refusals(case: Case) -> list[str]:
    """The codes of the errors that a case can end in; none for a case that must end in a file."""
    goal, target, codes = str(case["goal"]), case["target"], []
    if case["data"] == "iterator" and goal != "nothing":
        codes.append(UsageError.code)  # these goals read the data several times
    if goal == "min_speed" and target not in LAYER_TIMES:
        codes.append(UsageError.code)
    if goal == "min_speed" and case["run"] == "smoke":
        codes.append(UsageError.code)  # smoke measures no time
    if case["config"] == "weights only" and target in NO_WEIGHTS_ONLY[str(case["net"])]:
        codes.append(UsageError.code if "=" in goal else CoverageError.code)  # nothing would be quantized
    elif case["config"] == "weights only" and goal.startswith("speed"):
        codes.append(UsageError.code)  # with float activations nothing is faster
    return codes


class Convolution(nn.Module):
    """Ends in a convolution."""

    def __init__(self, *, returns_dict: bool) -> None:
        super().__init__()
        self.returns_dict = returns_dict
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 5), nn.BatchNorm2d(64), nn.ReLU())
        self.head = nn.Conv2d(64, 8, 3)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        hidden = self.stem(x)
        out = self.head(hidden if gain is None else hidden * gain[:, None, None, None])
        return {"map": out, "pooled": out.mean((2, 3))} if self.returns_dict else out


class Linear(nn.Module):
    """Ends in a linear layer."""

    def __init__(self, *, returns_dict: bool) -> None:
        super().__init__()
        self.returns_dict = returns_dict
        self.inner = nn.Linear(48, 128)
        self.head = nn.Linear(128, 64)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        hidden = torch.relu(self.inner(x.flatten(1)))
        out = self.head(hidden if gain is None else hidden * gain[:, None])
        return {"logits": out, "hidden": hidden} if self.returns_dict else out


NETS = {"convolution": Convolution, "linear": Linear}
OUTPUTS = {"convolution": {"map", "pooled"}, "linear": {"logits", "hidden"}}


def make_net(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return NETS[str(case["net"])](returns_dict=case["outputs"] == "dict").eval()


def make_batch(case: Case, seed: int) -> Any:
    """A batch as it is passed in this case: a tensor, a dict, or a tuple."""
    generator = torch.Generator().manual_seed(seed)
    size = 12 if case["net"] == "convolution" else 4
    x, gain = torch.randn(4, 3, size, size, generator=generator), torch.rand(4, generator=generator) + 0.5
    return {"positional": x, "keywords": {"x": x, "gain": gain}, "both": (x, gain)}[str(case["inputs"])]


def call(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def make_data(case: Case) -> Any:
    batches = [make_batch(case, seed) for seed in range(4)]

    def run_all(model: nn.Module) -> None:
        for batch in batches:
            call(model, batch)

    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type,var-annotated]  # a list is a dataset
    return {"list": batches, "iterator": iter(batches), "loader": loader, "function": run_all}[str(case["data"])]


def make_metric(case: Case) -> Callable[[Any], float]:
    """Minus the mean squared difference from the outputs of the float model."""
    batch = make_batch(case, seed=9)

    def first_output(model: Any) -> Tensor:
        output = call(model, batch)
        return next(iter(output.values())) if isinstance(output, dict) else output

    with torch.no_grad():
        expected = first_output(make_net(case))
    return lambda model: -float((first_output(model) - expected).square().mean())


def make_options(case: Case) -> dict[str, Any]:
    goal, config = str(case["goal"]), str(case["config"])
    options: dict[str, Any] = {"target": case["target"], "max_trials": 2, "progress": False}
    if case["inputs"] == "both":
        options["kwargs"] = {"gain": make_batch(case, 0)[1]}
    if config == "float head":
        overrides = [{"name": "head", "weight": "float", "activation": "float"}]
        options["config"] = {"overrides": overrides, "speed_first": False}
    elif config == "histogram":
        is_symmetric = case["target"] != "onnxruntime"  # its kernels take unsigned activations
        activation = {"calibration_method": "mse", "symmetric": is_symmetric}
        options["config"] = {"activation": activation, "speed_first": False}
    elif config == "weights only":
        options["config"] = QuantConfig.weight_only("int8", block_size=None)
    if goal in ("fast", "balanced", "best"):
        options["accuracy"] = goal
    elif goal == "max_drop":
        options |= {"max_drop": 1e-3, "evaluate": make_metric(case)}
    elif goal == "min_speed":
        options["min_speed"] = 0.01
    elif goal != "nothing":
        options |= {"budget": goal, "choices": ("int8", "float")}
    return options


class StopEarlyError(Exception):
    """Raised by a callback to interrupt a run."""


class Phases:
    """Counts the phases that a run finished; interrupts it after one of them where asked for."""

    def __init__(self, interrupted_after: str = "") -> None:
        self.finished: Counter[str] = Counter()
        self.interrupted_after = interrupted_after

    @property
    def reads_of_data(self) -> int:
        return self.finished["calibrating"] + self.finished["checking the data"]  # the latter if all layers stay float

    def __call__(self, event: Any) -> None:
        if event.kind == "end":
            self.finished[event.name] += 1
            if event.name == self.interrupted_after:
                raise StopEarlyError


def deploy(case: Case, output: Path, **options: Any) -> scalepoint.Deployment:
    example = make_batch(case, seed=0)
    example = example[0] if case["inputs"] == "both" else example
    return scalepoint.deploy(make_net(case), example, make_data(case), output=output, **make_options(case), **options)


def deploy_resumed(case: Case, output: Path) -> scalepoint.Deployment:
    """Interrupt a run, resume it, and compare it with a run that was not interrupted."""
    stopped, resumed, uninterrupted = Phases(interrupted_after="exporting"), Phases(), Phases()
    with pytest.raises(StopEarlyError):
        deploy(case, output, callback=stopped)
    done = deploy(case, output, resume=True, callback=resumed)
    expected = deploy(case, output.with_name("whole"), callback=uninterrupted)
    assert contents(done.path) == contents(expected.path)
    redone = stopped.reads_of_data + resumed.reads_of_data - uninterrupted.reads_of_data
    assert redone == (case["data"] == "iterator")  # its data cannot be compared with that of the earlier run
    return done


def output_names(path: Path) -> set[str] | None:
    """The names of the outputs in a file; None for a format without such names."""
    if path.suffix == ".onnx":
        return {output.name for output in onnx.load(path).graph.output}
    if path.suffix == ".tflite":
        from ai_edge_litert.interpreter import Interpreter

        return set(Interpreter(str(path)).get_signature_list()["serving_default"]["outputs"])
    if path.suffix == ".mlpackage":
        import coremltools

        return {output.name for output in coremltools.utils.load_spec(str(path)).description.output}
    return None


def check_result(case: Case, done: scalepoint.Deployment) -> None:
    if case["target"] in NO_RUNTIME:
        assert done.verification is None
    else:
        assert done.verification.status == Status.OK
        assert done.verification.holds
    assert not done.coverage.is_empty or case["config"] == "default"  # there float may be faster for every layer
    assert (done.score is not None) == (case["goal"] == "max_drop")
    if "=" in str(case["goal"]):
        assert done.allocation is not None
    names = [tensor.name for tensor in find_format(find_target(str(case["target"])).format).about(done.path).inputs]
    assert names == (["x"] if case["inputs"] == "positional" else ["x", "gain"])
    if case["outputs"] == "dict":
        assert output_names(done.path) in (OUTPUTS[str(case["net"])], None)


def check_folder(case: Case, done: scalepoint.Deployment, output: Path) -> None:
    """Everything in the folder is recorded as ours, but the files that were there before."""
    files = contents(output)
    foreign = set(FOREIGN) if case["run"] == "force" else set()
    ours = set(json.loads(files.pop(".scalepoint-files.json"))["files"])
    assert set(files) == ours | foreign
    assert all(files[name] == b"mine" for name in foreign)
    assert {"report.html", "report.json", "config.yaml", "log.txt"} <= ours
    float_files = [name for name in ours if name.startswith("float")]
    if case["run"] == "smoke":
        assert (done.float_path, float_files) == (None, [])
    else:
        assert done.float_path.exists()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an earlier run of ours and with files of the user."""
    output = tmp_path_factory.mktemp("earlier") / "out"
    x = torch.randn(4, 8)
    scalepoint.deploy(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), x, [x], output=output, progress=False)
    for name in FOREIGN:
        (output / name).write_text("mine")
    return output


@pytest.mark.parametrize("case", as_parameters(pairwise(FACTORS, refusals), refusals, COSTLY))
def test_a_combination_of_options_ends_in_a_verified_file_or_a_refusal(
    case: Case, earlier: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    runtime = find_target(str(case["target"])).runtime
    if runtime is not None and not find_runtime(runtime).is_installed:
        pytest.skip(f"{runtime} is not installed")
    output, codes = tmp_path / "out", refusals(case)
    options = {"smoke": case["run"] == "smoke"}
    if case["run"] == "force":
        shutil.copytree(earlier, output)
        options["force"] = True
    before = contents(output)
    if codes:
        with pytest.raises(ScalepointError) as error:
            deploy(case, output, **options)
        assert error.value.code in codes
        assert contents(output) == before
    else:
        done = deploy_resumed(case, output) if case["run"] == "resume" else deploy(case, output, **options)
        check_result(case, done)
        check_folder(case, done, output)
    ended = "file verified" if case["target"] not in NO_RUNTIME else "file not verified (no runtime)"
    record_property("matrix", f"refused with {error.value.code}" if codes else ended)
