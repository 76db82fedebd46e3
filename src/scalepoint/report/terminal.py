"""The report as text for a terminal: verdict, float against quantized, layers that stay float, worst layers.

A narrow terminal (40 columns) gets tables with fewer columns; nothing is cut off on the right.
"""

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from scalepoint.results import LanguageModelResult, PrecisionAllocation
from scalepoint.support.formatting import (
    describe_quality,
    describe_size_change,
    format_decibels,
    format_noise_level,
    format_plural,
    format_ratio,
    format_share,
    format_size,
    format_time,
    format_value,
    shorten,
    to_one_line,
)

if TYPE_CHECKING:
    from scalepoint.report.model import Report
    from scalepoint.verification import Verification

MIN_WIDE_COLUMNS = 72  # a narrower terminal gets tables with fewer columns
FLOAT = "float"
MAX_LISTED_LAYERS = 4
MAX_FRONT_ROWS = 8
NOT_QUANTIZED = "Nothing was quantized: int8 is slower than float for every layer here (placement='int8' forces it)."


def low_share(shares: dict[str, float] | None) -> float | None:
    """Return the share that is quantized."""
    return None if shares is None else sum(share for precision, share in shares.items() if precision != FLOAT)


def verdict(report: "Report") -> str:
    if report.language is not None:
        return _language_verdict(report.language)
    if report.coverage.is_float_for_speed:
        return f"{NOT_QUANTIZED} {_runtime_verdict(report)}"
    return _runtime_verdict(report)


def _language_verdict(result: LanguageModelResult) -> str:
    if not result.status and not result.tokens:
        return "Not run in a runtime, and nothing was measured: pass text to measure perplexity on (judge=, --judge)."
    if not result.status:
        return f"Not run in a runtime.{' All numbers are of the simulation.' if result.logits_db is not None else ''}"
    if result.status != "ok":
        return f"Not verified: {result.runtime}: {result.status}. {to_one_line(result.message)}".strip()
    text = "" if result.agreement_db is None else format_decibels(result.agreement_db)
    if not text:
        return f"Verified: {result.runtime} runs it."
    if text == "exact":
        return f"Verified: {result.runtime} runs it, and its logits are exactly those of the simulation."
    return f"Verified: {result.runtime} runs it. Its logits agree with the simulation's to {text} dB."


def describe_language_sizes(result: LanguageModelResult) -> str:
    """Return both sizes and their ratio, with the data type of the checkpoint, without which a ratio means little."""
    times, word = describe_size_change(result.float_size, result.size)
    checkpoint = f"the {result.float_dtype} checkpoint" if result.float_dtype else "the checkpoint"
    return f"{format_size(result.float_size)} -> {format_size(result.size)}, {times} {word} than {checkpoint}"


def _float_speed(result: LanguageModelResult) -> str:
    """Return the speed of the float model; "" if it was not measured."""
    if result.float_prefill is None or result.float_decode is None:
        return ""
    return f"; float model: {result.float_prefill:.0f} and {result.float_decode:.0f} in {result.float_runtime}"


def _language_lines(result: LanguageModelResult) -> list[str]:
    lines = [f"size: {describe_language_sizes(result)}, {result.bits:.2f} bits per weight"]
    if result.logits_db is not None:
        lines.append(
            f"logits: {format_decibels(result.logits_db)} dB against the float model's, on {result.tokens} tokens"
        )
    if result.prefill is not None and result.decode is not None:
        speed = f"prefill {result.prefill:.0f} tokens/s, decode {result.decode:.0f} tokens/s in {result.runtime}"
        lines.append(f"speed: {speed}{_float_speed(result)}")
    if result.continuation:
        lines.append(f"generated: {shorten(result.prompt, 60)} ... {shorten(result.continuation, 100)}")
    return lines


def _runtime_verdict(report: "Report") -> str:
    verification = report.verification
    if verification is None:
        simulated = " All numbers are of the simulation." if report.accuracy or report.layers else ""
        findings = describe_findings(report)
        return f"Not verified in a runtime.{simulated}{findings and ' ' + findings}"
    if not verification.holds:
        return _unverified(verification)
    chosen = f"; {to_one_line(verification.choices_text)}" if verification.choices else ""
    agrees = f"in {verification.runtime} it runs as simulated ({_describe_agreement(verification.sqnr)}){chosen}"
    if verification.latency is not None and verification.latency.ratio < 1:
        word = "Slower than" if verification.latency.is_slower else "No faster than"
        return f"{word} float: {format_ratio(verification.latency.ratio)} its speed; {agrees}."
    if report.coverage.is_float_for_speed:  # nothing is quantized: there is little to verify
        return f"{agrees[0].upper()}{agrees[1:]}."
    return f"Verified: {agrees}."


