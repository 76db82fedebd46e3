"""Report: everything a run found, as plain data first. JSON, the terminal and the HTML page only show it.

Report  ->  to_json  ->  report.json  ->  from_json  ->  the same Report
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import RenderableType

from scalepoint.covered import Coverage
from scalepoint.errors import DocumentError, StoreError, shown
from scalepoint.migrated import MigrationReport
from scalepoint.report import advice, terminal
from scalepoint.report.chosen import Allocated, Tuned
from scalepoint.report.language import Language
from scalepoint.support.documents import parse_json
from scalepoint.support.formatting import change_of
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.untrusted import read_text
from scalepoint.verification.result import Verification

SCHEMA = 1
LARGEST = 256_000_000
ROUNDING = 2e-7


def is_within(before: float, after: float, max_drop: float) -> bool:
    """Whether a score fell by no more than is allowed; what float32 rounds off is no fall."""
    return before - after <= max_drop + ROUNDING * abs(before)


@dataclass(frozen=True)
class Metric:
    """One number of the user's own: of the float model, of the simulation, and of the file in its runtime; what was
    not measured is None, and one of the last two was."""

    name: str
    float_value: float
    quantized_value: float | None = None
    runtime_value: float | None = None
    higher_is_better: bool = True  # False: perplexity, losses and other errors

    def __post_init__(self) -> None:
        if self.quantized_value is None and self.runtime_value is None:
            raise ValueError(f"{self.name}: neither the simulation nor the file was measured")

    @property
    def final(self) -> float:
        """What a user of the deployed model gets, as far as it was measured."""
        measured = self.quantized_value if self.runtime_value is None else self.runtime_value
        assert measured is not None  # noqa: S101  # checked when it was made
        return measured

    @property
    def change(self) -> float:
        return self.final - self.float_value

    @property
    def drop(self) -> float:
        """How much worse the final value is than the float model's, whichever direction is better; below 0: better."""
        return -self.change if self.higher_is_better else self.change

    @property
    def change_text(self) -> str:
        """The signed change, with the direction where it is not the usual one."""
        return change_of(self.change) if self.higher_is_better else f"{change_of(self.change)}, lower is better"

    def is_within(self, max_drop: float) -> bool:
        if self.higher_is_better:
            return is_within(self.float_value, self.final, max_drop)
        return is_within(-self.float_value, -self.final, max_drop)


@dataclass(frozen=True)
class ReportedLayer:
    """How far one layer's output is from the float model's, in the order of execution."""

    name: str
    sqnr_db: float
    cosine: float | None = None
    saturated: float | None = None  # share of the values outside of the range
    used: float | None = None  # share of the range that the values take up
    weight_sqnr_db: float | None = None


@dataclass(frozen=True)
class Histogram:
    """The values of one tensor: counts[i] of them in [edges[i], edges[i + 1]); [low, high] is what the codes reach."""

    layer: str
    kind: str  # "weight" or "activation"
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    low: float
    high: float

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges, not {len(self.edges)}")


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
class Raised:
    """More precision for one layer, or for all (an empty name): what it wins by estimate, and what it costs."""

    layer: str
    to: str
    gain: float | None = None  # of the output's noise to signal; None where only the metric can tell
    cost: float = 0.0  # what is added: shares of the float model's size and of its time


@dataclass(frozen=True)
class Attempt:
    """One file of a search for accuracy or speed: what was raised for it, from which other file on, and
    what came of it."""

    score: float | None
    raised: tuple[Raised, ...] = ()
    start: int | None = None  # the attempt that it began from
    is_kept: bool = False
    speed: float | None = None  # times the float file's


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
    accuracy: tuple[Metric, ...] = ()
    layers: tuple[ReportedLayer, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    verification: Verification | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # stage -> seconds
    warnings: tuple[str, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    attempts: tuple[Attempt, ...] = ()  # all files that were made for max_drop or min_speed
    max_drop: float | None = None
    reproduction: Reproduction | None = None
    migrated: MigrationReport | None = None  # rewrites of the float weights before calibration
    allocation: Allocated | None = None
    tuning: Tuned | None = None
    language: Language | None = None  # what only language models have
    findings: tuple[str, ...] | None = None  # of the target's static rules over the file; None: it has no such rules
    min_speed: float | None = None

    def worst(self, count: int = 3) -> tuple[ReportedLayer, ...]:
        """The layers with the largest error; not a number is worst of all."""
        key = [(each.sqnr_db if not math.isnan(each.sqnr_db) else -math.inf) for each in self.layers]
        order = sorted(range(len(key)), key=key.__getitem__)
        return tuple(self.layers[index] for index in order[:count])

    def raised(self) -> tuple[Raised, ...]:
        """Everything that the kept file has more than the first one, the earliest step first."""
        found: list[Raised] = []
        index = next((index for index, each in enumerate(self.attempts) if each.is_kept), None)
        for _ in self.attempts:  # a step starts from an earlier one: no more than there are
            if index is None or not 0 <= index < len(self.attempts):
                break
            found = [*self.attempts[index].raised, *found]
            index = self.attempts[index].start
        return tuple(found)

    def verdict(self) -> str:
        """One sentence: does the file do what it should? A file slower than float is said here, not hidden."""
        return terminal.verdict(self)

    def summary(self) -> list[str]:
        """The verdict, then accuracy, size, latency and coverage, one line each."""
        return terminal.summary(self)

    def next_steps(self) -> tuple[str, ...]:
        """What to do next, as text to type; the most pressing first."""
        return advice.next_steps(self)

    def table(self, rows: int = 10) -> RenderableType:
        """For rich: fits any width; at most `rows` layers and reasons."""
        return terminal.Shown(self, rows)

    def __str__(self) -> str:
        return terminal.text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; infinity and not-a-number are the strings that float() reads."""
        data: dict[str, Any] = {"schema": SCHEMA, **to_jsonable(self)}
        if self.verification is not None:
            data["verification"] = self.verification.to_dict()
        return data

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        version = data.get("schema")
        if version != SCHEMA:
            raise StoreError(
                f"a report of schema {shown(version)}; this scalepoint reads schema {SCHEMA}: "
                "open it with the scalepoint that wrote it"
            )
        try:
            return _reader().validate_python(dict(data))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the report"
            raise StoreError(f"not a report: {where}: {first['msg']}") from error

    @classmethod
    def from_file(cls, path: Path, *, folder: Path | None = None) -> "Report":
        """Read a report.json, which must be in `folder` once links are followed if that is given."""
        try:
            return cls.from_json(read_text(path, LARGEST, folder=folder))
        except DocumentError as error:
            raise StoreError(f"not a report: {error.args[0]}") from error

    @classmethod
    def from_json(cls, text: str) -> "Report":
        try:
            data = parse_json(text, LARGEST)
        except DocumentError as error:
            raise StoreError(f"not a report: {error.args[0]}") from error
        if not isinstance(data, dict):
            raise StoreError(f"not a report: an object is expected, not {shown(data)}")
        return cls.from_dict(data)


@cache
def _reader() -> TypeAdapter[Report]:
    return TypeAdapter(Report)
