"""Heartbeats: a rank writes a new value into the store every second, and is dead if its value no longer changes.

A timeout of messages could not tell a slow rank (rank 0 may evaluate for an hour) from a dead one.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from scalepoint.distributed.store import GroupStore
from scalepoint.errors import RankError, UsageError

TIMEOUT_VARIABLE = "SCALEPOINT_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 60.0  # seconds without a heartbeat; ten times as long before the first heartbeat of a rank
INTERVAL = 1.0  # seconds
IDLE = b"idle"  # instead of a heartbeat, between two public functions


def heartbeat_timeout() -> float:
    """Return the seconds after which a rank without a heartbeat counts as dead."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r}: must be a number of seconds above 0")
    return seconds


class Heartbeats:
    """Sends the heartbeats of this rank, and checks those of the others."""

    def __init__(self, store: GroupStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._last_check = 0.0
        self._last_values: dict[int, tuple[bytes, float]] = {}  # of each rank: the value, and when it changed

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Inside this context, a thread sends a heartbeat every second."""
        self._stopped, self._last_values = threading.Event(), {}
        self._send()
        self._thread = threading.Thread(target=self._send_until_stopped, daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._stop()

    def set_idle(self) -> None:
        """Send no more heartbeats: the user's program may take long until the next public function."""
        self._stop()
        self.store.set(_key(self.rank), IDLE)

    def check(self, ranks: Iterable[int], start_time: float) -> None:
        """Raise a RankError that names the first of these ranks whose heartbeat has stopped.

        Clocks of machines differ, so the time is measured here, from when the heartbeat last changed.

        Args:
            ranks: The ranks that this rank waits for.
            start_time: `time.monotonic()` when it began to wait.
        """
        now = time.monotonic()
        if now < self._last_check + INTERVAL / 4:
            return
        self._last_check = now
        for rank in ranks:
            if rank != self.rank:
                self._check_rank(rank, now, start_time)

    def _check_rank(self, rank: int, now: float, start_time: float) -> None:
        value = self.store.get(_key(rank)) if self.store.has(_key(rank)) else b""
        value = b"" if value == IDLE else value
        last_value, changed_time = self._last_values.get(rank, (None, now))
        timeout = heartbeat_timeout()
        if value != last_value:
            self._last_values[rank] = (value, now)
        elif now - changed_time > timeout and (value or now - start_time > 10 * timeout):
            reason = "sent no heartbeat" if value else "has not joined"
            raise RankError(
                f"rank {rank} of {self.size} {reason} for {now - changed_time:.0f} s: it has exited, or its machine is "
                f"unreachable. Start all ranks again with resume: finished work is kept. {TIMEOUT_VARIABLE} sets "
                "the seconds"
            )

    def _send(self) -> None:
        self.store.set(_key(self.rank), str(time.time()))

    def _send_until_stopped(self) -> None:
        with suppress(Exception):  # the store is gone: the main thread raises that error at its next exchange
            while not self._stopped.wait(INTERVAL):
                self._send()

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _key(rank: int) -> str:
    return f"beat/{rank}"
