"""What a long run says of itself, with and without a terminal."""

import io
import itertools
import re
import sys
import threading

import pytest

from scalepoint.support import progress
from scalepoint.support.progress import RunningPhase, callback_registered, format_duration, phase


def untimed(text: str) -> str:
    """However busy the machine is."""
    return re.sub(r"\d+(\.\d)? s\b", "T", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clocked(name: str, total: int | None, step: float) -> RunningPhase:
    ticks = itertools.count()
    return RunningPhase(name, total, "batches", clock=lambda: next(ticks) * step)


def test_without_a_terminal_a_phase_is_one_plain_line(capsys):
    with phase("calibrating", total=3) as running:
        for _ in range(3):
            running.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert untimed(err) == "calibrating: 3 batches in T\n"


def test_a_phase_that_counts_nothing_tells_its_time_alone(capsys):
    with phase("exporting"):
        pass
    assert untimed(capsys.readouterr().err) == "exporting: T\n"


def test_one_batch_is_not_batches(capsys):
    with phase("calibrating") as running:
        running.advance()
    assert untimed(capsys.readouterr().err) == "calibrating: 1 batch in T\n"


def test_show_false_says_nothing(capsys):
    with phase("calibrating", total=1, show=False) as running:
        running.advance()
    assert running.done == 1
    assert capsys.readouterr() == ("", "")


def test_a_phase_that_fails_says_how_far_it_came(capsys):
    def work() -> None:
        with phase("calibrating", total=3) as running:
            running.advance()
            raise KeyError("x")

    with pytest.raises(KeyError):
        work()
    assert untimed(capsys.readouterr().err) == "calibrating: stopped after 1 batch, T\n"


def test_long_work_says_now_and_then_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    with phase("calibrating", total=4) as running:
        running.advance()
        running.advance(3)
    first, second, last = untimed(capsys.readouterr().err).splitlines()
    assert first == "calibrating: 1/4 batches (25 %), T, about T left"
    assert second.startswith("calibrating: 4/4 batches (100 %)")
    assert last == "calibrating: 4 batches in T"


def test_the_time_left_follows_from_the_pace():
    running = clocked("calibrating", 128, 10.0)
    running.advance(32)
    assert str(running.make_event("advance")) == "calibrating: 32/128 batches (25 %), 10 s, about 30 s left"


def test_work_of_unknown_length_counts_without_a_share():
    running = clocked("evaluating", None, 10.0)
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
    assert untimed(stream.getvalue()).endswith("calibrating: 2 batches in T\n")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_terminal_that_wants_no_colour_gets_plain_lines(monkeypatch, name, value):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv(name, value)
    with phase("calibrating", total=2) as running:
        running.advance(2)
    assert untimed(stream.getvalue()) == "calibrating: 2 batches in T\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_stderr_that_is_gone_stops_no_work(monkeypatch, stream):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with phase("calibrating") as running:
        running.advance()
    assert running.done == 1


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119, "119 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_duration_reads_as_a_person_says_it(seconds, said):
    assert format_duration(seconds) == said


def test_a_listener_hears_what_the_screen_shows(capsys):
    heard: list[progress.Event] = []
    with callback_registered(heard.append), phase("calibrating", total=2) as running:
        running.advance()
        running.advance()
    assert [(each.kind, each.done, each.total) for each in heard] == [
        ("start", 0, 2),
        ("advance", 1, 2),
        ("advance", 2, 2),
        ("end", 2, 2),
    ]
    assert untimed(str(heard[-1])) + "\n" == untimed(capsys.readouterr().err)


def test_a_listener_hears_also_what_is_not_shown(capsys):
    heard: list[progress.Event] = []
    with callback_registered(heard.append), phase("calibrating", show=False):
        pass
    with phase("exporting", show=False):
        pass
    assert [each.kind for each in heard] == ["start", "end"]
    assert capsys.readouterr().err == ""


def test_listeners_of_other_threads_hear_nothing():
    heard: list[progress.Event] = []

    def work() -> None:
        with phase("elsewhere", show=False):
            pass

    with callback_registered(heard.append):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert heard == []


def test_what_a_listener_raises_ends_the_phase():
    def stop(event: progress.Event) -> None:
        if event.kind == "advance":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), callback_registered(stop), phase("calibrating", show=False) as running:
        running.advance()
