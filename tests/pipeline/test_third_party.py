"""A target of another package: installed next to scalepoint and found by its entry point, in its own process."""

import json
import os
import subprocess
import sys

import pytest

from scalepoint.targets import list_targets
from tests.warm import warm

TARGET = """
from dataclasses import replace
from scalepoint.targets import onnxruntime_target

TARGET = replace(onnxruntime_target("avx2"), name="acme", summary="the Acme accelerator")
NOTHING = "a string"
"""
POINTS = """
[scalepoint.targets]
acme = acme_target:TARGET
acme-other = acme_target:TARGET
acme-broken = acme_broken:TARGET
acme-nothing = acme_target:NOTHING
"""
DEPLOY = """
import sys, torch, scalepoint
from torch import nn

x = torch.randn(4, 32)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
done = scalepoint.deploy(model, x, [x], target="acme", output=sys.argv[1])
again = scalepoint.load(done.path.parent / "quantized", model, x)
assert torch.equal(again(x), done.model(x))
print(done.report.target, done.verification.holds, done.verification.low_precision)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as pip leaves it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_target.py").write_text(TARGET)
    (folder / "acme_broken.py").write_text("raise RuntimeError('no driver')")
    info = folder / "acme_targets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-targets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return folder


@pytest.fixture
def python(site):
    def run(*args):
        path = os.pathsep.join([str(site), *sys.path])
        return subprocess.run(
            [*warm(), *args],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )

    return run


def test_a_third_party_target_is_listed_and_a_broken_one_is_ignored(python):
    done = python("-m", "scalepoint.cli", "targets", "--json")
    assert done.returncode == 0
    listed = json.loads(done.stdout)
    names = [row["name"] for row in listed["targets"]]
    builtin_targets = {"onnxruntime", "openvino", "tensorrt", "executorch", "litert", "coreml", "coreai", "reference"}
    assert set(names) == {*builtin_targets, *list_targets(language=True), "acme"}
    assert next(row for row in listed["targets"] if row["name"] == "acme")["runtime"] == "ok"
    assert {row["name"] for row in listed["broken"]} == {"acme-broken", "acme-nothing", "acme-other"}
    assert all("'acme-targets'" in row["why"] for row in listed["broken"])


def test_a_third_party_target_deploys_and_is_verified_in_its_runtime(python, tmp_path):
    done = python("-c", DEPLOY, str(tmp_path / "out"))
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "capturing", "calibrating", "exporting", "verifying in the runtime", "reporting",
    ]  # fmt: skip
    assert done.stdout.split() == ["acme", "True", "2"]


ASK = """
import sys
from scalepoint.errors import TargetError
from scalepoint.targets import find_target
for name in sys.argv[1:]:
    try:
        find_target(name)
    except TargetError as error:
        print(error)
"""
BROKEN = {
    "acme-broken": "RuntimeError: no driver",
    "acme-nothing": "is not a scalepoint.targets.Target: 'a string'",
    "acme-other": "has the name 'acme'",
}


def test_the_error_for_a_broken_target_names_its_package(python):
    output_lines = python("-c", ASK, *BROKEN).stdout.strip().splitlines()
    for line, why in zip(output_lines, BROKEN.values(), strict=True):
        assert "the package 'acme-targets'" in line
        assert why in line
