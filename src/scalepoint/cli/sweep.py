"""The command `scalepoint sweep`: deploy with every combination of a grid of settings."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any

import typer

import scalepoint
from scalepoint import distributed
from scalepoint.cli import flags
from scalepoint.cli.deploy import deploy_keywords, make_command
from scalepoint.cli.exit_codes import Code, report_interrupt
from scalepoint.cli.flags import takes
from scalepoint.cli.load_objects import load_evaluate
from scalepoint.cli.metadata import with_metadata
from scalepoint.cli.model_and_data import load_for_deploy
from scalepoint.cli.output import say, show, show_json
from scalepoint.cli.run_config import check_names, check_settings, input_paths, load_settings, object_loader
from scalepoint.errors import UsageError
from scalepoint.options import SweepConfig

KEYWORD_NAMES = {"quantization": "config"}  # key of a config file -> keyword of scalepoint.sweep


@takes("output", "model", "data", "evaluate", "weights", "random", "smoke", "resume")
def sweep(
    context: typer.Context,
    config: flags.Config = None,
    trust: flags.Trust = False,
    force: flags.Force = False,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Deploy a model with every combination of a grid of settings.

    The key `grid:` of the config has a list of values for each setting. Every run gets a folder; a table and a page
    compare the runs.
    """
    from scalepoint.pipeline.sweep import check_runs, list_runs
    from scalepoint.pipeline.workspace import SweepWorkspace

    distributed.init_from_torchrun()
    if config is None:
        raise UsageError("no grid: pass a config with lists of values by -c, such as `grid: {accuracy: [fast, best]}`")
    check_names(context.params)
    settings = load_settings(context.params, SweepConfig)
    grid = settings.validate_grid()
    loader = object_loader(settings, context.params)
    check_settings(settings, loader)
    settings = with_metadata(settings, loader)
    names = {KEYWORD_NAMES.get(key, key): values for key, values in grid.items()}
    grid_options = {*names, "allow_departure"}  # a run that departs is a row of the table
    shared = {key: value for key, value in deploy_keywords(settings).items() if key not in grid_options}
    check_runs(list_runs(names), {**shared, "smoke": context.params["smoke"]}, has_metric=bool(settings.evaluate))
    smoke, resume = bool(context.params["smoke"]), bool(context.params["resume"]) or distributed.is_restarted()
    folder = Path(settings.output)
    SweepWorkspace(folder, resume=resume, force=force).check(input_paths(dict(settings), loader))
    evaluate = load_evaluate(settings.evaluate, loader) if settings.evaluate else None
    inputs = load_for_deploy(settings, loader)
    if not quiet:
        say(f"scalepoint {scalepoint.__version__}: {settings.model} over {', '.join(grid)} into {folder}/")

    try:
        result = scalepoint.sweep(
            *inputs, grid=names, output=folder, resume=resume, force=force,
            evaluate=evaluate, smoke=smoke, progress=not quiet, command=make_command(settings, loader), **shared,
        )  # fmt: skip
    except KeyboardInterrupt:
        return report_interrupt("finished runs are kept; the same command with --resume continues from there")
    return _show_result(result, folder, is_json=json)


def _show_result(result: Any, folder: Path, *, is_json: bool) -> int:
    from scalepoint.report import SweepTable

    failed = [row for row in result.rows if not row.is_done]
    code = Code.UNVERIFIED if failed else Code.DONE
    if is_json:
        show_json("sweep", {"exit_code": int(code), **result.to_dict()})
    else:
        show(SweepTable(result), f"page: {folder / 'sweep.html'}")
    if failed:
        say(f"failed: {len(failed)} of {len(result.rows)} runs", "red")
    return code
