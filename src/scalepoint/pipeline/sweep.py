"""sweep: deploy with every combination of a grid of options, and write one table and one page of all runs.

    grid {target: [a, b], accuracy: [fast, best]}  ->  OUT/a-fast, OUT/a-best, OUT/b-fast, OUT/b-best, OUT/sweep.html

The table is written after every run. resume=True keeps finished runs and continues the interrupted one, if what all
runs share is the same as before. A failed run becomes a row with its error, and the sweep goes on. With several ranks,
each rank makes complete runs.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import nn
from torch.export import ExportedProgram

from scalepoint import distributed
from scalepoint.budget import Budget
from scalepoint.errors import (
    ConfigError,
    ScalepointError,
    ScalepointWarning,
    StoreError,
    TargetError,
    UsageError,
    did_you_mean,
)
from scalepoint.graph.capture import as_module, unwrap_model
from scalepoint.graph.user_traceback import user_level
from scalepoint.options import DeployOptions, RunOptions
from scalepoint.pipeline.context import captures_reused
from scalepoint.pipeline.deploy import deploy
from scalepoint.pipeline.fingerprints import (
    fingerprint,
    fingerprint_code,
    fingerprint_model,
    fingerprint_target,
    fingerprint_tensors,
)
from scalepoint.pipeline.inputs import DataSource
from scalepoint.pipeline.job import build_options, check_metric, find_model_target
from scalepoint.pipeline.onnx_source import is_onnx_file
from scalepoint.pipeline.workspace import SweepWorkspace, list_finished_stages
from scalepoint.quantize.feeding import is_split_across_ranks
from scalepoint.report import Sweep, SweepRow, sweep_page
from scalepoint.report.html import JSON_FILE
from scalepoint.report.sweep import PAGE_FILE, SWEEP_FILE
from scalepoint.support.files import compute_digest
from scalepoint.support.jsonable import to_jsonable
from scalepoint.support.progress import write_line
from scalepoint.targets import Target

MAX_RUNS = 1000
NOT_COMPARED = ("progress", "callback", "command", "threads")  # options that change no file
RunCallback = Callable[[Any, Path, Mapping[str, Any]], object]


@distributed.participating()
def sweep(
    model: nn.Module | ExportedProgram | str | Path,
    example_inputs: Any,
    calibration_data: Any,
    *,
    grid: Mapping[str, Sequence[Any]],
    output: str | Path = "sweep",
    resume: bool = False,
    force: bool = False,
    finish: RunCallback | None = None,
    **options: Any,
) -> Sweep:
    """Deploy a model with every combination of a grid of options, and compare the results.

    Every run writes a subfolder of `output`, as deploy does. The files sweep.json and sweep.html compare all runs. The
    options of all runs are checked before the first one starts. A run that fails does not stop the sweep: its row in
    the table has the error.

    Args:
        model: The trained float model, an ExportedProgram, or the path of an .onnx file.
        example_inputs: One set of inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs. None
            for an .onnx file, as in deploy.
        calibration_data: Batches of inputs (list, DataLoader, ...), or a function that calls the model it is given.
            Not an iterator, because every run reads the data.
        grid: Keyword of `deploy` -> list of values, such as {"target": ["onnxruntime", "openvino"], "accuracy":
            ["fast", "best"]}. At most 1000 combinations.
        output: The folder to write.
        resume: Keep finished runs, and continue an interrupted sweep. If the model, the data or an option of all runs
            changed, all runs are made again.
        force: Overwrite files of an earlier sweep.
        finish: Called as `finish(deployment, folder, values)` after every run, on the rank that made it.
        **options: Keywords of `deploy` for all runs. `allow_departure` is True by default.

    Returns:
        The table of all runs; print it, or open sweep.html.

    Raises:
        UsageError: An option or the grid is invalid, the data is an iterator, or the output folder is not empty.

    Example:
        table = scalepoint.sweep(model, batches[0], batches, grid={"accuracy": ["fast", "best"]}, evaluate=top1)
        print(table)
    """
    runs = list_runs(grid)
    check_metric(options.get("evaluate"))
    check_runs(runs, options, has_metric=options.get("evaluate") is not None)
    if isinstance(calibration_data, Iterator):
        raise UsageError("a sweep reads the data in every run, an iterator only once: pass a list or a function")
    if is_split_across_ranks(calibration_data) and not callable(calibration_data):
        raise UsageError(
            "a sweep cannot be used with a DistributedSampler: every rank makes complete runs and needs all data"
        )
    workspace = SweepWorkspace(Path(output), resume=resume, force=force)
    workspace.check({"model": Path(str(model))} if is_onnx_file(model) else {})
    run_options = {"allow_departure": True, **options}
    if not distributed.is_main():
        run_options |= {"progress": False, "callback": None}
    with workspace.open(), captures_reused():
        inputs = distributed.run_on_main(
            "reading the inputs",
            lambda: _fingerprint_inputs(model, example_inputs, calibration_data, options),
            dict[str, str | None],
        )
        finished = distributed.run_on_main(
            "looking for finished runs", lambda: _finished_rows(workspace, inputs), dict[str, SweepRow]
        )
        rows = {
            name: row for name, row in finished.items() if name in runs and row.settings == _to_plain_values(runs[name])
        }
        for names in _batches_of_runs([name for name in runs if name not in rows]):
            with distributed.phase("a run of the sweep") as step:
                for name in distributed.shard(names):  # at most one run per rank
                    if options.get("progress") is not False:
                        write_line(f"run {len(rows) + 1} of {len(runs)}: {name}")
                    with distributed.single_process():
                        arguments = (model, example_inputs, calibration_data)
                        row = _run(arguments, workspace.run_folder(name), runs[name], run_options, finish)
                    step.value = to_jsonable(row)
            rows |= zip(names, map(TypeAdapter(SweepRow).validate_python, step.values), strict=False)
            table = Sweep(tuple(rows[name] for name in runs if name in rows), inputs)
            distributed.run_on_main("the table", partial(_write_table, workspace, table))
    return table


def check_runs(runs: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], *, has_metric: bool) -> None:
    """Check the options of every run. What a target does not support is not an error here: that run fails.

    Args:
        runs: Name of each run -> its keywords of deploy.
        options: Keywords of deploy for all runs.
        has_metric: Whether `evaluate` is given.
    """
    for name, run in runs.items():
        arguments = {**options, **run}
        target = arguments.get("target", DeployOptions.model_fields["target"].default)
        values = {key: value for key, value in arguments.items() if key in DeployOptions.model_fields}
        try:
            find_model_target(target, values.get("cpu", "auto"))
            with suppress(TargetError):
                build_options(
                    target, arguments.get("config"), values, has_metric=has_metric, smoke=bool(arguments.get("smoke"))
                )
        except (UsageError, ConfigError, TargetError) as error:
            raise UsageError(f"run {name}: {error.args[0]}") from error


def _batches_of_runs(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the runs that are made at the same time, one per rank; at the end no run, so that a table is written."""
    count = distributed.world_size()
    for first in range(0, len(names), count):
        yield names[first : first + count]
    yield ()


