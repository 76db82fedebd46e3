"""Loads the model of a command, its example inputs and its data."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
from typing import Any, NamedTuple

from scalepoint.cli.data import Batches, load_data
from scalepoint.cli.library_models import is_library_model, without_labels
from scalepoint.cli.load_objects import ObjectLoader, is_onnx_file, load_model
from scalepoint.cli.output import say
from scalepoint.cli.run_config import RANDOM_DATA, data_options, get_model_name
from scalepoint.options import DeployConfig

RANDOM_BATCHES = 8  # of random data, unless max_batches says otherwise


class ModelAndData(NamedTuple):
    """A model, its example inputs, and its data if there is any."""

    model: Any
    inputs: Any
    batches: Batches | list[Any] | None


def load_for_deploy(settings: DeployConfig, loader: ObjectLoader) -> ModelAndData:
    """Load what `deploy` and `sweep` take. Of an .onnx file that is its path: they read it and choose the example."""
    name = get_model_name(settings)
    if is_onnx_file(name):
        loaded = ModelAndData(loader.resolve(name), None, load_onnx_data(settings, loader))
    else:
        loaded = load_model_and_data(settings, loader)
    return loaded if loaded.batches is not None else loaded._replace(batches=[])


def load_model_and_data(settings: DeployConfig, loader: ObjectLoader, example: Any = None) -> ModelAndData:
    """Load the model, its example inputs and the data.

    The example inputs are `example`, else those that the user's factory returns, else the first batch of the data. A
    model of a library has generated example inputs; there the first batch of the data is preferred.
    """
    name = get_model_name(settings)
    if is_onnx_file(name):
        return load_onnx_and_data(settings, loader)
    model, inputs = load_model(name, loader)
    batches = load_data(settings.data, data_options(settings, loader)) if settings.data else None
    if example is not None:
        inputs = example
    elif batches is not None and is_library_model(name):
        inputs = without_labels(model, batch_to_example(model, batches.first()))
    elif inputs is None and batches is not None:
        inputs = batch_to_example(model, batches.first())
    return ModelAndData(model, inputs, batches)


def load_onnx_and_data(settings: DeployConfig, loader: ObjectLoader) -> ModelAndData:
    """Load an .onnx file, its data, and example inputs: the first batch of the data, or random ones."""
    from scalepoint.pipeline.onnx_source import read_source

    batches = load_onnx_data(settings, loader)
    path = loader.resolve(get_model_name(settings))
    source = read_source(path, example=None, kwargs=None, data=batches, options=settings, progress=None)
    return ModelAndData(source.model, source.example, batches)


def load_onnx_data(settings: DeployConfig, loader: ObjectLoader) -> Any:
    """Load the data for an .onnx file, or make random data if the user asked for it."""
    if settings.data != RANDOM_DATA:
        return load_data(settings.data, data_options(settings, loader)) if settings.data else None
    from scalepoint.onnx_reader import load_onnx
    from scalepoint.pipeline.onnx_source import named_shapes

    say("note: random data: the quantized file runs, but its accuracy means nothing", "yellow")
    path = loader.resolve(get_model_name(settings))
    model = load_onnx(path, fixed_inputs=settings.fixed_inputs, requantize=settings.requantize)
    shapes = named_shapes(model, settings.shape or {})
    return [model.make_example(shapes, seed) for seed in range(settings.max_batches or RANDOM_BATCHES)]


def batch_to_example(model: Any, batch: Any) -> Any:
    """Return a batch as example inputs, without values after the model's own inputs, such as labels."""
    from scalepoint.quantize.batches import to_model_inputs

    args, kwargs = to_model_inputs(batch, model)
    return kwargs or args
