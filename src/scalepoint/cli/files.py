"""check, bench and report: commands on files that are already there."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code, usage_error
from scalepoint.cli.load_objects import load_public
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.errors import TargetError, UsageError
from scalepoint.support.formatting import one_line, ratio, time_of
from scalepoint.support.formatting import size_of as written_size

MAX_PLACES = 3  # places of one finding
MAX_SLOWEST = 10
OnnxFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.")]


def check(
    path: OnnxFile,
    target: Annotated[str, typer.Option("--target", "-t", help="Whose compiler's rules.")] = "tensorrt",
    target_version: Annotated[str, typer.Option(help="Version of the compiler: 10.9, or 10 for the newest.")] = "10",
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """What a target's compiler would refuse or run badly, by its rules; the compiler is not needed."""
    _check_file(path)
    try:
        found = load_public("check")(path, target=target, version=target_version)
    except TargetError as error:  # a name or a version that is none
        raise usage_error(str(error.args[0])) from error
    from scalepoint.formats import find_format

    origin = find_format("onnx").about(path).made_for
    counts = Counter(each.severity.value for each in found)
    code = Code.MODEL if counts["error"] else Code.DONE
    if json:
        findings = [{**vars(each), "severity": each.severity.value} for each in found]
        told = {"target": target, "version": target_version, "made_for": origin, "findings": findings}
        show_json("check", {"exit_code": int(code), **told})
    else:
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing found"
        other = origin.get("target", target) != target
        made = f" (it was made for {origin['target']}, not for {target})" if other else ""
        show(_list_findings(found), Text(one_line(f"{path}: {summary}{made}")))
    if code:
        say(f"failed: {target} {target_version} would refuse this file", "red")
    return code


def _list_findings(found: Sequence[Any]) -> Listing:
    """One row a rule and reason, with the first places where it is broken; --json has them all."""
    places: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        reason = (each.rule, each.severity.value, each.why, each.way_out)
        places.setdefault(reason, []).append(each.node or each.tensor)
    rows = []
    for (rule, severity, why, way_out), nodes in places.items():
        more = f" and {len(nodes) - MAX_PLACES} more" if len(nodes) > MAX_PLACES else ""
        rows.append((f"{rule} {severity}", ", ".join(nodes[:MAX_PLACES]) + more, why, way_out))
    return Listing(("rule", "where", "why", "way out"), rows)


def bench(
    first: Annotated[Path, typer.Argument(metavar="A.onnx", help="The file to compare with, such as float.onnx.")],
    second: Annotated[Path, typer.Argument(metavar="B.onnx", help="The file that should be faster.")],
    runtime: flags.Runtime = None,
    threads: Annotated[
        str | None, typer.Option(help="Threads of the runtime; several, as 1,2,4, show how many samples a second.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sizes of batches, as 1,8,32: how many samples a second at each.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Size of free axes other than the batch, such as tokens; 1 unless given."),
    ] = None,
    min_ratio: Annotated[
        float | None, typer.Option(min=0, help="Exit with 5 when B is not so many times as fast.")
    ] = None,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """The speed of two files in one process, in turns: the ratio of medians, and the time of their layers.

    If B is in a folder that deploy wrote, the inputs are those that deploy measured with. Otherwise, and with --batches
    or --length, they are random."""
    _check_file(first, None)
    _check_file(second, None)
    from scalepoint.runtimes import find_runtime
    from scalepoint.verification.file_formats import find_runtime_for, read_file_info

    try:
        chosen = find_runtime_for(second) if runtime is None else find_runtime(runtime)
    except UsageError as error:
        raise usage_error(str(error.args[0])) from error
    sizes = [
        read_file_info(path, chosen).size for path in (first, second)
    ]  # what is no model is told before anything runs
    counts, sizes_of = _parse_counts("--threads", threads), _parse_counts("--batches", batches)
    from scalepoint.verification.benchmarking import make_random_inputs, throughput

    kept = (
        _load_saved_inputs(first, second, chosen) if batches is None and length is None and len(counts) == 1 else None
    )
    try:
        feeds = make_random_inputs(first, chosen, sizes_of[0], length or 1) if kept is None else kept
        more: Sequence[Any] = ()
        if len(counts) * len(sizes_of) > 1:
            more = throughput(first, second, batches=sizes_of, threads=counts, length=length or 1, runtime=chosen)
    except UsageError as error:
        raise usage_error(str(error.args[0])) from error
    found = more[0] if more else load_public("benchmark")(first, second, feeds, runtime=chosen, threads=counts[0])
    by_layer = _with_layer_names(first)
    layers = _profile_layers(by_layer, second, feeds, chosen, counts[0])
    code = Code.LIMIT if min_ratio is not None and not found.ratio >= min_ratio else Code.DONE
    if json:
        about = {"exit_code": int(code), "files": [first, second], "bytes": sizes}
        show_json("bench", {**about, **vars(found), "layers": list(map(vars, layers)), "throughput": _list_rates(more)})
    else:
        rows = [
            (path, time_of(seconds), written_size(size))
            for path, seconds, size in zip((first, second), found.seconds, sizes, strict=True)
        ]
        speed = f"{'' if found.ratio >= 1 else 'SLOWER: '}{ratio(found.ratio)} the speed"
        show(
            Listing(("file", "median", "size"), rows, numbers=(1, 2)),
            Text(one_line(f"{second.name}: {speed} of {first.name} ({found.how})")),
            *_show_throughput(more, first, second),
            *_show_slowest(layers, by_layer, second),
        )
    if code:
        say(f"failed: {ratio(found.ratio)} is less than the {min_ratio} asked for", "red")
    return code


def _load_saved_inputs(first: Path, second: Path, runtime: Any) -> dict[str, Any] | None:
    """Load the inputs that deploy measured the second file with; None if there are none, or the files take others."""
    from scalepoint.verification.file_formats import read_file_info
    from scalepoint.verification.inputs import INPUTS_FILE, load_inputs

    path = second.parent / INPUTS_FILE
    if not path.is_file():
        return None
    feeds = load_inputs(path)
    if any({each.name for each in read_file_info(file, runtime).inputs} != set(feeds) for file in (first, second)):
        return None
    say(f"inputs: {path}")
    return feeds


def _list_rates(more: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"batch": each.batch, "threads": each.threads, "per_second": each.per_second, "ratio": each.ratio}
        for each in more
    ]