def list_runs(grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return name of each run -> its keywords of deploy. The last key of the grid changes fastest."""
    allowed = [*DeployOptions.model_fields, *RunOptions.model_fields, "config"]
    allowed = [name for name in allowed if name not in ("output", "quantization", "resume", "force")]
    for key, values in grid.items():
        if key not in allowed:
            raise UsageError(f"grid: {key!r} is not a keyword of deploy for a grid: {did_you_mean(key, allowed)}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"grid: {key} must be a list of values, got {values!r}")
    count = math.prod(map(len, grid.values()))
    if not grid or count > MAX_RUNS:
        raise UsageError(
            f"grid: {count if grid else 0} runs: it must have at least one key and at most {MAX_RUNS} runs"
        )
    runs: dict[str, dict[str, Any]] = {}
    for choice in product(*(enumerate(values) for values in grid.values())):
        words = [_folder_word(key, value, index) for key, (index, value) in zip(grid, choice, strict=True)]
        name = "-".join(words)
        unused_name = name if name not in runs else f"{name}-{len(runs)}"
        runs[unused_name] = {key: value for key, (_, value) in zip(grid, choice, strict=True)}
    return runs


def _folder_word(key: str, value: Any, index: int) -> str:
    """Return the part of a folder name for one value: its text, or the key and a number if it has no short text."""
    text = str(value) if isinstance(value, Budget) else getattr(value, "name", value)
    if not isinstance(text, str | int | float):
        return f"{key}{index + 1}"
    word = re.sub(r"[^A-Za-z0-9._]+", "_", text if isinstance(text, str) else f"{key}{text}").strip("_.")
    return word or f"{key}{index + 1}"


def _fingerprint_inputs(model: Any, example: Any, data: Any, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Return name -> fingerprint of what all runs share."""
    if is_onnx_file(model):
        from scalepoint.formats.onnx.save import list_external_files  # noqa: PLC0415  # only for a model that is a file

        path = Path(str(model))
        digests: object = [compute_digest(file) for file in (path, *list_external_files(path))]
    else:
        digests = fingerprint_model(as_module(model) if isinstance(model, ExportedProgram) else unwrap_model(model))
    names = [name for name in options if name not in NOT_COMPARED]
    functions = {name: fingerprint_code(options[name]) for name in names if callable(options[name])}
    values = _to_plain_values({name: options[name] for name in names if name not in functions})
    return {
        "the model": fingerprint(digests),
        "the example inputs": fingerprint_tensors(example),
        "the calibration data": DataSource(data, options.get("max_batches")).fingerprint(),
        **functions,
        **{name: fingerprint(value) for name, value in values.items()},
    }


def _finished_rows(workspace: SweepWorkspace, inputs: Mapping[str, str | None]) -> dict[str, SweepRow]:
    """Return the finished runs whose folders exist; {} unless they are to be kept, or if the inputs changed."""
    try:
        table = Sweep.from_file(workspace.output / SWEEP_FILE) if workspace.resume else Sweep(())
    except StoreError:
        return {}
    changed = [name for name in {**table.inputs, **inputs} if table.inputs.get(name) != inputs.get(name)]
    if table.rows and changed:
        message = f"{', '.join(changed)} changed since the sweep was interrupted: finished runs are made again"
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())
        return {}
    return {row.name: row for row in table.rows if row.is_done and (workspace.output / row.name / JSON_FILE).is_file()}


