"""A format and a runtime of another package: found by entry points and used from export to deploy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import warm

PACKAGE = Path(__file__).with_name("third_party")
POINTS = """
[scalepoint.formats]
toy = toy_rooms:FORMAT
toy-nothing = toy_rooms:NO_FORMAT

[scalepoint.runtimes]
toy-numpy = toy_rooms:RUNTIME
toy-other = toy_rooms:RUNTIME

[scalepoint.targets]
toy = toy_rooms:TARGET
"""
ROAD = """
import json, sys
import torch, scalepoint
from torch import nn
from pathlib import Path
from scalepoint.quantize import quantize

torch.manual_seed(0)
x = torch.randn(64, 32)
model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
folder = Path(sys.argv[1])

quantized = quantize(model, x, forward_loop=[x], target="toy")
scalepoint.export(quantized, folder / "m.toy", x, float_path=folder / "f.toy")
found = scalepoint.verify(folder / "m.toy", quantized, x, float_path=folder / "f.toy")
speed = scalepoint.benchmark(folder / "f.toy", folder / "m.toy", runtime="toy-numpy", repeats=5, seconds=1)

judged = []
def evaluate(run):
    judged.append(type(run).__name__)
    return -float((run(x) - model(x)).square().mean())

done = scalepoint.deploy(model, x, [x], target="toy", output=folder / "out", evaluate=evaluate, progress=False)
print(json.dumps({
    "runtime": found.runtime, "status": found.status, "sqnr": found.sqnr, "low": found.low_precision,
    "made_for": dict(found.made_for), "smaller": found.float_size / found.size, "speed": speed.runtime,
    "shapes": {name: list(shape) for name, shape in speed.shapes.items()}, "judged": judged,
    "files": sorted(path.name for path in (folder / "out").iterdir() if path.is_file()),
    "holds": done.verification.holds, "score": done.score, "path": done.path.name,
    "others": [name for name in ("onnxruntime", "openvino") if name in sys.modules],
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Run Python with the package in a site folder as pip installs it."""
    site = tmp_path_factory.mktemp("site")
    for file in PACKAGE.glob("*.py"):
        shutil.copy(file, site)
    info = site / "toy_rooms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-rooms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)

    def run(*args, python=None):
        path = os.pathsep.join([str(site), *sys.path])
        return subprocess.run(
            [*(python or warm()), *args],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )

    return run


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    cold = [sys.executable, "-W", "ignore"]  # it prints the loaded modules
    done = python("-c", ROAD, str(tmp_path_factory.mktemp("road")), python=cold)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_export_writes_the_format_and_verify_runs_it_in_the_runtime(results):
    assert results["runtime"] == "toy-numpy"
    assert results["status"] == "ok"
    assert results["sqnr"] > 60
    assert results["low"] == 2
    assert results["made_for"] == {"target": "toy"}
    assert results["smaller"] > 1.5


def test_benchmark_builds_inputs_from_the_description_of_the_file(results):
    assert results["speed"] == "toy-numpy"
    assert results["shapes"] == {"x": [1, 32]}


def test_deploy_writes_verifies_and_evaluates_in_the_runtime(results):
    assert results["path"] == "model.toy"
    assert {"model.toy", "float.toy", "report.html", "report.json"} <= set(results["files"])
    assert not any(name.endswith(".onnx") for name in results["files"])
    assert results["holds"]
    assert results["judged"] == ["Sequential", "RuntimeModel"]
    assert -0.01 < results["score"] < 0
    assert results["others"] == []


ASK = """
from scalepoint.errors import ScalepointError
from scalepoint.formats import find_format
from scalepoint.runtimes import find_runtime
for find, name in ((find_format, "toy-nothing"), (find_runtime, "toy-other")):
    try:
        find(name)
    except ScalepointError as error:
        print(error)
"""
WRONG = (
    "format 'toy-nothing' of the package 'toy-rooms' (toy_rooms:NO_FORMAT) is not a scalepoint.formats.",
    "runtime 'toy-other' of the package 'toy-rooms' (toy_rooms:RUNTIME) has the name 'toy-numpy'",
)


def test_errors_of_a_plugin_are_reported_when_it_is_loaded(python):
    messages = python("-c", ASK).stdout.strip().splitlines()
    for line, why in zip(messages, WRONG, strict=True):
        assert why in line


def test_the_command_line_lists_third_party_targets(python):
    done = python("-m", "scalepoint.cli", "targets", "--json")
    row = next(file for file in json.loads(done.stdout)["targets"] if file["name"] == "toy")
    assert row["runtime"] == "ok"
