"""Report: everything a run found, as plain data first. JSON, the terminal and the HTML page only show it.

Report  ->  to_json  ->  report.json  ->  from_json  ->  the same Report
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import RenderableType

from scalepoint.errors import DocumentError, StoreError, short_repr
from scalepoint.migration_report import MigrationReport
from scalepoint.operation_coverage import Coverage
from scalepoint.report import terminal
from scalepoint.results import (
    LanguageModelResult,
    LayerError,
    PrecisionAllocation,
    PrecisionChange,
    Score,
    TensorHistogram,
    TrialSummary,
    TuneReport,
)
from scalepoint.support.documents import parse_json
from scalepoint.support.formatting import POOR_DB, short
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_text
from scalepoint.verification.result import Verification

REPORT_SCHEMA = 2  # of report.json; raised whenever a field of a class in it is renamed, removed or changes its meaning
MAX_REPORT_BYTES = 256_000_000
SMOKE_WARNING = "a smoke run"  # begins the warning of a smoke run
MAX_NEXT_STEPS = 3


@dataclass(frozen=True)
class GraphNode:
    """One operation of the placement graph; its name is its path in the model. `codes` are those of its inputs that
    reach it quantized."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    precision: str = "float"
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """How to make the same again: texts to copy, and marks that tell whether it is the same."""

    install: str
    call: str
    command: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What became of a model on its way to a target. Only the title, the target and the coverage are always there."""

    title: str
    target: str
    created: str  # ISO 8601; given, so that the same run makes the same bytes
    coverage: Coverage
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    accuracy: tuple[Score, ...] = ()
    layers: tuple[LayerError, ...] = ()  # in the order of execution
    histograms: tuple[TensorHistogram, ...] = ()
    verification: Verification | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # stage -> seconds
    warnings: tuple[str, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    trials: tuple[TrialSummary, ...] = ()  # all files that were made for max_drop or min_speed
    max_drop: float | None = None
    reproduction: Reproduction | None = None
    migrated: MigrationReport | None = None  # rewrites of the float weights before calibration
    allocation: PrecisionAllocation | None = None
    tuning: TuneReport | None = None
    language: LanguageModelResult | None = None
    findings: tuple[str, ...] | None = None  # of the target's static rules over the file; None: it has no such rules
    min_speed: float | None = None

    def worst(self, count: int = 3) -> tuple[LayerError, ...]:
        """The layers with the largest error; NaN is worst."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.badness)[:count])

    def precision_changes(self) -> tuple[PrecisionChange, ...]:
        """How the config of the best trial differs from that of the first, the earliest change first."""
        changes: list[PrecisionChange] = []
        index = next((index for index, trial in enumerate(self.trials) if trial.is_best), None)
        for _ in self.trials:  # a report.json from elsewhere may hold a cycle
            if index is None or not 0 <= index < len(self.trials):
                break
            changes = [*self.trials[index].precision_changes, *changes]
            index = self.trials[index].start
        return tuple(changes)

    def verdict(self) -> str:
        """One sentence: does the file do what it should? A file slower than float is said here, not hidden."""
        return terminal.verdict(self)

    def summary(self) -> list[str]:
        """The verdict, then accuracy, size, latency and coverage, one line each."""
        return terminal.summary(self)

    def next_steps(self) -> tuple[str, ...]:
        """At most three things to do next, as text to type; the most pressing first."""
        return _next_steps(self)

    def table(self, rows: int = 10) -> RenderableType:
        """For rich: fits any width; at most `rows` layers and reasons."""
        return terminal.ReportTable(self, rows)

    def __str__(self) -> str:
        return terminal.render_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; infinity and not-a-number are the strings that float() reads."""
        data: dict[str, Any] = {"schema": REPORT_SCHEMA, **to_jsonable(self)}
        if self.verification is not None:
            data["verification"] = self.verification.to_dict()
        return data

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        version = data.get("schema")
        if version != REPORT_SCHEMA:
            raise StoreError(
                f"a report of schema {short_repr(version)}; this scalepoint reads schema {REPORT_SCHEMA}: "
                "deploy again, or read it with the scalepoint that wrote it"
            )
        try:
            return _report_reader().validate_python(dict(data))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the report"
            raise StoreError(f"not a report: {where}: {first['msg']}") from error

    @classmethod
    def from_file(cls, path: Path, *, folder: Path | None = None) -> "Report":
        """Read a report.json.

        Args:
            path: The file.
            folder: If given, the file must be in this folder once links are followed.

        Raises:
            StoreError: The file is not a report, or has another schema than this version writes.
        """
        try:
            text = read_text(path, MAX_REPORT_BYTES, folder=folder)
        except DocumentError as error:  # it names the file
            raise StoreError(f"not a report: {error.args[0]}") from error
        try:
            return cls.from_json(text)
        except StoreError as error:
            raise StoreError(f"{path}: {error.args[0]}") from error

    @classmethod
    def from_json(cls, text: str) -> "Report":
        try:
            data = parse_json(text, MAX_REPORT_BYTES)
        except DocumentError as error:
            raise StoreError(f"not a report: {error.args[0]}") from error
        if not isinstance(data, dict):
            raise StoreError(f"not a report: an object is expected, not {short_repr(data)}")
        return cls.from_dict(data)


@cache
def _report_reader() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def _next_steps(report: Report) -> tuple[str, ...]:
    if any(warning.startswith(SMOKE_WARNING) for warning in report.warnings):
        return ("a full run: the same without smoke; --force writes into the same folder",)
    steps = [*_coverage_steps(report), *_runtime_steps(report), *_accuracy_steps(report)]
    found = report.verification
    if found is not None and found.status.value == "ok" and found.is_run and found.float_size:
        steps.append(f"measure the speed again: {_bench_command(found)}")
    return tuple(steps[:MAX_NEXT_STEPS])


def _bench_command(found: Verification) -> str:
    """The command that compares the same files with the same inputs as the run did."""
    file, latency = PurePath(found.path), found.latency
    float_file = latency.baseline_file if latency is not None else ""
    words = ["scalepoint", "bench", str(file.parent / (float_file or f"float{file.suffix}")), str(file)]
    if file.suffix == ".onnx" and found.runtime != "onnxruntime":  # which bench takes for such files
        words += ["--runtime", found.runtime]
    if latency is not None and latency.threads != 1:
        words += ["--threads", str(latency.threads)]
    return shlex.join(words)


def _is_from_command_line(report: Report) -> bool:
    """Whether the run came from the command line, so that the folder holds its config."""
    return report.reproduction is not None and bool(report.reproduction.command)


def _coverage_steps(report: Report) -> list[str]:
    if not report.coverage.is_float_for_speed:
        return []
    option = (
        "speed_first: false under quantization:" if _is_from_command_line(report) else "QuantConfig(speed_first=False)"
    )
    return [f"quantize all the same, smaller but slower: {option} in the config"]


def _runtime_steps(report: Report) -> list[str]:
    found = report.verification
    if found is None:
        return [] if report.findings is None else [f"build the engine for {short(report.target, 40)} from the file"]
    if found.status.value == "not verified here":
        return []
    if found.status.value != "ok":
        return ["see which runtimes are here: scalepoint doctor"]
    steps = []
    if not found.holds:
        steps.append(f"see where it departs: {_compare_command(report)}")
    if found.latency is not None and found.latency.ratio < 1:
        steps.append("another target may be faster: scalepoint targets")
    return steps


def _accuracy_steps(report: Report) -> list[str]:
    steps = []
    if not report.accuracy:
        metric = "--evaluate package.module:function" if _is_from_command_line(report) else "evaluate=your_metric"
        steps.append(f"measure what counts to you: deploy with {metric}")
    if report.max_drop is not None and report.accuracy and not report.accuracy[0].is_within(report.max_drop):
        steps.append(f"see which layers cost most: {_compare_command(report)}")
    poor = [layer for layer in report.worst(1) if not layer.sqnr_db >= POOR_DB]
    if poor:
        override = f"{{name: {poor[0].name!r}, weight: float, activation: float}}"
        steps.append(f"leave the worst layer float, in the config: overrides: [{override}]")
    return steps


def _compare_command(report: Report) -> str:
    if not _is_from_command_line(report) or report.verification is None:
        return "scalepoint.compare(model, done.model, data)"
    folder = PurePath(report.verification.path).parent
    words = ["scalepoint", "compare", str(folder), "-c", str(folder / "config.yaml")]
    is_trusted = report.reproduction is not None and "--trust" in report.reproduction.command.split()
    return shlex.join([*words, "--trust"] if is_trusted else words)