def _run(
    inputs: tuple[Any, Any, Any],
    folder: Path,
    values: Mapping[str, Any],
    options: Mapping[str, Any],
    finish: RunCallback | None,
) -> SweepRow:
    """Make one run, or continue it if it was interrupted. A ScalepointError becomes a failed row."""
    resume = folder.is_dir() and bool(list_finished_stages(folder))
    try:
        done = deploy(*inputs, output=folder, resume=resume, force=True, **{**options, **values})
    except ScalepointError as error:
        return SweepRow(folder.name, _to_plain_values(values), "failed", str(error))
    if finish is not None:
        finish(done, folder, values)
    return SweepRow.of(folder.name, _to_plain_values(values), done.report, done.path.stat().st_size)


def _to_plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run as JSON, equal in every process. A Target becomes name, options and fingerprint."""
    return {
        key: _to_plain_target(value) if isinstance(value, Target) else to_jsonable(value)
        for key, value in values.items()
    }


def _to_plain_target(target: Target) -> dict[str, Any]:
    return {"name": target.name, "options": to_jsonable(target.options), "fingerprint": fingerprint_target(target)}


def _write_table(workspace: SweepWorkspace, table: Sweep) -> None:
    workspace.write_text(SWEEP_FILE, table.to_json())
    workspace.write_text(PAGE_FILE, sweep_page(table))
