"""Builds the placement graph of the report: operations, their precision, and which of their inputs are codes.

Quantizers and operations that only move values (reshape, transpose) are not shown: edges skip them.
"""

from collections import Counter

from torch import fx

from scalepoint.graph.kinds import VALUE_PRESERVING
from scalepoint.graph.nodes import get_fake_tensor
from scalepoint.patterns import get_kind
from scalepoint.patterns.fused import Fused
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.coverage_rows import describe_spec
from scalepoint.quantize.operations import get_part_kind
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.record import coverage, record_of
from scalepoint.report import GraphNode

HIDDEN_KINDS = frozenset((*VALUE_PRESERVING, "identity", "dropout", "quant"))
MAX_PARTS = 4  # parts of a fused operation that its label lists


def build_placement_nodes(model: fx.GraphModule) -> tuple[GraphNode, ...]:
    """Return every operation on float tensors, in the order of execution."""
    precisions = {row.name: row.precision for row in coverage(model).operations}
    names = _unique_names(model)
    graph_nodes = []
    for node, name in names.items():
        sources = [_find_source(model, input_node) for input_node in node.all_input_nodes]
        visible = [(names[source], stub) for source, stub in sources if source in names]
        inputs = dict.fromkeys(source for source, _ in visible)
        codes = dict.fromkeys(source for source, stub in visible if stub is not None)
        dtypes = sorted({describe_spec(stub.spec) for _, stub in visible if stub is not None})
        input_precision = f"x {' / '.join(dtypes)}" if dtypes else "float"
        precision = "" if node.op == "placeholder" else precisions.get(name, input_precision)
        graph_nodes.append(GraphNode(name, _describe_kind(model, node), tuple(inputs), precision, tuple(codes)))
    return tuple(graph_nodes)


def _unique_names(model: fx.GraphModule) -> dict[fx.Node, str]:
    """Return the operations that are shown, each with a unique name."""
    layer_names = record_of(model).names
    counts: Counter[str] = Counter()
    names = {}
    for node in model.graph.nodes:
        if not _is_shown(node, layer_names):
            continue
        name = str(node.target) if node.op == "placeholder" else layer_names.get(node.name) or get_layer_name(node)
        counts[name] += 1
        names[node] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return names


def _is_shown(node: fx.Node, layer_names: dict[str, str]) -> bool:
    value = get_fake_tensor(node)
    if node.op == "placeholder":
        return value is not None
    if node.name in layer_names:
        return True
    is_float = value is not None and value.is_floating_point()
    return (
        node.op in ("call_module", "call_function", "call_method") and get_kind(node) not in HIDDEN_KINDS and is_float
    )


def _find_source(model: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, QuantStub | None]:
    """Return the operation that computes a tensor, skipping hidden ones, and the enabled quantizer on the way."""
    stub: QuantStub | None = None
    while get_kind(node) in HIDDEN_KINDS and node.op != "placeholder" and node.all_input_nodes:
        if node.op == "call_module" and isinstance(module := model.get_submodule(str(node.target)), QuantStub):
            stub = stub or (module if module.enabled else None)
        node = node.all_input_nodes[0]
    return node, stub


def _describe_kind(model: fx.GraphModule, node: fx.Node) -> str:
    """Return the kind of an operation; of a fused one such as "conv + batch_norm + relu"."""
    if node.op == "placeholder":
        return "input"
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, Fused):
        return get_kind(node)
    parts = module.parts.values()
    kinds = [part.kind if isinstance(part, QuantizedLayer) else get_part_kind(part) for part in parts]
    more = f" + {len(kinds) - MAX_PARTS} more" if len(kinds) > MAX_PARTS else ""
    return " + ".join(kinds[:MAX_PARTS]) + more
