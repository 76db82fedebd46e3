"""The commands `scalepoint init`, which writes files to start from, and `scalepoint config schema`."""

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
KEY_LINE = re.compile(r"(\w+): \S+ *(#.*)?$")
TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE_FILES = {"scalepoint.yaml": "scalepoint.yaml.txt", "deploy.py": "deploy.py.txt"}


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write into; the current folder by default.")
    ] = Path(),
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask for model, data, target and metric, and show what would be quantized.")
    ] = False,
    trust: flags.Trust = False,
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Write a commented scalepoint.yaml and an example deploy.py to start from.

    With --ask, write a scalepoint.yaml with your answers. Existing files are not overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise usage_error(f"{str(folder)!r} is a file: pass the path of a folder")
    names = ["scalepoint.yaml"] if ask else list(TEMPLATE_FILES)
    existing = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if existing:
        raise usage_error(
            f"{' and '.join(existing)} exists already in {str(folder)!r}, nothing was written: choose another folder"
        )
    from scalepoint.support.files import replace_text

    answers = ask_for_settings(folder) if ask else {}
    if any(text.startswith("deploy:") for text in answers.values()) and not _has_module(folder):
        names.append("deploy.py")  # the default answers name objects in deploy.py
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
    # The command is for the current folder, because file and module names in the answers are relative to it.
    command = shlex.join(["scalepoint", "deploy", "-c", str(folder / "scalepoint.yaml")])
    if ask:
        preview_model(folder, trust)
    if not ask or _is_local(folder, answers):
        command += " --trust"
    say(f"Next: {command} --dry-run\n      {command}")
    return Code.DONE


def fill_template(template: str, answers: Mapping[str, str]) -> str:
    """Replace the values of the template by the answers. Comments stay."""
    lines = []
    for line in template.splitlines():
        match = KEY_LINE.match(line)
        key, comment = match.groups() if match else ("", "")
        value = writer.dumps(answers[key]) if answers.get(key) else "null"
        lines.append(f"{key}: {value}  {comment}".rstrip() if key in answers else line)
    return "\n".join(lines) + "\n"


def ask_for_settings(folder: Path) -> dict[str, str]:
    """Ask the questions. An invalid answer prints an error, and the question is asked again."""
    from scalepoint.cli.data import DataOptions, check_data
    from scalepoint.cli.load_objects import ObjectLoader, check_name

    loader = ObjectLoader(folder, trust=True)  # names are only checked here, no code runs
    targets = ", ".join(_list_model_targets())
    questions: tuple[tuple[str, str, str, Check], ...] = (
        ("model", "The model (package.module:name, timm:NAME, hf:FOLDER)", "deploy:model",
         lambda text: check_name(text, "model", loader)),
        ("data", "Calibration data (.npz, .safetensors, package.module:name)", "deploy:data",
         lambda text: check_data(text, DataOptions(loader=loader))),
        ("target", f"Target runtime ({targets})", "onnxruntime", _check_known_target),
        ("evaluate", "Your metric, package.module:name; empty for none", "",
         lambda text: check_name(text, "evaluate", loader) if text else None),
    )  # fmt: skip
    return {key: _ask(question, default, check) for key, question, default, check in questions}


def _list_model_targets() -> list[str]:
    """Return the targets for models. Targets for language models need the folder of a checkpoint."""
    from scalepoint.targets import list_targets

    return list_targets()


def _check_known_target(text: str) -> None:
    if text not in _list_model_targets():
        raise usage_error(f"no target {text!r}: {did_you_mean(text, _list_model_targets())}")


def _ask(question: str, default: str, check: Check) -> str:
    """Ask until the answer passes the check."""
    while True:
        text: str = typer.prompt(question, default=default, err=True).strip()
        if not sys.stdin.isatty():  # input from a pipe is not echoed: end the line of the question
            say("")
        try:
            check(text)
        except UsageError as error:
            say(str(error.args[0]), "yellow")
        else:
            return text


def _has_module(folder: Path) -> bool:
    return any((parent / "deploy.py").exists() for parent in (folder, Path()))


def _is_local(folder: Path, answers: Mapping[str, str]) -> bool:
    """Whether an answer names code that needs --trust to run."""
    from scalepoint.cli.data import DataOptions, check_data
    from scalepoint.cli.load_objects import ObjectLoader, check_name

    loader = ObjectLoader(folder)
    try:
        check_name(answers["model"], "model", loader)
        check_data(answers["data"], DataOptions(loader=loader))
        if answers["evaluate"]:
            check_name(answers["evaluate"], "evaluate", loader)
    except UsageError:
        return True
    return False


def preview_model(folder: Path, trust: bool) -> None:
    """Print what the target would quantize, or why the model cannot be captured yet."""
    from scalepoint.cli.inspect import measure_coverage
    from scalepoint.cli.run_config import load_settings, object_loader

    settings = load_settings({"config": folder / "scalepoint.yaml"})
    try:
        coverage, _ = measure_coverage(settings, object_loader(settings, {"trust": trust}))
    except ScalepointError as error:
        say(f"the model was not inspected: {error.args[0]}", "yellow")
    else:
        say(f"{settings.target}: {coverage.summary()}")


def schema(json: flags.Json = True, debug: flags.Debug = False) -> int:
    """Print the JSON Schema of config files, with which editors complete and check them."""
    write(sys.stdout, writer.dumps(DeployConfig.model_json_schema(), indent=2) + "\n")
    return Code.DONE
