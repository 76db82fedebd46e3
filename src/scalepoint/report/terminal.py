"""The report in a terminal: a verdict, float against quantized, what stays float and why, the worst layers.

At 40 columns a table keeps the columns that matter most; nothing is ever cut off on the right.
"""

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
    change_of_size,
    decibel,
    level_of,
    one_line,
    plural,
    quality,
    ratio,
    share_of,
    short,
    size_of,
    time_of,
    value_of,
)

if TYPE_CHECKING:
    from scalepoint.report.model import Report
    from scalepoint.verification import Verification

MIN_WIDE_COLUMNS = 72
FLOAT = "float"
MAX_LISTED_LAYERS = 4
MAX_FRONT_ROWS = 8
NOT_QUANTIZED = "Nothing was quantized: int8 is slower than float for every layer here (speed_first=False forces it)."


def low_share(shares: dict[str, float] | None) -> float | None:
    """The share that runs in low precision."""
    return None if shares is None else sum(share for precision, share in shares.items() if precision != FLOAT)


def verdict(report: "Report") -> str:
    if report.language is not None:
        return _language_verdict(report.language)
    if report.coverage.is_float_for_speed:
        return f"{NOT_QUANTIZED} {_runtime_verdict(report)}"
    return _runtime_verdict(report)


def _language_verdict(found: LanguageModelResult) -> str:
    if not found.status and not found.tokens:
        return "Not run in a runtime, and nothing was measured: that needs text to judge by (judge=, --judge)."
    if not found.status:
        return f"Not run in a runtime.{' All numbers are of the simulation.' if found.logits_db is not None else ''}"
    if found.status != "ok":
        return f"Not verified: {found.runtime}: {found.status}. {one_line(found.message)}".strip()
    text = "" if found.agreement_db is None else decibel(found.agreement_db)
    agreement = {"": "", "exact": " and gives the simulation's logits exactly"}.get(
        text, f", its logits {text} dB from the simulation's"
    )
    return f"Verified: {found.runtime} runs it{agreement}."


def describe_language_sizes(found: LanguageModelResult) -> str:
    """Before and after; a factor says little unless the type of the checkpoint is named."""
    times, word = change_of_size(found.float_size, found.size)
    checkpoint = f"the {found.float_dtype} checkpoint" if found.float_dtype else "the checkpoint"
    return f"{size_of(found.float_size)} -> {size_of(found.size)}, {times} {word} than {checkpoint}"


def _float_speed(found: LanguageModelResult) -> str:
    """The float model's speed next to ours, where it was measured."""
    if found.float_prefill is None or found.float_decode is None:
        return ""
    return f"; the float model {found.float_prefill:.0f} and {found.float_decode:.0f}, in {found.float_runtime}"


def _language_lines(found: LanguageModelResult) -> list[str]:
    lines = [f"size: {describe_language_sizes(found)}, {found.bits:.2f} bits a weight"]
    if found.logits_db is not None:
        lines.append(f"logits: {decibel(found.logits_db)} dB from the float model's, {found.tokens} tokens judged")
    if found.prefill is not None and found.decode is not None:
        own = f"{found.prefill:.0f} tokens a second read, {found.decode:.0f} written, in {found.runtime}"
        lines.append(f"speed: {own}{_float_speed(found)}")
    if found.continuation:
        lines.append(f"it goes on: {short(found.prompt, 60)} ... {short(found.continuation, 100)}")
    return lines


def _runtime_verdict(report: "Report") -> str:
    found = report.verification
    if found is None:
        simulated = " All numbers are of the simulation." if report.accuracy or report.layers else ""
        checked = describe_findings(report)
        return f"Not verified in a runtime.{simulated}{checked and ' ' + checked}"
    if not found.holds:
        return _unverified(found)
    chosen = f"; {one_line(found.choices_text)}" if found.choices else ""
    agrees = f"in {found.runtime} it runs as simulated ({_describe_agreement(found.sqnr)}){chosen}"
    if found.latency is not None and found.latency.ratio < 1:
        word = "Slower than" if found.latency.is_slower else "No faster than"
        return f"{word} float: {ratio(found.latency.ratio)} its speed; {agrees}."
    if report.coverage.is_float_for_speed:  # nothing is quantized: there is little to verify
        return f"{agrees[0].upper()}{agrees[1:]}."
    return f"Verified: {agrees}."


