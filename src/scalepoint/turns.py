"""One at a time: threads of one process that capture, run or write models wait for each other.

torch traces a model by patching what all threads share (the call of every module, warnings, the random state), so two
at once would write into each other's graphs. The lock is one for the process; who holds it may take it again. Whoever
has the turn works under torch's own settings (ambient.py).
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from scalepoint.ambient import settled
from scalepoint.interrupts import remembering_interrupts

Called = TypeVar("Called", bound=Callable[..., Any])


class _Turn:
    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """In a process that was forked nobody is at work, whoever was when it was."""
        self.lock = threading.RLock()


_TURN = _Turn()


def in_turn(function: Called) -> Called:
    """The function, run by one thread at a time."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _TURN.lock, settled(), remembering_interrupts():
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # as it was


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage in circles: while a graph is built there is little, and to find that
    little it walks over all that torch has loaded, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
