"""Output of commands: results on stdout, messages on stderr.

Control characters in names are escaped by `say` and `Listing`; other parts that are given to `show` must be escaped by
the caller. A reader that closes the pipe is not an error.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scalepoint import distributed
from scalepoint.support.files import is_broken_pipe
from scalepoint.support.formatting import escape_unprintable, to_one_line
from scalepoint.support.jsonable import to_jsonable

JSON_SCHEMA_VERSION = 1  # of every JSON document on stdout
NARROW_WIDTH = 72
MAX_TEXT_LENGTH = 1500  # characters of one message, so that an error fits on one screen


def prepare_streams() -> None:
    """Open closed streams, and let them escape characters that the locale lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # stays open until the process exits
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def shorten(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Cut off a long text."""
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]} ... ({len(text) - max_length} more characters: --debug)"


def show(*parts: RenderableType) -> None:
    """Print a result on stdout. Names in it must be escaped, see the top of this file."""
    _print(sys.stdout, parts)


def say(text: str, style: str = "") -> None:
    """Print a message on stderr."""
    _print(sys.stderr, [Text(escape_unprintable(text), style=style)])


def show_json(command: str, fields: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout."""
    document = {"schema": JSON_SCHEMA_VERSION, "command": command, **fields}
    write(sys.stdout, json.dumps(to_jsonable(document), indent=2, allow_nan=False) + "\n")


def _print(stream: TextIO, parts: Sequence[RenderableType]) -> None:
    # Rich renders into memory, and `write` writes: it alone handles a closed pipe, and prints on rank 0 only.
    console = Console(file=stream)
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, highlight=False)
    write(stream, capture.get())


def write(stream: TextIO, text: str) -> None:
    """Write the text, on rank 0 only. A reader that has closed the pipe (`| head`) is not an error."""
    if not distributed.is_main():
        return
    try:
        stream.write(text)
        stream.flush()
    except ValueError:  # the stream is closed
        discard_output(stream)
    except OSError as error:
        if not is_broken_pipe(error):
            raise
        discard_output(stream)


def discard_output(stream: TextIO) -> None:
    """Redirect a closed stream to the null device: Python flushes it again at exit, which would fail."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


class Listing:
    """A table. On a narrow screen each row becomes a block of lines, so that no cell is cut off.

    Args:
        columns: Their titles.
        rows: One value per column, converted to text and escaped here.
        number_columns: Indices of the columns with numbers, which are aligned to the right and not wrapped.
    """

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], number_columns: Sequence[int] = ()
    ) -> None:
        self.columns = columns
        self.rows = [[to_one_line(cell) for cell in row] for row in rows]
        self.number_columns = number_columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.rows:
            return
        if options.max_width < NARROW_WIDTH:
            for row in self.rows:
                yield Text(row[0], style="bold", overflow="fold")
                for name, cell in zip(self.columns[1:], row[1:], strict=True):
                    if cell:
                        yield Padding(Text(f"{name}: {cell}", overflow="fold"), (0, 0, 0, 2), expand=False)
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for index, name in enumerate(self.columns):
            is_number = index in self.number_columns
            table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        yield table
