"""Accuracy first: what is raised, in which order, until the drop is small enough."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import scalepoint
from scalepoint.allocation import UNCHANGED, Width, WidthRow, Widths
from scalepoint.errors import UsageError
from scalepoint.formats import export
from scalepoint.pipeline import stages
from scalepoint.pipeline.result import Limits, Trial, best_trial
from scalepoint.pipeline.search import OTHER_RANGES_TEXT, next_for_accuracy, use_other_ranges
from scalepoint.quantize import CalibrationMethod, Override, QuantConfig, TensorQuantConfig
from scalepoint.quantize.config import FLOAT
from scalepoint.report import Report
from scalepoint.targets import find_target

INT8 = "int8 weights"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def searched(model, data, tmp_path_factory):
    """Two bits in the first layer ruin the net."""
    config = QuantConfig(overrides=(Override(name="stem", weight=TensorQuantConfig(n_bits=2)),))
    folder = tmp_path_factory.mktemp("searched")

    def evaluate(run):
        expected, actual = model(data[0]), run(data[0])
        return float(-100 * (expected - actual).square().sum() / expected.square().sum())

    more = {"config": config, "output": folder, "evaluate": evaluate, "max_drop": 0.2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "export", counted)
        patch.setattr(torch.export, "export", torch_exported)
        return scalepoint.deploy(model, data[0][:1], data, target="reference", **more), folder


EXPORTED_PATHS: list[tuple[Path, Path | None]] = []
TORCH_EXPORTS: list[object] = []
TORCH_EXPORT = torch.export.export


def counted(model, path, *args, float_path=None, **kwargs):
    EXPORTED_PATHS.append((path, float_path))
    return export(model, path, *args, float_path=float_path, **kwargs)


def torch_exported(model, *args, **kwargs):
    TORCH_EXPORTS.append(model)
    return TORCH_EXPORT(model, *args, **kwargs)


def test_torch_export_runs_once_for_all_trials(searched):
    done, _ = searched
    assert len(done.trials) > 2
    assert len(TORCH_EXPORTS) == 1


def test_every_trial_is_exported_once_and_the_float_model_with_the_first(searched):
    done, _ = searched
    files = [path for path, _ in EXPORTED_PATHS]
    assert len(files) == len(set(files)) == len(done.trials) > 2
    assert [float_path is not None for _, float_path in EXPORTED_PATHS] == [True, *[False] * (len(files) - 1)]


def test_other_ranges_are_tried_before_more_precision(searched):
    done, _ = searched
    first, ranges, layers = done.trials[:3]
    assert first.score < -0.2
    assert [change.to for change in ranges.precision_changes] == [OTHER_RANGES_TEXT]
    assert "weights" in {change.layer: change.to for change in layers.precision_changes}["stem"]
    assert done.score >= -0.2
    assert done.score == min((trial.cost, trial.score) for trial in done.trials if trial.score >= -0.2)[1]
    with_files = [trial for trial in done.trials if trial.file is not None]
    assert [trial.path for trial in with_files] == [done.path]
    assert done.path.is_file()
    with pytest.raises(UsageError, match="best trial"):
        _ = next(trial for trial in done.trials if trial.file is None).path


def test_the_report_lists_the_layers_with_more_precision(searched):
    done, folder = searched
    report = Report.from_json((folder / "report.json").read_text())
    assert [trial.score for trial in report.trials] == [trial.score for trial in done.trials]
    assert [trial.is_best for trial in report.trials].count(True) == 1
    best = next(trial for trial in report.trials if trial.is_best)
    assert all(change.gain > 0 and change.cost > 0 for change in best.precision_changes)
    page = (folder / "report.html").read_text()
    assert "within the allowed 0.2" in page
    assert best.precision_changes[0].to in page
    assert report.allocation.unit == "cost"
    assert {layer.name: layer.chosen for layer in report.allocation.layers}["stem"] == best.precision_changes[0].to
    assert "within the allowed 0.2" in "\n".join(report.summary())


def test_the_call_in_the_report_writes_the_same_file(searched, model, data, tmp_path, monkeypatch):
    done, folder = searched
    script = tmp_path / "again.py"
    script.write_text(done.report.reproduction.call)
    monkeypatch.chdir(tmp_path)
    arguments = {"model": model, "example_inputs": data[0][:1], "calibration_data": data}
    again = runpy.run_path(str(script), init_globals=arguments)["done"]
    assert again.path.read_bytes() == (folder / "model.onnx").read_bytes()
    assert again.report.reproduction.marks == done.report.reproduction.marks


def test_only_the_best_file_is_not_deleted(searched):
    _, folder = searched
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "float.onnx", "quantized", "report.html", "report.json", "config.yaml", "log.txt",
        ".scalepoint-files.json", "README.md", "bom.cdx.json",
    }  # fmt: skip


@pytest.mark.slow
def test_an_unreachable_limit_gives_the_best_trial(model, data, tmp_path, fidelity):
    more = {"output": tmp_path, "evaluate": fidelity, "max_drop": 0.0, "max_trials": 3}
    done = scalepoint.deploy(model, data[0][:1], data, target="reference", **more)
    assert len(done.trials) == 3
    assert done.score == max(trial.score for trial in done.trials)
    assert "more than the allowed 0" in "\n".join(done.report.summary())


def widths(*rows):
    """Layers of one weight each: (name, error now, error at int8, what int8 adds to the size)."""
    return Widths(
        tuple(
            WidthRow(
                (name,), "conv", 1,
                (
                    Width(UNCHANGED, 4, now, 0.0, 0.0, {}),
                    Width(INT8, 8, then, more, 0.0, {"weight": find_target("reference").weight.to_dict()}),
                    Width(FLOAT, 32, 0.0, 40.0, 40.0, {"weight": FLOAT, "activation": FLOAT}),
                ),
                {},
            )
            for name, now, then, more in rows
        ),
        100.0, 100.0, 0.0, 0.0,
    )  # fmt: skip


def trial(score, step=None):
    config = QuantConfig() if step is None else step.config
    more = () if step is None else (False, step.precision_changes, step.start, None, step.chosen, step.cost)
    return Trial(config, None, None, Path(), None, score, *more)


def searched_with(table, bar, scores, most=10):
    """The trials of a search in which a file's score depends on what was raised."""
    trials = [trial(scores(set()))]
    while len(trials) < most and (step := next_for_accuracy(trials, table, bar, is_last=len(trials) + 1 == most)):
        raised = {change.layer for change in step.precision_changes}
        trials.append(trial(scores(raised), step))
    return trials


