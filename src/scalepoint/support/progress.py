"""Progress on stderr: a bar on a terminal, otherwise one line per phase, and one every ten seconds in a long phase.

    with phase("calibrating", total=128) as running:      calibrating: batch 40 of 128 (31 %), 21 s, about 46 s left
        running.advance()                                 calibrating: 128 batches in 67 s

Without a terminal, and with NO_COLOR or TERM=dumb, lines are written instead of a bar. Only rank 0 writes. The same
events go to the `callback=` of deploy. Phases are not nested: a bar cannot be shown inside another bar.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from scalepoint import distributed
from scalepoint.support.interrupts import check_interrupt

LINE_INTERVAL_SECONDS = 10.0  # between two lines of a long phase


@dataclass(frozen=True)
class Event:
    """One event of a run: a phase starts, advances or ends; a metric was measured; a file was written.

    Attributes:
        kind: What happened.
        name: Name of the phase or of the metric, path of the file.
        done: Units of work that are done in the phase.
        total: Units of work of the phase; None if unknown.
        unit: What is counted, such as "batches".
        seconds: Time since the phase started.
        value: Value of the metric.
        is_whole: False if the phase was stopped by an error.
    """

    kind: Literal["start", "advance", "end", "metric", "file"]
    name: str
    done: int = 0
    total: int | None = None
    unit: str = ""
    seconds: float = 0.0
    value: float | None = None
    is_whole: bool = True

    def __str__(self) -> str:
        if self.kind == "metric":
            return f"{self.name}: {self.value}"
        if self.kind == "file":
            return self.name
        return self._describe_end() if self.kind == "end" else self._describe_progress()

    def _describe_progress(self) -> str:
        """Describe what is done; with a total also the share, and the estimated time to the end."""
        if self.total is None:
            return f"{self.name}: {_format_count(self.done, self.unit)}, {format_duration(self.seconds)}"
        remaining = self.seconds / self.done * max(self.total - self.done, 0) if self.done else 0.0
        percent = 100 * min(self.done / max(self.total, 1), 1)
        share = f"{_singular(self.unit)} {self.done} of {self.total} ({percent:.0f} %)"
        return f"{self.name}: {share}, {format_duration(self.seconds)}, about {format_duration(remaining)} left"

    def _describe_end(self) -> str:
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
    """Inside this context, call `callback` with every event of this thread, on rank 0 only.

    An error that the callback raises ends the run.
    """
    token = None
    if callback is not None and distributed.is_main():
        token = _CALLBACKS.set((*_CALLBACKS.get(), callback))
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
    """A phase that is running. Call `advance` for each unit of work.

    `display` shows the events on the terminal; None if the phase is not shown.
    """

    def __init__(self, name: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._clock = clock
        self._start = clock()
        self.display: Callback | None = None

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def advance(self, count: int = 1) -> None:
        """Count finished units of work, and raise KeyboardInterrupt if Ctrl-C was pressed."""
        check_interrupt()
        self.done += count
        self.send("advance")

    def make_event(self, kind: Literal["start", "advance", "end"], is_whole: bool = True) -> Event:
        return Event(kind, self.name, self.done, self.total, self.unit, self.seconds, is_whole=is_whole)

    def send(self, kind: Literal["start", "advance", "end"], is_whole: bool = True) -> None:
        """Send an event to the display first, because a callback may raise an error that ends the run."""
        if self.display is None and not _CALLBACKS.get():
            return
        event = self.make_event(kind, is_whole)
        if self.display is not None:
            self.display(event)
        send_event(event)


class _LineWriter:
    """Writes a line every ten seconds, and one at the end.

    A thread writes the line while a single step of the phase takes longer than that.
    """

    def __init__(self, phase: "RunningPhase") -> None:
        self._phase = phase
        self._seconds_of_last_line = 0.0
        self._has_ended = threading.Event()

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            threading.Thread(target=self._write_while_waiting, name="progress", daemon=True).start()
        elif event.kind == "end":
            self._has_ended.set()
            write_line(str(event))
        else:
            self._write_if_due(str(event))

    def _write_while_waiting(self) -> None:
        while not self._has_ended.wait(LINE_INTERVAL_SECONDS):
            self._write_if_due(f"{self._phase.name}: running for {format_duration(self._phase.seconds)}")

    def _write_if_due(self, line: str) -> None:
        seconds = self._phase.seconds
        if seconds - self._seconds_of_last_line >= LINE_INTERVAL_SECONDS:
            self._seconds_of_last_line = seconds
            write_line(line)


class _ProgressBar:
    """Shows a progress bar. When the phase ends, the bar is replaced by a line."""

    def __init__(self, phase: RunningPhase) -> None:
        from rich.console import Console  # noqa: PLC0415  # slow to import
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        count_columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) if phase.total is not None else ()
        columns = (TextColumn("{task.description}", markup=False), *count_columns, TimeElapsedColumn())
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
    """Run a phase: send its events to the callbacks, and show it on stderr unless show=False."""
    check_interrupt()
    running = RunningPhase(name, total, unit)
    if show is not False and distributed.is_main():
        running.display = _ProgressBar(running) if is_live() else _LineWriter(running)
    is_whole = False
    running.send("start")
    try:
        yield running
        is_whole = True
    finally:
        running.send("end", is_whole)


@contextmanager
def timed_phase(
    timings: dict[str, float], name: str, *, show: bool | None = None, is_phase: bool = True
) -> Iterator[None]:
    """Run a phase and add its seconds to `timings`. is_phase=False only measures, for work with phases of its own."""
    start = time.perf_counter()
    with phase(name, show=show) if is_phase else nullcontext():
        yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


def is_live() -> bool:
    """Whether stderr is a terminal that can show a bar."""
    stream = sys.stderr
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def write_line(line: str) -> None:
    """Write a line to stderr on rank 0. A closed stderr is ignored."""
    if not distributed.is_main():
        return
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


def format_duration(seconds: float) -> str:
    """Format a time as 0.4 s, 12 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 120:
        return f"{rounded} s"
    if rounded < 7200:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def _singular(unit: str) -> str:
    return {"batches": "batch", "layers": "layer", "files": "file", "passes": "pass"}.get(unit, unit)


def _format_count(count: int, unit: str) -> str:
    return f"{count} {_singular(unit) if count == 1 else unit}"
