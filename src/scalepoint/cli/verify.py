"""verify and compare: what deploy wrote against the model it was made from, or against another run."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from scalepoint import distributed
from scalepoint.cli import flags
from scalepoint.cli.data import Batches, check_data, load_data
from scalepoint.cli.deploy_checkpoint import is_folder
from scalepoint.cli.exit_codes import Code, usage_error
from scalepoint.cli.flags import takes
from scalepoint.cli.inspect import batch_to_example
from scalepoint.cli.library_models import without_labels
from scalepoint.cli.load_objects import load_model, load_public
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.cli.run_config import check_names, data_options, load_settings, object_loader
from scalepoint.support.formatting import decibel, one_line, plural, quality, share_of

MAX_WORST = 20
MODEL_OPTIONS = (
    "weights", "random", "data", "config", "max_batches", "batch_size", "size", "mean", "std", "root", "trust",
)  # fmt: skip
Against = Annotated[
    str | None,
    typer.Argument(
        metavar="OTHER",
        help="Another folder that deploy wrote; or the float model, as package.module:name.",
        show_default=False,
    ),
]


@takes("model", "data", "threads", "batch_size", "size", "mean", "std", "root", "weights", "random")
def verify(
    context: typer.Context,
    folder: flags.Folder,
    config: flags.Config = None,
    runtime: flags.Runtime = None,
    trust: flags.Trust = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Run the exported file in its runtime and compare it with the simulation in PyTorch."""
    folder, file = _find_run_and_file(folder)
    _, quantized, inputs, _ = restore_run(folder, context.params, 1)
    float_file, plain_file = (folder / f"{name}{file.suffix}" for name in ("float", "float_plain"))
    found = load_public("verify")(
        file,
        quantized,
        inputs,
        runtime=runtime,
        float_path=float_file if float_file.exists() else None,
        plain_path=plain_file if plain_file.exists() else None,
        threads=context.params["threads"] or 1,
    )
    code = Code.UNVERIFIED if found.is_refuted else Code.DONE
    if json:
        show_json("verify", {"exit_code": int(code), **found.to_dict()})
    else:
        show(Text(f"{file} in {found.runtime}: {found.status.value}"), Listing(("", "found"), found.rows()))
    if code:
        say("failed: the file does not run as the simulation says" if found.sqnr > float("-inf") else "failed", "red")
        _extract_first_departure(found, file, quantized, inputs, folder / "failing")
    return code


def _extract_first_departure(found: Any, file: Path, quantized: Any, inputs: Any, folder: Path) -> None:
    """The first layer that departs alone, where there is one."""
    if found.status.value != "ok" or found.runtime != "onnxruntime":
        return
    from scalepoint.verification import extract_failing

    if extract_failing(file, quantized, inputs, folder) is not None:
        say(f"the first layer that departs alone: python {folder / 'run.py'}")


