"""sweep: every combination in a folder of its own, the front marked, failures told, and resumed where it was."""

import json
import warnings

import pytest
import torch
from torch import nn

import scalepoint
from scalepoint.budget import Budget
from scalepoint.errors import ConfigError, ScalepointWarning, StoreError, UsageError
from scalepoint.options import SweepConfig
from scalepoint.pipeline.sweep import list_runs
from scalepoint.report import Sweep, SweepRow, SweepTable, sweep_page
from scalepoint.support.formatting import render_as_text
from scalepoint.targets import onnxruntime_target

ROWS = (
    SweepRow("small", score=0.5, size=1e6, speed=3.0),
    SweepRow("middle", score=0.8, size=2e6, speed=2.5),
    SweepRow("beaten", score=0.7, size=3e6, speed=2.0),
    SweepRow("large", score=0.9, size=4e6, speed=1.0),
    SweepRow("broken", status="failed", message="<script>alert(1)</script>", score=1.0, size=1.0),
    SweepRow("unknown", score=None, size=1e5),
)


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval(), torch.randn(2, 3, 8, 8)


def test_the_front_contains_the_runs_that_no_other_run_beats():
    table = Sweep(ROWS)
    assert [row.name for row in table.front("size")] == ["small", "middle", "large"]
    assert [row.name for row in table.front("speed")] == ["small", "middle", "large"]
    assert "1 failed" in table.summary()


def test_speeds_of_runs_with_other_float_files_are_compared_by_time():
    slow = SweepRow("slow", score=0.8, speed=3.0, latency=0.010)  # its own float file takes 30 ms
    fast = SweepRow("fast", score=0.8, speed=2.0, latency=0.005)  # its own takes 10 ms
    table = Sweep((slow, fast))
    assert [row.name for row in table.front("speed")] == ["fast"]
    assert [table.speed_of(row) for row in (slow, fast)] == pytest.approx([1.0, 2.0])
    assert "1.00x" in render_as_text(SweepTable(table))


def test_runs_that_differ_in_nothing_that_capture_reads_capture_the_model_once(tmp_path, monkeypatch):
    model, example = net()
    traced, original = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: traced.append(1) or original(*args, **options))
    grid = {"target": ["onnxruntime", "openvino"], "fixed_sizes": [False, True]}
    options = {"smoke": True, "progress": False, "cpu": "vnni", "allow_departure": True}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of VNNI
        table = scalepoint.sweep(model, example, [example], grid=grid, output=tmp_path / "sweep", **options)
        assert len(traced) == 2  # with a free batch, and with fixed sizes
        alone = scalepoint.deploy(
            model, example, [example], target="openvino", fixed_sizes=True, output=tmp_path / "alone", **options
        )
    assert all(row.is_done for row in table.rows)
    last = tmp_path / "sweep" / table.rows[-1].name
    assert (last / alone.path.name).read_bytes() == alone.path.read_bytes()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_sweep_over_target_objects_is_resumed_in_another_process(tmp_path, capsys):
    model, example = net()
    targets = [onnxruntime_target(cpu=cpu) for cpu in ("avx2", "vnni")]
    calls: list[str] = []
    options = {"output": tmp_path / "out", "smoke": True, "allow_departure": True}
    finish = lambda done, folder, point: calls.append(folder.name)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of VNNI
        scalepoint.sweep(model, example, [example], finish=finish, grid={"target": targets}, **options)
        assert len(calls) == 2
        run_lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run ")]
        assert run_lines == [f"run 1 of 2: {calls[0]}", f"run 2 of 2: {calls[1]}"]
        onnxruntime_target.cache_clear()  # other objects, as another process has them
        targets = [onnxruntime_target(cpu=cpu) for cpu in ("avx2", "vnni")]
        scalepoint.sweep(model, example, [example], finish=finish, grid={"target": targets}, resume=True, **options)
    assert len(calls) == 2
    assert "0x" not in (tmp_path / "out" / "sweep.json").read_text()  # no address of an object, another one each time


def test_equal_runs_are_both_on_the_front():
    twins = Sweep((SweepRow("a", score=1.0, size=1.0), SweepRow("b", score=1.0, size=1.0)))
    assert len(twins.front()) == 2


def test_a_grid_becomes_named_points():
    runs = list_runs({"target": ["onnxruntime", "reference"], "config": [{}, {"weight": "float"}], "threads": [2]})
    assert list(runs) == [
        f"{target}-{config}-threads2" for target in ("onnxruntime", "reference") for config in ("config1", "config2")
    ]
    assert runs["reference-config2-threads2"] == {"target": "reference", "config": {"weight": "float"}, "threads": 2}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"traget": ["a"]}, "did you mean 'target'"),
        ({"output": ["a"]}, "not a keyword"),
        ({"target": "onnxruntime"}, "a list of values"),
        ({"target": []}, "a list of values"),
        ({}, "at least one key"),
        ({"threads": list(range(1001))}, "at most 1000"),
    ],
)
def test_an_invalid_grid_is_refused(grid, message):
    with pytest.raises(UsageError, match=message):
        list_runs(grid)


