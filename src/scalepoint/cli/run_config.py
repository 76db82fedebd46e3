"""What a command was told: the config file, and over it the flags. A flag is a key of the file."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalepoint import distributed
from scalepoint.cli.data import DataOptions, check_data
from scalepoint.cli.exit_codes import usage_error
from scalepoint.cli.library_models import is_library_model
from scalepoint.cli.load_objects import ObjectLoader, check_name
from scalepoint.errors import ConfigError, did_you_mean
from scalepoint.options import CheckpointOptions, CommonOptions, DeployConfig, SweepConfig, changed_values
from scalepoint.support.validation_errors import cause_of, complaints

CHECKPOINT_ONLY_OPTIONS = tuple(
    name for name in CheckpointOptions.model_fields if name not in CommonOptions.model_fields
)
IMAGE_OPTIONS = ("size", "mean", "std")


def load_settings(given: Mapping[str, Any], *, is_sweep: bool = False) -> Any:
    """A DeployConfig (of a sweep one with a grid): the file that `config` names, and over it all other options that are
    keys of it."""
    kind = SweepConfig if is_sweep else DeployConfig
    file = given.get("config")
    settings: DeployConfig = kind.from_file(file) if file is not None else kind()
    if file is not None:
        settings = settings.updated({"root": str(Path(file).parent / (settings.root or ""))})
    said = {key: value for key, value in given.items() if key in DeployConfig.model_fields and value not in (None, [])}
    try:
        return settings.updated(said)
    except ConfigError as error:
        if (cause := cause_of(error)) is None:
            raise
        flags = [f"--{each.key.replace('_', '-')}: {each.message}" for each in complaints(cause, said)]
        raise usage_error("; ".join(flags)) from error


def data_options(settings: Any, finder: ObjectLoader, max_batches: int | None = None) -> DataOptions:
    """How files become batches."""
    return DataOptions(settings.batch_size, max_batches, settings.size, settings.mean, settings.std, finder)


def object_loader(settings: Any, given: Mapping[str, Any]) -> ObjectLoader:
    """Where the names of the settings are looked for."""
    return ObjectLoader(Path(settings.root or ""), bool(given.get("trust")), settings.weights, settings.random)


def check_names(given: Mapping[str, Any]) -> None:
    """What can be refused at once, before the seconds that torch takes to load."""
    roots = [Path(given["root"])] if given.get("root") else []
    roots += [Path(given["config"]).parent] if given.get("config") else []
    for key in ("model", "evaluate"):
        if given.get(key):
            check_name(given[key], key, ObjectLoader(roots[0] if roots else Path(), bool(given.get("trust"))))


def check_settings(settings: Any, finder: ObjectLoader, *, needs_data: bool = True) -> None:
    """All that can be told wrong before the model is made."""
    if not settings.model:
        raise usage_error("which model? Name it as package.module:name, or as `model:` in a config given with -c")
    check_name(settings.model, "model", finder)
    check_target(settings.target)
    check_with_target(settings)
    if not settings.data and needs_data and settings.quantization.activation != "float":
        raise usage_error("which data? Give --data, or `data:` in a config given with -c")
    _check_apply(settings, finder)
    if settings.data:
        check_data(settings.data, data_options(settings, finder))
    if settings.max_drop is not None and not settings.evaluate:
        raise usage_error("--max-drop needs --evaluate: the metric that must not drop")


def _check_apply(settings: Any, finder: ObjectLoader) -> None:
    """Refuse options that this run would not use: to leave them out silently would look as if they had worked."""
    for name in changed_values(settings):
        flag = f"--{name}"
        if name in CHECKPOINT_ONLY_OPTIONS:
            raise usage_error(
                f"{flag} is for checkpoints of language models, which are folders; {settings.model!r} is none"
            )
        if name in IMAGE_OPTIONS and not (settings.data and finder.path(settings.data).is_dir()):
            raise usage_error(f"{flag} is for data that is a folder of pictures; the data is {settings.data!r}")
        if name == "random" and not is_library_model(settings.model):
            raise usage_error(f"{flag} is for timm:NAME and hf:FOLDER; {settings.model!r} makes its own weights")


def check_target(name: str) -> None:
    from scalepoint.targets import list_targets

    if name in list_targets(language=True):
        raise usage_error(f"target {name!r} takes the folder of a language model's checkpoint, not the name of a model")
    if name not in list_targets():
        raise usage_error(f"no target {name!r}: {did_you_mean(name, list_targets())}")


def check_with_target(settings: Any) -> None:
    """What a target cannot have; of one that is broken the run itself says so."""
    from scalepoint.targets import find_target

    target = find_target(settings.target, settings.cpu)
    target.check_float_dtype(settings.float_dtype)
    target.check_free_sizes(settings.dynamic_axes)


def check_runtime(settings: Any) -> None:
    """Refuse a target whose runtime is not installed before the model is made, unless the file may be unverified."""
    from scalepoint.pipeline.job import check_installed
    from scalepoint.targets import find_target

    target = find_target(settings.target, settings.cpu)
    if not settings.allow_departure:
        distributed.run_on_main("looking for the runtime", lambda: check_installed(target, allow_departure=False))


def check_inputs(settings: Any, finder: ObjectLoader) -> None:
    """Refuse an output folder that contains the checkpoint, the weights or the data, or lies inside one of them."""
    from scalepoint.support import output_folder

    names = {
        "checkpoint": settings.model.partition(":")[2] if str(settings.model).startswith("hf:") else None,
        "weights": settings.weights,
        "data": settings.data,
    }
    found = {what: finder.path(name) for what, name in names.items() if name}
    output_folder.check_inputs(
        Path(settings.output), {what: path for what, path in found.items() if os.path.exists(path)}
    )
