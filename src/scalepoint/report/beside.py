"""Two runs beside each other in a terminal."""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from scalepoint.report.terminal import NARROW, plain_table
from scalepoint.support.formatting import decibel, one_line, short

if TYPE_CHECKING:
    from scalepoint.report.difference import Difference, LayerPair, Setting


def written(value: Any) -> str:
    """A value of a config on one line."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Beside:
    """For rich: fits any width; at most `rows` layers."""

    found: "Difference"
    rows: int = 10

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found, narrow = self.found, options.max_width < NARROW
        first, second = found.first, found.second
        for side in (first, second):
            yield Text(f"{one_line(side.name)}: {short(side.title)} for {short(side.target)}", style="bold")
            yield Text(f"  {one_line(side.verdict)}")
        for each in found.warnings:
            yield Text(f"warning: {one_line(each)}", style="yellow")
        yield Text()
        heads = ("", short(first.name, 24), short(second.name, 24), "change")
        numbers = [(short(each.name, 40), *each.texts()) for each in found.numbers]
        if narrow:  # names of runs take the room of what is compared
            yield plain_table(("", "first", "then", "change"), numbers, numbers=(1, 2, 3))
        else:
            yield plain_table(heads, numbers, numbers=(1, 2, 3))
        yield from self._layers(narrow)
        for title, settings in (("Settings that differ", found.settings), ("Circumstances", found.circumstances)):
            if settings:
                yield Text()
                yield Text(title, style="bold")
                yield plain_table(heads[:3], [_texts(each) for each in settings])
        yield Text()
        yield Text(one_line(found.summary()))

    def _layers(self, narrow: bool) -> RenderResult:
        changed = self.found.changed_layers
        if not changed:
            return
        yield Text()
        yield Text("Layers that differ", style="bold")
        rows = [layer_texts(each) for each in changed[: self.rows]]
        if len(changed) > self.rows:
            rows.append((f"and {len(changed) - self.rows} more", "", "", "", ""))
        if narrow:
            yield plain_table(
                ("layer", "dB", "then", "change"), [(row[0], *row[2:]) for row in rows], numbers=(1, 2, 3)
            )
        else:
            yield plain_table(("layer", "runs in", "dB", "then", "change"), rows, numbers=(2, 3, 4))


def _texts(each: "Setting") -> tuple[str, str, str]:
    return short(each.key, 60), short(written(each.first), 60), short(written(each.second), 60)


def layer_texts(each: "LayerPair") -> tuple[str, str, str, str, str]:
    first, second = ("-" if precision is None else precision for precision in each.precision)
    runs = first if first == second else f"{first} -> {second}"
    change = f"{each.change:+.1f}" if each.change and math.isfinite(each.change) else ""
    return short(each.name), runs, decibel(each.sqnr_db[0]), decibel(each.sqnr_db[1]), change
