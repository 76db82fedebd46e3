"""The command `scalepoint inspect`: what a target would quantize, or what an exported file contains."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any

import typer

import scalepoint
from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.flags import takes
from scalepoint.cli.load_objects import ObjectLoader, is_onnx_file
from scalepoint.cli.model_and_data import load_model_and_data
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.cli.run_config import check_names, check_settings, load_settings, object_loader
from scalepoint.errors import CoverageError, UsageError
from scalepoint.options import DeployConfig
from scalepoint.support.formatting import format_count, format_size

MAX_VALUE_LENGTH = 300  # characters of a metadata value shown without --json
UNKNOWN_SIZES_NOTE = (
    "the sizes of the inputs are not known, so MACs are not counted, and layers that are slower in int8 are not left "
    "float: deploy may quantize fewer layers. Pass --shape or --data, or let the factory return (model, example_inputs)"
)


@takes(
    *("model", "target", "data", "leave", "dynamic_axes", "batch_size", "size", "mean", "std", "root", "weights"),
    *("random", "shape", "fixed_inputs", "requantize"),
)
def inspect(
    context: typer.Context,
    config: flags.Config = None,
    trust: flags.Trust = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Show which operations of a model a target would quantize, which stay float, and why.

    No data is needed. For a quantized file: show its inputs and its metadata.
    """
    model = context.params["model"]
    if is_model_file(model) and not is_float_onnx(model):
        return show_file_info(Path(str(model)), json=json)
    check_names(context.params)
    settings = load_settings(context.params, DeployConfig)
    loader = object_loader(settings, context.params)
    check_settings(settings, loader, needs_data=False)
    return preview(settings, loader, "inspect", _random_inputs(settings), json=json)


def preview(settings: DeployConfig, loader: ObjectLoader, command: str, example: Any = None, *, json: bool) -> int:
    """Capture the model and show what would be quantized. Nothing is written."""
    coverage, has_sizes = measure_coverage(settings, loader, example)
    if settings.strict:
        coverage.check()
    if command == "deploy" and coverage.is_empty:  # deploy would refuse it
        raise CoverageError(coverage.describe_empty())
    if json:
        fields = {"exit_code": 0, "dry_run": True, "target": settings.target, "coverage": coverage.to_list()}
        show_json(command, {**fields, "has_sizes": has_sizes})
    else:
        show(coverage_listing(coverage), f"{settings.target}: {coverage.summary()}")
    if not has_sizes:
        say(f"note: {UNKNOWN_SIZES_NOTE}", "yellow")
    return Code.DONE


def measure_coverage(settings: DeployConfig, loader: ObjectLoader, example: Any = None) -> tuple[Any, bool]:
    """Return the coverage of the model, and whether the sizes of its inputs are known.

    With known sizes, it is the coverage that deploy would have.
    """
    from scalepoint.pipeline.job import choose_placement
    from scalepoint.targets import find_target

    model, inputs, _ = load_model_and_data(settings, loader, example)
    config, _ = choose_placement(settings)
    target = find_target(settings.target, settings.cpu)
    options = {"config": config, "leave": settings.leave, "dynamic_axes": settings.dynamic_axes}
    return scalepoint.inspect(model, inputs, target=target, **options), inputs is not None


def coverage_listing(coverage: Any) -> Listing:
    """List the operations with their precision and the reason."""
    rows = [
        (row.name, row.kind, row.precision, row.explanation, format_count(row.macs), format_count(row.parameters))
        for row in coverage.operations
    ]
    return Listing(("operation", "kind", "runs in", "why", "MACs", "weights"), rows, number_columns=(4, 5))


def _random_inputs(settings: DeployConfig) -> Any:
    """Return random inputs of the shapes of --shape, for a model that is not a file."""
    import torch

    if not settings.shape or is_onnx_file(settings.model):
        return None
    inputs = {name: torch.randn(sizes) for name, sizes in settings.shape.items()}
    return tuple(inputs.values()) if all(name.isdecimal() for name in inputs) else inputs


def is_model_file(name: str | None) -> bool:
    """Whether the name of a model is an exported file."""
    return name is not None and _find_file_format(Path(name)) is not None


def _find_file_format(path: Path) -> Any:
    """Return the format with the suffix of the file; None for other names, such as package.module:function."""
    from scalepoint.formats import find_format, list_formats

    suffix = path.suffix.lower()
    formats = map(find_format, list_formats() if suffix[1:].isalnum() else ())
    return next((file_format for file_format in formats if file_format.suffix == suffix), None)


def is_float_onnx(name: str | None) -> bool:
    """Whether a model is an .onnx file that scalepoint did not quantize: its layers are shown."""
    from scalepoint.formats import find_format

    path = Path(str(name))
    return path.suffix.lower() == ".onnx" and path.is_file() and not find_format("onnx").about(path).made_for


def show_file_info(path: Path, *, json: bool) -> int:
    """Show inputs, size and metadata of a file. The file is not run."""
    from scalepoint.formats import read_value

    if not path.exists():
        raise UsageError(f"{str(path)!r}: there is no such file in {Path.cwd()}")
    info = _find_file_format(path).about(path)
    if json:
        metadata = {key: read_value(value) for key, value in info.metadata.items()}
        inputs = [{"name": entry.name, "dtype": entry.dtype, "shape": entry.shape} for entry in info.inputs]
        show_json("inspect", {"exit_code": 0, "path": path, "size": info.size, "inputs": inputs, "metadata": metadata})
        return Code.DONE
    rows = [("size", format_size(info.size))]
    rows += [(f"input {entry.name}", f"{entry.dtype} {_format_shape(entry.shape)}") for entry in info.inputs]
    rows += [(key, _shorten(value)) for key, value in info.metadata.items()]
    has_metadata = bool(info.metadata)
    note = "--json shows all values in full" if has_metadata else "no metadata: the file was not written by scalepoint"
    show(Listing(("what", "value"), rows), note)
    return Code.DONE


def _format_shape(shape: tuple[int | None, ...]) -> str:
    return "x".join("*" if size is None else str(size) for size in shape)


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]} ... ({len(value)} characters)"
