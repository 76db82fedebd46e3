"""The comparison of two runs: which values differ, which are better, and warnings if they are hard to compare."""

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from scalepoint.errors import StoreError
from scalepoint.report import DifferenceTable, compare_runs, write
from scalepoint.report.difference import ComparedNumber
from tests.report import example_reports


def other():
    """The ordinary run, faster, smaller, a layer better and one in float."""
    first = example_reports.ordinary()
    rows = list(first.coverage.operations)
    rows[2] = example_reports.float_row(rows[2].name, "asked", "conv2d", rows[2].macs, True)
    layers = list(first.layers)
    layers[2] = replace(layers[2], sqnr_db=math.inf)
    layers[5] = replace(layers[5], sqnr_db=layers[5].sqnr_db - 20)
    return replace(
        first,
        coverage=replace(first.coverage, operations=tuple(rows)),
        layers=tuple(layers),
        accuracy=(replace(first.accuracy[0], value=0.6970), first.accuracy[1]),
        verification=replace(example_reports.verification(2.5), size=10_000_000),
        config={**first.config, "activation": "int8", "weight": {"dtype": "int4", "axis": 0}},
        environment={**first.environment, "onnxruntime": "1.32.0"},
    )


@pytest.fixture(scope="module")
def difference():
    return compare_runs(example_reports.ordinary(), other())


def test_a_change_within_the_noise_of_the_measurement_has_no_verdict():
    first, second = ordinary_with_latency(0.25, 0.01), ordinary_with_latency(0.25, 0.0)
    moods = {number.name: (number.mood, number.texts()[2]) for number in compare_runs(first, second).numbers}
    for name in ("latency", "speed against float"):
        mood, text = moods[name]
        assert mood == ""
        assert "within the noise" in text
    clear = compare_runs(ordinary_with_latency(0.01, 0.2), ordinary_with_latency(0.01, 0.0))
    assert {number.name: number.mood for number in clear.numbers}["latency"] == "better"


def ordinary_with_latency(spread, more):
    """A report whose file takes a part more time."""
    report = example_reports.ordinary()
    verification = report.verification
    before, after = verification.latency.seconds
    seconds = (before, after * (1 + more))
    latency = replace(verification.latency, seconds=seconds, ratio=seconds[0] / seconds[1], spread=(spread, spread))
    return replace(report, verification=replace(verification, latency=latency))


def test_numbers_are_marked_as_better_or_worse(difference):
    moods = {number.name: number.mood for number in difference.numbers}
    assert moods["top-1"] == moods["size"] == moods["speed against float"] == moods["latency"] == "better"
    assert moods["MACs in low precision"] == ""  # neither is better
    assert "top-1, float" not in moods
    assert moods["top-5"] == moods["agreement with the simulation"] == "same"
    assert "better: top-1, size, speed against float, latency" in difference.summary()


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (ComparedNumber("a", "score", 0.6958, 0.6970), ("0.6958", "0.6970", "+0.0012")),
        (ComparedNumber("a", "bytes", 2e6, 1e6, False), ("2.00 MB", "1.00 MB", "-50.0%")),
        (ComparedNumber("a", "share", 0.9, 1.0), ("90.0%", "100%", "+10 points")),
        (ComparedNumber("a", "share", 0.0, 1.0), ("0%", "100%", "+100 points")),
        (ComparedNumber("a", "dB", math.inf, math.inf), ("exact", "exact", "same")),
        (ComparedNumber("a", "bytes", 23_051_000, 23_050_000), ("23.05 MB", "23.05 MB", "same")),
        (ComparedNumber("a", "dB", math.nan, 3.0), ("not a number", "3.0 dB", "")),
        (ComparedNumber("a", "times", None, 2.0), ("-", "2.00x", "")),
    ],
)
def test_a_number_is_written_with_its_change(number, texts):
    assert number.texts() == texts


def test_the_layer_that_changed_most_comes_first_and_equal_ones_last(difference):
    first, second = example_reports.ordinary(), other()
    changed = difference.changed_layers
    assert [layer.name for layer in changed] == [first.layers[2].name, first.layers[5].name]
    assert changed[0].precision == (example_reports.LOW, "float")
    assert changed[1].change == pytest.approx(second.layers[5].sqnr_db - first.layers[5].sqnr_db)
    assert len(difference.layers) == len(first.coverage.operations)


