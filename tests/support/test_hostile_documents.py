"""Documents with random values: each is read and shown, or raises a ScalepointError."""

import copy
import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import scalepoint
from scalepoint.errors import ScalepointError, ScalepointWarning
from scalepoint.options import DeployConfig, SweepConfig
from scalepoint.pipeline.workspace import list_finished_stages
from scalepoint.quantize import quantize
from scalepoint.report import Report, Sweep, SweepRow, compare_runs, sweep_page, to_html, write
from tests.report.example_reports import ordinary

VALUES = (
    None, True, 0, -1, 2**63, 10**40, 10**400, 1.5, 1e308, 5e-324, float("nan"), float("inf"), "", "a", "\x1b[31m",
    "\ud800", "NaN", "Infinity", [], {}, [None], {"a": None}, [1, 2, 3], "../../x", "\0",
)  # fmt: skip
NUMBERS = (0, -1, 2**63, 10**40, -1.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), "NaN", "-Infinity")
TRIALS = 60


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from iterate_paths(item, (*path, key))


def mutate(document: Any, rng: random.Random) -> Any:
    """Replace a random value by another one, or random numbers by other numbers."""
    document = copy.deepcopy(document)
    entries = [(container_of(document, path), path[-1]) for path in iterate_paths(document)]
    numbers = [(container, key) for container, key in entries if type(container[key]) in (int, float)]
    if numbers and rng.random() < 0.6:
        for container, key in rng.choices(numbers, k=rng.choice((1, 3))):
            container[key] = rng.choice(NUMBERS)
    else:
        container, key = rng.choice(entries)
        container[key] = rng.choice(VALUES)
    return document


def container_of(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def check_reader(document: Any, read: Callable[[Any], object]) -> None:
    """Read many mutated documents. Errors other than ScalepointError fail the test; at least one must be accepted."""
    rng, accepted = random.Random(0), 0  # noqa: S311  # no secret
    read(document)
    for _ in range(TRIALS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ScalepointWarning)
                read(mutate(document, rng))
            accepted += 1
        except ScalepointError:
            pass
    assert accepted


def test_a_report(tmp_path: Path) -> None:
    for name in ("run", "other"):
        write(ordinary(), tmp_path / name)
    path = tmp_path / "run" / "report.json"

    def read(document: Any) -> None:
        path.write_text(json.dumps(document))
        report = Report.from_file(path)
        assert str(report)
        assert to_html(report)
        for pair in (("run", "other"), ("other", "run")):
            assert str(compare_runs(*(tmp_path / name for name in pair)))

    check_reader(json.loads(path.read_text()), read)


def test_a_sweep(tmp_path: Path) -> None:
    rows = (
        SweepRow("a", {"target": "onnxruntime"}, score=0.5, float_score=0.6, size=100.0, speed=1.2, latency=0.001),
        SweepRow("b", {"threads": [1]}, "failed", "no runtime"),
        SweepRow("c", {}, last_db=20.0, size=50.0, speed=0.7, low=0.5),
    )

    def read(document: Any) -> None:
        (tmp_path / "sweep.json").write_text(json.dumps(document))
        sweep = Sweep.from_file(tmp_path / "sweep.json")
        assert str(sweep)
        assert sweep_page(sweep)
        assert sweep.to_json()

    check_reader(json.loads(Sweep(rows).to_json()), read)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e308", "-1"])
@pytest.mark.parametrize("field", ["speed", "latency", "size", "last_db", "score", "low"])
def test_a_sweep_with_odd_numbers_is_shown(field: str, value: str, tmp_path: Path) -> None:
    text = Sweep((SweepRow("a", {}, speed=1.0), SweepRow("b", {}, speed=2.0, size=3.0))).to_json()
    document = json.loads(text)
    document["rows"][0][field] = float(value)
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    assert str(Sweep.from_file(tmp_path / "sweep.json"))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config(suffix: str, tmp_path: Path) -> None:
    config = DeployConfig(model="a:b", target="openvino", mean=(0.5, 0.25), dynamic_axes={"x": {2: "height"}})
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"

    def read(document: Any) -> None:
        first.write_text(json.dumps(document) if suffix == ".json" else yaml.safe_dump(document))
        DeployConfig.from_file(first).to_file(second)
        DeployConfig.from_file(second)

    check_reader(config.to_dict(), read)


def test_a_grid(tmp_path: Path) -> None:
    def read(document: Any) -> None:
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(document))
        SweepConfig.from_file(tmp_path / "sweep.yaml").validate_grid()

    check_reader(
        {"model": "a:b", "grid": {"target": ["openvino"], "accuracy": ["fast", "best"], "threads": [1, 2]}}, read
    )


def test_a_journal(tmp_path: Path) -> None:
    path = tmp_path / ".scalepoint" / "journal.json"
    path.parent.mkdir()

    def read(document: Any) -> None:
        path.write_text(json.dumps(document))
        list_finished_stages(tmp_path)

    check_reader({"format": 1, "stages": {"one": {"marks": {"a": "b"}, "result": {"x": 1}, "files": {"f": "0"}}}}, read)


def test_a_manifest_whose_checksum_fits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    quantized = quantize(model, x, forward_loop=[x], freeze_weights=True, target="onnxruntime")
    scalepoint.save(quantized, tmp_path / "kept", with_graph=True)
    path = tmp_path / "kept" / "scalepoint.json"

    def read(document: Any) -> None:
        body = json.dumps(document, sort_keys=True)
        sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": document}
        path.write_text(json.dumps(sealed))
        scalepoint.load(tmp_path / "kept")

    check_reader(json.loads(path.read_text())["manifest"], read)
