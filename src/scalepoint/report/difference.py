"""Compares two runs: numbers, layers, settings and environment.

    Report, Report  ->  Difference  ->  terminal, JSON

A run is a folder that deploy wrote. Runs with other machines, data or models can be compared too; warnings say so.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from scalepoint.errors import DocumentError, StoreError
from scalepoint.report.headline import low_share
from scalepoint.report.html import JSON_FILE
from scalepoint.report.model import CONFIG_FILE, Report
from scalepoint.report.terminal import MIN_WIDE_COLUMNS, plain_table
from scalepoint.report.view import to_json_text
from scalepoint.support.formatting import (
    format_decibels,
    format_ratio,
    format_share,
    format_size,
    format_time,
    format_value,
    render_as_text,
    shorten,
    to_one_line,
)
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_yaml

INPUT_NAMES = {"model": "the model", "calibration data": "the calibration data", "example inputs": "the example inputs"}
IGNORED_KEYS = ("output", "root")  # folders differ between runs without changing the result
FORMATTERS: Mapping[str, Callable[[float], str]] = {
    "score": format_value,
    "bytes": format_size,
    "seconds": format_time,
    "times": format_ratio,
    "share": format_share,
    "dB": lambda value: f"{format_decibels(value)} dB" if math.isfinite(value) else format_decibels(value),
}
NUMBERS: tuple[tuple[str, str, bool | None], ...] = (  # name, unit, whether higher is better; None if neither is
    ("size", "bytes", False),
    ("speed against float", "times", True),
    ("latency", "seconds", False),
    ("bits per weight", "score", False),
    ("generated tokens per second", "score", True),
    ("logits against float", "dB", True),
    ("outputs against float", "dB", True),
    ("agreement with the simulation", "dB", True),
    ("worst layer", "dB", True),
    ("MACs in low precision", "share", None),
    ("weights in low precision", "share", None),
)
MIN_SHOWN_SHARE = 0.0005  # smaller changes would be printed as 0.0 %, and count as "same"
MIN_TIME_NOISE = 0.03  # times of two files with the same kernels differ by up to this share


@dataclass(frozen=True)
class ComparedNumber:
    """One number of both runs.

    Attributes:
        name: What it measures.
        unit: "score", "bytes", "seconds", "times", "share" or "dB".
        first, second: The number of each run; None if it was not measured.
        is_better_high: Whether a higher number is better; None if neither is better.
        noise: Smallest relative change that is more than measurement noise.
    """

    name: str
    unit: str
    first: float | None
    second: float | None
    is_better_high: bool | None = True
    noise: float = 0.0

    @property
    def is_noise(self) -> bool:
        """Whether two measurements of the same file could differ by as much."""
        return self._share is not None and abs(self._share) <= self.noise

    @property
    def change(self) -> float | None:
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def _share(self) -> float | None:
        """The relative change, for units that are compared in percent."""
        if self.unit not in ("bytes", "seconds", "times") or not self.first or self.second is None:
            return None
        return self.second / self.first - 1

    @property
    def mood(self) -> str:
        """One of "better", "worse" and "same"; "" if a number is missing, neither is better, or the change is noise."""
        change = self.change
        is_zero = self._share is not None and abs(self._share) < MIN_SHOWN_SHARE
        if self.first == self.second or is_zero:
            return "same"
        if change is None or math.isnan(change) or self.is_better_high is None or self.is_noise:
            return ""
        return "better" if (change > 0) == self.is_better_high else "worse"

    def texts(self) -> tuple[str, str, str]:
        """Return both numbers and the change as text."""
        first, second = ("-" if value is None else FORMATTERS[self.unit](value) for value in (self.first, self.second))
        if self.mood == "same":
            return first, second, "same"
        if self.change is None or not math.isfinite(self.change):
            return first, second, f"{first} -> {second}" if self.mood in ("better", "worse") else ""
        if self._share is not None:
            return first, second, f"{self._share:+.1%}{', within the noise' if self.is_noise else ''}"
        if self.unit == "share":
            return first, second, f"{100 * self.change:+.3g} points"
        return first, second, f"{self.change:+.1f} dB" if self.unit == "dB" else f"{self.change:+.4g}"


@dataclass(frozen=True)
class LayerPair:
    """One layer in both runs: its precision, and its error. None if a run does not have the layer."""

    name: str
    precision: tuple[str | None, str | None]
    sqnr_db: tuple[float | None, float | None]

    @property
    def change(self) -> float:
        """Change of the SQNR in dB; 0 if one is missing or both are exact."""
        first, second = self.sqnr_db
        change = 0.0 if first is None or second is None else second - first
        return 0.0 if math.isnan(change) else change

    @property
    def is_same(self) -> bool:
        return self.precision[0] == self.precision[1] and not self.change


@dataclass(frozen=True)
class ChangedSetting:
    """A key of the config or of the environment whose value differs; None if a run does not have it."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class RunDescription:
    """One of the two runs."""

    name: str
    title: str
    target: str
    created: str
    verdict: str