class TestRaising:
    FOUR = widths(("a", 1.0, 0.01, 1.0), ("b", 0.5, 0.01, 1.0), ("c", 0.2, 0.01, 1.0), ("d", 0.1, 0.01, 1.0))

    def test_layers_that_remove_most_error_for_their_cost_come_first(self):
        step = next_for_accuracy([trial(98.0)], self.FOUR, Limits(100.0, 1.0))
        assert [(change.layer, change.to) for change in step.precision_changes] == [("a", INT8)]
        assert step.cost == pytest.approx(0.01)
        assert step.config.overrides[0].name == "a"

    def test_a_larger_drop_raises_more_layers_at_once(self):
        step = next_for_accuracy([trial(50.0)], self.FOUR, Limits(100.0, 1.0))
        assert [change.layer for change in step.precision_changes] == ["a", "b", "c"]

    def test_after_a_file_within_the_limit_a_cheaper_one_is_tried(self):
        def scores(raised):
            return 99.5 if {"a", "b"} <= raised else 60.0

        trials = searched_with(self.FOUR, Limits(100.0, 1.0), scores)
        assert {change.layer for change in best_trial(trials, Limits(100.0, 1.0)).precision_changes} == {"a", "b"}
        assert any(len(trial.precision_changes) > 2 and trial.score == 99.5 for trial in trials)

    def test_a_single_layer_is_lowered_again(self):
        """c came before d, as it is cheap; with d it is not needed any more."""
        table = widths(("a", 1.0, 0.01, 1.0), ("b", 0.5, 0.01, 1.0), ("c", 0.05, 0.0, 0.2), ("d", 0.3, 0.01, 2.0))
        trials = searched_with(table, Limits(100.0, 1.0), lambda raised: 99.5 if {"a", "b", "d"} <= raised else 60.0)
        assert {change.layer for change in best_trial(trials, Limits(100.0, 1.0)).precision_changes} == {"a", "b", "d"}

    def test_few_layers_are_raised_if_few_are_enough(self):
        """Six cheap layers come before the two that count; a few files later only these are left."""
        cheap = [(name, 0.1, 0.0, 0.05) for name in "cdefgh"]
        table, bar = widths(("a", 1.0, 0.01, 3.0), ("b", 0.8, 0.01, 3.0), *cheap), Limits(100.0, 1.0)
        trials = searched_with(table, bar, lambda raised: 99.5 if {"a", "b"} <= raised else 60.0, most=6)
        assert len(trials[1].precision_changes) > 4
        assert {change.layer for change in best_trial(trials, bar).precision_changes} == {"a", "b"}

    def test_nothing_is_tried_twice_and_the_search_ends(self):
        for good in ({"a"}, {"d"}, {"a", "b", "c", "d"}, {"none"}):
            bar = Limits(100.0, 1.0)
            trials = searched_with(self.FOUR, bar, lambda raised, good=good: 99.5 if good <= raised else 50.0, most=99)
            keys = [tuple(sorted(trial.chosen.items())) for trial in trials[1:]]
            assert len(set(keys)) == len(keys)
            assert len(trials) < 20
            assert any(bar.allows_score(trial.score) for trial in trials) == (good != {"none"})

    def test_one_layer_with_weights_stays_quantized(self):
        trials = searched_with(self.FOUR, Limits(100.0, 1.0), lambda _: 0.0, most=99)
        assert all(any(width != FLOAT for width in trial.chosen.values()) for trial in trials[1:])

    def test_the_last_trial_aims_at_a_smaller_error(self):
        bar = Limits(100.0, 1.0)
        one, last = (next_for_accuracy([trial(98.0)], self.FOUR, bar, is_last=is_last) for is_last in (False, True))
        assert len(last.precision_changes) > len(one.precision_changes)

    def test_a_nan_score_is_an_infinite_drop(self):
        step = next_for_accuracy([trial(float("nan"))], self.FOUR, Limits(100.0, 1.0))
        assert len(step.precision_changes) == 3

    def test_more_precision_starts_from_the_better_of_the_first_files(self):
        step = next_for_accuracy([trial(90.0), trial(95.0)], self.FOUR, Limits(100.0, 1.0))
        assert step.start == 1


