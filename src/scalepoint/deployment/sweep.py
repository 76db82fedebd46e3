"""sweep: deploy over a grid of settings, one folder each, one table and one page over all.

    grid {target: [a, b], accuracy: [fast, best]}  ->  OUT/a-fast, OUT/a-best, OUT/b-fast, OUT/b-best, OUT/sweep.html

After every run the table is written, so that resume=True takes the runs that are done, goes on in the one that was
interrupted, and does the rest. A run that fails is told in its row; the others go on. Several ranks run as many at a
time, each of them alone; the first has the table.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from scalepoint import ranks
from scalepoint.deployment.journal import stages_in
from scalepoint.deployment.marks import mark_of_target
from scalepoint.deployment.story import deploy
from scalepoint.errors import ScalepointError, StoreError, UsageError, nearest
from scalepoint.files import LOCK, locked, replace_text
from scalepoint.files import sweep as sweep_files
from scalepoint.output_folder import check_links, check_path
from scalepoint.plain import plain
from scalepoint.progress import say
from scalepoint.quantize.feeding import is_split
from scalepoint.report import Report, Sweep, SweepRow, sweep_page
from scalepoint.report.folder import JSON_FILE
from scalepoint.report.sweep import FILE
from scalepoint.targets import Target

PAGE = "sweep.html"
MOST_RUNS = 1000
_NOT_SWEPT = (
    "model",
    "example_inputs",
    "calibration_data",
    "output",
    "evaluate",
    "kwargs",
    "resume",
    "force",
    "progress",
    "callback",
)


@ranks.together()
def sweep(
    model: nn.Module,
    example_inputs: Any,
    calibration_data: Any,
    *,
    grid: Mapping[str, Sequence[Any]],
    output: str | Path = "sweep",
    resume: bool = False,
    force: bool = False,
    finish: Callable[[Any, Path, Mapping[str, Any]], object] | None = None,
    **options: Any,
) -> Sweep:
    """Deploy with every combination of the grid's values: of keywords of `deploy` such as target, accuracy, config.

    `options` are keywords of `deploy` that all runs share. Each run has a folder of its own in `output`, beside
    sweep.json and sweep.html. What a run cannot do (a target that refuses, a runtime that is missing) is told in its
    row. resume=True keeps the runs that are done. finish(done, folder, point) is called after every run, on the rank
    that had it.
    """
    points = points_of(grid)
    if isinstance(calibration_data, Iterator):
        raise UsageError("a sweep reads the data once a run, an iterator gives it once: pass a list or a function")
    if ranks.size() > 1 and is_split(calibration_data) and not callable(calibration_data):
        raise UsageError("a sweep gives every rank whole runs, a DistributedSampler a part of the data: leave it away")
    folder = Path(output)
    with _opened(folder, resume=resume, force=force) as known:
        rows = {name: row for name, row in known.items() if name in points and row.settings == _plain(points[name])}
        due = [name for name in points if name not in rows]
        for first in range(0, len(due), ranks.size()):
            turn = due[first : first + ranks.size()]
            with ranks.agreed("a run of the sweep") as told:
                if ranks.rank() < len(turn):
                    name = turn[ranks.rank()]
                    if options.get("progress") is not False:
                        say(f"run {len(rows) + 1} of {len(points)}: {name}")
                    shown = options if ranks.is_main() else {**options, "progress": False, "callback": None}
                    with ranks.alone():
                        inputs = (example_inputs, calibration_data)
                        told.mine = plain(_run(model, inputs, folder / name, points[name], shown, finish))
            rows |= zip(turn, map(TypeAdapter(SweepRow).validate_python, told.all), strict=False)
            ranks.told("the table", partial(_write, folder, _table(points, rows)))
        found = _table(points, rows)
        ranks.told("the table", partial(_write, folder, found))
    return found


def _table(points: Iterable[str], rows: Mapping[str, SweepRow]) -> Sweep:
    """The runs so far, in the order of the grid."""
    return Sweep(tuple(rows[name] for name in points if name in rows))


@contextmanager
def _opened(folder: Path, *, resume: bool, force: bool) -> Iterator[dict[str, SweepRow]]:
    """The runs that are done already. Of several ranks the first looks, and keeps other jobs out."""
    with ExitStack() as held:

        def looked() -> Any:
            check_path(folder)
            check_links(folder, (LOCK, FILE, PAGE))
            if folder.exists() and any(folder.iterdir()) and not (resume or force):
                raise UsageError(
                    f"{folder} is not empty: go on with resume=True, overwrite with force=True, or choose another"
                )
            known = _known(folder) if resume else {}
            held.enter_context(locked(folder))
            sweep_files(folder, (FILE, PAGE))
            return plain(known)

        found = ranks.told("looking at the output", looked)
        yield {name: TypeAdapter(SweepRow).validate_python(row) for name, row in found.items()}


def points_of(grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Name -> keywords of every run; the last key of the grid turns fastest."""
    allowed = [name for name in inspect.signature(deploy).parameters if name not in _NOT_SWEPT]
    for key, values in grid.items():
        if key not in allowed:
            raise UsageError(f"grid: {key!r} is no keyword of deploy that can be swept: {nearest(key, allowed)}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"grid: {key} is a list of values, not {values!r}")
    count = 1
    for values in grid.values():
        count *= len(values)
    if not grid or count > MOST_RUNS:
        raise UsageError(f"grid: {count if grid else 0} runs; at least one key and at most {MOST_RUNS} runs")
    found: dict[str, dict[str, Any]] = {}
    for places in product(*(range(len(values)) for values in grid.values())):
        point = {key: grid[key][place] for key, place in zip(grid, places, strict=True)}
        name = "-".join(_word(key, point[key], place) for key, place in zip(grid, places, strict=True))
        found[name if name not in found else f"{name}-{len(found)}"] = point
    return found


def _word(key: str, value: Any, place: int) -> str:
    """A part of a folder's name."""
    text = getattr(value, "name", value)
    if text is None or isinstance(text, Mapping) or not isinstance(text, str | int | float | bool):
        return f"{key}{place + 1}"
    word = re.sub(r"[^A-Za-z0-9._]+", "_", text if isinstance(text, str) else f"{key}{text}").strip("_.")
    return word or f"{key}{place + 1}"


def _known(folder: Path) -> dict[str, SweepRow]:
    """The runs that are done, and whose folders are there."""
    try:
        rows = Sweep.from_file(folder / FILE).rows
    except StoreError:
        return {}
    return {row.name: row for row in rows if row.is_done and (folder / row.name / JSON_FILE).is_file()}


def _run(
    model: nn.Module,
    inputs: tuple[Any, Any],
    folder: Path,
    point: Mapping[str, Any],
    options: Mapping[str, Any],
    finish: Callable[[Any, Path, Mapping[str, Any]], object] | None,
) -> SweepRow:
    """One run, from where it was."""
    check_links(folder.parent, (folder.name,))
    goes_on = folder.is_dir() and bool(stages_in(folder))
    try:
        done = deploy(
            model, *inputs, output=folder, resume=goes_on, force=True, **{"allow_departure": True, **options, **point}
        )
    except ScalepointError as error:
        return SweepRow(folder.name, _plain(point), "failed", str(error))
    if finish is not None:
        finish(done, folder, point)
    report: Report = done.report
    return SweepRow.of(folder.name, _plain(point), report, done.path.stat().st_size)


def _plain(point: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run as JSON, the same in every process: a target by its name, options and fingerprint."""
    return {key: _plain_target(each) if isinstance(each, Target) else plain(each) for key, each in point.items()}


def _plain_target(target: Target) -> dict[str, Any]:
    return {"name": target.name, "options": plain(target.options), "fingerprint": mark_of_target(target)}


def _write(folder: Path, found: Sweep) -> None:
    replace_text(folder / FILE, json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n")
    replace_text(folder / PAGE, sweep_page(found))