@dataclass(frozen=True)
class Difference:
    """The comparison of two runs. Layers with a different precision come first, then by change of their error."""

    first: RunDescription
    second: RunDescription
    numbers: tuple[ComparedNumber, ...]
    layers: tuple[LayerPair, ...]
    settings: tuple[ChangedSetting, ...]
    circumstances: tuple[ChangedSetting, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def changed_layers(self) -> tuple[LayerPair, ...]:
        return tuple(layer for layer in self.layers if not layer.is_same)

    def summary(self) -> str:
        """Return one sentence: which numbers are better, which are worse, how many layers differ."""
        parts = []
        for mood in ("better", "worse"):
            names = [number.name for number in self.numbers if number.mood == mood]
            if names:
                parts.append(f"{mood}: {', '.join(names)}")
        parts.append(f"{len(self.changed_layers)} of {len(self.layers)} layers differ")
        return f"{self.second.name} against {self.first.name}: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        numbers = [
            {**to_jsonable(number), "change": to_jsonable(number.change), "mood": number.mood}
            for number in self.numbers
        ]
        return {**to_jsonable(self), "numbers": numbers, "summary": self.summary()}

    def __str__(self) -> str:
        return render_as_text(DifferenceTable(self))


@dataclass(frozen=True)
class DifferenceTable:
    """A comparison that rich can print at any width.

    Attributes:
        difference: The comparison.
        rows: Largest number of layers to print.
    """

    difference: Difference
    rows: int = 10

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        difference, narrow = self.difference, options.max_width < MIN_WIDE_COLUMNS
        first, second = difference.first, difference.second
        for side in (first, second):
            yield Text(f"{to_one_line(side.name)}: {shorten(side.title)} for {shorten(side.target)}", style="bold")
            yield Text(f"  {to_one_line(side.verdict)}")
        for warning in difference.warnings:
            yield Text(f"warning: {to_one_line(warning)}", style="yellow")
        yield Text()
        names = (shorten(first.name, 24), shorten(second.name, 24))
        numbers = [(shorten(number.name, 40), *number.texts()) for number in difference.numbers]
        # In a narrow terminal, the names of the runs would take the space of the names of the numbers.
        heads = ("first", "second") if narrow else names
        yield plain_table(("", *heads, "change"), numbers, numbers=(1, 2, 3))
        yield from self._layers(narrow)
        groups = (("Settings that differ", difference.settings), ("Environments that differ", difference.circumstances))
        for title, settings in groups:
            if settings:
                yield Text()
                yield Text(title, style="bold")
                yield plain_table(("", *names), [_setting_texts(setting) for setting in settings])
        yield Text()
        yield Text(to_one_line(difference.summary()))

    def _layers(self, narrow: bool) -> RenderResult:
        changed = self.difference.changed_layers
        if not changed:
            return
        yield Text()
        yield Text("Layers that differ", style="bold")
        rows = [_layer_texts(layer) for layer in changed[: self.rows]]
        if len(changed) > self.rows:
            rows.append((f"and {len(changed) - self.rows} more", "", "", "", ""))
        if narrow:
            heads = ("layer", "dB", "second", "change")
            yield plain_table(heads, [(row[0], *row[2:]) for row in rows], numbers=(1, 2, 3))
        else:
            yield plain_table(("layer", "runs in", "dB", "second", "change"), rows, numbers=(2, 3, 4))


