"""Why torch cannot write a model as ONNX: the operation, the line in the user's code, and the first cause."""

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
    """The error to raise for one that torch.onnx.export raised."""
    causes = list(_iterate_causes(error))
    said = "\n".join(_ANSI_COLOR.sub("", str(cause)) for cause in causes)
    first = f"{type(causes[-1]).__name__}: {_first_line(_ANSI_COLOR.sub('', str(causes[-1])))}"
    node = None if program is None else _find_node(said, program.graph)
    named = _OPERATION_PATTERN.search(said)
    operation = get_operation_name(node) or (named[1] if named else "")
    own = next((cause for cause in causes if isinstance(cause, ExportError)), None)
    if own is not None:  # a translation of ours has said why
        return ExportError(f"{operation}{'' if node is None else describe_location(node)}: {own}".removeprefix(": "))
    if not operation:
        return ExportError(f"torch cannot write this model as ONNX. {first}")
    return ExportError(
        f"torch cannot write {operation} as ONNX{'' if node is None else describe_location(node)}. "
        f"{first.rstrip('.')}. Write that line with other operations"
    )


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from, down to the first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _find_node(said: str, graph: fx.Graph) -> fx.Node | None:
    """The node that is spoken of; where torch has renamed it, the first of the same operation."""
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    names = [name for pattern in _NODE_PATTERNS for name in pattern.findall(said)]
    found = next((nodes[name] for name in names if name in nodes), None)
    named = _OPERATION_PATTERN.search(said)
    if found is None and named:
        own = named[1].partition(".")[2]  # decomposed, aten.special_x is prims.x
        found = next((node for node in nodes.values() if get_operation_name(node).endswith(own)), None)
    return found
