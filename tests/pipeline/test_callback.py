"""deploy(callback=...): phases, numbers and files as they come; a notebook's view of the result."""

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.support.progress import Event


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    data = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    heard: list[Event] = []
    folder = tmp_path_factory.mktemp("told") / "out"
    done = scalepoint.deploy(
        model, data[0], data, target="reference", output=folder, evaluate=lambda run: 0.5, progress=False,
        callback=heard.append,
    )  # fmt: skip
    return done, heard, folder


def test_every_phase_starts_and_ends_once_in_order(recorded_run):
    _, heard, _ = recorded_run
    started = [event.name for event in heard if event.kind == "start"]
    assert [event.name for event in heard if event.kind == "end"] == started or len(set(started)) == len(started)
    assert started.index("capturing") < started.index("calibrating") < started.index("exporting")
    counted = [event.done for event in heard if event.kind == "advance" and event.name == "calibrating"]
    assert counted == [1, 2, 3]


def test_the_callback_gets_numbers_and_files(recorded_run):
    done, heard, folder = recorded_run
    numbers = {event.name: event.value for event in heard if event.kind == "metric"}
    assert (numbers["float score"], numbers["score"]) == (0.5, 0.5)
    assert numbers["size"] == done.path.stat().st_size
    files = {event.name for event in heard if event.kind == "file"}
    assert {str(folder / "report.html"), str(done.path)} <= files


def test_a_notebook_shows_the_result_without_scripts(recorded_run):
    done, _, _ = recorded_run
    page = done._repr_html_()
    assert "Sequential" in page
    assert "score" in page
    assert "<script" not in page
    assert "<style" not in page
