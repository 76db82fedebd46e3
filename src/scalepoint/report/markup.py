"""HTML by construction: text that is not Html is escaped wherever it is put, so nothing has to remember to.

tag("td", "<b>", data_v=3)  ->  <td data-v="3">&lt;b&gt;</td>
"""

import html
import json
from collections.abc import Iterable
from typing import Any

from scalepoint.words import one_line, short, visible

SHAPES = frozenset(("line", "rect", "path", "circle"))
EMPTY = SHAPES | {"meta", "input"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Html | int | None


def escape(text: str) -> Html:
    return Html(html.escape(visible(text), quote=True))


def tag(element: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """One element. class_ and data_v become class and data-v; True is a bare attribute, None and False are none."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if element in EMPTY:
        return Html(f"<{element}{written}{'/' if element in SHAPES else ''}>")
    return Html(f"<{element}{written}>{join(children)}</{element}>")


def _attribute(key: str, value: Any) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return f' {name}="{text if isinstance(value, Html) else escape(text)}"'


def join(children: Iterable[Child]) -> Html:
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(str(child))
            for child in children
            if child is not None and child != ""
        )
    )


def name(text: str, longest: int = 96) -> Html:
    """A name of the user's: isolated from the direction of what is around it; the whole of a long one is its title."""
    shown = short(text, longest)
    whole = one_line(text)
    return tag("bdi", _breakable(shown), title=None if shown == whole else whole)


def _breakable(text: str) -> Html:
    """A path may wrap after its dots."""
    return Html(escape(text).replace(".", ".<wbr>"))


def data_block(value: Any, identifier: str) -> Html:
    """JSON that no browser takes for markup or a script: ASCII, with < > & as escapes too."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')
