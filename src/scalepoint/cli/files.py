"""The commands `scalepoint check`, `bench`, `report` and `gate`, which work on existing files."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import scalepoint
from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.output import Listing, say, show, show_json, write
from scalepoint.errors import TargetError, UsageError
from scalepoint.support.formatting import format_ratio, format_size, format_time, to_one_line

MAX_SHOWN_NODES = 3  # nodes of one finding
MAX_SLOWEST_LAYERS = 10
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"  # set by GitHub Actions: a file that the page of the job shows
OnnxFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.")]


def check(
    path: OnnxFile,
    target: Annotated[str, typer.Option("--target", "-t", help="The target whose rules are applied.")] = "tensorrt",
    target_version: Annotated[
        str, typer.Option(help="Version of the target's compiler, such as 10.9; 10 is the newest 10.x.")
    ] = "10",
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Check an ONNX file against the rules of a target's compiler: what it would refuse or run slowly.

    The compiler itself is not needed.
    """
    _check_file(path)
    try:
        findings = scalepoint.check(path, target=target, version=target_version)
    except TargetError as error:  # an unknown target or version
        raise UsageError(str(error.args[0])) from error
    from scalepoint.formats import find_format

    origin = find_format("onnx").about(path).made_for
    counts = Counter(finding.severity.value for finding in findings)
    code = Code.MODEL if counts["error"] else Code.DONE
    if json:
        rows = [{**vars(finding), "severity": finding.severity.value} for finding in findings]
        fields = {"target": target, "version": target_version, "made_for": origin, "findings": rows}
        show_json("check", {"exit_code": int(code), **fields})
    else:
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing found"
        is_other_target = origin.get("target", target) != target
        note = f" (it was made for {origin['target']}, not for {target})" if is_other_target else ""
        show(_list_findings(findings), Text(to_one_line(f"{path}: {summary}{note}")))
    if code:
        say(f"failed: {target} {target_version} would refuse this file", "red")
    return code


def _list_findings(findings: Sequence[Any]) -> Listing:
    """List one row per rule and reason, with the first nodes that break it. --json lists all nodes."""
    nodes_by_reason: dict[tuple[str, ...], list[str]] = {}
    for finding in findings:
        reason = (finding.rule, finding.severity.value, finding.why, finding.way_out)
        nodes_by_reason.setdefault(reason, []).append(finding.node or finding.tensor)
    rows = []
    for (rule, severity, why, hint), nodes in nodes_by_reason.items():
        more = f" and {len(nodes) - MAX_SHOWN_NODES} more" if len(nodes) > MAX_SHOWN_NODES else ""
        rows.append((f"{rule} {severity}", ", ".join(nodes[:MAX_SHOWN_NODES]) + more, why, hint))
    return Listing(("rule", "where", "why", "what to do"), rows)


