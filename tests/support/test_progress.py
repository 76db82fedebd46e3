"""Progress of a long run, with and without a terminal."""

import io
import itertools
import re
import sys
import threading
import time

import pytest

from scalepoint.support import progress
from scalepoint.support.progress import RunningPhase, callback_registered, format_duration, phase


def hide_times(text: str) -> str:
    """Replace times, which depend on the load of the machine."""
    return re.sub(r"\d+(\.\d)? s\b", "T", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_phase(name: str, total: int | None, step: float) -> RunningPhase:
    ticks = itertools.count()
    return RunningPhase(name, total, "batches", clock=lambda: next(ticks) * step)


def test_without_a_terminal_a_phase_is_one_line(capsys):
    with phase("calibrating", total=3) as running:
        for _ in range(3):
            running.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert hide_times(err) == "calibrating: 3 batches in T\n"


def test_a_phase_without_a_count_shows_only_its_time(capsys):
    with phase("exporting"):
        pass
    assert hide_times(capsys.readouterr().err) == "exporting: T\n"


def test_the_unit_is_singular_for_one_batch(capsys):
    with phase("calibrating") as running:
        running.advance()
    assert hide_times(capsys.readouterr().err) == "calibrating: 1 batch in T\n"


def test_show_false_writes_nothing(capsys):
    with phase("calibrating", total=1, show=False) as running:
        running.advance()
    assert running.done == 1
    assert capsys.readouterr() == ("", "")


def test_a_phase_that_fails_shows_what_was_done(capsys):
    def work() -> None:
        with phase("calibrating", total=3) as running:
            running.advance()
            raise KeyError("x")

    with pytest.raises(KeyError):
        work()
    assert hide_times(capsys.readouterr().err) == "calibrating: stopped after 1 batch, T\n"


def test_a_long_phase_writes_a_line_when_one_is_due(capsys):
    running = make_phase("calibrating", 4, 4.0)  # each look at the clock is 4 s later
    writer = progress._LineWriter(running)
    for done in (1, 2, 3):
        running.done = done
        writer(running.make_event("advance"))
    assert capsys.readouterr().err == "calibrating: batch 2 of 4 (50 %), 12 s, about 12 s left\n"


def test_a_phase_with_one_long_step_writes_that_it_is_running(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.02)
    text, deadline = "", time.monotonic() + 20
    with phase("capturing"):
        while not text and time.monotonic() < deadline:
            time.sleep(0.01)
            text = capsys.readouterr().err
    assert hide_times(text).splitlines()[0] == "capturing: running for T"


def test_the_remaining_time_is_estimated_from_the_speed():
    running = make_phase("calibrating", 128, 10.0)
    running.advance(32)
    assert str(running.make_event("advance")) == "calibrating: batch 32 of 128 (25 %), 10 s, about 30 s left"


def test_without_a_total_no_share_is_shown():
    running = make_phase("evaluating", None, 10.0)
    running.advance(7)
    assert str(running.make_event("advance")) == "evaluating: 7 batches, 10 s"


def test_a_terminal_gets_a_bar_and_keeps_the_last_line(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with phase("calibrating", total=2) as running:
        running.advance(2)
    assert "\x1b[" in stream.getvalue()
    assert hide_times(stream.getvalue()).endswith("calibrating: 2 batches in T\n")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_terminal_without_colours_gets_lines(monkeypatch, name, value):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv(name, value)
    with phase("calibrating", total=2) as running:
        running.advance(2)
    assert hide_times(stream.getvalue()) == "calibrating: 2 batches in T\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_closed_stderr_does_not_stop_the_work(monkeypatch, stream):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with phase("calibrating") as running:
        running.advance()
    assert running.done == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119, "119 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_have_readable_units(seconds, text):
    assert format_duration(seconds) == text


def test_a_callback_gets_the_shown_events(capsys):
    events: list[progress.Event] = []
    with callback_registered(events.append), phase("calibrating", total=2) as running:
        running.advance()
        running.advance()
    assert [(event.kind, event.done, event.total) for event in events] == [
        ("start", 0, 2),
        ("advance", 1, 2),
        ("advance", 2, 2),
        ("end", 2, 2),
    ]
    assert hide_times(str(events[-1])) + "\n" == hide_times(capsys.readouterr().err)


def test_a_callback_gets_events_that_are_not_shown(capsys):
    events: list[progress.Event] = []
    with callback_registered(events.append), phase("calibrating", show=False):
        pass
    with phase("exporting", show=False):
        pass
    assert [event.kind for event in events] == ["start", "end"]
    assert capsys.readouterr().err == ""


def test_a_callback_gets_no_events_of_other_threads():
    events: list[progress.Event] = []

    def work() -> None:
        with phase("elsewhere", show=False):
            pass

    with callback_registered(events.append):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert events == []


def test_an_error_of_a_callback_ends_the_phase():
    def stop(event: progress.Event) -> None:
        if event.kind == "advance":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), callback_registered(stop), phase("calibrating", show=False) as running:
        running.advance()