def _parse_counts(name: str, given: str | None) -> list[int]:
    """1,8,32 as numbers; 1 unless given."""
    parts = [part.strip() for part in (given or "1").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise usage_error(f"{name} {given!r}: whole numbers above 0, as 1,8,32")
    return list(dict.fromkeys(map(int, parts)))


def _show_throughput(more: Sequence[Any], first: Path, second: Path) -> Iterator[Any]:
    """Samples a second, where several batches or numbers of threads were asked for."""
    if more:
        rows = [
            (str(each.batch), str(each.threads), *(f"{rate:,.1f}" for rate in each.per_second), ratio(each.ratio))
            for each in more
        ]
        columns = ("batch", "threads", f"{first.name}, a second", f"{second.name}, a second", "speed")
        yield Listing(columns, rows, numbers=(0, 1, 2, 3, 4))


def _profile_layers(first: Path, second: Path, feeds: Any, runtime: Any, threads: int) -> Sequence[Any]:
    """By layer, where the runtime tells."""
    from scalepoint.verification import profile

    return profile(first, second, feeds, runtime=runtime, threads=threads) if runtime.profiles else ()


def _with_layer_names(path: Path) -> Path:
    """The float file whose nodes have the names of layers: torch.onnx.export gives those of float_plain other names."""
    own = path.with_name(f"float{path.suffix}")
    return own if path.stem == "float_plain" and own.is_file() else path


def _show_slowest(layers: Sequence[Any], first: Path, second: Path) -> Iterator[Any]:
    """The slowest rows of the second file, and what loses time against the first."""
    from scalepoint.verification.layer_times import describe_slower_layers

    if not layers:
        return
    rows = [
        (
            one_line(each.name),
            "" if each.float_seconds is None else time_of(each.float_seconds),
            "" if each.seconds is None else time_of(each.seconds),
            ratio(each.float_seconds / each.seconds) if each.float_seconds and each.seconds else "",
            one_line(" + ".join(each.kernels[:2])),
        )
        for each in layers[:MAX_SLOWEST]
    ]
    yield Listing(("slowest layer", first.name, second.name, "speed", "kernels"), rows, numbers=(1, 2, 3))
    if why := describe_slower_layers(layers):
        yield Text(one_line(f"{second.name} loses time in {why}"))


def report(
    folder: flags.Folder,
    html: Annotated[Path | None, typer.Option(help="Write the page anew to this file.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="At most so many layers and reasons.")] = 10,
    force: flags.Force = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Show the report of a deployment; the page is report.html in the folder."""
    path = folder / "report.json" if folder.is_dir() else folder
    if not path.is_file() or path.suffix != ".json":
        raise usage_error(f"{path} is not there or no report: give the folder that `scalepoint deploy` wrote")
    if html is not None and html.exists() and not force:
        raise usage_error(f"{html} is there already: choose another name, or overwrite it with --force")
    from scalepoint.report import Report, to_html
    from scalepoint.support.files import replace_text

    found = Report.from_file(path, folder=path.parent if folder.is_dir() else None)
    if html is not None:
        replace_text(html, to_html(found))
        say(f"written: {html}")
    if json:
        show_json("report", {"exit_code": 0, "report": found.to_dict()})
        return Code.DONE
    show(found.table(rows))
    page = html or path.with_name("report.html")
    if page.is_file():
        say(f"page: {page}")
    return Code.DONE


def _check_file(path: Path, suffix: str | None = ".onnx") -> None:
    if not path.is_file():
        raise usage_error(f"{str(path)!r}: there is no such file ({Path.cwd()})")
    if suffix is not None and path.suffix != suffix:
        raise usage_error(f"{str(path)!r} is not an {suffix} file")
