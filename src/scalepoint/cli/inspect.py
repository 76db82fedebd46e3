"""The command `scalepoint inspect`: what a target would quantize. Also loads model and data for other commands."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from pathlib import Path
from typing import Any, NamedTuple

import typer

from scalepoint.cli import flags
from scalepoint.cli.data import RANDOM_BATCHES, RANDOM_DATA, Batches, load_data
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.flags import takes
from scalepoint.cli.library_models import is_library_model, without_labels
from scalepoint.cli.load_objects import ObjectLoader, is_onnx_file, load_model, load_public
from scalepoint.cli.metadata import is_float_onnx, is_model_file, show_file_info
from scalepoint.cli.output import Listing, say, show, show_json
from scalepoint.cli.run_config import check_names, check_settings, data_options, load_settings, object_loader
from scalepoint.errors import CoverageError
from scalepoint.support.formatting import format_count

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
    settings = load_settings(context.params)
    loader = object_loader(settings, context.params)
    check_settings(settings, loader, needs_data=False)
    return preview(settings, loader, "inspect", _random_inputs(settings), json=json)


def preview(settings: Any, loader: ObjectLoader, command: str, example: Any = None, *, json: bool) -> int:
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


def measure_coverage(settings: Any, loader: ObjectLoader, example: Any = None) -> tuple[Any, bool]:
    """Return the coverage of the model, and whether the sizes of its inputs are known.

    With known sizes, it is the coverage that deploy would have.
    """
    from scalepoint.pipeline.job import choose_placement
    from scalepoint.targets import find_target

    model, inputs, _ = load_model_and_data(settings, loader, example)
    config, _ = choose_placement(settings)
    target = find_target(settings.target, settings.cpu)
    options = {"config": config, "leave": settings.leave, "dynamic_axes": settings.dynamic_axes}
    return load_public("inspect")(model, inputs, target=target, **options), inputs is not None


class ModelAndData(NamedTuple):
    """A model, its example inputs, and its data if there is any."""

    model: Any
    inputs: Any
    batches: Batches | None


def load_model_and_data(settings: Any, loader: ObjectLoader, example: Any = None) -> ModelAndData:
    """Load the model, its example inputs and the data.

    The example inputs are `example`, else those that the user's factory returns, else the first batch of the data. A
    model of a library has generated example inputs; there the first batch of the data is preferred.
    """
    if is_onnx_file(settings.model):
        return load_onnx_and_data(settings, loader)
    model, inputs = load_model(settings.model, loader)
    batches = load_data(settings.data, data_options(settings, loader)) if settings.data else None
    if example is not None:
        inputs = example
    elif batches is not None and is_library_model(settings.model):
        inputs = without_labels(model, batch_to_example(model, batches.first()))
    elif inputs is None and batches is not None:
        inputs = batch_to_example(model, batches.first())
    return ModelAndData(model, inputs, batches)


def load_onnx_and_data(settings: Any, loader: ObjectLoader) -> ModelAndData:
    """Load an .onnx file, its data, and example inputs: the first batch of the data, or random ones."""
    from scalepoint.pipeline.onnx_source import read_source

    batches = load_onnx_data(settings, loader)
    path = loader.resolve(settings.model)
    source = read_source(path, example=None, kwargs=None, data=batches, options=settings, progress=None)
    return ModelAndData(source.model, source.example, batches)


def load_onnx_data(settings: Any, loader: ObjectLoader) -> Any:
    """Load the data for an .onnx file, or make random data if the user asked for it."""
    if settings.data != RANDOM_DATA:
        return load_data(settings.data, data_options(settings, loader)) if settings.data else None
    from scalepoint.onnx_reader import load_onnx
    from scalepoint.pipeline.onnx_source import named_shapes

    say("note: random data: the quantized file runs, but its accuracy means nothing", "yellow")
    model = load_onnx(
        loader.resolve(settings.model), fixed_inputs=settings.fixed_inputs, requantize=settings.requantize
    )
    shapes = named_shapes(model, settings.shape or {})
    return [model.make_example(shapes, seed) for seed in range(settings.max_batches or RANDOM_BATCHES)]


def batch_to_example(model: Any, batch: Any) -> Any:
    """Return a batch as example inputs, without values after the model's own inputs, such as labels."""
    from scalepoint.quantize.batches import to_model_inputs

    args, kwargs = to_model_inputs(batch, model)
    return kwargs or args


def coverage_listing(coverage: Any) -> Listing:
    """List the operations with their precision and the reason."""
    rows = [
        (row.name, row.kind, row.precision, row.explanation, format_count(row.macs), format_count(row.parameters))
        for row in coverage.operations
    ]
    return Listing(("operation", "kind", "runs in", "why", "MACs", "weights"), rows, numbers=(4, 5))


def _random_inputs(settings: Any) -> Any:
    """Return random inputs of the shapes of --shape, for a model that is not a file."""
    import torch

    if not settings.shape or is_onnx_file(settings.model):
        return None
    inputs = {name: torch.randn(sizes) for name, sizes in settings.shape.items()}
    return tuple(inputs.values()) if all(name.isdecimal() for name in inputs) else inputs
