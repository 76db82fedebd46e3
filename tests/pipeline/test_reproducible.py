"""The same bytes twice, the whole config next to the files also from Python, and a log of the run."""

import random

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.options import DeployConfig, DeployOptions


def make_run(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    example = torch.randn(2, 3, 8, 8)

    def data(run):
        for _ in range(3):
            run(torch.randn(2, 3, 8, 8) * random.random())  # noqa: S311

    return scalepoint.deploy(model, example, data, target="reference", output=folder, progress=False, **options)


def test_the_seed_determines_the_bytes(tmp_path):
    files = [make_run(tmp_path / str(index), seed=seed).path.read_bytes() for index, seed in enumerate((1, 1, 2))]
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_the_callers_random_state_is_untouched(tmp_path):
    example = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    before, state = torch.get_rng_state(), random.getstate()
    scalepoint.deploy(model, example, [example], target="reference", output=tmp_path / "out", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == state


def test_the_saved_config_has_every_default(tmp_path):
    done = make_run(tmp_path / "out", seed=3, max_batches=2, config={"overrides": [{"name": "0", "weight": "float"}]})
    config = DeployConfig.from_file(tmp_path / "out" / "config.yaml")
    assert (config.seed, config.max_batches, config.target) == (3, 2, "reference")
    text = (tmp_path / "out" / "config.yaml").read_text()
    # No sources, which have no names here, and no keys of language models.
    assert all((f"\n{key}:" in text) == (key in DeployOptions.model_fields) for key in DeployConfig.model_fields)
    assert config.quantization.to_dict()["overrides"] == done.report.config["overrides"]


def test_the_log_lists_the_phases_with_their_times(tmp_path):
    make_run(tmp_path / "out", evaluate=lambda run: 0.5)
    lines = (tmp_path / "out" / "log.txt").read_text().splitlines()
    assert all(line.startswith("20") for line in lines)
    assert any(" end calibrating: 3 batches in" in line for line in lines)
    assert any(line.endswith("metric score: 0.5") for line in lines)
    assert any(" file " in line and line.endswith("report.html") for line in lines)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, scale):
        return self.second(torch.relu(self.first(x)) * scale)


@pytest.mark.filterwarnings("ignore:.*contain NaN")
def test_the_call_in_the_report_writes_the_same_file(tmp_path, monkeypatch):
    """With all options that change the file or whether there is one."""
    torch.manual_seed(0)
    model, x, scale = Scaled().eval(), torch.randn(4, 8), torch.rand(4, 8)

    def drawing(run):
        for _ in range(2):
            run(x * random.random(), scale=scale)  # noqa: S311

    batches = [{"x": x * float("nan"), "scale": scale}, {"x": x, "scale": scale}]
    for name, data, on_nan in (("function", drawing, "error"), ("batches", batches, "skip")):
        options = {"on_nan": on_nan, "strict": True, "metadata": {"author": "A. Uthor"}, "smoke": True, "seed": 5}
        out = tmp_path / name
        shared = {"target": "reference", "kwargs": {"scale": scale}, "output": out, "progress": False}
        done = scalepoint.deploy(model, x, data, **shared, **options)
        monkeypatch.chdir(out)
        names = {"model": model, "example_inputs": x, "calibration_data": data, "kwargs": {"scale": scale}}
        exec(done.report.reproduction.call, names)  # noqa: S102  # the text of the report
        assert names["done"].path.read_bytes() == done.path.read_bytes()
        assert names["done"].report.warnings == done.report.warnings
