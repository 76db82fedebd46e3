"""README.md, use.py and bom.cdx.json of an output folder."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointWarning

RUN_SCRIPT = """
import runpy, sys
import numpy as np
values = runpy.run_path("use.py", run_name="__main__")
assert not any(name.partition(".")[0] == "scalepoint" for name in sys.modules)
np.savez("outputs.npz", *values["outputs"].values())
"""


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, image, offset):
        return self.conv(image).relu() + offset


def deploy_small(output, **options):
    torch.manual_seed(0)
    data = [(torch.randn(2, 3, 8, 8), torch.randn(1)) for _ in range(2)]
    options = {"smoke": True, "progress": False, "metadata": {"labels": ["a|b", "c"]}} | options
    return scalepoint.deploy(TwoInputs(), data[0], data, output=output, **options)


@pytest.mark.parametrize(
    "target", ["onnxruntime", "openvino", "litert", pytest.param("executorch", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_script_runs_the_file_without_scalepoint(target, tmp_path):
    pytest.importorskip({"litert": "ai_edge_litert"}.get(target, target))
    done = deploy_small(tmp_path, target=target)
    command = [sys.executable, "-I", "-c", RUN_SCRIPT]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    simulated = done.model(torch.zeros(2, 3, 8, 8), torch.zeros(1)).detach().numpy()
    with np.load(tmp_path / "outputs.npz") as outputs:
        np.testing.assert_allclose(outputs["arr_0"], simulated, atol=0.05)
        assert np.ptp(simulated) > 0.1
    assert len((tmp_path / "use.py").read_text().splitlines()) < 30


def test_a_target_without_runtime_has_a_card_and_no_script(tmp_path):
    deploy_small(tmp_path, target="tensorrt")
    assert not (tmp_path / "use.py").exists()
    assert "tensorrt" in (tmp_path / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("output") / "out"
    deploy_small(output, evaluate=lambda run: 0.5)
    return output


def test_the_card_has_metrics_inputs_and_files(folder):
    text = (folder / "README.md").read_text()
    for words in ("TwoInputs, quantized for onnxruntime", "1 of 1 layer", "0.5000 -> 0.5000", "| `image` | float32 |"):
        assert words in text
    assert "stores as metadata: `labels`" in text
    assert all(
        f"`{path.name}`" in text for path in folder.iterdir() if path.name in ("model.onnx", "use.py", "report.html")
    )


def test_the_bill_of_materials_has_the_hash_of_every_file_and_what_it_was_made_from(folder):
    bom = json.loads((folder / "bom.cdx.json").read_text())
    files = {
        component["name"]: component["hashes"][0]["content"]
        for component in bom["components"]
        if component["type"] == "file"
    }
    listed = set(json.loads((folder / ".scalepoint-files.json").read_text())["files"])
    assert set(files) == listed - {"bom.cdx.json", "log.txt"}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in files.items())
    assert bom["metadata"]["component"]["hashes"][0]["content"] == files["model.onnx"]
    report = json.loads((folder / "report.json").read_text())
    assert report["reproduction"]["marks"]["model"] in json.dumps(bom["components"])
    packages = {
        component["name"]: component["version"] for component in bom["components"] if component["type"] == "library"
    }
    assert packages["torch"] == str(torch.__version__)
    metrics = bom["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert {"type": "score", "value": "0.5", "slice": "quantized, runtime"} in metrics


def test_the_bill_of_materials_is_valid_by_the_schema_of_cyclonedx(folder):
    pytest.importorskip("cyclonedx")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str((folder / "bom.cdx.json").read_text()) is None


def test_files_of_the_user_with_these_names_stay(tmp_path):
    for name in ("README.md", "bom.cdx.json"):
        (tmp_path / name).write_text("mine")
    with pytest.warns(ScalepointWarning, match="stays as it is"):
        deploy_small(tmp_path, force=True)
    assert {(tmp_path / name).read_text() for name in ("README.md", "bom.cdx.json")} == {"mine"}
    assert "onnxruntime" in (tmp_path / "use.py").read_text()


def test_an_edited_card_stays_and_others_are_replaced(tmp_path):
    deploy_small(tmp_path)
    card, script = tmp_path / "README.md", tmp_path / "use.py"
    card.write_text(card.read_text() + "License: MIT\n")
    before = script.stat().st_ino
    with pytest.warns(ScalepointWarning, match=r"README\.md is not ours"):
        deploy_small(tmp_path, force=True)
    assert card.read_text().endswith("License: MIT\n")
    assert os.stat(script).st_ino != before
