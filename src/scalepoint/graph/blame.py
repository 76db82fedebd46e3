"""The line of the user's own code at which a capture failed, or which a warning is about."""

import sys
import traceback
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def user_line(error: Exception | None) -> str:
    """ " at file:line: code", or nothing when only torch and scalepoint were running."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def user_level() -> int:
    """The stacklevel by which the caller's warning names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    return level
