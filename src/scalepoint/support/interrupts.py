"""Makes sure that Ctrl-C is not lost.

Python raises KeyboardInterrupt in whatever code is running. In a weakref callback or in __del__ Python prints the
exception and drops it, and the run goes on. So the handler also sets a flag, and `check_interrupt`, called at every
stage and for every batch, raises KeyboardInterrupt again.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = threading.Event()  # set by the signal handler, which runs in the main thread


def _handle(number: int, frame: FrameType | None) -> None:
    _INTERRUPTED.set()
    signal.default_int_handler(number, frame)


@contextmanager
def interrupts_remembered() -> Iterator[None]:
    """Inside this context, Ctrl-C also sets the flag, unless the user has installed another handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _INTERRUPTED.clear()


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and the exception was lost."""
    if _INTERRUPTED.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
