"""Command line flags. Those of options are made from the declarations in `scalepoint/options.py`.

    @takes("model", "data", "target")            # flags of these options
    def inspect(context: typer.Context, json: Json = False) -> int:
        context.params["model"]                  # None if the flag was not given

A flag is a keyword of the Python function and a key of the config file.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from scalepoint.options import FILE_GROUP, RUN_GROUP, DeployConfig, RunOptions, get_option

OUTPUT = "What is shown"
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder that deploy wrote.")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML or JSON config; flags given here win over it.")
]
Runtime = Annotated[
    str | None,
    typer.Option(help="The runtime, such as onnxruntime or openvino; that of the file by default.", show_default=False),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run code that is not installed: from the folder of the config file or the current directory.",
        rich_help_panel=FILE_GROUP,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Capture and show the plan; write nothing.", rich_help_panel=RUN_GROUP)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Also show starts of phases, numbers and files.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, for programs.", rich_help_panel=OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, and all warnings.", rich_help_panel=OUTPUT)
]
Force = Annotated[
    bool,
    typer.Option("--force", "-f", help=get_option(RunOptions.model_fields["force"]).help, rich_help_panel=RUN_GROUP),
]


def takes(
    *names: str, options: type[DeployConfig] = DeployConfig
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: add the flags of these options to a command, which finds their values in `context.params`.

    Args:
        names: Fields of `options` or of RunOptions.
        options: The class that declares them.
    """
    fields = {**options.model_fields, **RunOptions.model_fields}
    generated = [parameter(name, fields[name]) for name in names]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(function).parameters

        @wraps(function)
        def command(**values: Any) -> int:
            return function(**{name: values[name] for name in own})

        keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()]
        required = [each for each in keyword if each.default is inspect.Parameter.empty]
        optional = [each for each in keyword if each.default is not inspect.Parameter.empty]
        vars(command)["__signature__"] = inspect.Signature([*required, *generated, *optional])
        return command

    return decorate


def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The parameter of a typer command for one option; None means that the flag was not given."""
    option = get_option(field)
    panel = {"rich_help_panel": option.group} if option.group else {}
    common: dict[str, Any] = {"help": option.help, "show_default": False, "metavar": option.metavar, **panel}
    annotation: Any
    if name == "model":
        annotation = Annotated[str | None, typer.Argument(**common)]
    else:
        flags = option.flags or (f"--{name.replace('_', '-')}",)
        annotation = Annotated[_flag_type(field) | None, typer.Option(*flags, **common)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(field: FieldInfo) -> Any:
    """The type that the command line reads; the config checks the value."""
    if get_option(field).is_repeated:
        return list[str]
    types = _plain_types(field.annotation)
    return next((each for each in (bool, int, float) if types == {each}), str)


def _plain_types(annotation: Any) -> set[Any]:
    """The types of an annotation, without None and without metadata."""
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if type(None) in get_args(annotation):
        return {kind for each in get_args(annotation) if each is not type(None) for kind in _plain_types(each)}
    return {annotation}