@takes("data", "max_batches", "batch_size", "size", "mean", "std", "root", "weights", "random")
def compare(
    context: typer.Context,
    folder: flags.Folder,
    model: Against = None,
    config: flags.Config = None,
    trust: flags.Trust = False,
    rows: Annotated[int, typer.Option(min=1, help="At most so many layers.")] = MAX_WORST,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Two runs next to each other: accuracy, size, speed, layers, settings. Or a run and its float model: where it
    departs, layer by layer, those with the largest error of their own first."""
    if is_folder(model):
        return compare_folders(folder, Path(str(model)), context.params)
    _check_other(model)
    distributed.init_from_torchrun()
    float_model, quantized, inputs, batches = restore_run(folder, context.params, context.params["max_batches"])
    found = load_public("compare")(float_model, quantized, batches if batches is not None else [inputs])
    found = replace(found, rows=tuple(found.worst(len(found.rows))))
    if json:
        outputs = [vars(each) for each in found.outputs]
        show_json("compare", {"exit_code": 0, "layers": found.to_list(), "outputs": outputs, "batches": found.batches})
        return Code.DONE
    cells = [
        (
            row.name,
            row.precision,
            decibel(own := row.sqnr_db if row.local_sqnr_db is None else row.local_sqnr_db),
            quality(own),
            decibel(row.sqnr_db),
            decibel(row.weight_sqnr_db),
            share_of(row.saturation),
            share_of(row.used_range),
        )
        for row in found.rows[:rows]
    ]
    columns = ("layer", "runs in", "own dB", "which is", "in the net dB", "weight dB", "clipped", "range used")
    outputs_text = ", ".join(f"{each.name} {decibel(each.sqnr_db)} dB" for each in found.outputs)
    show(
        Listing(columns, cells, numbers=(2, 4, 5, 6, 7)),
        Text(f"{plural(len(found.rows), 'layer')}, worst own error first, {plural(found.batches, 'batch')}"),
        Text(one_line(f"outputs: {outputs_text}")),
    )
    return Code.DONE


def _check_other(name: str | None) -> None:
    if name is not None and ":" not in name:
        raise usage_error(
            f"{name!r} is not a folder in {Path.cwd()}: give another folder that `scalepoint deploy` wrote, or the "
            "float model as package.module:name"
        )


def compare_folders(first: Path, second: Path, parameters: Mapping[str, Any]) -> int:
    """Show what differs between two folders that deploy wrote."""
    for key in MODEL_OPTIONS:
        if parameters.get(key) not in (None, False):
            raise usage_error(f"--{key.replace('_', '-')} is for a run and its float model, not for two runs")
    from scalepoint.report import DifferenceTable, compare_runs

    difference = compare_runs(first, second)
    if parameters["json"]:
        show_json("compare", {"exit_code": 0, **difference.to_dict()})
    else:
        show(DifferenceTable(difference, parameters["rows"]))
    return Code.DONE


def restore_run(
    folder: Path, given: Mapping[str, Any], max_batches: int | None
) -> tuple[Any, Any, Any, Batches | None]:
    """The float model, the quantized one that deploy saved of it, example inputs, data."""
    check_names(given)
    saved = folder / "quantized"
    _check_there(folder)
    if not saved.is_dir():
        raise usage_error(
            f"{folder} holds no saved model ({saved.name}/): give the folder that `scalepoint deploy` wrote"
        )
    settings = load_settings(given)
    finder = object_loader(settings, given)
    reading = data_options(settings, finder, max_batches)
    if not settings.model and given.get("config") is None and _has_graph(saved):
        return _load_without_float_model(saved, settings, reading)
    if not settings.model:
        hint = f" or -c {folder / 'config.yaml'}" if _names_model(folder / "config.yaml") else ""
        raise usage_error(f"which float model was it made from? Name it as package.module:name{hint}")
    if settings.data:
        check_data(settings.data, reading)
    model, inputs = load_model(settings.model, finder)
    batches = load_data(settings.data, reading) if settings.data else None
    if batches is not None:
        inputs = without_labels(model, batch_to_example(model, batches.first()))
    if inputs is None:
        raise usage_error("no inputs: give --data, or let the factory return (model, example_inputs)")
    return model, load_public("load")(saved, model, inputs), inputs, batches


def _names_model(config: Path) -> bool:
    """Whether a config says which model it is for; that of a call from Python does not."""
    return config.is_file() and load_public("DeployConfig").from_file(config).model is not None


def _check_there(path: Path) -> None:
    if not path.exists():
        raise usage_error(
            f"{str(path)!r}: there is no such file or folder ({Path.cwd()}): give the folder that `scalepoint deploy` "
            "wrote"
        )


def _has_graph(saved: Path) -> bool:
    from scalepoint.quantize.store import has_saved_graph

    return has_saved_graph(saved)


def _load_without_float_model(saved: Path, settings: Any, reading: Any) -> tuple[Any, Any, Any, Batches | None]:
    """What the folder itself holds: no float model is needed; without data, inputs of the shapes it was captured
    for."""
    from scalepoint.graph.serialization import make_example

    quantized = load_public("load")(saved)
    batches = load_data(settings.data, reading) if settings.data else None
    inputs = make_example(quantized) if batches is None else batch_to_example(quantized, batches.first())
    return None, quantized, inputs, batches


def _find_run_and_file(given: Path) -> tuple[Path, Path]:
    """The folder that deploy wrote and its file; one of them may be named."""
    if given.is_file() and (given.parent / "quantized").is_dir():
        return given.parent, given
    return given, _find_file(given, "model")


def _find_file(folder: Path, name: str) -> Path:
    """The file of whatever format the target writes."""
    from scalepoint.formats import find_format, list_formats

    _check_there(folder)
    suffixes = [find_format(each).suffix for each in list_formats()]
    if folder.suffix in suffixes:
        raise usage_error(
            f"{folder} is a file, and the folder quantized/, which verify compares it with, is not next to it: give "
            "the folder that `scalepoint deploy` wrote"
        )
    paths = [folder / f"{name}{suffix}" for suffix in suffixes]
    if not any(path.exists() for path in paths):
        raise usage_error(f"{folder} holds no {name} of any format: give the folder that `scalepoint deploy` wrote")
    return next(path for path in paths if path.exists())
