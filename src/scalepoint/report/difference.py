"""Compares two runs: numbers, layers, settings and environment.

    Report, Report  ->  Difference  ->  terminal, JSON

A run is a folder that deploy wrote. Runs on two machines, data sets or models are compared too, with a warning.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from scalepoint.errors import DocumentError, StoreError
from scalepoint.report.html import JSON_FILE
from scalepoint.report.model import Report
from scalepoint.report.terminal import MIN_WIDE_COLUMNS, low_share, plain_table
from scalepoint.support.formatting import (
    decibel,
    one_line,
    printed,
    ratio,
    share_of,
    short,
    size_of,
    time_of,
    value_of,
)
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_yaml

CONFIG_FILE = "config.yaml"
INPUT_NAMES = {"model": "the model", "calibration data": "the calibration data", "example inputs": "the example inputs"}
IGNORED_KEYS = ("output", "root")  # a run's own, whatever it computes
FORMATTERS: Mapping[str, Callable[[float], str]] = {
    "score": value_of,
    "bytes": size_of,
    "seconds": time_of,
    "times": ratio,
    "share": share_of,
    "dB": lambda value: f"{decibel(value)} dB" if math.isfinite(value) else decibel(value),
}


MIN_SHOWN_SHARE = 0.0005  # what is told as 0.0 % is no change
MIN_TIME_NOISE = 0.03  # of times: two files with the same kernels differ by as much


@dataclass(frozen=True)
class ComparedNumber:
    """One thing that was measured of both runs; None where it was not."""

    name: str
    unit: str  # score, bytes, seconds, times, share, dB
    first: float | None
    second: float | None
    is_better_high: bool | None = True  # None: neither is
    noise: float = 0.0  # of a measured time: a change by less, as a part of the first, tells nothing

    @property
    def is_noise(self) -> bool:
        """Whether the change is smaller than what two measurements of one file may differ by."""
        return self._share is not None and abs(self._share) <= self.noise

    @property
    def change(self) -> float | None:
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def _share(self) -> float | None:
        """The change as a part of the first, of what people compare so."""
        if self.unit not in ("bytes", "seconds", "times") or not self.first or self.second is None:
            return None
        return self.second / self.first - 1

    @property
    def mood(self) -> str:
        """better, worse, same; empty where one is not known, neither is better, or the change is noise."""
        change = self.change
        is_zero = self._share is not None and abs(self._share) < MIN_SHOWN_SHARE
        if self.first == self.second or is_zero:
            return "same"
        if change is None or math.isnan(change) or self.is_better_high is None or self.is_noise:
            return ""
        return "better" if (change > 0) == self.is_better_high else "worse"

    def texts(self) -> tuple[str, str, str]:
        """Both and the change, as people read them."""
        first, second = ("-" if each is None else FORMATTERS[self.unit](each) for each in (self.first, self.second))
        if self.change is None or self.mood == "same" or not math.isfinite(self.change):
            turned = f"{first} -> {second}" if self.mood in ("better", "worse") else ""
            return first, second, "same" if self.mood == "same" else turned
        if self._share is not None:
            return first, second, f"{self._share:+.1%}{', within the noise' if self.is_noise else ''}"
        if self.unit == "share":
            return first, second, f"{100 * self.change:+.3g} points"
        return first, second, f"{self.change:+.1f} dB" if self.unit == "dB" else f"{self.change:+.4g}"


@dataclass(frozen=True)
class LayerPair:
    """A layer in both runs: what it runs in, and how far its output is from float; None where it is not there."""

    name: str
    precision: tuple[str | None, str | None]
    sqnr_db: tuple[float | None, float | None]

    @property
    def change(self) -> float:
        """In dB; 0 where one is not known or both are exact."""
        first, second = self.sqnr_db
        change = 0.0 if first is None or second is None else second - first
        return 0.0 if math.isnan(change) else change

    @property
    def is_same(self) -> bool:
        return self.precision[0] == self.precision[1] and not self.change


@dataclass(frozen=True)
class ChangedSetting:
    """A key of the config, or a fact of the circumstances, that is not the same; None where it is not given."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    title: str
    target: str
    created: str
    verdict: str