def _unverified(verification: "Verification") -> str:
    if verification.differences:
        return f"The file differs from the model: {to_one_line(verification.differences[0])}"
    if verification.status.value == "not verified here":
        return f"Not verified here: {to_one_line(verification.message)}"
    if verification.status.value != "ok":
        reason = f"{verification.runtime}: {verification.status.value}. {to_one_line(verification.message)}"
        return f"Not verified: {reason}".strip()
    return (
        f"{verification.runtime} departs from the simulation: {format_decibels(verification.sqnr)} dB, "
        f"less than the required {verification.bound:.0f} dB."
    )


def describe_findings(report: "Report") -> str:
    """Return how many problems the target's static rules report for the file; "" if there are no rules."""
    if report.findings is None:
        return ""
    problems = format_plural(len(report.findings), "problem") if report.findings else "no problem"
    return f"The static rules of {shorten(report.target)} find {problems} in the file."


def _describe_agreement(sqnr: float) -> str:
    text = format_decibels(sqnr)
    return "exactly" if text == "exact" else f"{text} dB, {describe_quality(sqnr)}"


def summary(report: "Report") -> list[str]:
    """Return lines of text, one result per line. Results that were not measured are omitted."""
    lines = [f"{shorten(report.title)} for {shorten(report.target)}. {verdict(report)}"]
    lines += [
        f"{shorten(score.name)}: {format_value(score.float_value)} -> {format_value(score.value)} ({score.change_text}"
        f"{', in the runtime' if score.where == 'runtime' else ', simulated'})"
        for score in report.accuracy
    ]
    lines += [] if report.language is None else _language_lines(report.language)
    lines += _limit_lines(report)
    lines += [
        f"{what}: {text}"
        for what, text in (("precision", describe_allocation(report)), ("tuned", describe_tuning(report)))
        if text
    ]
    lines += [f"{name}: {before} -> {after} ({note})" for name, before, after, note in _size_and_latency_rows(report)]
    lines += _baseline_lines(report)
    lines.append(f"coverage: {report.coverage.summary()}")
    lines += [f"migrations: {report.migrated.summary()}"] if report.migrated else []
    worst = [
        f"{shorten(layer.name, 40)} {format_decibels(layer.sqnr_db)} ({describe_quality(layer.sqnr_db)})"
        for layer in report.worst()
    ]
    lines += [f"worst layers (dB): {', '.join(worst)}"] if worst else []
    lines += [f"finding: {to_one_line(finding)}" for finding in report.findings or ()]
    lines += [f"warning: {to_one_line(warning)}" for warning in report.warnings]
    return lines


def _limit_lines(report: "Report") -> list[str]:
    """Return whether the limits of accuracy or speed are kept, and what the search for them did."""
    what = "accuracy" if report.min_speed is None else "speed"
    return [
        f"{what}: {text}"
        for text in (describe_score_limit(report), describe_speed_limit(report), describe_search(report))
        if text
    ]


def describe_score_limit(report: "Report") -> str:
    """Return whether the metric dropped by more than max_drop; "" without a limit."""
    if report.max_drop is None or not report.accuracy:
        return ""
    holds = report.accuracy[0].is_within(report.max_drop)
    return f"{'within' if holds else 'more than'} the allowed {report.max_drop:g}"


def describe_speed_limit(report: "Report") -> str:
    """Return whether the file has the speed that min_speed asks for; "" without a limit."""
    verification = report.verification
    if report.min_speed is None or verification is None or verification.latency is None:
        return ""
    holds = verification.latency.ratio >= report.min_speed
    return f"{'at least' if holds else 'less than'} the required {format_ratio(report.min_speed)}"


def describe_search(report: "Report") -> str:
    """Return one sentence about the search for accuracy or speed; "" if only one file was made."""
    if len(report.trials) < 2:
        return ""
    changes = report.precision_changes()
    raised = [f"{shorten(change.layer, 40) or 'all layers'} to {change.to}" for change in changes]
    more = f" and {len(raised) - MAX_LISTED_LAYERS} more" if len(raised) > MAX_LISTED_LAYERS else ""
    words = (
        f"raised: {', '.join(raised[:MAX_LISTED_LAYERS])}{more}"
        if raised
        else "nothing raised was better than the first"
    )
    return f"{format_plural(len(report.trials), 'file')} tried; {words}"


def describe_cost(unit: str, value: float) -> str:
    """Return a cost with its unit."""
    words = {"size": "of the float file's size", "bits": "bits per weight", "speed": "times the speed by MACs"}
    return f"{value:.3g} {words.get(unit, 'of size and time')}"


