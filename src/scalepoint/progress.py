"""Progress on stderr: a bar on a terminal, elsewhere one plain line a phase, and every ten seconds one of a long phase.

    with phase("calibrating", total=128) as running:      calibrating: 40/128 batches (31 %), 21 s, about 46 s left
        running.advance()                                 calibrating: 128 batches in 67 s

Nothing turns or blinks where nobody can see it: no terminal, NO_COLOR or TERM=dumb means plain lines. Phases
follow one another: of one inside another only one is shown, the other has show=False. Of several ranks the first tells.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from scalepoint import ranks

EVERY = 10.0  # seconds between two lines of a long phase


class Phase:
    """A named piece of work that counts what it has done."""

    def __init__(self, name: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._clock = clock
        self._start = clock()
        self.shown: _Shown | None = None

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self.shown is not None:
            self.shown.advanced(self)

    def now(self) -> str:
        """How far it is; with a total also the share, and the time that is left at this pace."""
        seconds = self.seconds
        if self.total is None:
            return f"{self.name}: {_counted(self.done, self.unit)}, {duration(seconds)}"
        left = seconds / self.done * max(self.total - self.done, 0) if self.done else 0.0
        percent = 100 * min(self.done / max(self.total, 1), 1)
        share = f"{self.done}/{self.total} {self.unit} ({percent:.0f} %)"
        return f"{self.name}: {share}, {duration(seconds)}, about {duration(left)} left"

    def end(self, is_whole: bool) -> str:
        if not is_whole:
            after = f" after {_counted(self.done, self.unit)}" if self.done else ""
            return f"{self.name}: stopped{after}, {duration(self.seconds)}"
        if not self.done:
            return f"{self.name}: {duration(self.seconds)}"
        return f"{self.name}: {_counted(self.done, self.unit)} in {duration(self.seconds)}"


class _Shown(Protocol):
    def advanced(self, phase: Phase) -> None: ...


class _Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def advanced(self, phase: Phase) -> None:
        if phase.seconds - self._last >= EVERY:
            self._last = phase.seconds
            say(phase.now())


class _Bar:
    """A live bar; it goes when the phase ends, and the last line stays."""

    def __init__(self, phase: Phase) -> None:
        from rich.console import Console  # noqa: PLC0415  # only a terminal pays for it
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        counted = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if phase.total is not None else ()
        columns = (TextColumn("{task.description}", markup=False), *counted, TimeElapsedColumn())
        self.live = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self.live.add_task(phase.name, total=phase.total)

    def advanced(self, phase: Phase) -> None:
        self.live.update(self._task, completed=phase.done)


@contextmanager
def phase(name: str, *, total: int | None = None, unit: str = "batches", show: bool | None = None) -> Iterator[Phase]:
    """A phase that is shown while it runs. show: None or True shows it, False does not."""
    running = Phase(name, total, unit)
    if show is False or not ranks.is_main():
        yield running
        return
    bar = _Bar(running) if is_live() else None
    running.shown = bar or _Lines()
    is_whole = False
    if bar is not None:
        bar.live.start()
    try:
        yield running
        is_whole = True
    finally:
        if bar is not None:
            bar.live.stop()
        say(running.end(is_whole))


@contextmanager
def timed(timings: dict[str, float], doing: str, *, show: bool | None = None) -> Iterator[None]:
    """A phase whose seconds are added up under its name; show=False for one that shows itself."""
    start = time.perf_counter()
    with phase(doing, show=show):
        yield
    timings[doing] = timings.get(doing, 0.0) + time.perf_counter() - start


def is_live() -> bool:
    """Whether stderr is a terminal that can show a bar."""
    stream = sys.stderr
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def say(line: str) -> None:
    """A line on stderr, at once; a reader that has gone is no error of the work."""
    if not ranks.is_main():
        return
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def duration(seconds: float) -> str:
    """As a person says it: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _counted(count: int, unit: str) -> str:
    singular = {"batches": "batch", "layers": "layer", "files": "file", "passes": "pass"}
    return f"{count} {singular.get(unit, unit) if count == 1 else unit}"
