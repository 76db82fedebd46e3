"""A quality gate for CI: compares the report of an output folder with limits of accuracy, speed and size.

    OUT/report.json -> Report -> one GateCheck per limit -> GateResult -> Markdown summary, exit code

The gate runs no model: it reads what deploy measured. That the file matches the simulation, and that it is the file
that was measured, is always checked. A limit whose value was not measured is not passed.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from scalepoint.errors import UsageError, short_repr
from scalepoint.report import headline
from scalepoint.report.model import SMOKE_WARNING, Report
from scalepoint.support.formatting import format_ratio, format_size, format_value, shorten
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.output_folder import WrittenFiles

REPORT_FILE = "report.json"
MAX_CELL_LENGTH = 200
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]i?B|[KMG]|B)?", re.IGNORECASE)
SIZE_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}


class Outcome(StrEnum):
    """Result of one check."""

    PASSED = "pass"
    FAILED = "fail"
    UNVERIFIED = "not verified"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class GateCheck:
    """One row of the gate.

    Attributes:
        name: What is checked.
        measured: What the report says.
        limit: What is required.
        outcome: Whether it is met.
    """

    name: str
    measured: str
    limit: str
    outcome: Outcome


@dataclass(frozen=True)
class GateResult:
    """The result of the gate.

    Attributes:
        title: Name of the model.
        target: Name of the target.
        verdict: First sentence of the report.
        checks: One row per check.
    """

    title: str
    target: str
    verdict: str
    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.outcome == Outcome.PASSED for check in self.checks)

    def with_outcome(self, outcome: Outcome) -> tuple[GateCheck, ...]:
        """Return the checks with this outcome."""
        return tuple(check for check in self.checks if check.outcome == outcome)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"passed": self.passed, **to_jsonable(self)}

    def to_markdown(self) -> str:
        """Return a summary with one table row per check, for a CI log or a pull request."""
        lines = [
            f"### scalepoint gate: {'passed' if self.passed else 'failed'}",
            "",
            f"{_cell(self.title)} for {_cell(self.target)}. {_cell(self.verdict)}",
            "",
            "| check | measured | limit | result |",
            "| --- | --- | --- | --- |",
        ]
        for check in self.checks:
            result = str(check.outcome) if check.outcome == Outcome.PASSED else f"**{check.outcome}**"
            cells = (_cell(check.name), _cell(check.measured), _cell(check.limit), result)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def gate(
    folder: str | Path,
    *,
    max_drop: float | None = None,
    min_speed: float | None = None,
    max_size: float | str | None = None,
    allow_unverified: bool = False,
) -> GateResult:
    """Check the results of a deployment against limits. Nothing is run; the report of the folder is read.

    Args:
        folder: The output folder of deploy, or its report.json.
        max_drop: Largest allowed drop of the metric from the float model.
        min_speed: Smallest allowed speed relative to the fastest float file, for example 1.5.
        max_size: Largest allowed size of the file: bytes, or text such as "30MB" or "8MiB".
        allow_unverified: Accept a file that did not run in its runtime, for example of a target without a runtime
            here. A file that gives other values than the simulation always fails.

    Returns:
        One row per check, and whether all passed. `to_markdown()` is the summary that the command prints.

    Raises:
        UsageError: The folder has no report, or a limit is not a number.
        StoreError: The report cannot be read.

    Example:
        result = scalepoint.gate("out", max_drop=0.5, min_speed=1.5, max_size="30MB")
        assert result.passed, result.to_markdown()
    """
    path = Path(folder)
    report_path = path / REPORT_FILE if path.is_dir() else path
    if not report_path.is_file():
        raise UsageError(f"{report_path} does not exist: pass the output folder of `scalepoint deploy`")
    for name, limit in (("max_drop", max_drop), ("min_speed", min_speed)):
        if limit is not None and not math.isfinite(limit):
            raise UsageError(f"{name}={limit}: must be a finite number")
    max_bytes = None if max_size is None else parse_size(max_size)
    report = Report.from_file(report_path, folder=path if path.is_dir() else None)
    checks = [_check_values(report, allow_unverified=allow_unverified)]
    if path.is_dir() and (changed := _find_changed_file(report, path)):
        measured = f"{changed} changed after it was measured"
        checks.append(GateCheck("measured file", measured, "unchanged", Outcome.UNVERIFIED))
    if any(warning.startswith(SMOKE_WARNING) for warning in report.warnings):
        checks.append(GateCheck("kind of run", "smoke run: its numbers mean nothing", "full run", Outcome.NOT_MEASURED))
    if max_drop is not None:
        checks.append(_check_score(report, max_drop))
    if min_speed is not None:
        checks.append(_check_speed(report, min_speed))
    if max_bytes is not None:
        checks.append(_check_size(report, max_bytes))
    return GateResult(report.title, report.target, headline.verdict(report), tuple(checks))


def parse_size(size: float | str) -> int:
    """Convert 30e6, "30MB" (a million bytes each) or "8MiB" (2**20 bytes each) to bytes."""
    match = SIZE.fullmatch(str(size).strip())
    if isinstance(size, str) and match is not None:
        return round(float(match[1]) * SIZE_UNITS[(match[2] or "").lower()])
    if isinstance(size, int | float) and math.isfinite(size) and size >= 0:
        return round(size)
    raise UsageError(f"max_size={short_repr(size)}: must be a number of bytes, or text such as 30MB or 8MiB")


def _check_values(report: Report, *, allow_unverified: bool) -> GateCheck:
    """Check that the runtime gives the values of the simulation."""
    verification, language = report.verification, report.language
    if language is not None:
        measured, is_verified = headline.verdict(report), language.status == "ok"
        is_wrong = language.status in ("failed", "departs")
    else:
        measured, is_verified = headline.describe_check(report), verification is not None and verification.holds
        is_wrong = verification is not None and verification.is_refuted
    accepted = is_verified or (allow_unverified and not is_wrong)
    limit = "the simulated values" if not allow_unverified else "no other values than the simulated ones"
    outcome = Outcome.PASSED if accepted else Outcome.UNVERIFIED
    return GateCheck("values in the runtime", measured, limit, outcome)


def _find_changed_file(report: Report, folder: Path) -> str:
    """Return the name of the verified file if it is not the one that deploy wrote; "" if it is, or is not here."""
    name = "" if report.verification is None else PurePath(report.verification.path).name
    if not name or not (folder / name).is_file():
        return ""
    return "" if name in WrittenFiles(folder) else name


def _check_score(report: Report, max_drop: float) -> GateCheck:
    if not report.accuracy:
        measured = "no metric: deploy with evaluate= (--evaluate package.module:function)"
        return GateCheck("drop of the metric", measured, f"at most {max_drop:g}", Outcome.NOT_MEASURED)
    score = report.accuracy[0]
    where = "in the runtime" if score.where == "runtime" else "simulated"
    values = f"{format_value(score.float_value)} -> {format_value(score.value)} ({score.change_text}, {where})"
    outcome = Outcome.PASSED if score.is_within(max_drop) else Outcome.FAILED
    return GateCheck(f"drop of {score.name}", values, f"at most {max_drop:g}", outcome)


def _check_speed(report: Report, min_speed: float) -> GateCheck:
    limit = f"at least {format_ratio(min_speed)}"
    language, latency = report.language, report.latency
    if language is not None and language.decode and language.float_decode:
        ratio, text = language.decode / language.float_decode, " the float model's tokens per second"
    elif latency is not None:
        ratio, text = latency.ratio, f" the fastest float file ({latency.conditions})"
    else:
        return GateCheck("speed", "no latency", limit, Outcome.NOT_MEASURED)
    outcome = Outcome.PASSED if ratio >= min_speed else Outcome.FAILED
    return GateCheck("speed", f"{format_ratio(ratio)}{text}", limit, outcome)


def _check_size(report: Report, max_bytes: int) -> GateCheck:
    size = report.language.size if report.language is not None else 0
    size = report.verification.size if report.verification is not None else size
    limit = f"at most {format_size(max_bytes)}"
    if not size:
        return GateCheck("size", "no size", limit, Outcome.NOT_MEASURED)
    return GateCheck("size", format_size(size), limit, Outcome.PASSED if size <= max_bytes else Outcome.FAILED)


def _cell(text: str) -> str:
    """Return text for a Markdown table. Names come from a file of unknown source, so markup in them is escaped."""
    line = shorten(text, MAX_CELL_LENGTH)
    return re.sub(r"([\\`*\[<|])", r"\\\1", line)
