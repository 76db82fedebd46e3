"""What to do next, from what was found: the worst trouble first, each step as text to type."""

import shlex
from pathlib import PurePath
from typing import TYPE_CHECKING

from scalepoint.support.formatting import POOR_DB, short

if TYPE_CHECKING:
    from scalepoint.report.model import Report
    from scalepoint.verification import Verification

SMOKE = "a smoke run"  # begins the warning of one
MOST = 3


def next_steps(report: "Report") -> tuple[str, ...]:
    """At most three; of a run that went well, how to measure it again."""
    if any(each.startswith(SMOKE) for each in report.warnings):
        return ("a full run: the same without smoke; --force writes into the same folder",)
    steps = [*_quantizing(report), *_runtime(report), *_accuracy(report)]
    found = report.verification
    if found is not None and found.status.value == "ok" and found.is_run and found.float_size:
        steps.append(f"measure the speed again: {_bench(found)}")
    return tuple(steps[:MOST])


def _bench(found: "Verification") -> str:
    """The command that compares the same files with the same inputs as the run did."""
    file, latency = PurePath(found.path), found.latency
    float_file = latency.baseline_file if latency is not None else ""
    words = ["scalepoint", "bench", str(file.parent / (float_file or f"float{file.suffix}")), str(file)]
    if file.suffix == ".onnx" and found.runtime != "onnxruntime":  # which bench takes for such files
        words += ["--runtime", found.runtime]
    if latency is not None and latency.threads != 1:
        words += ["--threads", str(latency.threads)]
    return shlex.join(words)


def _is_typed(report: "Report") -> bool:
    """Whether the run came from the command line, so that the folder holds its config."""
    return report.reproduction is not None and bool(report.reproduction.command)


def _quantizing(report: "Report") -> list[str]:
    if not report.coverage.is_float_for_speed:
        return []
    option = "speed_first: false under quantization:" if _is_typed(report) else "QuantConfig(speed_first=False)"
    return [f"quantize all the same, smaller but slower: {option} in the config"]


def _runtime(report: "Report") -> list[str]:
    found = report.verification
    if found is None:
        return [] if report.findings is None else [f"build the engine for {short(report.target, 40)} from the file"]
    if found.status.value == "not verified here":
        return []
    if found.status.value != "ok":
        return ["see which runtimes are here: scalepoint doctor"]
    steps = []
    if not found.holds:
        steps.append(f"see where it departs: {_compare(report)}")
    if found.latency is not None and found.latency.ratio < 1:
        steps.append("another target may be faster: scalepoint targets")
    return steps


def _accuracy(report: "Report") -> list[str]:
    steps = []
    if not report.accuracy:
        metric = "--evaluate package.module:function" if _is_typed(report) else "evaluate=your_metric"
        steps.append(f"measure what counts to you: deploy with {metric}")
    if report.max_drop is not None and report.accuracy and not report.accuracy[0].is_within(report.max_drop):
        steps.append(f"see which layers cost most: {_compare(report)}")
    poor = [each for each in report.worst(1) if not each.sqnr_db >= POOR_DB]
    if poor:
        told = f"{{name: {poor[0].name!r}, weight: float, activation: float}}"
        steps.append(f"leave the worst layer float, in the config: overrides: [{told}]")
    return steps


def _compare(report: "Report") -> str:
    if not _is_typed(report) or report.verification is None:
        return "scalepoint.compare(model, done.model, data)"
    folder = PurePath(report.verification.path).parent
    words = ["scalepoint", "compare", str(folder), "-c", str(folder / "config.yaml")]
    is_trusted = report.reproduction is not None and "--trust" in report.reproduction.command.split()
    return shlex.join([*words, "--trust"] if is_trusted else words)
