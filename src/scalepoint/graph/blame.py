"""The line of the user's own code at which a capture failed, or which a warning is about."""

import contextlib
import re
import sys
import traceback
from pathlib import Path

import torch
from torch import fx, nn

from scalepoint.graph.nodes import info_of

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__, "<")
_TYPED = ("<ipython-input", "<stdin>")  # code without a file that is the user's all the same


def is_users(filename: str) -> bool:
    """Whether code of this file is the user's, not torch's or ours."""
    return filename.startswith(_TYPED) or not filename.startswith(_NOT_THE_USERS)


def user_line(error: Exception | None) -> str:
    """ " at file:line: code", or nothing when only torch and scalepoint were running."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    own = [frame for frame in frames if is_users(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def has_passed(error: Exception | None, *functions: str) -> bool:
    """Whether an error was raised below a line that calls one of these functions."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    return any(f"{each}(" in (frame.line or "") for frame in frames for each in functions)


def holds(error: Exception | None, kind: type) -> bool:
    """Whether a function that the error passed through had a value of this type in a local variable."""
    frame = error.__traceback__ if error else None
    while frame is not None:
        if any(isinstance(value, kind) for value in frame.tb_frame.f_locals.values()):
            return True
        frame = frame.tb_next
    return False


def user_module(error: Exception | None, model: nn.Module) -> str:
    """The path of the innermost submodule in whose own code an error was raised; nothing for the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, frame = "", error.__traceback__ if error else None
    while frame is not None:
        code, own = frame.tb_frame.f_code, frame.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and is_users(code.co_filename):
            found = paths.get(id(own), found)
        frame = frame.tb_next
    return found


def recorded_line(trace: str | None) -> str:
    """The same of the stack trace that a node of a graph carries."""
    found = re.findall(r'File "(.+?)", line (\d+), in .*\n +(.+)', trace or "")
    own = [frame for frame in found if is_users(frame[0])]
    return " at {}:{}: {}".format(*own[-1]) if own else ""


def user_level() -> int:
    """The stacklevel by which the caller's warning names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def operation_of(node: fx.Node | None) -> str:
    """Name of the operation as the user wrote it, before decomposition; "" without a node."""
    if node is not None and isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"torch.{node.target.__name__}"
    return "" if node is None else str(info_of(node).written or node.target).rpartition(".")[0]


def place_of(node: fx.Node) -> str:
    """The user's line and the module that a node comes from, for the end of an error."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    module = f" (in {stack[-1][0]})" if stack and stack[-1][0] else ""
    return f"{recorded_line(node.stack_trace)}{module}"