def bench(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="The file to compare with, such as out/float.onnx.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="The file that should be faster.")],
    runtime: flags.Runtime = None,
    threads: Annotated[
        str | None,
        typer.Option(help="Threads of the runtime. A list such as 1,2,4 shows the samples per second for each."),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes such as 1,8,32: shows the samples per second for each.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Size of free axes that are not the batch, such as the number of tokens; 1 by default."
        ),
    ] = None,
    min_ratio: Annotated[
        float | None, typer.Option(min=0, help="Exit with code 5 if B is less than this many times as fast as A.")
    ] = None,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Compare the speed of two files in one process, with interleaved runs.

    Prints the ratio of the median times, and the time of each layer. If B is in an output folder of deploy, the inputs
    are those that deploy measured with. Otherwise, and with --batches or --length, they are random.
    """
    _check_file(first, None)
    _check_file(second, None)
    thread_counts, batch_sizes = _parse_counts("--threads", threads), _parse_counts("--batches", batches)
    from scalepoint.runtimes import find_runtime
    from scalepoint.verification.benchmarking import make_random_inputs, throughput
    from scalepoint.verification.file_formats import find_runtime_for, read_file_info

    chosen_runtime = find_runtime_for(second) if runtime is None else find_runtime(runtime)
    # Reading both files first reports a file that is not a model before anything runs.
    file_sizes = [read_file_info(path, chosen_runtime).size for path in (first, second)]
    feeds = None
    if batches is None and length is None and len(thread_counts) == 1:
        feeds = _load_saved_inputs(first, second, chosen_runtime)
    if feeds is None:
        feeds = make_random_inputs(first, chosen_runtime, batch_sizes[0], length or 1)
    results: Sequence[Any] = ()  # one per combination of batch size and threads, if there are several
    if len(thread_counts) * len(batch_sizes) > 1:
        results = throughput(
            first, second, batches=batch_sizes, threads=thread_counts, length=length or 1, runtime=chosen_runtime
        )
        result = results[0]
    else:
        result = scalepoint.benchmark(first, second, feeds, runtime=chosen_runtime, threads=thread_counts[0])
    profiled_file = _with_layer_names(first)
    layers = _profile_layers(profiled_file, second, feeds, chosen_runtime, thread_counts[0])
    code = Code.LIMIT if min_ratio is not None and not result.ratio >= min_ratio else Code.DONE
    if json:
        fields = {"exit_code": int(code), "files": [first, second], "bytes": file_sizes, **vars(result)}
        names = ("batch", "threads", "per_second", "ratio")
        rates = [{name: getattr(rate, name) for name in names} for rate in results]
        show_json("bench", {**fields, "layers": [vars(layer) for layer in layers], "throughput": rates})
    else:
        rows = [
            (path, format_time(seconds), format_size(size))
            for path, seconds, size in zip((first, second), result.seconds, file_sizes, strict=True)
        ]
        speed = f"{'' if result.ratio >= 1 else 'SLOWER: '}{format_ratio(result.ratio)} the speed"
        show(
            Listing(("file", "median", "size"), rows, number_columns=(1, 2)),
            Text(to_one_line(f"{second.name}: {speed} of {first.name} ({result.conditions})")),
            *_show_throughput(results, first, second),
            *_show_slowest(layers, profiled_file, second),
        )
    if code:
        say(f"failed: {format_ratio(result.ratio)} is less than the {min_ratio} of --min-ratio", "red")
    return code


def _load_saved_inputs(first: Path, second: Path, runtime: Any) -> dict[str, Any] | None:
    """Load the inputs that deploy saved next to the second file; None if there are none or the names differ."""
    from scalepoint.verification.file_formats import read_file_info
    from scalepoint.verification.inputs import INPUTS_FILE, load_inputs

    path = second.parent / INPUTS_FILE
    if not path.is_file():
        return None
    feeds = load_inputs(path)
    for file in (first, second):
        if {info.name for info in read_file_info(file, runtime).inputs} != set(feeds):
            return None
    say(f"inputs: {path}")
    return feeds


def _parse_counts(flag: str, text: str | None) -> list[int]:
    """Parse numbers such as "1,8,32"; [1] without a text."""
    parts = [part.strip() for part in (text or "1").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag} {text!r}: must be whole numbers above 0, such as 1,8,32")
    return list(dict.fromkeys(map(int, parts)))


def _show_throughput(results: Sequence[Any], first: Path, second: Path) -> Iterator[Any]:
    """Yield a table of samples per second, if several batch sizes or numbers of threads were measured."""
    if not results:
        return
    rows = [
        (
            str(result.batch),
            str(result.threads),
            *(f"{rate:,.1f}" for rate in result.per_second),
            format_ratio(result.ratio),
        )
        for result in results
    ]
    columns = ("batch", "threads", f"{first.name}, per second", f"{second.name}, per second", "speed")
    yield Listing(columns, rows, number_columns=(0, 1, 2, 3, 4))


def _profile_layers(first: Path, second: Path, feeds: Any, runtime: Any, threads: int) -> Sequence[Any]:
    """Measure the time of every layer; () if the runtime has no profiler."""
    from scalepoint.verification import profile

    return profile(first, second, feeds, runtime=runtime, threads=threads) if runtime.profiles else ()


def _with_layer_names(path: Path) -> Path:
    """Return float.onnx instead of float_plain.onnx, whose nodes torch.onnx.export does not name after layers."""
    float_file = path.with_name(f"float{path.suffix}")
    return float_file if path.stem == "float_plain" and float_file.is_file() else path


def _show_slowest(layers: Sequence[Any], first: Path, second: Path) -> Iterator[Any]:
    """Yield the slowest layers of the second file, and the layers that are slower than in the first file."""
    from scalepoint.verification.layer_times import describe_slower_layers

    if not layers:
        return
    rows = [
        (
            to_one_line(layer.name),
            "" if layer.float_seconds is None else format_time(layer.float_seconds),
            "" if layer.seconds is None else format_time(layer.seconds),
            format_ratio(layer.float_seconds / layer.seconds) if layer.float_seconds and layer.seconds else "",
            to_one_line(" + ".join(layer.kernels[:2])),
        )
        for layer in layers[:MAX_SLOWEST_LAYERS]
    ]
    yield Listing(("slowest layer", first.name, second.name, "speed", "kernels"), rows, number_columns=(1, 2, 3))
    if slower_layers := describe_slower_layers(layers):
        yield Text(to_one_line(f"{second.name} loses time in {slower_layers}"))


def report(
    folder: flags.Folder,
    html: Annotated[Path | None, typer.Option(help="Write the report as an HTML page to this file.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Largest number of layers and reasons in a table.")] = 10,
    force: flags.Force = False,
    verbose: flags.VerboseReport = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Show the report of a deployment. The same report as a page is report.html in the folder."""
    path = folder / "report.json" if folder.is_dir() else folder
    if not path.is_file() or path.suffix != ".json":
        raise UsageError(f"{path} is not a report: pass the output folder of `scalepoint deploy`")
    if html is not None and html.exists() and not force:
        raise UsageError(f"{html} exists already: choose another name, or overwrite it with --force")
    from scalepoint.report import Report, to_html
    from scalepoint.support.files import replace_text

    loaded = Report.from_file(path, folder=path.parent if folder.is_dir() else None)
    if html is not None:
        replace_text(html, to_html(loaded))
        say(f"written: {html}")
    if json:
        show_json("report", {"exit_code": 0, "report": loaded.to_dict()})
        return Code.DONE
    show(loaded.table(rows, verbose=verbose))
    page = html or path.with_name("report.html")
    if page.is_file():
        say(f"page: {page}")
    return Code.DONE