def _unverified(found: "Verification") -> str:
    if found.differences:
        return f"The file differs from the model: {one_line(found.differences[0])}"
    if found.status.value == "not verified here":
        return f"Not verified here: {one_line(found.message)}"
    if found.status.value != "ok":
        return f"Not verified: {found.runtime}: {found.status.value}. {one_line(found.message)}".strip()
    return (
        f"{found.runtime} departs from the simulation: {decibel(found.sqnr)} dB, "
        f"less than the {found.bound:.0f} dB asked for."
    )


def describe_findings(report: "Report") -> str:
    """What the static rules of the target say of the file."""
    if report.findings is None:
        return ""
    count = len(report.findings)
    return (
        f"The static rules of {short(report.target)} find {plural(count, 'fault') if count else 'nothing'} in the file."
    )


def _describe_agreement(sqnr: float) -> str:
    text = decibel(sqnr)
    return "exactly" if text == "exact" else f"{text} dB, {quality(sqnr)}"


def summary(report: "Report") -> list[str]:
    """Plain lines, one thing each; none for what was not measured."""
    lines = [f"{short(report.title)} for {short(report.target)}. {verdict(report)}"]
    lines += [
        f"{short(each.name)}: {value_of(each.float_value)} -> {value_of(each.value)} ({each.change_text}"
        f"{', in the runtime' if each.where == 'runtime' else ', simulated'})"
        for each in report.accuracy
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
    worst = [f"{short(each.name, 40)} {decibel(each.sqnr_db)} ({quality(each.sqnr_db)})" for each in report.worst()]
    lines += [f"worst layers (dB): {', '.join(worst)}"] if worst else []
    lines += [f"finding: {one_line(each)}" for each in report.findings or ()]
    lines += [f"warning: {one_line(each)}" for each in report.warnings]
    return lines


def _limit_lines(report: "Report") -> list[str]:
    """What was asked of accuracy or speed, and what a search for it did."""
    what = "accuracy" if report.min_speed is None else "speed"
    return [
        f"{what}: {text}"
        for text in (describe_score_limit(report), describe_speed_limit(report), describe_search(report))
        if text
    ]


def describe_score_limit(report: "Report") -> str:
    """Whether the metric stayed within what was allowed."""
    if report.max_drop is None or not report.accuracy:
        return ""
    holds = report.accuracy[0].is_within(report.max_drop)
    return f"{'within' if holds else 'more than'} the {report.max_drop:g} allowed"


def describe_speed_limit(report: "Report") -> str:
    """Whether the file is as fast as was asked."""
    found = report.verification
    if report.min_speed is None or found is None or found.latency is None:
        return ""
    holds = found.latency.ratio >= report.min_speed
    return f"{'at least' if holds else 'less than'} the {ratio(report.min_speed)} asked for"


def describe_search(report: "Report") -> str:
    """What a search for accuracy or speed did, in one sentence."""
    if len(report.trials) < 2:
        return ""
    raised = [f"{short(each.layer, 40) or 'all layers'} to {each.to}" for each in report.precision_changes()]
    more = f" and {len(raised) - MAX_LISTED_LAYERS} more" if len(raised) > MAX_LISTED_LAYERS else ""
    words = (
        f"raised: {', '.join(raised[:MAX_LISTED_LAYERS])}{more}"
        if raised
        else "nothing raised was better than the first"
    )
    return f"{plural(len(report.trials), 'file')} tried; {words}"


def describe_cost(unit: str, value: float) -> str:
    """A cost in the words of its unit."""
    words = {"size": "of the float file's size", "bits": "bits a weight", "speed": "times the speed by MACs"}
    return f"{value:.3g} {words.get(unit, 'of size and time')}"


def describe_allocation(report: "Report") -> str:
    """What a budget came to, in one sentence."""
    found = report.allocation
    if found is None:
        return ""
    counts = ", ".join(f"{number} {short(choice, 40)}" for choice, number in found.counts.items())
    limit = "" if found.limit is None else f", {found.limit:g} allowed"
    return f"{counts}: {describe_cost(found.unit, found.reached)}{limit}; {level_of(found.error)} dB expected"


def describe_tuning(report: "Report") -> str:
    """What tuning did, in one sentence."""
    found = report.tuning
    if found is None:
        return ""
    gains = sorted(each.gain_db for each in found.layers)
    median = f", {gains[len(gains) // 2]:+.1f} dB in the middle" if gains else ""
    left = f"; {len(found.left)} left" if found.left else ""
    return f"{plural(len(found.layers), 'layer')}, {found.moved_layers} with other than the nearest codes{median}{left}"


def _size_and_latency_rows(report: "Report") -> list[tuple[str, str, str, str]]:
    """Size and latency, where verify measured them."""
    found = report.verification
    rows = []
    if found is not None and found.float_size:
        times = " ".join(change_of_size(found.float_size, found.size))
        rows.append(("size", size_of(found.float_size), size_of(found.size), times.rstrip()))
    if found is not None and found.latency:
        before, after = found.latency.seconds
        batch = "" if found.latency.batch is None else f", batch {found.latency.batch}"
        how = f"{ratio(found.latency.ratio)} the speed, {plural(found.latency.threads, 'thread')}{batch}"
        rows.append(("latency", time_of(before), time_of(after), how))
    return rows


def _baseline_lines(report: "Report") -> list[str]:
    """Which float file the latency is compared with."""
    latency = None if report.verification is None else report.verification.latency
    return [] if latency is None else [f"Latency is compared with {one_line(latency.baseline_text)}."]


@dataclass(frozen=True)
class ReportTable:
    """A report that rich can print at any width."""

    report: "Report"
    rows: int = 10

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, narrow = self.report, options.max_width < MIN_WIDE_COLUMNS
        yield Text(f"{short(report.title)} for {short(report.target)}", style="bold")
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
        for each in report.findings or ():
            yield Text(f"finding: {one_line(each)}", style="yellow")
        for each in report.warnings:
            yield Text(f"warning: {one_line(each)}", style="yellow")
        steps = Table.grid(padding=(0, 1, 0, 0))
        for index, each in enumerate(report.next_steps()):
            steps.add_row("" if index else "Next:", Text(one_line(each), overflow="fold"))
        yield steps


def render_text(report: "Report") -> str:
    """As wide as the terminal, without colours."""
    file = StringIO()
    Console(file=file, width=shutil.get_terminal_size((100, 24)).columns, no_color=True).print(ReportTable(report))
    return file.getvalue()


def _with_title(title: str, table: Table | None) -> Iterable[Text | Table]:
    if table is None:
        return ()
    return (Text(), Text(title, style="bold"), table) if title else (Text(), table, Text())


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Table:
    """Cells are plain text: a name that looks like markup stays a name."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(columns))
    for index, column in enumerate(columns):
        is_number = index in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def comparison_rows(report: "Report") -> list[tuple[str, str, str, str]]:
    """Float against quantized, a row each number."""
    return [
        (short(each.name), value_of(each.float_value), value_of(each.value), each.change_text)
        for each in report.accuracy
    ] + _size_and_latency_rows(report)


def _comparison_table(report: "Report", narrow: bool) -> Table | None:
    rows = comparison_rows(report)
    if not rows:
        return None
    if narrow:  # how it was measured stands further down
        rows = [(*row[:3], row[3].partition(",")[0]) for row in rows]
    return plain_table(("", "float", "quantized", "change"), rows, numbers=(1, 2))


def _float_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    left = [row for row in report.coverage.operations if row.precision == FLOAT]
    if not left:
        return None
    rows = [(short(row.name), row.kind, one_line(row.explanation)) for row in left[:limit]]
    rows += [(f"and {len(left) - limit} more", "", "")] if len(left) > limit else []
    if narrow:
        return plain_table(("operation", "why"), [(row[0], row[2]) for row in rows])
    return plain_table(("operation", "kind", "why"), rows)


def _error_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    if not report.layers:
        return None
    rows = [
        (
            short(each.name),
            decibel(each.sqnr_db),
            quality(each.sqnr_db),
            "" if each.cosine is None else f"{each.cosine:.4f}",
            share_of(each.saturation),
            share_of(each.used_range),
            decibel(each.weight_sqnr_db),
        )
        for each in report.worst(limit)
    ]
    if narrow:
        return plain_table(("layer", "dB", "which is"), [row[:3] for row in rows], numbers=(1,))
    columns = ("layer", "SQNR dB", "which is", "cosine", "clipped", "range used", "weight dB")
    return plain_table(columns, rows, numbers=(1, 3, 4, 5, 6))


def _precision_table(found: PrecisionAllocation, narrow: bool, limit: int) -> Table:
    """The layers that have other than most, then the rest, at most so many."""
    usual = next(iter(found.counts), "")
    ordered = sorted(found.layers, key=lambda each: each.chosen == usual)
    choices = list(dict.fromkeys(choice for each in found.layers for choice in each.errors))[:3]
    rows = [
        (
            short(each.name),
            short(each.chosen, 40),
            *(level_of(each.errors[choice]) if choice in each.errors else "-" for choice in choices),
        )
        for each in ordered[:limit]
    ]
    rows += [(f"and {len(ordered) - limit} more", "", *("" for _ in choices))] if len(ordered) > limit else []
    if narrow:
        return plain_table(("layer", "chosen"), [row[:2] for row in rows])
    heads = ("layer", "chosen", *(f"dB at {short(choice, 24)}" for choice in choices))
    return plain_table(heads, rows, numbers=range(2, len(heads)))


def _front_table(found: PrecisionAllocation) -> Table:
    """Some points of the front; the last that costs no more than what was chosen is marked."""
    sign = -1 if found.unit == "speed" else 1
    fitting = [index for index, each in enumerate(found.front) if sign * each.cost <= sign * found.reached * (1 + 1e-9)]
    mark = fitting[-1] if fitting else 0
    step = max(1, -(-len(found.front) // MAX_FRONT_ROWS))
    shown = sorted({*range(0, len(found.front), step), mark, len(found.front) - 1})
    rows = [
        (
            describe_cost(found.unit, each.cost),
            level_of(each.error),
            ", ".join(f"{number} {short(choice, 30)}" for choice, number in each.counts.items()),
            "<- chosen near here" if index == mark else "",
        )
        for index, each in ((index, found.front[index]) for index in shown)
    ]
    return plain_table(("cost", "dB", "layers", ""), rows, numbers=(1,))


def _time_table(report: "Report", narrow: bool, limit: int) -> Table | None:
    found = report.verification
    if found is None or not found.times:
        return None
    rows = [
        (
            short(each.name),
            "" if each.float_seconds is None else time_of(each.float_seconds),
            "" if each.seconds is None else time_of(each.seconds),
            ratio(each.float_seconds / each.seconds) if each.float_seconds and each.seconds else "",
            short(" + ".join(each.kernels[:2]), 60),
        )
        for each in found.times[:limit]
    ]
    if narrow:
        return plain_table(("layer", "float", "quantized"), [row[:3] for row in rows], numbers=(1, 2))
    return plain_table(("layer", "float", "quantized", "speed", "kernels"), rows, numbers=(1, 2, 3))


def _pair_table(rows: Iterable[tuple[str, str]]) -> Table:
    return plain_table(("", ""), [(name, one_line(value)) for name, value in rows])
