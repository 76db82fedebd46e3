"""Turns errors of torch.onnx.export into an ExportError with the operation, the user's line, and the first cause."""

import re
from collections.abc import Iterator

from torch import fx
from torch.export import ExportedProgram

from scalepoint.errors import ExportError
from scalepoint.graph.user_traceback import describe_location, get_operation_name

_ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_NODE_PATTERNS = (re.compile(r"%(\w+) : "), re.compile(r"for node '(?:node_)?(\w+)'"))
_OPERATION_PATTERN = re.compile(r"target=torch\.ops\.(\w+\.\w+)")


def explain_export_error(error: Exception, program: ExportedProgram | None) -> ExportError:
    """Build the error to raise for an error that torch.onnx.export raised."""
    causes = list(_iterate_causes(error))
    messages = [_ANSI_COLOR.sub("", str(cause)) for cause in causes]
    text = "\n".join(messages)
    first_cause = f"{type(causes[-1]).__name__}: {_first_line(messages[-1])}"
    node = None if program is None else _find_node(text, program.graph)
    location = "" if node is None else describe_location(node)
    match = _OPERATION_PATTERN.search(text)
    operation = get_operation_name(node) or (match[1] if match else "")
    own_error = next((cause for cause in causes if isinstance(cause, ExportError)), None)
    if own_error is not None:  # raised by one of scalepoint's translations, which gives the reason
        return ExportError(f"{operation}{location}: {own_error}".removeprefix(": "))
    if not operation:
        return ExportError(f"torch cannot write this model as ONNX. {first_cause}")
    return ExportError(
        f"torch cannot write {operation} as ONNX{location}. {first_cause.rstrip('.')}. "
        "Write that line with other operations"
    )


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, down to the first one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _find_node(text: str, graph: fx.Graph) -> fx.Node | None:
    """Find the node that an error message names; if torch has renamed it, the first node with the same operation."""
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    names = [name for pattern in _NODE_PATTERNS for name in pattern.findall(text)]
    named_node = next((nodes[name] for name in names if name in nodes), None)
    match = _OPERATION_PATTERN.search(text)
    if named_node is not None or match is None:
        return named_node
    # The message has the decomposed operation: aten.special_x became prims.x.
    operation = match[1].partition(".")[2]
    return next((node for node in nodes.values() if get_operation_name(node).endswith(operation)), None)
