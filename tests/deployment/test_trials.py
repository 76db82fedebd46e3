"""Accuracy first: what is raised, in which order, until the drop is small enough."""

import runpy

import pytest

import scalepoint
from scalepoint.analysis import Sensitivity
from scalepoint.deployment.trials import FLOAT, INT8, RANGES, _chosen, other_ranges
from scalepoint.errors import UsageError
from scalepoint.quantize import CalibrationMethod, Override, QuantConfig, TensorQuantConfig
from scalepoint.report import Report
from scalepoint.targets import find_target

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def searched(model, data, tmp_path_factory):
    """Two bits in the first layer ruin the net."""
    config = QuantConfig(overrides=(Override(name="stem", weight=TensorQuantConfig(n_bits=2)),))
    folder = tmp_path_factory.mktemp("searched")

    def evaluate(run):
        expected, found = model(data[0]), run(data[0])
        return float(-100 * (expected - found).square().sum() / expected.square().sum())

    more = {"config": config, "output": folder, "evaluate": evaluate, "max_drop": 0.2}
    return scalepoint.deploy(model, data[0][:1], data, target="reference", **more), folder


def test_free_ranges_come_first_then_the_layer_that_hurts(searched):
    done, _ = searched
    first, ranges, layers = done.trials[:3]
    assert first.score < -0.2
    assert [each.to for each in ranges.raised] == [RANGES]
    assert {each.layer: each.to for each in layers.raised}["stem"] == INT8
    assert done.score == max(trial.score for trial in done.trials) >= -0.2
    kept = [trial for trial in done.trials if trial.file is not None]
    assert [trial.path for trial in kept] == [done.path]
    assert done.path.is_file()
    with pytest.raises(UsageError, match="only the best trial keeps its file"):
        _ = next(trial for trial in done.trials if trial.file is None).path


def test_the_report_says_what_was_raised_and_why(searched):
    done, folder = searched
    report = Report.from_json((folder / "report.json").read_text())
    assert [each.score for each in report.attempts] == [trial.score for trial in done.trials]
    assert [each.is_kept for each in report.attempts].count(True) == 1
    kept = next(each for each in report.attempts if each.is_kept)
    assert all(each.gain > 0 and each.cost > 0 for each in kept.raised)
    page = (folder / "report.html").read_text()
    assert "within the 0.2 allowed" in page
    assert INT8 in page
    assert "within the 0.2 allowed" in "\n".join(report.summary())


def test_the_call_in_the_report_makes_the_same_file(searched, model, data, tmp_path, monkeypatch):
    done, folder = searched
    script = tmp_path / "again.py"
    script.write_text(done.report.reproduction.call)
    monkeypatch.chdir(tmp_path)
    given = {"model": model, "example_inputs": data[0][:1], "calibration_data": data}
    again = runpy.run_path(str(script), init_globals=given)["done"]
    assert again.path.read_bytes() == (folder / "model.onnx").read_bytes()
    assert again.report.reproduction.marks == done.report.reproduction.marks


def test_nothing_but_the_best_file_stays(searched):
    _, folder = searched
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "float.onnx", "quantized", "report.html", "report.json"
    }  # fmt: skip


def test_a_bound_that_cannot_be_held_keeps_the_best(model, data, tmp_path, fidelity):
    more = {"output": tmp_path, "evaluate": fidelity, "max_drop": 0.0, "max_trials": 3}
    done = scalepoint.deploy(model, data[0][:1], data, target="reference", **more)
    assert len(done.trials) == 3
    assert done.score == max(trial.score for trial in done.trials)
    assert "more than the 0 allowed" in "\n".join(done.report.summary())


def row(name: str, score: float, cost: float) -> Sensitivity:
    return Sensitivity(name, score, "conv", 1, 1, cost, score / cost)


class TestOrder:
    def test_gain_per_cost_decides(self):
        rows = [row("big", 0.5, 0.5), row("small", 0.3, 0.1), row("tiny", 0.2, 0.4)]
        assert [each.layer for each in _chosen(rows, {}, 0.5)] == ["small", "big"]
        assert [each.layer for each in _chosen([*rows, row("last", 0.01, 0.1)], {}, 0.1)] == ["small", "big", "tiny"]

    def test_narrow_weights_get_eight_bits_before_they_become_float(self):
        chosen = _chosen([row("a", 0.4, 0.5), row("b", 0.4, 0.5), row("c", 0.0, 0.5)], {"b": 4}, 0.01)
        assert [(each.layer, each.to) for each in chosen] == [("b", INT8), ("a", FLOAT)]
        assert chosen[0].cost < chosen[1].cost

    def test_what_breaks_the_model_comes_first_and_what_wins_nothing_never(self):
        rows = [row("fine", 0.0, 0.1), row("bad", 0.4, 0.1), row("nan", float("nan"), 0.1)]
        assert [each.layer for each in _chosen(rows, {}, 0.1)] == ["nan"]
        assert _chosen(rows[:1], {}, 0.1) == []

    def test_one_layer_with_weights_stays_quantized(self):
        rows = [row("a", 0.5, 0.5), row("b", 0.4, 0.5)]
        assert [each.layer for each in _chosen(rows, {}, 0.0)] == ["a"]
        assert _chosen(rows[:1], {}, 0.0) == []
        assert [each.layer for each in _chosen(rows, {"a": 4, "b": 4}, 0.0)] == ["a", "b"]


class TestRanges:
    @pytest.mark.parametrize(
        ("given", "other"),
        [("mse", "global_minmax"), ("percentile", "global_minmax"), ("minmax", "histogram_mse")],
    )
    def test_of_activations(self, given, other):
        said = TensorQuantConfig(symmetric=False, calibration_method=CalibrationMethod(given))
        overrides = (Override(name="a", input=said, weight=FLOAT),)
        found = other_ranges(QuantConfig(activation=said, overrides=overrides), find_target("onnxruntime"))
        assert found.to_dict()["activation"]["qparam_calculator_cls"] == other
        assert found.to_dict()["overrides"][0]["input"]["qparam_calculator_cls"] == other
        assert found.overrides[0].weight == FLOAT

    def test_of_weights_only_where_bits_are_few(self):
        target = find_target("onnxruntime")
        config = QuantConfig(activation=FLOAT, weight=TensorQuantConfig(n_bits=4, per_channel=True))
        assert other_ranges(config, target).to_dict()["weight"]["range_calculator_cls"] == "mse"
        config = QuantConfig(activation=FLOAT, weight=TensorQuantConfig(per_channel=True))
        assert other_ranges(config, target) == config
