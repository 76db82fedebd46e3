"""Settings of a command: the config file, overridden by the flags. Checks them before anything slow happens."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from scalepoint import distributed
from scalepoint.cli.data import DataOptions, check_data
from scalepoint.cli.library_models import is_library_model
from scalepoint.cli.load_objects import ObjectLoader, check_name, is_onnx_file
from scalepoint.errors import ConfigError, TargetError, UsageError
from scalepoint.options import CheckpointOptions, CommonOptions, DeployConfig, DeployOptions, changed_values, get_option
from scalepoint.support.validation_errors import find_validation_error, list_problems

ConfigT = TypeVar("ConfigT", bound=DeployConfig)
RANDOM_DATA = "random"  # as --data: random inputs of an .onnx file
CHECKPOINT_ONLY_OPTIONS = tuple(
    name for name in CheckpointOptions.model_fields if name not in CommonOptions.model_fields
)


def load_settings(parameters: Mapping[str, Any], config_class: type[ConfigT]) -> ConfigT:
    """Return the config file, overridden by the flags that were given.

    Args:
        parameters: Parameters of the command, by name. A flag that was not given is None or ().
        config_class: DeployConfig, or SweepConfig, which also has a grid.
    """
    file = parameters.get("config")
    settings = config_class.from_file(file) if file is not None else config_class()
    if file is not None:
        settings = settings.updated({"root": str(Path(file).parent / (settings.root or ""))})
    options = {key: value for key, value in parameters.items() if key in DeployConfig.model_fields}
    flag_values = {key: value for key, value in options.items() if value not in (None, ())}
    try:
        return settings.updated(flag_values)
    except ConfigError as error:
        if (cause := find_validation_error(error)) is None:
            raise
        problems = list_problems(cause, flag_values)
        messages = [f"--{problem.key.replace('_', '-')}: {problem.message}" for problem in problems]
        raise UsageError("; ".join(messages)) from error


def data_options(settings: DeployConfig, loader: ObjectLoader, max_batches: int | None = None) -> DataOptions:
    """Return how files become batches."""
    return DataOptions(settings.batch_size, max_batches, settings.size, settings.mean, settings.std, loader)


def object_loader(settings: DeployConfig, parameters: Mapping[str, Any]) -> ObjectLoader:
    """Return the loader for the names in the settings."""
    return ObjectLoader(Path(settings.root or ""), bool(parameters.get("trust")), settings.weights, settings.random)


def check_names(parameters: Mapping[str, Any]) -> ObjectLoader:
    """Check the names of model and metric in the flags, before torch is loaded, which takes seconds.

    Returns:
        The loader for the names in the flags.
    """
    root = Path()
    if parameters.get("root"):
        root = Path(parameters["root"])
    elif parameters.get("config"):
        root = Path(parameters["config"]).parent
    loader = ObjectLoader(root, bool(parameters.get("trust")))
    for key in ("model", "evaluate"):
        if parameters.get(key):
            check_name(parameters[key], key, loader)
    return loader


def get_model_name(settings: DeployConfig) -> str:
    """Return the name of the model. Raise UsageError if it is missing."""
    if not settings.model:
        raise UsageError("no model: pass package.module:name, or a config with `model:` by -c")
    return settings.model


def check_settings(settings: DeployConfig, loader: ObjectLoader, *, needs_data: bool = True) -> None:
    """Check all settings that can be checked before the model is loaded."""
    check_name(get_model_name(settings), "model", loader)
    check_target(settings.target, settings.cpu)
    if not settings.data and needs_data and settings.quantization.activation != "float":
        raise UsageError("no data: pass --data, or a config with `data:` by -c")
    _check_options_apply(settings, loader, needs_data=needs_data)
    if settings.data == RANDOM_DATA:
        if not is_onnx_file(settings.model):
            raise UsageError("--data random is for .onnx files, whose inputs have known shapes")
    elif settings.data:
        check_data(settings.data, data_options(settings, loader))


def _check_options_apply(settings: DeployConfig, loader: ObjectLoader, *, needs_data: bool) -> None:
    """Refuse options that have no effect in this run."""
    for name in changed_values(settings):
        flag, subject = f"--{name.replace('_', '-')}", get_option(type(settings).model_fields[name]).only_for
        if name in CHECKPOINT_ONLY_OPTIONS:
            raise UsageError(
                f"{flag} is for checkpoints of language models, which are folders: it cannot be used with "
                f"{settings.model!r}"
            )
        if subject == "images" and not (settings.data and loader.resolve(settings.data).is_dir()):
            raise UsageError(f"{flag} is for data that is a folder of images: it cannot be used with {settings.data!r}")
        if name == "weights" and is_onnx_file(settings.model):
            raise UsageError(f"{flag} is for a model that is built by code: {settings.model!r} has its weights")
        takes_shapes = name == "shape" and not needs_data  # inspect takes the shapes of other models too
        if subject == "onnx files" and not (is_onnx_file(settings.model) or takes_shapes):
            raise UsageError(f"{flag} is for .onnx files: it cannot be used with {settings.model!r}")
        if subject == "library models" and not is_library_model(settings.model):
            raise UsageError(f"{flag} is for timm:NAME and hf:FOLDER: it cannot be used with {settings.model!r}")


def check_target(name: str, cpu: str) -> Any:
    """Return the target. An unknown target, and a target for checkpoints of language models, are usage errors."""
    from scalepoint.pipeline.job import find_model_target

    try:
        return find_model_target(name, cpu)
    except TargetError as error:
        raise UsageError(str(error.args[0])) from error


def check_deploy_options(settings: DeployConfig, *, smoke: bool) -> None:
    """Check the options as deploy does, before the model is loaded."""
    from scalepoint.pipeline import job

    options, target = settings.part(DeployOptions), check_target(settings.target, settings.cpu)
    job.check_options(options, has_metric=bool(settings.evaluate), smoke=smoke)
    job.check_with_target(options, target)


def check_installed(settings: DeployConfig) -> None:
    """Refuse a target whose packages are not installed, unless --allow-departure accepts an unverified file."""
    from scalepoint.pipeline import job

    target = check_target(settings.target, settings.cpu)
    if not settings.allow_departure:
        distributed.run_on_main("checking the runtime", lambda: job.check_installed(target, allow_departure=False))


def input_paths(values: Mapping[str, Any], loader: ObjectLoader) -> dict[str, Path]:
    """Return description -> path of the .onnx file, the checkpoint, the weights and the data, if they exist."""
    model = values["model"] or ""
    names = {
        "model": model if is_onnx_file(model) else None,
        "checkpoint": model.partition(":")[2] if model.startswith("hf:") else None,
        "weights": values["weights"],
        "data": values["data"],
    }
    paths = {description: loader.resolve(name) for description, name in names.items() if name}
    return {description: path for description, path in paths.items() if os.path.exists(path)}