def test_the_result_is_the_cheapest_file_within_the_limit_or_the_best():
    bar = Limits(100.0, 1.0)
    dear, cheap, bad = (replace(trial(score), cost=cost) for score, cost in ((99.9, 0.5), (99.2, 0.1), (98.0, 0.0)))
    assert best_trial([dear, cheap, bad], bar) is cheap
    assert best_trial([bad, replace(dear, score=98.5)], bar).score == 98.5
    assert best_trial([bad, dear], Limits(100.0, None)) is dear


class TestRanges:
    @pytest.mark.parametrize(
        ("method", "other"),
        [("mse", "global_minmax"), ("percentile", "global_minmax"), ("minmax", "histogram_mse")],
    )
    def test_activation_ranges_are_replaced_by_other_methods(self, method, other):
        activation = TensorQuantConfig(symmetric=False, calibration_method=CalibrationMethod(method))
        overrides = (Override(name="a", input=activation, weight=FLOAT),)
        new_config = use_other_ranges(
            QuantConfig(activation=activation, overrides=overrides), find_target("onnxruntime")
        )
        assert new_config.to_dict()["activation"]["qparam_calculator_cls"] == other
        assert new_config.to_dict()["overrides"][0]["input"]["qparam_calculator_cls"] == other
        assert new_config.overrides[0].weight == FLOAT

    def test_weight_ranges_are_replaced_below_8_bits_only(self):
        target = find_target("onnxruntime")
        config = QuantConfig(activation=FLOAT, weight=TensorQuantConfig(n_bits=4, per_channel=True))
        assert use_other_ranges(config, target).to_dict()["weight"]["range_calculator_cls"] == "mse"
        config = QuantConfig(activation=FLOAT, weight=TensorQuantConfig(per_channel=True))
        assert use_other_ranges(config, target) == config