def describe_allocation(report: "Report") -> str:
    """Return one sentence about the chosen precisions; "" if no allocation was made."""
    allocation = report.allocation
    if allocation is None:
        return ""
    counts = ", ".join(f"{count} {shorten(choice, 40)}" for choice, count in allocation.counts.items())
    limit = "" if allocation.limit is None else f", {allocation.limit:g} allowed"
    cost = describe_cost(allocation.unit, allocation.reached)
    return f"{counts}: {cost}{limit}; {format_noise_level(allocation.error)} dB expected"


def describe_tuning(report: "Report") -> str:
    """Return one sentence about tuning; "" if the model was not tuned."""
    tuning = report.tuning
    if tuning is None:
        return ""
    gains = sorted(layer.gain_db for layer in tuning.layers)
    median = f", median gain {gains[len(gains) // 2]:+.1f} dB" if gains else ""
    not_tuned = f"; {len(tuning.left)} not tuned" if tuning.left else ""
    return f"{format_plural(len(tuning.layers), 'layer')}, {tuning.moved_layers} with changed codes{median}{not_tuned}"


def _size_and_latency_rows(report: "Report") -> list[tuple[str, str, str, str]]:
    """Return rows of size and latency, if they were measured."""
    verification = report.verification
    rows = []
    if verification is not None and verification.float_size:
        times = " ".join(describe_size_change(verification.float_size, verification.size))
        rows.append(("size", format_size(verification.float_size), format_size(verification.size), times.rstrip()))
    if verification is not None and verification.latency:
        before, after = verification.latency.seconds
        batch = "" if verification.latency.batch is None else f", batch {verification.latency.batch}"
        threads = format_plural(verification.latency.threads, "thread")
        speed = f"{format_ratio(verification.latency.ratio)} the speed, {threads}{batch}"
        rows.append(("latency", format_time(before), format_time(after), speed))
    return rows


def _baseline_lines(report: "Report") -> list[str]:
    """Return a line that says which float file the latency is compared with."""
    latency = None if report.verification is None else report.verification.latency
    return [] if latency is None else [f"Latency is compared with {to_one_line(latency.baseline_text)}."]


@dataclass(frozen=True)
class ReportTable:
    """A report that rich can print at any width."""

    report: "Report"
    rows: int = 10

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, narrow = self.report, options.max_width < MIN_WIDE_COLUMNS
        yield Text(f"{shorten(report.title)} for {shorten(report.target)}", style="bold")
        yield Text(verdict(report))
        yield from _with_title("", _comparison_table(report, narrow))
        yield from map(Text, _baseline_lines(report))
        yield from map(Text, _limit_lines(report))
        for line in () if report.language is None else _language_lines(report.language):
            yield Text(line)
        yield Text(report.coverage.summary())
        if report.allocation is not None:
            yield Text(f"precision: {describe_allocation(report)}")
            yield from _with_title("Precision by layer", _precision_table(report.allocation, narrow, self.rows))
            yield from _with_title("Error against cost", _front_table(report.allocation))
        if report.tuning is not None:
            yield Text(f"tuned: {describe_tuning(report)}")
        yield from _with_title("Stays float", _float_table(report, narrow, self.rows))
        yield from _with_title("Worst layers", _error_table(report, narrow, self.rows))
        yield from _with_title("Slowest layers", _time_table(report, narrow, self.rows))
        if report.verification is not None:
            yield from _with_title("In the runtime", _pair_table(report.verification.rows()))
        for finding in report.findings or ():
            yield Text(f"finding: {to_one_line(finding)}", style="yellow")
        for warning in report.warnings:
            yield Text(f"warning: {to_one_line(warning)}", style="yellow")
        steps = Table.grid(padding=(0, 1, 0, 0))
        for index, step in enumerate(report.next_steps()):
            steps.add_row("" if index else "Next:", Text(to_one_line(step), overflow="fold"))
        yield steps


def render_text(report: "Report") -> str:
    """Render a report as wide as the terminal, without colours."""
    file = StringIO()
    Console(file=file, width=shutil.get_terminal_size((100, 24)).columns, no_color=True).print(ReportTable(report))
    return file.getvalue()


