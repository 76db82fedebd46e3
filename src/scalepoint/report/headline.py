"""The result of a run in about twenty lines: a verdict, then rows of (label, text).

    verdict   one sentence; what is wrong comes first: nothing quantized, departing, slower than float, far from float
    rows      outputs and metrics, how much is quantized, speed, size, the check in the runtime, what stays float

The terminal, `Report.summary` and the page show the same texts. A row that was not measured is left out.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from scalepoint.operation_coverage import CoverageRow, OperationState
from scalepoint.results import LanguageModelResult
from scalepoint.support.formatting import (
    describe_precision,
    describe_quality,
    describe_runtime,
    describe_size_change,
    format_decibels,
    format_error_share,
    format_noise_level,
    format_plural,
    format_ratio,
    format_share,
    format_size,
    format_time,
    format_value,
    is_poor,
    shorten,
    to_one_line,
)
from scalepoint.verification.layer_times import describe_slower_layers

if TYPE_CHECKING:
    from scalepoint.report.model import Report
    from scalepoint.verification import Verification

FLOAT = "float"
MAX_LISTED_LAYERS = 4
MAX_FLOAT_GROUPS = 3
MAX_NAMED_FLOAT_LAYERS = 2
MAX_PRECISIONS = 2
WORST_LAYERS = 3
NOT_QUANTIZED = "Nothing was quantized: int8 is slower than float for every layer here (placement='int8' forces it)."

Row = tuple[str, str]


def low_share(shares: dict[str, float] | None) -> float | None:
    """Return the share that is quantized."""
    if shares is None:
        return None
    return sum(share for precision, share in shares.items() if precision != FLOAT)


def verdict(report: "Report") -> str:
    """Return one sentence: the first problem, or the gains if there is none."""
    return _problem(report) or _good_verdict(report)


def is_good(report: "Report") -> bool:
    """Whether the verdict names nothing that is wrong."""
    return not _problem(report)


def _problem(report: "Report") -> str:
    verification = report.verification
    if report.language is not None:
        return _language_verdict(report.language)
    if report.coverage.is_float_for_speed:
        return NOT_QUANTIZED
    if verification is None:
        simulated = " All numbers are of the simulation." if report.accuracy or report.layers else ""
        findings = describe_findings(report)
        return f"Not verified in a runtime.{simulated}{findings and ' ' + findings}"
    if not verification.holds:
        return _unverified(verification)
    if report.latency is not None and report.latency.is_slower:
        return f"Slower than float: {format_ratio(report.latency.ratio)} its speed."
    if exceeds_max_drop(report):
        return f"Loses more than the allowed {report.max_drop:g} of {shorten(report.accuracy[0].name)}."
    if not report.accuracy and report.output_db is not None and is_poor(report.output_db):
        return f"Far from the float model: {describe_output_error(report.output_db)}."
    return ""


def _good_verdict(report: "Report") -> str:
    verification = report.verification
    if verification is None:
        return ""
    speed = describe_speed(report)
    size = " ".join(describe_size_change(verification.float_size or 0, verification.size))
    gains = [text for text in (speed, size if verification.float_size else "") if text]
    return f"Verified in {describe_runtime(verification.runtime)}{': ' if gains else ''}{', '.join(gains)}."


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


def _unverified(verification: "Verification") -> str:
    runtime = describe_runtime(verification.runtime)
    if verification.differences:
        return f"The file differs from the model: {to_one_line(verification.differences[0])}"
    if verification.status.value == "not verified here":
        return f"Not verified here: {to_one_line(verification.message)}"
    if verification.status.value != "ok":
        reason = f"{runtime}: {verification.status.value}. {to_one_line(verification.message)}"
        return f"Not verified: {reason}".strip()
    return (
        f"{runtime} departs from the simulation: {format_decibels(verification.sqnr)} dB, "
        f"less than the required {verification.bound:.0f} dB."
    )


def result_rows(report: "Report") -> list[Row]:
    """Return the answers in order: outputs and metrics, coverage, speed and size, the check, then details."""
    rows = [] if report.output_db is None else [("outputs", describe_output_error(report.output_db))]
    rows += [
        (shorten(score.name), _describe_score(score.float_value, score.value, score.change_text, score.where))
        for score in report.accuracy
    ]
    rows += [] if report.language is None else _language_rows(report.language)
    rows += _limit_rows(report)
    rows.append(("quantized", describe_coverage(report)))
    details = (
        ("precision", describe_allocation(report)),
        ("tuned", describe_tuning(report)),
        ("migrated", report.migrated.summary() if report.migrated else ""),
        ("speed", _speed_row(report)),
        ("free sizes", _free_sizes_row(report)),
        ("slower in", _slower_layers(report)),
        ("size", _size_row(report)),
        ("checked", describe_check(report)),
    )
    rows += [row for row in details if row[1]]
    # Only the first of these rows has a label.
    rows += [("" if index else "float", text) for index, text in enumerate(describe_float_layers(report))]
    worst = [
        f"{shorten(layer.name, 60)} {format_decibels(layer.sqnr_db)} dB ({describe_quality(layer.sqnr_db) or 'exact'})"
        for layer in report.worst(WORST_LAYERS)
    ]
    if worst:
        rows.append(("weakest", ", ".join(worst)))
    return rows


def summary(report: "Report") -> list[str]:
    """Return the verdict and the rows, one line of text each."""
    lines = [f"{shorten(report.title)} for {shorten(report.target)}. {verdict(report)}"]
    label = ""
    for name, text in result_rows(report):
        label = name or label
        lines.append(f"{label}: {text}")
    return lines + notes(report)


def notes(report: "Report") -> list[str]:
    """Return findings of static rules, and warnings."""
    verification = report.verification
    lines = [f"finding: {to_one_line(finding)}" for finding in report.findings or ()]
    warnings = [*report.warnings, *([verification.warning] if verification and verification.warning else [])]
    return lines + [f"warning: {to_one_line(warning)}" for warning in warnings]


def describe_output_error(sqnr: float) -> str:
    """Describe how far the outputs are from those of the float model."""
    text = format_decibels(sqnr)
    if text == "exact":
        return "exactly those of the float model"
    error = f", error {format_error_share(sqnr)}" if describe_quality(sqnr) != "broken" else ""
    return f"{text} dB against the float model: {describe_quality(sqnr)}{error}"


def _describe_score(float_value: float, value: float, change: str, where: str) -> str:
    measured = "in the runtime" if where == "runtime" else "simulated"
    return f"{format_value(float_value)} -> {format_value(value)} ({change}, {measured})"


def describe_coverage(report: "Report") -> str:
    """Describe how much is quantized: layers, share of the MACs (of the weights if MACs are unknown), precision."""
    operations, coverage = report.coverage.operations, report.coverage
    if not operations:
        return "no operation with weights or a matrix product"
    quantized = coverage.in_state(OperationState.QUANTIZED)
    macs = coverage.share_of_macs()
    shares = coverage.share_of_parameters() if macs is None else macs
    share = f"{format_share(low_share(shares))} of the {'weights' if macs is None else 'MACs'}"
    text = f"{len(quantized)} of {format_plural(len(operations), 'layer')}, {share}"
    if not quantized and any(row.stored for row in operations):
        stored = Counter(row.stored for row in operations if row.stored).most_common(1)[0][0]
        return f"{text}; weights stored as {shorten(describe_precision(stored), 40)}"
    return f"{text}{_list_precisions(quantized)}"


def _list_precisions(quantized: Sequence[CoverageRow]) -> str:
    """Return ": int8 weights per channel, uint8 activations"; several precisions with their number of layers."""
    weighted = [row for row in quantized if row.parameters] or quantized
    counts = Counter(describe_precision(row.precision) for row in weighted).most_common()
    if not counts:
        return ""
    if len(counts) == 1:
        return f": {shorten(counts[0][0])}"
    texts = [f"{shorten(text)} ({count})" for text, count in counts[:MAX_PRECISIONS]]
    other_count = sum(count for _, count in counts[MAX_PRECISIONS:])
    if other_count:
        texts.append(f"others ({other_count})")
    return f": {'; '.join(texts)}"


def describe_speed(report: "Report") -> str:
    """Describe the speed in words; a difference within the noise of the measurement is "the same"."""
    latency = report.latency
    if latency is None:
        return ""
    if latency.is_same:
        return f"as fast as float, {format_ratio(latency.ratio)} is within the noise"
    return f"{format_ratio(latency.ratio)} the speed of float"


def _speed_row(report: "Report") -> str:
    latency = report.latency
    if latency is None:
        return ""
    before, after = map(format_time, latency.seconds)
    batch = "" if latency.batch is None else f", batch {latency.batch}"
    ratio = format_ratio(latency.ratio)
    change = (
        f"same as the fastest float file ({ratio}, noise)" if latency.is_same else f"{ratio} the fastest float file"
    )
    return f"{change}: {before} -> {after}, {format_plural(latency.threads, 'thread')}{batch}"


def _free_sizes_row(report: "Report") -> str:
    return "" if report.latency is None else report.latency.free_sizes_text


def _slower_layers(report: "Report") -> str:
    verification = report.verification
    if verification is None or verification.latency is None or not verification.latency.is_slower:
        return ""
    return to_one_line(describe_slower_layers(verification.times))


def _size_row(report: "Report") -> str:
    verification = report.verification
    if verification is None or not verification.float_size:
        return ""
    change = " ".join(describe_size_change(verification.float_size, verification.size)).rstrip()
    return f"{change}: {format_size(verification.float_size)} -> {format_size(verification.size)}"


def describe_check(report: "Report") -> str:
    """Describe in one line whether the runtime gives the simulated values; "" for a language model."""
    verification = report.verification
    if report.language is not None:
        return ""
    if verification is None:
        return describe_findings(report) or "not run in a runtime"
    if verification.status.value != "ok" or verification.differences:
        return _unverified(verification)
    runtime = describe_runtime(verification.runtime)
    if not verification.holds:
        departure = verification.departure
        first = f"; first at {departure.where}: {departure.cause}. {departure.way_out}" if departure else ""
        return (
            f"{runtime} does not give the simulated values: {format_decibels(verification.sqnr)} dB{to_one_line(first)}"
        )
    is_exact = format_decibels(verification.sqnr) == "exact"
    closeness = "exactly" if is_exact else f"within {format_decibels(verification.sqnr)} dB"
    choices = f"; {to_one_line(verification.choices_text)}" if verification.choices else ""
    return f"{runtime} gives the simulated values: {closeness}{choices}"


def describe_float_layers(report: "Report") -> list[str]:
    """Return one line per reason why layers stay float, the reason with the most MACs first; all norms in one line."""
    groups: dict[tuple[bool, str], list[CoverageRow]] = {}  # by (whether it is a norm, reason)
    for row in report.coverage.operations:
        if row.precision == FLOAT:
            is_norm = "norm" in row.kind
            groups.setdefault((is_norm, "" if is_norm else row.reason), []).append(row)
    ordered = sorted(groups.values(), key=lambda rows: -sum(row.macs or 0 for row in rows))
    lines = [f"{_name_float_layers(rows)}: {_float_reason(rows)}" for rows in ordered[:MAX_FLOAT_GROUPS]]
    other_count = sum(map(len, ordered[MAX_FLOAT_GROUPS:]))
    if other_count:
        lines.append(f"and {format_plural(other_count, 'other layer')}")
    return lines


def _float_reason(rows: Sequence[CoverageRow]) -> str:
    if len(rows) == 1:
        return to_one_line(rows[0].explanation)
    return to_one_line(Counter(row.reason for row in rows).most_common(1)[0][0])


def _name_float_layers(rows: Sequence[CoverageRow]) -> str:
    """Return the names of a few layers, or their number and kind."""
    if len(rows) <= MAX_NAMED_FLOAT_LAYERS:
        return ", ".join(shorten(row.name, 60) for row in rows)
    kinds = {"norm" if "norm" in row.kind else row.kind for row in rows}
    return f"{len(rows)} {shorten(kinds.pop(), 30)}s" if len(kinds) == 1 else format_plural(len(rows), "layer")


def describe_language_sizes(result: LanguageModelResult) -> str:
    """Return both sizes and their ratio, with the data type of the checkpoint, without which a ratio means little."""
    times, word = describe_size_change(result.float_size, result.size)
    checkpoint = f"the {result.float_dtype} checkpoint" if result.float_dtype else "the checkpoint"
    return f"{format_size(result.float_size)} -> {format_size(result.size)}, {times} {word} than {checkpoint}"


def _language_rows(result: LanguageModelResult) -> list[Row]:
    rows = []
    if result.logits_db is not None:
        level = format_decibels(result.logits_db)
        rows.append(("logits", f"{level} dB against the float model's, on {result.tokens} tokens"))
    rows.append(("size", f"{describe_language_sizes(result)}, {result.bits:.2f} bits per weight"))
    if result.prefill is not None and result.decode is not None:
        speed = f"prefill {result.prefill:.0f} tokens/s, decode {result.decode:.0f} tokens/s in {result.runtime}"
        rows.append(("speed", f"{speed}{_float_speed(result)}"))
    if result.continuation:
        rows.append(("generated", f"{shorten(result.prompt, 60)} ... {shorten(result.continuation, 100)}"))
    return rows


def _float_speed(result: LanguageModelResult) -> str:
    """Return the speed of the float model; "" if it was not measured."""
    if result.float_prefill is None or result.float_decode is None:
        return ""
    return f"; float model: {result.float_prefill:.0f} and {result.float_decode:.0f} in {result.float_runtime}"


def describe_findings(report: "Report") -> str:
    """Return how many problems the target's static rules report for the file; "" if there are no rules."""
    if report.findings is None:
        return ""
    problems = format_plural(len(report.findings), "problem") if report.findings else "no problem"
    return f"The static rules of {shorten(report.target)} find {problems} in the file."


