"""The report as data, as lines in a terminal, and as a page that no name can break."""

import html
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from scalepoint.errors import StoreError
from scalepoint.operation_coverage import Coverage
from scalepoint.report import (
    GraphNode,
    Report,
    Reproduction,
    compare_runs,
    placement_graph,
    to_html,
    write,
)
from scalepoint.report.html import jinja_environment
from scalepoint.report.placement_graph import build_blocks
from scalepoint.report.terminal import WrappedText
from scalepoint.report.view import ReportView, choose_colour_class
from scalepoint.results import PrecisionChange, Score, TensorHistogram, TrialSummary, is_within
from scalepoint.support.formatting import (
    describe_quality,
    escape_unprintable,
    format_count,
    format_decibels,
    format_ratio,
    format_share,
    format_time,
    format_value,
    render_as_text,
    shorten,
)
from scalepoint.verification import Choice, Status, Verification
from tests.errors import raises
from tests.report import example_reports

REPORTS = {
    "ordinary": example_reports.ordinary,
    "bare": example_reports.bare,
    "evil": example_reports.evil,
    "large": lambda: example_reports.large(300),
}
VOID = {"meta", "input", "wbr"}


class Page(HTMLParser):
    """What a browser's parser would see: elements, attributes, and that all is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        assert len(dict(attributes)) == len(attributes)
        self.elements.append((name, dict(attributes)))
        if "id" in dict(attributes):
            self.ids.append(dict(attributes)["id"])
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name


@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
def test_a_report_read_from_json_is_the_same(make):
    report = make()
    again = Report.from_json(report.to_json())
    assert again.to_dict() == report.to_dict()
    if make is not example_reports.evil:  # it has not-a-numbers, which equal nothing
        assert again == report
    json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json_contains_the_result_of_verification():
    data = example_reports.ordinary().to_dict()
    assert data["schema"] == 2
    assert data["verification"]["holds"] is True
    assert data["verification"]["status"] == "ok"
    assert data["verification"]["unoptimized"][0]["sqnr"] == "Infinity"


def test_numbers_of_numpy_and_paths_are_plain_in_json(tmp_path):
    layers = (example_reports.layer_error("fc", np.float32(1.5), np.float64(0.5)),)
    report = replace(
        example_reports.bare(), layers=layers, config={"path": tmp_path, "set": {2, 1}, "tuple": (1, math.nan)}
    )
    data = json.loads(report.to_json())
    assert data["layers"][0]["sqnr_db"] == 1.5
    assert data["config"] == {"path": str(tmp_path), "set": [1, 2], "tuple": [1, "NaN"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema 1.*schema 2.*deploy again"),
        ({"schema": 3}, "schema 3.*schema 2.*deploy again"),
        ({"schema": None}, "schema None"),
        ({"coverage": 3}, "coverage"),
        ({"coverage": {"operations": [{"name": "a"}]}}, r"coverage\.operations\.0\.kind"),
        ({"layers": [{"name": "a", "kind": "linear", "precision": "int8", "sqnr_db": "much"}]}, r"layers\.0\.sqnr_db"),
        ({"title": None}, "title"),
        ({"histograms": [{"name": "a", "role": "weight", "stub": "", "edges": [1], "counts": [1]}]}, "edges"),
    ],
)
def test_another_schema_or_a_wrong_value_is_a_clear_error(change, message):
    data = example_reports.bare().to_dict() | change
    with pytest.raises(StoreError, match=message):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("schema", [1, 3], ids=["older", "newer"])
def test_a_file_of_another_schema_is_refused_by_name(tmp_path, schema):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(example_reports.ordinary().to_dict() | {"schema": schema}))
    with raises(StoreError, str(path), f"schema {schema}", "reads schema 2", "deploy again"):
        Report.from_file(path)
    with raises(StoreError, str(path), f"schema {schema}"):
        compare_runs(tmp_path, example_reports.ordinary())


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "{", '{"schema": 2}', "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_text_that_is_not_a_report_is_refused(text):
    with pytest.raises(StoreError):
        Report.from_json(text)


def test_a_truncated_file_is_refused_at_every_length():
    text = example_reports.bare().to_json().strip()
    for length in range(len(text)):
        with pytest.raises(StoreError):
            Report.from_json(text[:length])


@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_the_terminal_shows_the_report_at_any_width(make, width):
    file = StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="truecolor").print(make().table())
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert all(len(line) <= width for line in plain.splitlines())
    assert not set(plain) & {"\x1b", "\x00", "\u202e", "\u2028"}


def test_forty_columns_show_names_and_errors():
    file = StringIO()
    Console(file=file, width=40).print(example_reports.ordinary().table(verbose=True))
    text = file.getvalue()
    assert "layer4.0.conv1" in text
    assert "22.9" in text
    assert "float  quantized" in text  # of the slowest layers
    assert "3.95x" in text
    assert "cosine" not in text


def test_a_next_step_of_two_lines_is_indented():
    file = StringIO()
    Console(file=file, width=60).print(example_reports.ordinary().table())
    assert re.search(r"\nNext: measure the speed again: scalepoint bench *\n      out/float.onnx", file.getvalue())


def test_a_speed_limit_is_not_shown_as_an_accuracy_limit():
    lines = replace(example_reports.ordinary(), max_drop=None, min_speed=1.5).summary()
    assert "speed: at least the required 1.50x" in lines
    assert not any(line.startswith("accuracy: at least") for line in lines)


def test_markup_in_a_name_is_shown_as_it_is():
    assert "[bold red]markup[/bold red]" in str(example_reports.evil())


def test_str_is_ascii_if_the_names_are():
    text = str(example_reports.ordinary())
    assert text.isascii()
    assert "\x1b" not in text
    assert "1.87x the speed" in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert "\n".join(example_reports.ordinary().summary()).isascii()


def test_summary_of_an_ordinary_run():
    report = replace(example_reports.ordinary(), output_db=28.9)
    assert report.summary()[:12] == [
        "resnet18 for onnxruntime. Verified in ONNX Runtime: 1.87x the speed of float, 3.95x smaller.",
        "outputs: 28.9 dB against the float model: good, error 3.6%",
        "top-1: 0.6976 -> 0.6958 (-0.0018, in the runtime)",
        "top-5: 0.8908 -> 0.8896 (-0.0012, in the runtime)",
        "accuracy: the drop is within the allowed 0.002",
        "accuracy: 3 files tried; raised: all layers to other ranges, layer4.1.conv2 to float",
        "quantized: 20 of 22 layers, 93.8% of the MACs: int8 weights per channel, uint8 activations",
        "precision: 13 int4, 7 int8: 0.178 of the float file's size, 0.18 allowed; 29.6 dB expected",
        "tuned: 20 layers, 19 with changed codes, median gain +8.2 dB; 1 not tuned",
        "speed: 1.87x the fastest float file: 31.20 ms -> 16.68 ms, 1 thread",
        "size: 3.95x smaller: 46.75 MB -> 11.83 MB",
        "checked: ONNX Runtime gives the simulated values: within 41.3 dB",
    ]


@pytest.mark.parametrize(
    ("verification", "words"),
    [
        (None, "Not verified in a runtime"),
        (Verification("m.onnx", "openvino", Status.CRASHED, "exit -11"), "Not verified: OpenVINO: crashed. exit -11"),
        (
            Verification("m.mlpackage", "coreml", Status.NOT_VERIFIED, "fancy can only be checked on macOS"),
            "Not verified here: fancy can only be checked on macOS",
        ),
        (example_reports.verification(sqnr=12.0), "departs from the simulation: 12.0 dB, less than the required 20 dB"),
        (example_reports.verification(ratio=0.83), "Slower than float: 0.83x its speed"),
        (example_reports.verification(ratio=0.999), "as fast as float, 0.99x is within the noise"),
    ],
)
def test_the_verdict_lists_every_problem(verification, words):
    report = replace(example_reports.ordinary(), verification=verification)
    assert re.search(words, report.summary()[0])
    assert re.search(words, to_html(report).replace("&lt;", "<"))


@pytest.mark.parametrize(
    ("verification", "words"),
    [
        (example_reports.verification(sqnr=math.inf), "gives the simulated values: exactly"),
        (example_reports.verification(sqnr=41.3), "gives the simulated values: within 41.3 dB"),
        (example_reports.verification(sqnr=12.0), "does not give the simulated values: 12.0 dB"),
        (
            replace(example_reports.verification(), choices=(Choice("decoder.topk", 141.0, 0.0),)),
            "within 41.3 dB; .* chose differently from the simulation among .* at decoder.topk .*141.0 dB",
        ),
    ],
)
def test_one_line_says_whether_the_runtime_agrees_with_the_simulation(verification, words):
    report = replace(example_reports.ordinary(), verification=verification)
    assert re.search(f"checked: ONNX Runtime .*{words}", "\n".join(report.summary()))
    assert re.search(words, html.unescape(to_html(report)))


def test_outputs_far_from_the_float_model_come_first_without_a_metric():
    report = replace(example_reports.ordinary(), output_db=7.0)
    assert report.verdict().startswith("Verified")
    report = replace(report, accuracy=())
    assert report.verdict().startswith("Far from the float model: 7.0 dB")
    assert "7.0 dB" in to_html(report).partition("<script")[0]


@pytest.mark.parametrize(
    ("ratio", "spread", "is_same"), [(0.99, 0.0, True), (0.9, 0.04, False), (0.9, 0.2, True), (1.1, 0.2, True)]
)
def test_a_ratio_within_the_quartiles_is_called_the_same_speed(ratio, spread, is_same):
    verification = example_reports.verification(ratio)
    latency = replace(verification.latency, spread=(spread, spread))
    report = replace(example_reports.ordinary(), verification=replace(verification, latency=latency))
    assert (latency.is_same, latency.is_slower) == (is_same, not is_same)
    assert ("within the noise" in report.verdict()) == is_same
    assert report.verdict().startswith("Slower") == (not is_same)


def test_the_result_has_about_twenty_lines_and_no_name_is_broken_inside_a_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = example_reports.ordinary()
    name = "encoder.layers.0.attention." * 2 + "projection"
    layers = tuple(
        replace(layer, name=f"layer{index}.{name}", sqnr_db=5.0) for index, layer in enumerate(report.layers)
    )
    text = str(replace(report, layers=layers))
    assert len(text.splitlines()) <= 26  # with a search, a budget and a warning
    names = re.sub(r"\s+", " ", text.partition("weakest")[2].partition("warning:")[0])
    assert names.count("projection 5.0 dB (poor)") == 3
    assert len(repr(report)) < 200


@pytest.mark.parametrize("width", [12, 30, 50])
def test_a_long_name_is_broken_at_dots(width):
    file = StringIO()
    Console(file=file, width=width).print(WrappedText("encoder.layers.0.attention.projection", ""))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert "".join(lines) == "encoder.layers.0.attention.projection"
    assert all(line.endswith(".") for line in lines[:-1])


def test_all_norms_are_one_line_whatever_their_reasons():
    norms = [example_reports.float_row(f"layers.{index}.norm", f"reason {index}") for index in range(12)]
    report = replace(example_reports.bare(), coverage=Coverage((example_reports.operation("fc"), *norms)))
    assert [line for line in report.summary() if line.startswith("float: ")] == ["float: 12 norms: reason 0"]


def test_the_colour_of_a_precision_is_the_same_in_every_report():
    colours = {
        "w int8 per_channel, x uint8": "p-int8",
        "int8": "p-int8",
        "w int8 per_channel": "p-weight8",
        "w int4 per_block": "p-weight4",
    }
    colours |= {
        "stored int8 per_channel": "p-weight8",
        "w fp8_e4m3, x fp8_e4m3": "p-float8",
        "w int2": "p-weight3",
        "float": "p-float",
    }
    assert {precision: choose_colour_class(precision) for precision in colours} == colours


def test_advice_fits_a_score_that_is_not_below_that_of_the_float_model():
    layers = (example_reports.layer_error("bad", 3.0),)
    report = replace(example_reports.ordinary(), layers=layers, accuracy=(Score("top-1", 0.71, 0.70),), max_drop=None)
    assert not any("leave the worst layer" in step for step in report.next_steps())
    worse = replace(report, accuracy=(Score("top-1", 0.69, 0.70),))
    assert any("leave the worst layer" in step for step in worse.next_steps())


def test_measured_placements_are_one_line():
    trials = (TrialSummary(None, speed=1.1), TrialSummary(None, speed=1.2), TrialSummary(None, speed=1.3, is_best=True))
    report = replace(example_reports.ordinary(), trials=trials, max_drop=None, allocation=None)
    assert "placement: 3 placements measured; the fastest is kept" in report.summary()
    page = to_html(report)
    assert "3 placements measured; the fastest is kept" in page
    assert "Files that were tried" not in page


@pytest.mark.parametrize(("speed", "is_slower"), [(0.83, True), (0.99, False), (1.2, False)])
def test_the_page_calls_a_file_slower_only_beyond_noise(speed, is_slower):
    page = to_html(replace(example_reports.ordinary(), verification=example_reports.verification(ratio=speed)))
    assert ("the speed of float: slower" in page) == is_slower


@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
def test_the_page_is_valid_html_without_external_resources(make):
    page = Page(to_html(make()))
    allowed = {"href": re.compile("#"), "src": re.compile("(?!)"), "style": re.compile("(?!)")}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert all(allowed[name].match(value) for name, value in attributes.items() if name in allowed)
    scripts = [attributes for name, attributes in page.elements if name == "script"]
    assert scripts == [{"type": "application/json", "id": "report-data"}, {}]
    assert not {name for name, _ in page.elements} & {"img", "link", "iframe", "object", "base", "form"}
    assert len(page.ids) == len(set(page.ids))
    links = {attributes["href"][1:] for name, attributes in page.elements if name == "a"}
    assert links <= set(page.ids)


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_names_of_layers_cannot_add_elements_to_the_page(name):
    def shape(text: str) -> list[str]:
        return [element for element, _ in Page(text).elements if element != "wbr"]

    def report(name: str) -> Report:
        rows = Coverage((example_reports.operation(name, kind=name, reason=name or "x"),))
        nodes = (GraphNode(name.replace(".", " "), name),)
        return Report(
            name, name, name, rows, layers=(example_reports.layer_error(name, 3.0),), graph=nodes, warnings=(name,)
        )

    to_html(report(name)).encode()
    expected = shape(to_html(report("a")))
    elements = shape(to_html(report(name)))
    assert len(elements) == len(expected)


def test_the_data_in_the_page_is_the_report_and_is_escaped():
    report = example_reports.evil()
    text = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', to_html(report), re.S)[1]
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == report.to_dict()


def test_the_policy_lists_exactly_the_scripts_and_styles_of_the_page():
    text = to_html(example_reports.bare())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_page_of_300_layers_is_below_a_megabyte_and_the_same_every_time():
    text = to_html(example_reports.large(300))
    assert len(text.encode()) < 1_000_000
    assert text == to_html(example_reports.large(300))


def test_the_page_says_how_to_get_missing_parts():
    text = to_html(example_reports.bare())
    for words in ("evaluate=", "float_path=", "MACs not known", "scalepoint verify"):
        assert words in text
    for identifier in ("error", "histograms", "placement", "circumstances"):
        assert f'id="{identifier}"' not in text


def test_an_empty_report_is_a_valid_page():
    empty = Report("", "", "", Coverage(()))
    Page(to_html(empty))
    assert "No operation with weights" in to_html(empty)
    assert str(empty)


def test_repeated_names_have_separate_errors():
    rows = Coverage((example_reports.operation("a"), example_reports.operation("a"), example_reports.operation("b")))
    layers = (
        example_reports.layer_error("a", 11.0),
        example_reports.layer_error("a", 22.0),
        example_reports.layer_error("c", 33.0),
    )
    text = to_html(replace(example_reports.bare(), coverage=rows, layers=layers))
    assert re.findall(r'c6 number" role="cell" data-v="(\d+)"', text) == ["11", "22", "33"]


def test_nan_errors_are_listed_first_among_the_worst_layers():
    layers = (
        example_reports.layer_error("good", 40),
        example_reports.layer_error("bad", 5),
        example_reports.layer_error("nan", math.nan),
        example_reports.layer_error("same", math.inf),
    )
    assert [layer.name for layer in replace(example_reports.bare(), layers=layers).worst(4)] == [
        "nan",
        "bad",
        "good",
        "same",
    ]


def test_histogram_needs_one_more_edge_than_counts():
    with raises(ValueError, "2 counts", "3 edges"):
        TensorHistogram("a", "weight", "", (0, 1), (1, 1), 0, 1)


def test_the_change_of_a_score_is_the_difference_of_its_values():
    assert Score("m", 0.4, 0.5).change == pytest.approx(-0.1)
    assert Score("m", 0.3, 0.5, "runtime", simulated_value=0.4).change == pytest.approx(-0.2)


def test_inner_blocks_are_opened_if_that_gives_few_boxes(monkeypatch):
    inside = [GraphNode(f"encoder.{layer}.{name}", "k") for layer in range(3) for name in "abc"]
    monkeypatch.setattr(placement_graph, "MAX_OPENED_BOXES", 5)
    whole_model = build_blocks([GraphNode("embeddings.word", "k"), *inside, GraphNode("pooler", "k")])[0]
    assert [box.label for box in whole_model.boxes] == [
        "embeddings.word",
        "encoder.0",
        "encoder.1",
        "encoder.2",
        "pooler",
    ]
    monkeypatch.setattr(placement_graph, "MAX_OPENED_BOXES", 4)
    whole_model = build_blocks([GraphNode("embeddings.word", "k"), *inside, GraphNode("pooler", "k")])[0]
    assert [box.label for box in whole_model.boxes] == ["embeddings.word", "encoder", "pooler"]


def test_a_tensor_between_integer_layers_is_drawn_as_codes():
    nodes = (GraphNode("a", "conv"), GraphNode("b", "conv", ("a",), "x uint8", ("a",)), GraphNode("c", "add", ("b",)))
    page = to_html(replace(example_reports.bare(), graph=nodes))
    assert page.count('class="edge codes"') == 1
    assert page.count('class="edge"') == 1
    assert "a quantized tensor" in page


def test_names_of_the_worst_layers_do_not_overlap():
    layers = tuple(example_reports.layer_error(f"layer3.{index}.convolution", 12.0 + index / 100) for index in range(3))
    page = to_html(
        replace(
            example_reports.bare(),
            layers=layers + tuple(example_reports.layer_error(f"x{i}", 40.0) for i in range(300)),
        )
    )
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="worst-name">([^<]*)', page)
    spans = [(float(x), float(x) + 7 * len(text), float(y)) for x, y, text in labels]
    assert len(spans) == 3
    for index, (left, right, y) in enumerate(spans):
        for other_left, other_right, other_y in spans[:index]:
            assert left > other_right or right < other_left or abs(y - other_y) >= 12


@pytest.mark.parametrize("share", [0.9996, 0.99999, 1.0, 0.5])
def test_the_terminal_and_the_page_round_equally(share):
    rows = (
        example_reports.operation("a", macs=int(share * 1e6)),
        example_reports.float_row("b", "why", macs=10**6 - int(share * 1e6)),
    )
    report = replace(example_reports.bare(), coverage=Coverage(rows if share < 1 else rows[:1]))
    share_text = format_share(share)
    assert f"{share_text} of the MACs" in report.coverage.summary()
    assert f'<span class="number">{share_text}</span>' in to_html(report)


def test_a_speed_is_the_same_number_everywhere():
    report = example_reports.ordinary(ratio=0.5899)
    assert "0.58x" in report.verdict()
    assert "0.58x" in str(report.verification.latency)
    assert "0.59" not in to_html(report).partition("<script")[0] + str(report)


def test_an_unverified_run_mentions_the_simulation_only_if_it_has_its_numbers():
    report = replace(example_reports.ordinary(), verification=None)
    assert "of the simulation" in report.verdict()
    assert "of the simulation" not in replace(report, accuracy=(), layers=()).verdict()


def test_layers_that_are_faster_in_float_share_a_card_whatever_their_times():
    times = [(1.2e-6, 1.4e-6), (18e-6, 25e-6), (1e-3, 1.5e-3)]
    rows = [example_reports.float_row(f"layer{index}", "faster in float") for index in range(len(times))]
    rows = [replace(row, saves=4e-6, seconds=seconds) for row, seconds in zip(rows, times, strict=True)]
    report = replace(example_reports.bare(), coverage=Coverage(tuple(rows)))
    assert "float: 3 norms: faster in float" in report.summary()
    assert Report.from_json(report.to_json()).coverage == report.coverage
    page = to_html(report).partition('id="left-float"')[2]
    assert page.count("<h3>faster in float") == 1
    assert "3 operations" in page
    assert "12 us" in page


def test_a_command_in_the_next_steps_can_be_typed_whatever_the_folder_is_called():
    verification = replace(example_reports.verification(sqnr=1.0), path="my out/model.onnx")
    again = Reproduction("", "", "scalepoint deploy -c config.yaml --trust")
    report = replace(example_reports.ordinary(), verification=verification, reproduction=again)
    assert "scalepoint compare 'my out' -c 'my out/config.yaml' --trust" in "\n".join(report.next_steps())


def test_only_operations_that_the_config_names_are_shown_as_requested():
    rows = (
        example_reports.float_row("a", "asked for by the config", is_asked=True),
        example_reports.float_row("b", "a norm"),
    )
    page = to_html(replace(example_reports.bare(), coverage=Coverage(rows)))
    assert page.count(", as requested") == 1


@pytest.mark.parametrize(
    ("sqnr", "word"),
    [(60, "very good"), (28.9, "good"), (20, "fair"), (3, "poor"), (math.nan, "broken"), (math.inf, ""), (None, "")],
)
def test_a_noise_level_has_a_word_next_to_it(sqnr, word):
    assert describe_quality(sqnr) == word
    if sqnr is not None:
        report = replace(example_reports.bare(), layers=(example_reports.layer_error("only", sqnr),))
        assert word in str(report)
        assert word in report.summary()[-1]


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({}, "measure the speed again: scalepoint bench out/float.onnx out/model.onnx"),
        ({"accuracy": ()}, "deploy with"),
        (
            {"layers": (example_reports.layer_error("bad", 3.0),), "max_drop": 0.001},
            "overrides: [{name: 'bad', weight: float, activation: float}]",
        ),
        ({"warnings": ("a smoke run: two batches",)}, "the same call without smoke"),
    ],
)
def test_the_report_says_what_to_do_next(change, step):
    report = example_reports.ordinary()
    report = replace(report, **{"verification": replace(report.verification, path="out/model.onnx"), **change})
    assert any(step in text for text in report.next_steps())
    assert "Next: " in str(report)
    assert report.next_steps()[0] in html.unescape(to_html(report))


def test_a_file_that_is_slower_or_departs_has_special_advice():
    report = example_reports.ordinary(ratio=0.5)
    assert "scalepoint targets" in report.next_steps()[0]
    broken = replace(report, verification=replace(report.verification, status=Status.CRASHED))
    assert "scalepoint doctor" in broken.next_steps()[0]


def test_blocks_are_the_tree_of_the_names_without_repetition(monkeypatch):
    nodes = [GraphNode("m.a.x", "k"), GraphNode("m.a.y", "k", ("m.a.x",)), GraphNode("m.b.c.z", "k", ("m.a.y",))]
    monkeypatch.setattr(placement_graph, "MAX_OPENED_BOXES", 1)
    first, second = build_blocks(nodes)
    assert [first.title, second.title] == ["m", "m.a"]  # the whole model is m, and m.b holds one operation
    assert [(box.label, box.row, box.block) for box in first.boxes] == [("a", 0, ("m", "a")), ("b.c.z", 1, None)]
    assert [box.row for box in second.boxes] == [0, 1]


def test_a_block_with_a_cycle_through_another_block_is_drawn(monkeypatch):
    nodes = [
        GraphNode("a.x", "k"),
        GraphNode("b.x", "k", ("a.x",)),
        GraphNode("a.y", "k", ("b.x",)),
        GraphNode("b.y", "k"),
    ]
    monkeypatch.setattr(placement_graph, "MAX_OPENED_BOXES", 1)
    whole_model = build_blocks(nodes)[0]
    assert [box.inputs for box in whole_model.boxes] == [{1}, {0}]
    to_html(replace(example_reports.bare(), graph=tuple(nodes)))


def test_a_block_of_many_operations_says_how_many_are_hidden():
    nodes = tuple(GraphNode(f"op{index}", "add", (f"op{index - 1}",)) for index in range(1000))
    assert build_blocks(nodes)[0].left_out == 800
    assert "and 800 more, not drawn" in to_html(replace(example_reports.bare(), graph=nodes))


def test_write_creates_or_replaces_both_files(tmp_path):
    page = write(example_reports.bare(), tmp_path / "new" / "out")
    write(example_reports.ordinary(), page.parent)
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    assert Report.from_json((page.parent / "report.json").read_text()) == example_reports.ordinary()
    assert page.read_text() == to_html(example_reports.ordinary())


def test_writing_into_a_file_is_a_scalepoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write into"):
        write(example_reports.bare(), tmp_path / "file")


def test_hostile_names_can_be_written(tmp_path):
    write(example_reports.evil(), tmp_path)
    assert Report.from_json((tmp_path / "report.json").read_text()).title == example_reports.EVIL[0]


def test_printing_works_with_an_ascii_terminal():
    code = "from tests.report import example_reports; print(example_reports.ordinary())"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_every_value_of_a_template_is_escaped_and_shows_control_characters():
    template = jinja_environment().from_string('<td title="{{ text }}">{{ text }}{{ nothing }}</td>{{ data|tojson }}')
    assert template.render(text="<b>'\"&\x1b\u202e", nothing=None, data="</script>\u2028&") == (
        '<td title="&lt;b&gt;&#39;&#34;&amp;\\x1b\\u202e">&lt;b&gt;&#39;&#34;&amp;\\x1b\\u202e</td>'
        '"\\u003c/script\\u003e\\u2028\\u0026"'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(None), "?"), (format_count(999), "999"), (format_count(1_500_000), "1.5M"),
        (format_value(0.69763), "0.6976"), (format_value(76.131), "76.13"), (format_value(math.nan), "nan"),
        (format_share(0.99999), "99.9%"), (format_share(1.0), "100%"), (format_share(0.0), "0%"),
        (format_share(2e-5), "<0.01%"), (format_decibels(math.inf), "exact"), (format_decibels(-3.04), "-3.0"),
        (format_decibels(math.nan), "not a number"),
        (format_ratio(0.999), "0.99x"), (format_ratio(1.0), "1.00x"), (format_ratio(1.87), "1.87x"),
        (format_time(5e-5), "50 us"), (format_time(0.0312), "31.20 ms"), (format_time(22.4), "22.4 s"),
        (escape_unprintable("a\u202eb\nc"), "a\\u202eb\nc"), (shorten("ab" * 100, 10), "ab...babab"),
    ],
)  # fmt: skip
def test_numbers_are_never_rounded_into_something_better(text, expected):
    assert text == expected


def test_precision_changes_are_followed_back_to_the_first_trial():
    report = example_reports.ordinary()
    assert [(change.layer, change.to) for change in report.precision_changes()] == [
        ("", "other ranges"),
        ("layer4.1.conv2", "float"),
    ]
    assert replace(report, trials=report.trials[:1]).precision_changes() == ()
    looped = replace(report, trials=(TrialSummary(1.0, (PrecisionChange("a", "float"),), 0, True),))
    assert len(looped.precision_changes()) == 1


def test_a_drop_that_is_too_large_is_reported():
    report = replace(example_reports.ordinary(), max_drop=0.001)
    assert "accuracy: the drop is more than the allowed 0.001" in report.summary()
    assert "more than the allowed 0.001" in to_html(report)
    assert 'class="tile warn"' in to_html(report)


def test_the_page_has_the_command_to_reproduce_the_run():
    page = to_html(example_reports.ordinary())
    for text in ("pip install scalepoint==0.1.0", "scalepoint deploy -c out/config.yaml", "calibration_data,"):
        assert text in page
    assert page.count('class="copy"') == 3
    assert "How to reproduce" not in to_html(example_reports.bare())


@pytest.mark.parametrize(
    ("before", "after", "allowed", "holds"),
    [
        (77.30000019073486, 77.19999998, 0.1, True),  # accuracies that float32 rounded
        (0.7730000019, 0.7719999999, 0.001, True),
        (77.3, 77.19, 0.1, False),
        (1.0, 2.0, 0.0, True),
        (1.0, math.nan, 5.0, False),
    ],
)
def test_a_drop_within_rounding_is_not_reported(before, after, allowed, holds):
    assert is_within(before, after, allowed) is holds
    assert Score("score", after, before).is_within(allowed) is holds


def test_the_page_shows_precision_by_layer_the_front_and_tuning():
    report = example_reports.ordinary()
    page = to_html(report)
    assert 'id="allocation"' in page
    assert "budget 0.18" in page
    assert page.count(">all int8<") == 1
    assert "12 int4, 8 int8" in page  # the counts of a point
    assert "cannot run dtype int2" in html.unescape(page)
    assert "nearest codes" in page
    assert "its weight is shared with a layer before it" in page
    without = to_html(replace(report, allocation=None, tuning=None))
    assert "Precision by layer" not in without
    assert "<h2>Tuning</h2>" not in without


def test_the_terminal_shows_the_front_and_the_layers_that_differ():
    text = render_as_text(example_reports.ordinary().table(verbose=True))
    assert "<- chosen near here" in text
    assert text.index("layer1.1.conv2") < text.index("and 10 more")


def test_a_file_without_a_float_file_shows_its_size():
    report = example_reports.ordinary()
    page = to_html(replace(report, verification=replace(report.verification, float_size=None)))
    assert "no float file to compare with" in page


def test_layers_without_an_operation_are_listed_in_the_order_of_the_model():
    names = ["unknown.first", "unknown.second", "unknown.third"]
    layers = tuple(example_reports.layer_error(name, 20.0) for name in names)
    rows = ReportView(replace(example_reports.ordinary(), layers=layers)).layer_rows
    assert [row.name for row in rows if not row.is_operation] == names