def gate(
    folder: flags.Folder,
    max_drop: Annotated[
        float | None, typer.Option(help="Largest allowed drop of the metric from the float model.")
    ] = None,
    min_speed: Annotated[
        float | None, typer.Option(help="Smallest allowed speed relative to the fastest float file, such as 1.5.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest allowed size of the file, such as 30MB or 8MiB.")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Accept a file that could not run in its runtime.")
    ] = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Check a deployment against limits, for CI. Prints a Markdown summary; runs no model.

    Exit code 0: all passed. 5: a limit is exceeded. 4: the file does not match the simulation, was not run, or changed
    after it was measured. 2: there is no report, or a limit cannot be checked because its value was not measured.
    In GitHub Actions the summary is also appended to the page of the job.
    """
    from scalepoint.report import Outcome

    limits = {"max_drop": max_drop, "min_speed": min_speed, "max_size": max_size}
    result = scalepoint.gate(folder, **limits, allow_unverified=allow_unverified)
    codes = {Outcome.UNVERIFIED: Code.UNVERIFIED, Outcome.FAILED: Code.LIMIT, Outcome.NOT_MEASURED: Code.USAGE}
    code = next((code for outcome, code in codes.items() if result.with_outcome(outcome)), Code.DONE)
    summary = result.to_markdown()
    if summary_path := os.environ.get(SUMMARY_VARIABLE):
        with Path(summary_path).open("a", encoding="utf-8") as file:
            file.write(summary)
    if json:
        show_json("gate", {"exit_code": int(code), **result.to_dict()})
    else:
        write(sys.stdout, summary)
    if code:
        say(f"failed: {', '.join(check.name for check in result.checks if check.outcome != Outcome.PASSED)}", "red")
    return code


def sign(
    folder: flags.Folder,
    key: Annotated[Path, typer.Option(metavar="KEY.pem", help="Elliptic curve private key in a PEM file.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier signature.")] = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Sign all files of an output folder with a local key. Nothing is sent over the network.

    Writes OUT/model.sig. `scalepoint verify OUT --signature PUBLIC.pem` checks it. The environment variable
    SCALEPOINT_KEY_PASSWORD has the password of an encrypted key.
    """
    from scalepoint.pipeline.signature import PASSWORD_VARIABLE

    signature = scalepoint.sign(folder, key, password=os.environ.get(PASSWORD_VARIABLE) or None, force=force)
    if json:
        show_json("sign", {"exit_code": int(Code.DONE), "signature": str(signature)})
    else:
        show(Text(to_one_line(f"signed: {signature}")))
    return Code.DONE


def _check_file(path: Path, suffix: str | None = ".onnx") -> None:
    if not path.is_file():
        raise UsageError(f"{str(path)!r}: there is no such file in {Path.cwd()}")
    if suffix is not None and path.suffix != suffix:
        raise UsageError(f"{str(path)!r} is not an {suffix} file: pass an {suffix} file")
