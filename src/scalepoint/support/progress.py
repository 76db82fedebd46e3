"""Progress on stderr: a bar on a terminal, elsewhere one plain line a phase, and every ten seconds one of a long phase.

    with phase("calibrating", total=128) as running:      calibrating: 40/128 batches (31 %), 21 s, about 46 s left
        running.advance()                                 calibrating: 128 batches in 67 s

Nothing turns or blinks where nobody can see it: no terminal, NO_COLOR or TERM=dumb means plain lines. Phases
follow one another: of one inside another only one is shown. Of several ranks the first tells. The same events go to the
`callback=` of deploy.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from scalepoint import distributed
from scalepoint.support.interrupts import check_interrupt

LINE_INTERVAL_SECONDS = 10.0  # seconds between two lines of a long phase


@dataclass(frozen=True)
class Event:
    """What a run tells: a phase that starts, goes on or ends, a number that was measured, a file that was written."""

    kind: Literal["start", "advance", "end", "metric", "file"]
    name: str  # of the phase, of the number; the path of the file
    done: int = 0
    total: int | None = None
    unit: str = ""
    seconds: float = 0.0
    value: float | None = None  # of a metric
    is_whole: bool = True  # of a phase that ends: False where it was stopped

    def __str__(self) -> str:
        if self.kind == "metric":
            return f"{self.name}: {self.value}"
        return self.name if self.kind == "file" else self._ended() if self.kind == "end" else self._now()

    def _now(self) -> str:
        """How far it is; with a total also the share, and the time that is left at this pace."""
        if self.total is None:
            return f"{self.name}: {_format_count(self.done, self.unit)}, {format_duration(self.seconds)}"
        left = self.seconds / self.done * max(self.total - self.done, 0) if self.done else 0.0
        percent = 100 * min(self.done / max(self.total, 1), 1)
        share = f"{self.done}/{self.total} {self.unit} ({percent:.0f} %)"
        return f"{self.name}: {share}, {format_duration(self.seconds)}, about {format_duration(left)} left"

    def _ended(self) -> str:
        if not self.is_whole:
            after = f" after {_format_count(self.done, self.unit)}" if self.done else ""
            return f"{self.name}: stopped{after}, {format_duration(self.seconds)}"
        if not self.done:
            return f"{self.name}: {format_duration(self.seconds)}"
        return f"{self.name}: {_format_count(self.done, self.unit)} in {format_duration(self.seconds)}"


Callback = Callable[[Event], object]
_CALLBACKS: ContextVar[tuple[Callback, ...]] = ContextVar("scalepoint.listeners", default=())


@contextmanager
def callback_registered(callback: Callback | None) -> Iterator[None]:
    """Call `callback` with every event of this thread, on rank 0 only. An error that it raises ends the run."""
    token = None if callback is None or not distributed.is_main() else _CALLBACKS.set((*_CALLBACKS.get(), callback))
    try:
        yield
    finally:
        if token is not None:
            _CALLBACKS.reset(token)


def send_event(event: Event) -> None:
    """Call all callbacks."""
    for callback in _CALLBACKS.get():
        callback(event)


class RunningPhase:
    """A named piece of work that counts what it has done."""

    def __init__(self, name: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._clock = clock
        self._start = clock()
        self.shown: Callback | None = None

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def advance(self, count: int = 1) -> None:
        check_interrupt()
        self.done += count
        self.tell("advance")

    def event(self, kind: Literal["start", "advance", "end"], is_whole: bool = True) -> Event:
        return Event(kind, self.name, self.done, self.total, self.unit, self.seconds, is_whole=is_whole)

    def tell(self, kind: Literal["start", "advance", "end"], is_whole: bool = True) -> None:
        """What is shown is told first: a listener may end the run."""
        if self.shown is None and not _CALLBACKS.get():
            return
        event = self.event(kind, is_whole)
        if self.shown is not None:
            self.shown(event)
        send_event(event)


class _LineWriter:
    """A line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "end":
            write_line(str(event))
        elif event.kind == "advance" and event.seconds - self._last >= LINE_INTERVAL_SECONDS:
            self._last = event.seconds
            write_line(str(event))


class _ProgressBar:
    """A live bar; it goes when the phase ends, and the last line stays."""

    def __init__(self, phase: RunningPhase) -> None:
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

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self.live.start()
        elif event.kind == "advance":
            self.live.update(self._task, completed=event.done)
        else:
            self.live.stop()
            write_line(str(event))


@contextmanager
def phase(
    name: str, *, total: int | None = None, unit: str = "batches", show: bool | None = None
) -> Iterator[RunningPhase]:
    """A phase that is told while it runs. show: None or True shows it too, False does not."""
    check_interrupt()
    running = RunningPhase(name, total, unit)
    if show is not False and distributed.is_main():
        running.shown = _ProgressBar(running) if is_live() else _LineWriter()
    is_whole = False
    running.tell("start")
    try:
        yield running
        is_whole = True
    finally:
        running.tell("end", is_whole)


@contextmanager
def timed_phase(
    timings: dict[str, float], doing: str, *, show: bool | None = None, is_phase: bool = True
) -> Iterator[None]:
    """A phase whose seconds are added up under its name; is_phase=False for one that tells of itself."""
    start = time.perf_counter()
    with phase(doing, show=show) if is_phase else nullcontext():
        yield
    timings[doing] = timings.get(doing, 0.0) + time.perf_counter() - start


def is_live() -> bool:
    """Whether stderr is a terminal that can show a bar."""
    stream = sys.stderr
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def write_line(line: str) -> None:
    """A line on stderr, at once; a reader that has gone is no error of the work."""
    if not distributed.is_main():
        return
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def format_duration(seconds: float) -> str:
    """As a person says it: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _format_count(count: int, unit: str) -> str:
    singular = {"batches": "batch", "layers": "layer", "files": "file", "passes": "pass"}
    return f"{count} {singular.get(unit, unit) if count == 1 else unit}"
