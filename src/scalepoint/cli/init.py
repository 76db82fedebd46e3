"""The commands `scalepoint init`, which writes files to start from, and `scalepoint config schema`."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from scalepoint.cli import flags
from scalepoint.cli.exit_codes import Code
from scalepoint.cli.output import say, show, show_json, write
from scalepoint.errors import UsageError
from scalepoint.options import DeployConfig

TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE_FILES = {"scalepoint.yaml": "scalepoint.yaml.txt", "deploy.py": "deploy.py.txt"}


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write into; the current folder by default.")
    ] = Path(),
    json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Write a commented scalepoint.yaml and an example deploy.py to start from.

    Existing files are not overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is a file: pass the path of a folder")
    existing = [name for name in TEMPLATE_FILES if (folder / name).exists() or (folder / name).is_symlink()]
    if existing:
        raise UsageError(
            f"{' and '.join(existing)} exists already in {str(folder)!r}, nothing was written: choose another folder"
        )
    from scalepoint.support.files import replace_text

    folder.mkdir(parents=True, exist_ok=True)
    for name, template in TEMPLATE_FILES.items():
        replace_text(folder / name, (TEMPLATES / template).read_text(encoding="utf-8"))
    paths = [folder / name for name in TEMPLATE_FILES]
    if json:
        show_json("init", {"exit_code": 0, "written": paths})
    else:
        show(Text("\n".join(map(str, paths))))
    # The config is named as seen from the current folder.
    command = shlex.join(["scalepoint", "deploy", "-c", str(folder / "scalepoint.yaml"), "--trust"])
    say(f"Next: {command} --dry-run\n      {command}")
    return Code.DONE


def schema(json: flags.Json = True, debug: flags.Debug = False) -> int:
    """Print the JSON Schema of config files, with which editors complete and check them."""
    write(sys.stdout, dumps(DeployConfig.model_json_schema(), indent=2) + "\n")
    return Code.DONE