def test_layers_that_only_one_run_has_are_listed_as_missing():
    first = example_reports.ordinary()
    rows = (replace(first.coverage.operations[0], name="stem"), *first.coverage.operations[1:])
    difference = compare_runs(first, replace(first, coverage=replace(first.coverage, operations=rows)))
    assert {layer.name: layer.precision for layer in difference.changed_layers} == {
        "conv1": (example_reports.LOW, None),
        "stem": (None, example_reports.LOW),
    }


def test_repeated_names_are_compared_in_order():
    first = example_reports.ordinary()
    twice = (first.layers[0], replace(first.layers[0], sqnr_db=3.0))
    better = (twice[0], replace(twice[1], sqnr_db=5.0))
    difference = compare_runs(replace(first, layers=twice), replace(first, layers=better))
    assert [(layer.name, layer.change) for layer in difference.changed_layers] == [("conv1 (2)", 2.0)]


def test_changed_settings_are_listed_by_key(difference):
    assert {setting.key: (setting.first, setting.second) for setting in difference.settings} == {
        "activation": ("uint8", "int8"),
        "weight.dtype": ("int8", "int4"),
    }
    assert [setting.key for setting in difference.circumstances] == ["onnxruntime"]


def test_other_models_data_and_machines_cause_a_warning():
    first, second = example_reports.ordinary(), example_reports.ordinary()
    marks = dict.fromkeys(("model", "calibration data", "example inputs"), "one")
    again = replace(first.reproduction, marks=marks)
    first = replace(first, reproduction=again, environment={"instructions": "vnni"})
    second = replace(
        second,
        reproduction=replace(again, marks={**marks, "model": "other"}),
        environment={"instructions": "avx2"},
        verification=replace(second.verification, latency=replace(second.verification.latency, threads=2)),
    )
    warned = compare_runs(first, second).warnings
    assert warned[0] == "not the same: the model"
    assert "vnni and avx2" in warned[1]
    assert warned[2] == "measured with 1 and 2 threads"


def test_a_run_is_the_same_as_itself():
    difference = compare_runs(example_reports.evil(), example_reports.evil())
    assert {number.mood for number in difference.numbers} <= {"same", ""}
    assert (difference.changed_layers, difference.settings, difference.circumstances, difference.warnings) == (
        (),
        (),
        (),
        (),
    )


def test_folders_are_read_with_the_config_in_them(tmp_path):
    for name, report, config in (
        ("a", example_reports.ordinary(), "max_drop: 0.1"),
        ("b", other(), "max_drop: 0.2\noutput: b"),
    ):
        write(report, tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(config)
    difference = compare_runs(tmp_path / "a", tmp_path / "b")
    assert [(setting.key, setting.first, setting.second) for setting in difference.settings] == [("max_drop", 0.1, 0.2)]
    assert (difference.first.name, difference.second.name) == ("a", "b")
    json.loads(json.dumps(difference.to_dict(), allow_nan=False))


@pytest.mark.parametrize("content", [None, "{", '{"schema": 99}', "\xff"], ids=["none", "half", "newer", "no text"])
def test_a_path_that_is_not_a_run_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StoreError, match=tmp_path.name):
        compare_runs(tmp_path, example_reports.ordinary())


@pytest.mark.parametrize("width", [40, 100])
def test_the_terminal_shows_the_difference_at_any_width(difference, width):
    console = Console(width=width, record=True, file=None)
    with console.capture() as capture:
        console.print(DifferenceTable(difference, rows=1))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(capture.get().split())
    assert "and 1 more" in text
    assert "weight.dtype" in text
    assert "Layers that differ" in text


def test_sixty_columns_do_not_break_the_compared_values():
    runs = (
        replace(example_reports.ordinary(), title="a"),
        replace(example_reports.ordinary(), title="b", target="openvino"),
    )
    console = Console(width=60, record=True, file=None)
    with console.capture() as capture:
        console.print(DifferenceTable(compare_runs(*runs)))
    assert "speed against float" in capture.get()