def _limit_rows(report: "Report") -> list[Row]:
    """Return whether the limits of accuracy or speed are kept, and what the search for them did."""
    if has_only_placements(report):
        return [("placement", describe_search(report))]
    what = "accuracy" if report.min_speed is None else "speed"
    texts = (describe_score_limit(report), describe_speed_limit(report), describe_search(report))
    return [(what, text) for text in texts if text]


def has_only_placements(report: "Report") -> bool:
    """Whether the trials only chose by speed which layers stay float: there is no limit and no budget."""
    return len(report.trials) > 1 and report.max_drop is None and report.min_speed is None and not report.allocation


def exceeds_max_drop(report: "Report") -> bool:
    """Whether the metric dropped by more than the limit."""
    return report.max_drop is not None and bool(report.accuracy) and not report.accuracy[0].is_within(report.max_drop)


def describe_score_limit(report: "Report") -> str:
    """Return whether the metric dropped by more than max_drop; "" without a limit."""
    if report.max_drop is None or not report.accuracy:
        return ""
    return f"the drop is {'more than' if exceeds_max_drop(report) else 'within'} the allowed {report.max_drop:g}"


def describe_speed_limit(report: "Report") -> str:
    """Return whether the file has the speed that min_speed asks for; "" without a limit."""
    if report.min_speed is None or report.latency is None:
        return ""
    holds = report.latency.reaches(report.min_speed)
    return f"{'at least' if holds else 'less than'} the required {format_ratio(report.min_speed)}"


def describe_search(report: "Report") -> str:
    """Return one sentence about the search for accuracy or speed; "" if only one file was made."""
    if len(report.trials) < 2:
        return ""
    if has_only_placements(report):
        return f"{format_plural(len(report.trials), 'placement')} measured; the fastest is kept"
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
    """Return a cost with its unit. Without a unit, the cost is the share of the size plus the share of the time."""
    words = {"size": "of the float file's size", "bits": "bits per weight", "speed": "times the speed by MACs"}
    return f"{value:.3g} {words[unit]}" if unit in words else f"size and time cost {value:.3g}, float costs 2"


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


def short_repr(report: "Report", path: object) -> str:
    """Return a repr of one line: the file, the target, and how much was quantized."""
    operations = report.coverage.operations
    quantized = len(report.coverage.in_state(OperationState.QUANTIZED))
    speed = "" if report.latency is None else f", {format_ratio(report.latency.ratio)} the speed of float"
    file = repr(to_one_line(PurePath(str(path))))
    return f"{file}, target={to_one_line(report.target)!r}, {quantized} of {len(operations)} layers quantized{speed}"