def _setting_texts(setting: ChangedSetting) -> tuple[str, str, str]:
    return shorten(setting.key, 60), shorten(_value_text(setting.first), 60), shorten(_value_text(setting.second), 60)


def _value_text(value: Any) -> str:
    return "-" if value is None else to_json_text(value)


def _layer_texts(layer: LayerPair) -> tuple[str, str, str, str, str]:
    first, second = ("-" if precision is None else precision for precision in layer.precision)
    runs = first if first == second else f"{first} -> {second}"
    change = f"{layer.change:+.1f}" if layer.change and math.isfinite(layer.change) else ""
    return shorten(layer.name), runs, format_decibels(layer.sqnr_db[0]), format_decibels(layer.sqnr_db[1]), change


def compare_runs(first: str | Path | Report, second: str | Path | Report) -> Difference:
    """Compare two runs of deploy.

    Args:
        first: A folder that deploy wrote, or its report.
        second: Another one.

    Returns:
        What differs: settings, accuracy, size, speed, layers.
    """
    (report_1, config_1), (report_2, config_2) = _read(first), _read(second)
    names = _run_names(first, second)
    if not (config_1 and config_2):  # a report has only the quantization config, without the other options
        config_1, config_2 = report_1.config, report_2.config
    return Difference(
        _describe_run(names[0], report_1),
        _describe_run(names[1], report_2),
        numbers=tuple(_compare_numbers(report_1, report_2)),
        layers=tuple(sorted(_compare_layers(report_1, report_2), key=_sort_key)),
        settings=tuple(_compare_settings(config_1, config_2)),
        circumstances=tuple(_compare_settings(report_1.environment, report_2.environment)),
        warnings=tuple(_compare_circumstances(report_1, report_2)),
    )


def _sort_key(layer: LayerPair) -> tuple[bool, bool, float]:
    return layer.is_same, layer.precision[0] == layer.precision[1], -abs(layer.change)


def _describe_run(name: str, report: Report) -> RunDescription:
    return RunDescription(name, report.title, report.target, report.created, report.verdict())


def _run_names(first: object, second: object) -> tuple[str, str]:
    """Return the names of the folders, or their paths if the names are equal."""
    if isinstance(first, Report) or isinstance(second, Report):
        return "first", "second"
    path_1, path_2 = Path(str(first)), Path(str(second))
    names = (path_1.resolve().name, path_2.resolve().name)
    return names if names[0] != names[1] else (str(path_1), str(path_2))


def _read(run: str | Path | Report) -> tuple[Report, Mapping[str, Any]]:
    """Return the report, and the config next to it; {} if there is no config."""
    if isinstance(run, Report):
        return run, {}
    path = Path(run) / JSON_FILE
    try:
        report = Report.from_file(path, folder=path.parent)
        config = path.with_name(CONFIG_FILE)
        settings = read_yaml(config, folder=config.parent) if config.is_file() else {}
    except OSError as error:
        raise StoreError(f"{run} is not a run: {path} cannot be read. Pass a folder that `deploy` wrote") from error
    except DocumentError as error:
        raise StoreError(f"{run}: {error.args[0]}") from error
    return report, settings if isinstance(settings, dict) else {}


def _compare_numbers(first: Report, second: Report) -> Iterator[ComparedNumber]:
    scores_1, scores_2 = ({score.name: score for score in report.accuracy} for report in (first, second))
    for name in dict.fromkeys((*scores_1, *scores_2)):
        pair = (scores_1.get(name), scores_2.get(name))
        is_high = all(score.higher_is_better for score in pair if score is not None)
        first_value, second_value = (None if score is None else score.value for score in pair)
        first_float, second_float = (None if score is None else score.float_value for score in pair)
        yield ComparedNumber(name, "score", first_value, second_value, is_high)
        if first_float != second_float:
            yield ComparedNumber(f"{name}, float", "score", first_float, second_float, is_high)
    numbers_1, numbers_2 = _read_numbers(first), _read_numbers(second)
    for name, unit, is_better_high in NUMBERS:
        if numbers_1[name] is not None or numbers_2[name] is not None:
            noise = max(_read_noise(report).get(name, 0.0) for report in (first, second))
            yield ComparedNumber(name, unit, numbers_1[name], numbers_2[name], is_better_high, noise)