def _with_title(title: str, table: Table | None) -> Iterable[Text | Table]:
    if table is None:
        return ()
    return (Text(), Text(title, style="bold"), table) if title else (Text(), table, Text())


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """Return a table without borders. Cells are plain text: a name that looks like rich markup is not interpreted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for index, column in enumerate(columns):
        is_number = index in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def comparison_rows(report: "Report") -> list[tuple[str, str, str, str]]:
    """Return rows of (name, float, quantized, change) for accuracy, size and latency."""
    return [
        (shorten(score.name), format_value(score.float_value), format_value(score.value), score.change_text)
        for score in report.accuracy
    ] + _size_and_latency_rows(report)


def _comparison_table(report: "Report", narrow: bool) -> Table | None:
    rows = comparison_rows(report)
    if not rows:
        return None
    if narrow:  # without threads and batch, which are also in the section of the runtime
        rows = [(*row[:3], row[3].partition(",")[0]) for row in rows]
    return plain_table(("", "float", "quantized", "change"), rows, numbers=(1, 2))


def _float_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    float_rows = [row for row in report.coverage.operations if row.precision == FLOAT]
    if not float_rows:
        return None
    rows = [(shorten(row.name), row.kind, to_one_line(row.explanation)) for row in float_rows[:limit]]
    rows += [(f"and {len(float_rows) - limit} more", "", "")] if len(float_rows) > limit else []
    if narrow:
        return plain_table(("operation", "why"), [(row[0], row[2]) for row in rows])
    return plain_table(("operation", "kind", "why"), rows)


def _error_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    if not report.layers:
        return None
    rows = [
        (
            shorten(layer.name),
            format_decibels(layer.sqnr_db),
            describe_quality(layer.sqnr_db),
            "" if layer.cosine is None else f"{layer.cosine:.4f}",
            format_share(layer.saturation),
            format_share(layer.used_range),
            format_decibels(layer.weight_sqnr_db),
        )
        for layer in report.worst(limit)
    ]
    if narrow:
        return plain_table(("layer", "dB", "quality"), [row[:3] for row in rows], numbers=(1,))
    columns = ("layer", "SQNR dB", "quality", "cosine", "clipped", "range used", "weight dB")
    return plain_table(columns, rows, numbers=(1, 3, 4, 5, 6))


def _precision_table(allocation: PrecisionAllocation, narrow: bool, limit: int) -> Table:
    """Return the precision of at most `limit` layers; layers with the most frequent precision come last."""
    most_frequent = next(iter(allocation.counts), "")
    ordered = sorted(allocation.layers, key=lambda layer: layer.chosen == most_frequent)
    choices = list(dict.fromkeys(choice for layer in allocation.layers for choice in layer.errors))[:3]
    rows = [
        (
            shorten(layer.name),
            shorten(layer.chosen, 40),
            *(format_noise_level(layer.errors[choice]) if choice in layer.errors else "-" for choice in choices),
        )
        for layer in ordered[:limit]
    ]
    rows += [(f"and {len(ordered) - limit} more", "", *("" for _ in choices))] if len(ordered) > limit else []
    if narrow:
        return plain_table(("layer", "chosen"), [row[:2] for row in rows])
    heads = ("layer", "chosen", *(f"dB at {shorten(choice, 24)}" for choice in choices))
    return plain_table(heads, rows, numbers=range(2, len(heads)))


def _front_table(allocation: PrecisionAllocation) -> Table:
    """Return some points of the front. The last one that costs no more than the chosen allocation is marked."""
    sign = -1 if allocation.unit == "speed" else 1  # a higher speed is a lower cost
    limit = sign * allocation.reached * (1 + 1e-9)
    within = [index for index, point in enumerate(allocation.front) if sign * point.cost <= limit]
    marked = within[-1] if within else 0
    step = max(1, math.ceil(len(allocation.front) / MAX_FRONT_ROWS))
    rows = []
    for index in sorted({*range(0, len(allocation.front), step), marked, len(allocation.front) - 1}):
        point = allocation.front[index]
        counts = ", ".join(f"{count} {shorten(choice, 30)}" for choice, count in point.counts.items())
        mark = "<- chosen near here" if index == marked else ""
        rows.append((describe_cost(allocation.unit, point.cost), format_noise_level(point.error), counts, mark))
    return plain_table(("cost", "dB", "layers", ""), rows, numbers=(1,))


def _time_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    verification = report.verification
    if verification is None or not verification.times:
        return None
    rows = [
        (
            shorten(row.name),
            "" if row.float_seconds is None else format_time(row.float_seconds),
            "" if row.seconds is None else format_time(row.seconds),
            format_ratio(row.float_seconds / row.seconds) if row.float_seconds and row.seconds else "",
            shorten(" + ".join(row.kernels[:2]), 60),
        )
        for row in verification.times[:limit]
    ]
    if narrow:
        return plain_table(("layer", "float", "quantized"), [row[:3] for row in rows], numbers=(1, 2))
    return plain_table(("layer", "float", "quantized", "speed", "kernels"), rows, numbers=(1, 2, 3))


def _pair_table(rows: Iterable[tuple[str, str]]) -> Table:
    return plain_table(("", ""), [(name, to_one_line(value)) for name, value in rows])