def test_a_budget_names_the_folder_of_its_run():
    assert list(list_runs({"budget": ["size=0.9", Budget(bits=6)]})) == ["size_0.9", "bits_6"]


def test_names_of_folders_are_safe():
    assert list(list_runs({"target": ["../../x y", "..", "a"]})) == ["x_y", "target2", "a"]


def test_a_sweep_deploys_every_run_reports_failures_and_resumes(tmp_path):
    model, example = net()
    override_lists = [[{"name": name, "weight": "float", "activation": "float"}] for name in ("2", "no such layer")]
    grid = {"config": [{}, *({"overrides": override} for override in override_lists)]}
    calls: list[str] = []
    options = {"grid": grid, "output": tmp_path / "out", "target": "reference", "progress": False}
    finish = lambda done, folder, point: calls.append(folder.name)  # noqa: E731
    table = scalepoint.sweep(model, example, [example], finish=finish, **options)
    assert calls == ["config1", "config2"]
    assert [row.status for row in table.rows] == ["done", "done", "failed"]
    assert "no such layer" in table.rows[2].message
    assert (tmp_path / "out" / "config1" / "report.html").is_file()
    assert (tmp_path / "out" / "sweep.html").read_text().startswith("<!doctype html>")
    assert Sweep.from_file(tmp_path / "out" / "sweep.json") == table
    with pytest.raises(UsageError, match="resume=True"):
        scalepoint.sweep(model, example, [example], **options)
    grid["config"][1] = {"overrides": [{"name": "0", "weight": "float", "activation": "float"}]}
    again = scalepoint.sweep(model, example, [example], finish=finish, resume=True, **options)
    assert calls == ["config1", "config2", "config2"]  # the first is as it was, the second was another
    assert again.rows[0] == table.rows[0]
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.warns(ScalepointWarning, match="the model, max_batches changed"):
        scalepoint.sweep(model, example, [example], finish=finish, resume=True, max_batches=1, **options)
    assert calls[3:] == ["config1", "config2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": {"accuracy": ["fast", "beste"]}}, "run beste: .*accuracy"),
        ({"grid": {"target": ["reference", "onnxrutime"]}}, "run onnxrutime: "),
        ({"grid": {"config": [{}, {"weihgt": "float"}]}}, "run config2: .*weight"),
        ({"grid": {"seed": [0, 1]}, "max_drop": 1.0}, "max_drop= needs evaluate="),
        ({"grid": {"max_drop": [1.0]}, "evaluate": "top1"}, "must be a function"),
    ],
    ids=str,
)
def test_options_of_all_runs_are_checked_before_the_first_one(tmp_path, options, message):
    model, example = net()
    with pytest.raises(UsageError, match=message):
        scalepoint.sweep(model, example, [example], output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_option_that_one_target_does_not_support_is_a_failed_run(tmp_path):
    model, example = net()
    options = {"float_dtype": "float16", "output": tmp_path / "out"}
    table = scalepoint.sweep(model, example, [example], grid={"target": ["onnxruntime", "reference"]}, **options)
    assert [row.status for row in table.rows] == ["failed", "done"]
    assert "float_dtype" in table.rows[0].message


def test_an_onnx_file_in_the_output_is_refused(tmp_path):
    path = tmp_path / "out" / "net.onnx"
    with pytest.raises(UsageError, match=r"net\.onnx"):
        scalepoint.sweep(path, None, [], grid={"seed": [0]}, output=tmp_path / "out")


def test_data_that_is_read_once_is_refused(tmp_path):
    model, example = net()
    with pytest.raises(UsageError, match="iterator"):
        scalepoint.sweep(model, example, iter([example]), grid={"threads": [1]}, output=tmp_path / "out")


@pytest.mark.parametrize("text", ["{", '{"schema": 2}', '{"schema": 1, "rows": [{"name": 3}]}', "[]"])
def test_values_that_are_not_a_sweep_are_refused(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(StoreError, match="not a sweep"):
        Sweep.from_file(tmp_path / "sweep.json")


def test_values_of_a_grid_are_checked_as_those_of_the_config():
    assert SweepConfig(grid={"accuracy": ("fast", None)}).validate_grid() == {"accuracy": ["fast", None]}
    with pytest.raises(ConfigError, match="did you mean 'target'"):
        SweepConfig(grid={"tarket": ("a",)}).validate_grid()
    with pytest.raises(ConfigError, match="accuracy"):
        SweepConfig(grid={"accuracy": ("slow",)}).validate_grid()


def test_the_table_and_the_page_show_all_rows_without_scripts(monkeypatch):
    table = Sweep(ROWS)
    for width in ("40", "120"):
        monkeypatch.setenv("COLUMNS", width)
        text = render_as_text(SweepTable(table))
        assert max(map(len, text.splitlines())) <= int(width)
        assert width == "40" or all(row.name in text for row in ROWS)
    page = sweep_page(table)
    assert page.count("<script") == 2
    assert "&lt;script&gt;" in page
    json.loads(json.dumps(table.to_dict(), allow_nan=False))