def _read_noise(report: Report) -> dict[str, float]:
    """Return the relative noise of the numbers that depend on time, by name."""
    latency = report.latency
    if latency is None:
        return {}
    return {
        "speed against float": max(MIN_TIME_NOISE, sum(latency.spread)),
        "latency": max(MIN_TIME_NOISE, latency.spread[1]),
    }


def _read_numbers(report: Report) -> dict[str, float | None]:
    """Return the numbers of a run, by their name in NUMBERS."""
    verification, language, latency = report.verification, report.language, report.latency
    size = 0
    if language is not None:
        size = language.size
    elif verification is not None:
        size = verification.size
    worst = report.worst(1)
    was_run = verification is not None and verification.status.value == "ok"
    return {
        "size": float(size) if size else None,
        "speed against float": None if latency is None else latency.ratio,
        "latency": None if latency is None else latency.seconds[1],
        "bits per weight": None if language is None else language.bits,
        "generated tokens per second": None if language is None else language.decode,
        "logits against float": None if language is None else language.logits_db,
        "outputs against float": report.output_db,
        "agreement with the simulation": verification.sqnr if was_run and verification is not None else None,
        "worst layer": worst[0].sqnr_db if worst else None,
        "MACs in low precision": low_share(report.coverage.share_of_macs()),
        "weights in low precision": low_share(report.coverage.share_of_parameters()),
    }


def _compare_layers(first: Report, second: Report) -> Iterator[LayerPair]:
    """Pair the layers by name, in the order of execution of the first run. Repeated names get a number."""
    precisions_1, errors_1 = _precision_by_name(first), _error_by_name(first)
    precisions_2, errors_2 = _precision_by_name(second), _error_by_name(second)
    for name in dict.fromkeys((*precisions_1, *errors_1, *precisions_2, *errors_2)):
        yield LayerPair(
            name, (precisions_1.get(name), precisions_2.get(name)), (errors_1.get(name), errors_2.get(name))
        )


def _precision_by_name(report: Report) -> dict[str, str]:
    names = _number_repeated([row.name for row in report.coverage.operations])
    return dict(zip(names, (row.precision for row in report.coverage.operations), strict=True))


def _error_by_name(report: Report) -> dict[str, float]:
    names = _number_repeated([layer.name for layer in report.layers])
    return dict(zip(names, (layer.sqnr_db for layer in report.layers), strict=True))


def _number_repeated(names: Sequence[str]) -> list[str]:
    counts: Counter[str] = Counter()
    unique_names = []
    for name in names:
        counts[name] += 1
        unique_names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return unique_names


def _compare_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[ChangedSetting]:
    settings_1, settings_2 = dict(_flatten(first)), dict(_flatten(second))
    for key in dict.fromkeys((*settings_1, *settings_2)):
        if key not in IGNORED_KEYS and settings_1.get(key) != settings_2.get(key):
            yield ChangedSetting(key, settings_1.get(key), settings_2.get(key))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of nested mappings, with dotted keys. Empty values are omitted."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif value not in (None, [], ()):
        yield path, to_jsonable(value)


def _compare_circumstances(first: Report, second: Report) -> Iterator[str]:
    """Yield warnings about differences that make the two runs hard to compare."""
    marks_1, marks_2 = (dict(report.reproduction.marks) if report.reproduction else {} for report in (first, second))
    in_both = marks_1.keys() & marks_2.keys()
    changed = [name for key, name in INPUT_NAMES.items() if key in in_both and marks_1[key] != marks_2[key]]
    if changed:
        yield f"not the same: {', '.join(changed)}"
    instructions_1, instructions_2 = (report.environment.get("instructions") for report in (first, second))
    if instructions_1 != instructions_2:
        yield f"measured on processors with different instructions: {instructions_1} and {instructions_2}"
    threads = [report.latency.threads for report in (first, second) if report.latency is not None]
    if len(set(threads)) > 1:
        yield f"measured with {threads[0]} and {threads[1]} threads"
