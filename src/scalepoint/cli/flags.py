"""Command line flags. Flags of options are generated from the declarations in `scalepoint/options.py`.

    @takes("model", "data", "target")            # flags of these options
    def inspect(context: typer.Context, json: Json = False) -> int:
        context.params["model"]                  # None if the flag was not given

A flag of an option is also a keyword of `scalepoint.deploy` or `deploy_checkpoint`, and a key of the config file.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Self, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from scalepoint.options import FILE_GROUP, RUN_GROUP, DeployConfig, RunOptions, get_option

OUTPUT_GROUP = "Output of the command"
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of `scalepoint deploy`.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML or JSON config file. Flags override its values.")
]
Runtime = Annotated[
    str | None,
    typer.Option(
        help="The runtime, such as onnxruntime or openvino; by default the runtime of the file.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Allow code that is not installed to run: from the folder of the config file or the current folder.",
        rich_help_panel=FILE_GROUP,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Capture the model and show what would be quantized; write nothing.",
        rich_help_panel=RUN_GROUP,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors on stderr.", rich_help_panel=OUTPUT_GROUP)
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Also print starts of phases, metrics, written files, and tables of layers.",
        rich_help_panel=OUTPUT_GROUP,
    ),
]
VerboseReport = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print tables of layers.", rich_help_panel=OUTPUT_GROUP)
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout.", rich_help_panel=OUTPUT_GROUP)
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Print the traceback of an error, and all warnings.", rich_help_panel=OUTPUT_GROUP),
]
Force = Annotated[
    bool,
    typer.Option("--force", "-f", help=get_option(RunOptions.model_fields["force"]).help, rich_help_panel=RUN_GROUP),
]


@dataclass(frozen=True)
class RunFlags:
    """The flags of `scalepoint deploy` that are not keys of a config file."""

    smoke: bool
    resume: bool
    force: bool
    dry_run: bool
    quiet: bool
    verbose: bool
    json: bool

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Read the flags from the parameters of the command. A flag that was not given is None or False."""
        return cls(**{field.name: bool(parameters[field.name]) for field in fields(cls)})


def takes(
    *names: str, options: type[DeployConfig] = DeployConfig
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds the flags of these options to a command. Their values are in `context.params`.

    Args:
        names: Fields of `options` or of RunOptions.
        options: The class that declares them.
    """
    fields = {**options.model_fields, **RunOptions.model_fields}
    generated = [build_parameter(name, fields[name]) for name in names]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        declared = inspect.signature(function).parameters

        @wraps(function)
        def command(**values: Any) -> int:
            return function(**{name: values[name] for name in declared})

        # Typer reads positional arguments in the order of the signature (OUT before MODEL) and prints the help in it.
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in declared.values()]
        required = [parameter for parameter in keyword_only if parameter.default is inspect.Parameter.empty]
        optional = [parameter for parameter in keyword_only if parameter.default is not inspect.Parameter.empty]
        # typer reads __signature__; vars(), because mypy does not allow attributes of functions.
        vars(command)["__signature__"] = inspect.Signature([*required, *generated, *optional])
        return command

    return decorate


def build_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Build the parameter of a typer command for one option. Its value is None if the flag was not given."""
    option = get_option(field)
    panel = {"rich_help_panel": option.group} if option.group else {}
    common: dict[str, Any] = {"help": option.help, "show_default": False, "metavar": option.metavar, **panel}
    annotation: Any
    if name == "model":
        annotation = Annotated[str | None, typer.Argument(**common)]
    else:
        flags = option.flags or (f"--{name.replace('_', '-')}",)
        callback = _split_commas if _is_list(field) and not option.is_repeated else None
        annotation = Annotated[_flag_type(field) | None, typer.Option(*flags, callback=callback, **common)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _is_list(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple for kind in _plain_types(field.annotation))


def _split_commas(text: str | None) -> tuple[str, ...] | None:
    """Convert the text of a flag to the list that a config file and Python have."""
    return None if text is None else tuple(text.split(","))


def _flag_type(field: FieldInfo) -> Any:
    """Return the type of the flag's value. DeployConfig checks the value itself later."""
    if get_option(field).is_repeated:
        return list[str]
    types = _plain_types(field.annotation)
    if len(types) == 1 and types <= {bool, int, float}:
        return types.pop()
    return str  # also for an option that takes several types


def _plain_types(annotation: Any) -> set[Any]:
    """Return the types in an annotation, without None and without metadata."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if type(None) in get_args(annotation):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return {kind for member in members for kind in _plain_types(member)}
    return {annotation}
