"""Find the line of the user's code at which a capture failed, or that a warning is about."""

import contextlib
import re
import sys
import traceback
from pathlib import Path

import torch
from torch import fx, nn

from scalepoint.compat.torch_names import HigherOrderOperator
from scalepoint.graph.nodes import get_info

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__, "<")
_INTERACTIVE_FILES = ("<ipython-input", "<stdin>")  # names of user code without a file


def is_user_file(filename: str) -> bool:
    """Whether a file is user code, not part of torch or scalepoint."""
    return filename.startswith(_INTERACTIVE_FILES) or not filename.startswith(_LIBRARY_FOLDERS)


def user_line(error: Exception | None) -> str:
    """Return " at file:line: code" of the innermost user frame; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    user_frames = [frame for frame in frames if is_user_file(frame.filename)]
    return f" at {user_frames[-1].filename}:{user_frames[-1].lineno}: {user_frames[-1].line}" if user_frames else ""


def has_passed_through(error: Exception | None, *functions: str) -> bool:
    """Whether a line of the traceback calls one of these functions."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    return any(f"{function}(" in (frame.line or "") for frame in frames for function in functions)


def has_local_of_type(error: Exception | None, kind: type) -> bool:
    """Whether a frame of the traceback has a value of this type in a local variable."""
    frame = error.__traceback__ if error else None
    while frame is not None:
        if any(isinstance(value, kind) for value in frame.tb_frame.f_locals.values()):
            return True
        frame = frame.tb_next
    return False


def user_module(error: Exception | None, model: nn.Module) -> str:
    """Return the path of the innermost submodule whose code raised an error; "" for the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    innermost, frame = "", error.__traceback__ if error else None
    while frame is not None:
        code, owner = frame.tb_frame.f_code, frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and is_user_file(code.co_filename):
            innermost = paths.get(id(owner), innermost)
        frame = frame.tb_next
    return innermost


def recorded_line(trace: str | None) -> str:
    """Return " at file:line: code" of the innermost user frame of a node's stack trace; "" if there is none."""
    frames = re.findall(r'File "(.+?)", line (\d+), in .*\n +(.+)', trace or "")
    user_frames = [frame for frame in frames if is_user_file(frame[0])]
    return " at {}:{}: {}".format(*user_frames[-1]) if user_frames else ""


def user_level() -> int:
    """Return the stacklevel with which a warning of the caller names the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def get_operation_name(node: fx.Node | None) -> str:
    """Return the name of an operation as the user wrote it, before decomposition; "" without a node."""
    if node is not None and isinstance(node.target, HigherOrderOperator):
        return f"torch.{node.target.__name__}"
    return "" if node is None else str(get_info(node).decomposed_from or node.target).rpartition(".")[0]


def describe_location(node: fx.Node) -> str:
    """Describe the user's line and the module that a node comes from, for the end of an error message."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    module = f" (in {stack[-1][0]})" if stack and stack[-1][0] else ""
    return f"{recorded_line(node.stack_trace)}{module}"
