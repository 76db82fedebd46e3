"""The commands `scalepoint verify` and `scalepoint compare`, which work on output folders of deploy."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

import scalepoint
from scalepoint import distributed
from scalepoint.cli import flags
from scalepoint.cli.data import Batches, check_data, load_data
from scalepoint.cli.deploy_checkpoint import is_folder
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.flags import takes
from scalepoint.cli.library_models import without_labels
from scalepoint.cli.load_objects import is_onnx_file, load_model
from scalepoint.cli.model_and_data import batch_to_example, load_onnx_and_data
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.cli.run_config import check_names, data_options, load_settings, object_loader
from scalepoint.errors import UsageError
from scalepoint.options import DeployConfig
from scalepoint.support.formatting import describe_quality, format_decibels, format_plural, format_share, to_one_line

MAX_SHOWN_LAYERS = 20
MODEL_OPTIONS = (
    "weights", "random", "data", "config", "max_batches", "batch_size", "size", "mean", "std", "root", "trust",
)  # fmt: skip
Other = Annotated[
    str | None,
    typer.Argument(
        metavar="OTHER",
        help="Another output folder of deploy, or the float model as package.module:name.",
        show_default=False,
    ),
]


@takes("model", "data", "threads", "batch_size", "size", "mean", "std", "root", "weights", "random")
def verify(
    context: typer.Context,
    folder: flags.Folder,
    config: flags.Config = None,
    runtime: flags.Runtime = None,
    signature: Annotated[
        Path | None,
        typer.Option(metavar="PUBLIC.pem", help="First check the signature of `scalepoint sign` with this public key."),
    ] = None,
    trust: flags.Trust = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Run the exported file of an output folder in its runtime, and compare it with the simulation in PyTorch.

    Name the float model only if the command asks for it: most folders contain all that is needed.
    """
    folder, file = _find_run_and_file(folder)
    if signature is not None:
        scalepoint.verify_signature(folder, signature)
        say(f"signature: the files are those that were signed with the key of {signature}")
    _, quantized, inputs, _ = restore_run(folder, context.params, 1)
    float_file, plain_file = (folder / f"{name}{file.suffix}" for name in ("float", "float_plain"))
    verification = scalepoint.verify(
        file,
        quantized,
        inputs,
        runtime=runtime,
        float_path=float_file if float_file.exists() else None,
        plain_path=plain_file if plain_file.exists() else None,
        threads=context.params["threads"] or 1,
    )
    code = Code.UNVERIFIED if verification.is_refuted else Code.DONE
    if json:
        show_json("verify", {"exit_code": int(code), **verification.to_dict()})
    else:
        title = f"{file} in {verification.runtime}: {verification.status.value}"
        show(Text(title), Listing(("", "result"), verification.rows()))
    if code:
        has_outputs = verification.sqnr > float("-inf")
        say("failed: the file does not agree with the simulation" if has_outputs else "failed", "red")
        _extract_failing_layer(verification, file, quantized, inputs, folder)
    return code


def _extract_failing_layer(verification: Any, file: Path, quantized: Any, inputs: Any, folder: Path) -> None:
    """Write the first layer that departs by itself as a small file, if ONNX Runtime ran the file."""
    if verification.status.value != "ok" or verification.runtime != "onnxruntime":
        return
    from scalepoint.pipeline.stages import write_failing_layer
    from scalepoint.pipeline.workspace import DeployWorkspace

    if script := write_failing_layer(DeployWorkspace(folder), file, quantized, inputs):
        say(f"to reproduce the first layer that departs: python {script}")