@dataclass(frozen=True)
class Difference:
    """The comparison of two runs. Layers with a different precision come first, then by change of their error."""

    first: ComparedRun
    second: ComparedRun
    numbers: tuple[ComparedNumber, ...]
    layers: tuple[LayerPair, ...]
    settings: tuple[ChangedSetting, ...]
    circumstances: tuple[ChangedSetting, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def changed_layers(self) -> tuple[LayerPair, ...]:
        return tuple(each for each in self.layers if not each.is_same)

    def summary(self) -> str:
        """One sentence: what is better, what is worse."""
        moods = {mood: [each.name for each in self.numbers if each.mood == mood] for mood in ("better", "worse")}
        told = [f"{mood}: {', '.join(names)}" for mood, names in moods.items() if names]
        layers = f"{len(self.changed_layers)} of {len(self.layers)} layers differ"
        return f"{self.second.name} against {self.first.name}: {'; '.join((*told, layers))}"

    def to_dict(self) -> dict[str, Any]:
        """For machines: the numbers with their change."""
        numbers = [
            {**to_jsonable(each), "change": to_jsonable(each.change), "mood": each.mood} for each in self.numbers
        ]
        return {**to_jsonable(self), "numbers": numbers, "summary": self.summary()}

    def __str__(self) -> str:
        return printed(DifferenceTable(self))


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
            yield Text(f"{one_line(side.name)}: {short(side.title)} for {short(side.target)}", style="bold")
            yield Text(f"  {one_line(side.verdict)}")
        for warning in difference.warnings:
            yield Text(f"warning: {one_line(warning)}", style="yellow")
        yield Text()
        names = (short(first.name, 24), short(second.name, 24))
        numbers = [(short(number.name, 40), *number.texts()) for number in difference.numbers]
        # In a narrow terminal, names of runs would leave no space for the names of the numbers.
        yield plain_table(("", *(("first", "then") if narrow else names), "change"), numbers, numbers=(1, 2, 3))
        yield from self._layers(narrow)
        groups = (("Settings that differ", difference.settings), ("Circumstances", difference.circumstances))
        for title, settings in groups:
            if settings:
                yield Text()
                yield Text(title, style="bold")
                yield plain_table(("", *names), [_setting_texts(setting) for setting in settings])
        yield Text()
        yield Text(one_line(difference.summary()))

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
            heads = ("layer", "dB", "then", "change")
            yield plain_table(heads, [(row[0], *row[2:]) for row in rows], numbers=(1, 2, 3))
        else:
            yield plain_table(("layer", "runs in", "dB", "then", "change"), rows, numbers=(2, 3, 4))


def _setting_texts(setting: ChangedSetting) -> tuple[str, str, str]:
    return short(setting.key, 60), short(_value_text(setting.first), 60), short(_value_text(setting.second), 60)


def _value_text(value: Any) -> str:
    """A value of a config on one line."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _layer_texts(layer: LayerPair) -> tuple[str, str, str, str, str]:
    first, second = ("-" if precision is None else precision for precision in layer.precision)
    runs = first if first == second else f"{first} -> {second}"
    change = f"{layer.change:+.1f}" if layer.change and math.isfinite(layer.change) else ""
    return short(layer.name), runs, decibel(layer.sqnr_db[0]), decibel(layer.sqnr_db[1]), change


def compare_runs(first: str | Path | Report, second: str | Path | Report) -> Difference:
    """Compare two runs of deploy.

    Args:
        first: A folder that deploy wrote, or its report.
        second: Another one.

    Returns:
        What differs: settings, accuracy, size, speed, layers.
    """
    (one, one_config), (other, other_config) = _read(first), _read(second)
    names = _run_names(first, second)
    if not (one_config and other_config):  # a report alone knows how was quantized, not what else was asked
        one_config, other_config = one.config, other.config
    return Difference(
        _describe_run(names[0], one),
        _describe_run(names[1], other),
        numbers=tuple(_compare_numbers(one, other)),
        layers=tuple(sorted(_compare_layers(one, other), key=_sort_key)),
        settings=tuple(_compare_settings(one_config, other_config)),
        circumstances=tuple(_compare_settings(one.environment, other.environment)),
        warnings=tuple(_compare_circumstances(one, other)),
    )


def _sort_key(each: LayerPair) -> tuple[bool, bool, float]:
    return each.is_same, each.precision[0] == each.precision[1], -abs(each.change)


def _describe_run(name: str, report: Report) -> ComparedRun:
    return ComparedRun(name, report.title, report.target, report.created, report.verdict())


def _run_names(first: object, second: object) -> tuple[str, str]:
    """The folders' own names where these tell them apart."""
    if isinstance(first, Report) or isinstance(second, Report):
        return "first", "second"
    one, other = Path(str(first)), Path(str(second))
    names = (one.resolve().name, other.resolve().name)
    return names if names[0] != names[1] else (str(one), str(other))


def _read(run: str | Path | Report) -> tuple[Report, Mapping[str, Any]]:
    """The report, and the config beside it, if there is one."""
    if isinstance(run, Report):
        return run, {}
    path = Path(run) / JSON_FILE
    try:
        report = Report.from_file(path, folder=path.parent)
        config = path.with_name(CONFIG_FILE)
        known = read_yaml(config, folder=config.parent) if config.is_file() else {}
    except OSError as error:
        raise StoreError(f"{run} is no run: {path} cannot be read. Give a folder that `deploy` wrote") from error
    except DocumentError as error:
        raise StoreError(f"{run}: {error.args[0]}") from error
    return report, known if isinstance(known, dict) else {}


def _compare_numbers(first: Report, second: Report) -> Iterator[ComparedNumber]:
    ours, theirs = ({each.name: each for each in report.accuracy} for report in (first, second))
    for name in dict.fromkeys((*ours, *theirs)):
        pair = [each.get(name) for each in (ours, theirs)]
        is_high = all(each.higher_is_better for each in pair if each is not None)
        first_final, second_final = (None if each is None else each.value for each in pair)
        first_float, second_float = (None if each is None else each.float_value for each in pair)
        yield ComparedNumber(name, "score", first_final, second_final, is_high)
        if first_float != second_float:
            yield ComparedNumber(f"{name}, float", "score", first_float, second_float, is_high)
    rows: tuple[tuple[str, str, str, bool | None], ...] = (
        ("size", "bytes", "size", False),
        ("speed against float", "times", "speed", True),
        ("latency", "seconds", "latency", False),
        ("bits a weight", "score", "bits", False),
        ("tokens written a second", "score", "decode", True),
        ("logits against float", "dB", "logits", True),
        ("agreement with the simulation", "dB", "agreement", True),
        ("worst layer", "dB", "worst", True),
        ("MACs in low precision", "share", "macs", None),
        ("weights in low precision", "share", "weights", None),
    )
    one, other = _read_numbers(first), _read_numbers(second)
    for name, unit, key, is_better_high in rows:
        if one[key] is not None or other[key] is not None:
            noise = max(each.get(f"{key} noise") or 0.0 for each in (one, other))
            yield ComparedNumber(name, unit, one[key], other[key], is_better_high, noise)


def _read_numbers(report: Report) -> dict[str, float | None]:
    found, words = report.verification, report.language
    latency = None if found is None else found.latency
    size = words.size if words is not None else 0 if found is None else found.size
    worst = report.worst(1)
    return {
        "size": float(size) if size else None,
        "bits": None if words is None else words.bits,
        "decode": None if words is None else words.decode,
        "logits": None if words is None else words.logits_db,
        "speed": None if latency is None else latency.ratio,
        "latency": None if latency is None else latency.seconds[1],
        "speed noise": None if latency is None else max(MIN_TIME_NOISE, sum(latency.spread)),
        "latency noise": None if latency is None else max(MIN_TIME_NOISE, latency.spread[1]),
        "agreement": None if found is None or found.status.value != "ok" else found.sqnr,
        "worst": worst[0].sqnr_db if worst else None,
        "macs": low_share(report.coverage.share_of_macs()),
        "weights": low_share(report.coverage.share_of_parameters()),
    }


def _compare_layers(first: Report, second: Report) -> Iterator[LayerPair]:
    """By name, in the order of execution of the first; of names that repeat, each with its number."""
    sides = [(_precision_by_name(report), _error_by_name(report)) for report in (first, second)]
    names = dict.fromkeys(name for precisions, errors in sides for name in (*precisions, *errors))
    for name in names:
        precision = tuple(precisions.get(name) for precisions, _ in sides)
        errors = tuple(errors.get(name) for _, errors in sides)
        yield LayerPair(name, (precision[0], precision[1]), (errors[0], errors[1]))


def _precision_by_name(report: Report) -> dict[str, str]:
    rows = report.coverage.operations
    return dict(zip(_number_repeated([row.name for row in rows]), (row.precision for row in rows), strict=True))


def _error_by_name(report: Report) -> dict[str, float]:
    return dict(
        zip(
            _number_repeated([each.name for each in report.layers]),
            (each.sqnr_db for each in report.layers),
            strict=True,
        )
    )


def _number_repeated(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _compare_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[ChangedSetting]:
    one, other = dict(_flatten(first)), dict(_flatten(second))
    for key in dict.fromkeys((*one, *other)):
        if key not in IGNORED_KEYS and one.get(key) != other.get(key):
            yield ChangedSetting(key, one.get(key), other.get(key))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots between; what is empty says nothing."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flatten(each, f"{path}.{key}" if path else str(key))
    elif value not in (None, [], ()):
        yield path, to_jsonable(value)


def _compare_circumstances(first: Report, second: Report) -> Iterator[str]:
    """What makes the two hard to compare."""
    marks = [dict(each.reproduction.marks) if each.reproduction else {} for each in (first, second)]
    shared = [key for key in INPUT_NAMES if all(key in each for each in marks)]
    others = [INPUT_NAMES[key] for key in shared if marks[0][key] != marks[1][key]]
    if others:
        yield f"not the same: {', '.join(others)}"
    here = [each.environment.get("instructions") for each in (first, second)]
    if here[0] != here[1]:
        yield f"measured on processors with other instructions: {here[0]} and {here[1]}"
    latencies = [each.verification.latency for each in (first, second) if each.verification]
    threads = [each.threads for each in latencies if each is not None]
    if len(set(threads)) > 1:
        yield f"measured with {threads[0]} and {threads[1]} threads"
