"""The line of the user's own code at which a capture failed."""

import traceback
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def user_line(error: Exception) -> str:
    """ " at file:line: code", or nothing when only torch and scalepoint were running."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
