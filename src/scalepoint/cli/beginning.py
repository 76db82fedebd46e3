"""init: files to start from. config schema: for editors that complete config files."""

# ruff: noqa: PLC0415  # what needs torch is imported when a command runs
import json as writer
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from scalepoint.cli import declared, options
from scalepoint.cli.ending import Code, usage
from scalepoint.cli.screen import say, show, show_json, write

TEMPLATES = Path(__file__).with_name("templates")
WRITTEN = {"scalepoint.yaml": "scalepoint.yaml.txt", "deploy.py": "deploy.py.txt"}


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")] = Path(),
    json: options.Json = False,
    debug: options.Debug = False,
) -> int:
    """Write a commented scalepoint.yaml and a deploy.py to start from; nothing is overwritten."""
    if folder.exists() and not folder.is_dir():
        raise usage(f"{str(folder)!r} is a file, not a folder")
    there = [name for name in WRITTEN if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise usage(
            f"{' and '.join(there)} in {str(folder)!r} is there already, nothing was written: choose another folder"
        )
    from scalepoint.files import replace_text

    folder.mkdir(parents=True, exist_ok=True)
    for name, template in WRITTEN.items():
        replace_text(folder / name, (TEMPLATES / template).read_text(encoding="utf-8"))
    paths = [folder / name for name in WRITTEN]
    if json:
        show_json("init", {"exit_code": 0, "written": paths})
    else:
        show(Text("\n".join(map(str, paths))))
    change = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    command = f"{change}scalepoint deploy -c scalepoint.yaml"
    say(f"Next: {command} --dry-run\n      {command}")
    return Code.DONE


def schema(json: options.Json = True, debug: options.Debug = False) -> int:
    """The JSON Schema of config files."""
    write(sys.stdout, writer.dumps(declared.read()["schema"], indent=2) + "\n")
    return Code.DONE
