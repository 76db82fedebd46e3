"""init: files to start from. config schema: for editors that complete config files."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import json as writer
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code, usage_error
from scalepoint.cli.output import say, show, show_json, write
from scalepoint.errors import ScalepointError, UsageError, did_you_mean
from scalepoint.options import DeployConfig

Check = Callable[[str], None]
KEY = re.compile(r"(\w+): \S+ *(#.*)?$")
TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE_FILES = {"scalepoint.yaml": "scalepoint.yaml.txt", "deploy.py": "deploy.py.txt"}


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")] = Path(),
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask for model, data, target and metric, and look at the model.")
    ] = False,
    trust: flags.Trust = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Write a commented scalepoint.yaml and a deploy.py to start from; nothing is overwritten. With --ask, a
    scalepoint.yaml of your answers."""
    if folder.exists() and not folder.is_dir():
        raise usage_error(f"{str(folder)!r} is a file, not a folder")
    names = ["scalepoint.yaml"] if ask else list(TEMPLATE_FILES)
    there = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise usage_error(
            f"{' and '.join(there)} in {str(folder)!r} is there already, nothing was written: choose another folder"
        )
    from scalepoint.support.files import replace_text

    answers = ask_for_settings(folder) if ask else {}
    if any(text.startswith("deploy:") for text in answers.values()) and not _has_module(folder):
        names.append("deploy.py")  # what the usual answers name
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        replace_text(
            folder / name, fill_template((TEMPLATES / TEMPLATE_FILES[name]).read_text(encoding="utf-8"), answers)
        )
    paths = [folder / name for name in names]
    if json:
        show_json("init", {"exit_code": 0, "written": paths})
    else:
        show(Text("\n".join(map(str, paths))))
    # From here, not from the folder: the answers are names of files and modules as they are found from here.
    command = shlex.join(["scalepoint", "deploy", "-c", str(folder / "scalepoint.yaml")])
    if ask:
        preview_model(folder, trust)
    if not ask or _is_local(folder, answers):
        command += " --trust"
    say(f"Next: {command} --dry-run\n      {command}")
    return Code.DONE


def fill_template(template: str, answers: Mapping[str, str]) -> str:
    """The template with the answers in the places of its values; comments stay."""
    lines = []
    for line in template.splitlines():
        found = KEY.match(line)
        key, comment = found.groups() if found else ("", "")
        value = writer.dumps(answers[key]) if answers.get(key) else "null"
        lines.append(f"{key}: {value}  {comment}".rstrip() if key in answers else line)
    return "\n".join(lines) + "\n"


def ask_for_settings(folder: Path) -> dict[str, str]:
    """One question after the other; what cannot be is said, and asked again."""
    from scalepoint.cli.data import DataOptions, check_data
    from scalepoint.cli.load_objects import ObjectLoader, check_name

    finder = ObjectLoader(folder, trust=True)  # nothing is run here: whether names can be is checked
    targets = ", ".join(_list_model_targets())
    questions: tuple[tuple[str, str, str, Check], ...] = (
        ("model", "The model (package.module:name, timm:NAME, hf:FOLDER)", "deploy:model",
         lambda text: check_name(text, "model", finder)),
        ("data", "Data to calibrate with (.npz, .safetensors, package.module:name)", "deploy:data",
         lambda text: check_data(text, DataOptions(finder=finder))),
        ("target", f"Where it will run ({targets})", "onnxruntime", _check_known_target),
        ("evaluate", "Your metric, package.module:name; empty for none", "",
         lambda text: check_name(text, "evaluate", finder) if text else None),
    )  # fmt: skip
    return {key: _ask(question, usual, check) for key, question, usual, check in questions}


def _list_model_targets() -> list[str]:
    """Targets for models; those for language models take the folder of a checkpoint."""
    from scalepoint.targets import list_targets

    return list_targets()


def _check_known_target(text: str) -> None:
    if text not in _list_model_targets():
        raise usage_error(f"no target {text!r}: {did_you_mean(text, _list_model_targets())}")


def _ask(question: str, usual: str, check: Check) -> str:
    while True:
        text: str = typer.prompt(question, default=usual, err=True).strip()
        if not sys.stdin.isatty():  # nobody pressed Enter: what is said next would stand on the same line
            say("")
        try:
            check(text)
        except UsageError as error:
            say(str(error.args[0]), "yellow")
        else:
            return text


def _has_module(folder: Path) -> bool:
    return any((each / "deploy.py").exists() for each in (folder, Path()))


def _is_local(folder: Path, answers: Mapping[str, str]) -> bool:
    """Whether an answer names code that is run only with --trust."""
    from scalepoint.cli.data import DataOptions, check_data
    from scalepoint.cli.load_objects import ObjectLoader, check_name

    finder = ObjectLoader(folder)
    try:
        check_name(answers["model"], "model", finder)
        check_data(answers["data"], DataOptions(finder=finder))
        if answers["evaluate"]:
            check_name(answers["evaluate"], "evaluate", finder)
    except UsageError:
        return True
    return False


def preview_model(folder: Path, trust: bool) -> None:
    """What the target would quantize of the model; of one that cannot be looked at yet, why."""
    from scalepoint.cli.inspect import measure_coverage
    from scalepoint.cli.run_config import load_settings, object_loader

    settings = load_settings({"config": folder / "scalepoint.yaml"})
    try:
        found, _ = measure_coverage(settings, object_loader(settings, {"trust": trust}))
    except ScalepointError as error:
        say(f"not looked at yet: {error.args[0]}", "yellow")
    else:
        say(f"{settings.target}: {found.summary()}")


def schema(json: flags.Json = True, debug: flags.Debug = False) -> int:
    """The JSON Schema of config files."""
    write(sys.stdout, writer.dumps(DeployConfig.model_json_schema(), indent=2) + "\n")
    return Code.DONE
