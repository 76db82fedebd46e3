"""The graph as it runs, for the report: its operations under their layers' names, and which tensors pass as codes.

Stubs are no operations, and what only moves values (reshapes, transposes) says nothing of precision: an edge leads
through both.
"""

from collections import Counter

from torch import fx

from scalepoint.graph.kinds import VALUE_PRESERVING
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.patterns import get_kind
from scalepoint.patterns.fused import Fused
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.coverage import describe
from scalepoint.quantize.parts import kind_of_part
from scalepoint.quantize.record import coverage, record_of
from scalepoint.quantize.stubs import QuantStub
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.report import GraphNode

HIDDEN_KINDS = frozenset((*VALUE_PRESERVING, "identity", "dropout", "quant"))
MAX_PARTS = 4


def build_placement_nodes(model: fx.GraphModule) -> tuple[GraphNode, ...]:
    """Every operation on float tensors, in the order of execution."""
    rows = {row.name: row.precision for row in coverage(model).operations}
    names = _unique_names(model)
    found = []
    for node, name in names.items():
        sources = [(source, stub) for each in node.all_input_nodes for source, stub in _find_source(model, each)]
        inputs = dict.fromkeys(names[source] for source, _ in sources if source in names)
        stubs = [stub for source, stub in sources if stub is not None and source in names]
        codes = dict.fromkeys(names[source] for source, stub in sources if stub is not None and source in names)
        low = f"x {' / '.join(sorted({describe(stub.spec) for stub in stubs}))}" if stubs else "float"
        precision = "" if node.op == "placeholder" else rows.get(name, low)
        found.append(GraphNode(name, _describe_kind(model, node), tuple(inputs), precision, tuple(codes)))
    return tuple(found)


def _unique_names(model: fx.GraphModule) -> dict[fx.Node, str]:
    """The operations that are shown, each under a name of its own."""
    layers = record_of(model).names
    seen: Counter[str] = Counter()
    names = {}
    for node in model.graph.nodes:
        if not _is_shown(node, layers):
            continue
        name = str(node.target) if node.op == "placeholder" else layers.get(node.name) or get_layer_name(node)
        seen[name] += 1
        names[node] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def _is_shown(node: fx.Node, layers: dict[str, str]) -> bool:
    if node.op == "placeholder" or node.name in layers:
        return node.op != "placeholder" or get_fake_tensor(node) is not None
    value = get_fake_tensor(node)
    is_float = value is not None and value.is_floating_point()
    return (
        node.op in ("call_module", "call_function", "call_method") and get_kind(node) not in HIDDEN_KINDS and is_float
    )


def _find_source(model: fx.GraphModule, node: fx.Node) -> list[tuple[fx.Node, QuantStub | None]]:
    """What gave a tensor, through all that only moves it, and the stub that it passed."""
    stub: QuantStub | None = None
    while get_kind(node) in HIDDEN_KINDS and node.op != "placeholder" and node.all_input_nodes:
        if node.op == "call_module" and isinstance(module := model.get_submodule(str(node.target)), QuantStub):
            stub = stub or (module if module.enabled else None)
        node = node.all_input_nodes[0]
    return [(node, stub)]


def _describe_kind(model: fx.GraphModule, node: fx.Node) -> str:
    """conv + batch_norm + relu"""
    if node.op == "placeholder":
        return "input"
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, Fused):
        return get_kind(node)
    parts = module.parts.values()
    kinds = [part.kind if isinstance(part, QuantizedWeighted) else kind_of_part(part) for part in parts]
    more = f" + {len(kinds) - MAX_PARTS} more" if len(kinds) > MAX_PARTS else ""
    return " + ".join(kinds[:MAX_PARTS]) + more
