"""Report: all results of a run as plain data. JSON, terminal text and the HTML page are made from it.

Report  ->  to_json  ->  report.json  ->  from_json  ->  an equal Report
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
from scalepoint.report import headline, terminal
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
from scalepoint.support.formatting import is_poor, shorten
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_text
from scalepoint.verification.result import Benchmark, Verification

REPORT_SCHEMA = 2  # version of report.json; raised if a field is renamed, removed or changes its meaning
MAX_REPORT_BYTES = 256_000_000
CONFIG_FILE = "config.yaml"  # the options of a run, next to its report
SMOKE_WARNING = "a smoke run"  # the warning of a smoke run begins with this text
MAX_NEXT_STEPS = 3


@dataclass(frozen=True)
class GraphNode:
    """One operation of the placement graph.

    Attributes:
        name: Path of the operation in the model.
        kind: Kind of operation.
        inputs: Names of the operations that it reads.
        precision: Precision that it runs in; "" for an input of the model.
        codes: The `inputs` whose tensors are quantized.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    precision: str = "float"
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """How to make the same file again.

    Attributes:
        install: Command that installs the same packages.
        call: Call of deploy, as Python source.
        command: The same for the command line; "" for a run from Python.
        marks: Name of each input of the run -> its fingerprint.
    """

    install: str
    call: str
    command: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Report:
    """All results of a run. Only title, target, time and coverage are always present.

    Attributes:
        title: Name of the model.
        target: Name of the target.
        created: Time of the run, ISO 8601.
        coverage: Precision of every operation.
        environment: Versions of packages, machine, options of the target.
        config: The quantization config.
        accuracy: The metrics.
        layers: Error of every layer, in the order of execution.
        histograms: Values of the layers with the largest errors.
        verification: Result of running the file in its runtime.
        timings: Stage -> seconds.
        warnings: Warnings that concern the result.
        graph: Operations and the precision of the tensors between them.
        trials: All files that were tried.
        max_drop: The limit of the metric's drop, if there is one.
        reproduction: How to make the same file again.
        migrated: Rewrites of the float weights before calibration.
        allocation: Precision of every layer, if a budget or max_drop chose it.
        tuning: Result of tune.
        language: Sizes and runtime results of a language model.
        findings: Problems that the target's static rules found in the file; None if the target has no rules.
        min_speed: The limit of speed, if there is one.
        output_db: Signal-to-noise ratio of the worst output of the simulation against the float model, on the example
            inputs, in dB; None if it was not measured.
    """

    title: str
    target: str
    created: str
    coverage: Coverage
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    accuracy: tuple[Score, ...] = ()
    layers: tuple[LayerError, ...] = ()
    histograms: tuple[TensorHistogram, ...] = ()
    verification: Verification | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    trials: tuple[TrialSummary, ...] = ()
    max_drop: float | None = None
    reproduction: Reproduction | None = None
    migrated: MigrationReport | None = None
    allocation: PrecisionAllocation | None = None
    tuning: TuneReport | None = None
    language: LanguageModelResult | None = None
    findings: tuple[str, ...] | None = None
    min_speed: float | None = None
    output_db: float | None = None

    @property
    def latency(self) -> Benchmark | None:
        """Times of the float file and of the quantized file; None if they were not measured."""
        return None if self.verification is None else self.verification.latency

    def worst(self, count: int = 3) -> tuple[LayerError, ...]:
        """Return the layers with the largest error; NaN is the worst."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.badness)[:count])

    def precision_changes(self) -> tuple[PrecisionChange, ...]:
        """Return how the config of the best trial differs from that of the first, the earliest change first."""
        changes: list[PrecisionChange] = []
        index = next((index for index, trial in enumerate(self.trials) if trial.is_best), None)
        for _ in self.trials:  # not `while`: a report.json from an unknown source may contain a cycle
            if index is None or not 0 <= index < len(self.trials):
                break
            changes = [*self.trials[index].precision_changes, *changes]
            index = self.trials[index].start
        return tuple(changes)

    def verdict(self) -> str:
        """Return one sentence: whether the file computes what it should, and whether it is faster than float."""
        return headline.verdict(self)

    def summary(self) -> list[str]:
        """Return the verdict, then outputs, metrics, coverage, speed, size and the check, one line each."""
        return headline.summary(self)

    def next_steps(self) -> tuple[str, ...]:
        """Return at most three suggestions with commands, the most important first."""
        return _next_steps(self)

    def table(self, rows: int = 10, *, verbose: bool = False) -> RenderableType:
        """Return the result for rich, which fits any width.

        Args:
            rows: Largest number of layers and reasons in a table.
            verbose: Also print tables: what stays float, the worst and the slowest layers, the runtime.
        """
        return terminal.ReportTable(self, rows, verbose)

    def __repr__(self) -> str:
        path = "" if self.verification is None else self.verification.path
        return f"Report({headline.short_repr(self, path)})"

    def __str__(self) -> str:
        return terminal.render_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Infinity and NaN are strings that float() accepts."""
        data: dict[str, Any] = {"schema": REPORT_SCHEMA, **to_jsonable(self)}
        if self.verification is not None:
            data["verification"] = self.verification.to_dict()
        return data

    def to_json(self, indent: int | None = 1) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """Read a report that to_dict made. Raises StoreError for an unknown schema."""
        version = data.get("schema")
        if version != REPORT_SCHEMA:
            raise StoreError(
                f"the report has schema {short_repr(version)}, this version of scalepoint reads schema "
                f"{REPORT_SCHEMA}: deploy again, or read it with the version that wrote it"
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
            StoreError: The file is not a report, or its schema is not the one of this version.
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
        """Read report.json. Raises StoreError if the text is not a report."""
        try:
            data = parse_json(text, MAX_REPORT_BYTES)
        except DocumentError as error:
            raise StoreError(f"not a report: {error.args[0]}") from error
        if not isinstance(data, dict):
            raise StoreError(f"not a report: must be an object, got {short_repr(data)}")
        return cls.from_dict(data)


@cache
def _report_reader() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def _next_steps(report: Report) -> tuple[str, ...]:
    if any(warning.startswith(SMOKE_WARNING) for warning in report.warnings):
        return ("do a full run: the same call without smoke; --force writes into the same folder",)
    steps = [*_coverage_steps(report), *_runtime_steps(report), *_accuracy_steps(report)]
    verification = report.verification
    was_run = verification is not None and verification.status.value == "ok" and verification.is_run
    if was_run and verification is not None and verification.latency is not None:
        steps.append(f"measure the speed again: {_bench_command(verification)}")
    return tuple(steps[:MAX_NEXT_STEPS])


def _bench_command(verification: Verification) -> str:
    """Return the command that times the same two files with the same inputs as the run did."""
    file, latency = PurePath(verification.path), verification.latency
    float_file = latency.baseline_file if latency is not None else ""
    words = ["scalepoint", "bench", str(file.parent / (float_file or f"float{file.suffix}")), str(file)]
    if file.suffix == ".onnx" and verification.runtime != "onnxruntime":  # the default of bench for .onnx files
        words += ["--runtime", verification.runtime]
    if latency is not None and latency.threads != 1:
        words += ["--threads", str(latency.threads)]
    return shlex.join(words)


def _is_from_command_line(report: Report) -> bool:
    """Whether the run was started from the command line, so that config.yaml has its model, data and metric."""
    return report.reproduction is not None and bool(report.reproduction.command)


def _coverage_steps(report: Report) -> list[str]:
    if not report.coverage.is_float_for_speed:
        return []
    option = "--placement int8" if _is_from_command_line(report) else "placement='int8'"
    return [f"quantize anyway, for a smaller but slower file: {option}"]


def _runtime_steps(report: Report) -> list[str]:
    verification = report.verification
    if verification is None:
        return [] if report.findings is None else [f"build the engine for {shorten(report.target, 40)} from the file"]
    if verification.status.value == "not verified here":
        return []
    if verification.status.value != "ok":
        return ["list the installed runtimes: scalepoint doctor"]
    steps = []
    if not verification.holds:
        steps.append(f"find the layer that differs: {_compare_command(report)}")
    if verification.latency is not None and verification.latency.is_slower:
        steps.append("another target may be faster: scalepoint targets")
    return steps


def _accuracy_steps(report: Report) -> list[str]:
    steps = []
    if not report.accuracy:
        metric = "--evaluate package.module:function" if _is_from_command_line(report) else "evaluate=your_metric"
        steps.append(f"measure your own metric: deploy with {metric}")
    if report.max_drop is not None and report.accuracy and not report.accuracy[0].is_within(report.max_drop):
        steps.append(f"find the layers with the largest errors: {_compare_command(report)}")
    limit = report.max_drop or 0.0
    keeps_score = bool(report.accuracy) and report.accuracy[0].is_within(limit)
    poor = [layer for layer in report.worst(1) if is_poor(layer.sqnr_db)]
    if poor and not keeps_score:
        override = f"{{name: {poor[0].name!r}, weight: float, activation: float}}"
        steps.append(f"leave the worst layer float, in the config: overrides: [{override}]")
    return steps


def _compare_command(report: Report) -> str:
    if not _is_from_command_line(report) or report.verification is None:
        return "scalepoint.compare(model, done.model, data)"
    folder = PurePath(report.verification.path).parent
    words = ["scalepoint", "compare", str(folder), "-c", str(folder / CONFIG_FILE)]
    is_trusted = report.reproduction is not None and "--trust" in report.reproduction.command.split()
    return shlex.join([*words, "--trust"] if is_trusted else words)