@takes("data", "max_batches", "batch_size", "size", "mean", "std", "root", "weights", "random")
def compare(
    context: typer.Context,
    folder: flags.Folder,
    model: Other = None,
    config: flags.Config = None,
    trust: flags.Trust = False,
    rows: Annotated[int, typer.Option(min=1, help="Largest number of layers to show.")] = MAX_SHOWN_LAYERS,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Compare two runs: accuracy, size, speed, layers and settings.

    Or compare a run with its float model layer by layer, the layers with the largest own error first.
    """
    if is_folder(model):
        return compare_folders(folder, Path(str(model)), context.params)
    _check_other(model)
    distributed.init_from_torchrun()
    float_model, quantized, inputs, batches = restore_run(folder, context.params, context.params["max_batches"])
    comparison = scalepoint.compare(float_model, quantized, batches if batches is not None else [inputs])
    comparison = replace(comparison, rows=tuple(comparison.worst(len(comparison.rows))))
    if json:
        fields = {"layers": comparison.to_list(), "outputs": [vars(output) for output in comparison.outputs]}
        show_json("compare", {"exit_code": 0, **fields, "batches": comparison.batches})
        return Code.DONE
    layers, batch_count = format_plural(len(comparison.rows), "layer"), format_plural(comparison.batches, "batch")
    outputs = ", ".join(f"{output.name} {format_decibels(output.sqnr_db)} dB" for output in comparison.outputs)
    show(
        _layer_listing(comparison.rows[:rows]),
        Text(f"{layers}, worst own error first, {batch_count}"),
        Text(to_one_line(f"outputs: {outputs}")),
    )
    return Code.DONE


def _layer_listing(rows: Sequence[Any]) -> Listing:
    """List the errors of layers. The own error of a layer is measured with the inputs of the float model."""
    cells = []
    for row in rows:
        own_sqnr = row.sqnr_db if row.local_sqnr_db is None else row.local_sqnr_db
        cells.append(
            (
                row.name,
                row.precision,
                format_decibels(own_sqnr),
                describe_quality(own_sqnr),
                format_decibels(row.sqnr_db),
                format_decibels(row.weight_sqnr_db),
                format_share(row.saturation),
                format_share(row.used_range),
            )
        )
    columns = ("layer", "runs in", "own dB", "quality", "in the net dB", "weight dB", "clipped", "range used")
    return Listing(columns, cells, number_columns=(2, 4, 5, 6, 7))


def _check_other(name: str | None) -> None:
    if name is not None and ":" not in name:
        raise UsageError(
            f"{name!r} is not a folder in {Path.cwd()}: pass another output folder of `scalepoint deploy`, or the "
            "float model as package.module:name"
        )


def compare_folders(first: Path, second: Path, parameters: Mapping[str, Any]) -> int:
    """Show the differences between two output folders of deploy."""
    for key in MODEL_OPTIONS:
        if parameters.get(key) not in (None, False):
            flag = f"--{key.replace('_', '-')}"
            raise UsageError(f"{flag} is for a run and its float model: it cannot be used with two runs")
    from scalepoint.report import DifferenceTable, compare_runs

    difference = compare_runs(first, second)
    if parameters["json"]:
        show_json("compare", {"exit_code": 0, **difference.to_dict()})
    else:
        show(DifferenceTable(difference, parameters["rows"]))
    return Code.DONE


class RestoredRun(NamedTuple):
    """The models, example inputs and data of an output folder. The float model is None if it is not needed."""

    float_model: Any
    quantized: Any
    inputs: Any
    batches: Batches | list[Any] | None


def restore_run(folder: Path, parameters: Mapping[str, Any], max_batches: int | None) -> RestoredRun:
    """Load the models, example inputs and data of a run from its output folder."""
    check_names(parameters)
    saved = folder / "quantized"
    _check_exists(folder)
    if not saved.is_dir():
        raise UsageError(
            f"{folder} contains no saved model ({saved.name}/): pass the output folder of `scalepoint deploy`"
        )
    settings = load_settings(parameters, DeployConfig)
    loader = object_loader(settings, parameters)
    options = data_options(settings, loader, max_batches)
    if not settings.model and parameters.get("config") is None and _has_graph(saved):
        return _load_without_float_model(saved, settings, options)
    if not settings.model:
        hint = f" or -c {folder / 'config.yaml'}" if _config_has_model(folder / "config.yaml") else ""
        raise UsageError(f"no float model to compare with: pass package.module:name{hint}")
    if settings.data:
        check_data(settings.data, options)
    if is_onnx_file(settings.model):
        model, inputs, batches = load_onnx_and_data(settings, loader)
        return RestoredRun(model, scalepoint.load(saved, model, inputs), inputs, batches)
    model, inputs = load_model(settings.model, loader)
    batches = load_data(settings.data, options) if settings.data else None
    if batches is not None:
        inputs = without_labels(model, batch_to_example(model, batches.first()))
    if inputs is None:
        raise UsageError("no inputs: pass --data, or let the factory return (model, example_inputs)")
    return RestoredRun(model, scalepoint.load(saved, model, inputs), inputs, batches)


def _config_has_model(config: Path) -> bool:
    """Whether a config names its model. The config of a deployment from Python does not."""
    return config.is_file() and DeployConfig.from_file(config).model is not None


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise UsageError(
            f"{str(path)!r}: there is no such file or folder in {Path.cwd()}: pass the output folder of "
            "`scalepoint deploy`"
        )


def _has_graph(saved: Path) -> bool:
    """Whether the saved model contains its graph, so that it loads without the float model."""
    from scalepoint.quantize.store import has_saved_graph

    return has_saved_graph(saved)


def _load_without_float_model(saved: Path, settings: DeployConfig, options: Any) -> RestoredRun:
    """Load a saved model that contains its graph. Without data its inputs have the shapes of the capture."""
    from scalepoint.graph.serialization import make_example

    quantized = scalepoint.load(saved)
    batches = load_data(settings.data, options) if settings.data else None
    inputs = make_example(quantized) if batches is None else batch_to_example(quantized, batches.first())
    return RestoredRun(None, quantized, inputs, batches)


def _find_run_and_file(path: Path) -> tuple[Path, Path]:
    """Return the output folder and the model file in it. `path` is one of the two."""
    if path.is_file() and (path.parent / "quantized").is_dir():
        return path.parent, path
    return path, _find_file(path, "model")


def _find_file(folder: Path, name: str) -> Path:
    """Find the file with this name in any format."""
    from scalepoint.formats import find_format, list_formats

    _check_exists(folder)
    suffixes = [find_format(format_name).suffix for format_name in list_formats()]
    if folder.suffix in suffixes:
        raise UsageError(
            f"{folder} is a file without the folder quantized/ next to it, which it is compared with: pass the output "
            "folder of `scalepoint deploy`"
        )
    paths = [folder / f"{name}{suffix}" for suffix in suffixes]
    if not any(path.exists() for path in paths):
        raise UsageError(f"{folder} contains no file named {name}: pass the output folder of `scalepoint deploy`")
    return next(path for path in paths if path.exists())
