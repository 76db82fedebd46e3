"""The check after every stage: the graph is valid, its targets exist, and the owner of every parameter is in it."""

from torch import fx, nn

from scalepoint.errors import GraphError
from scalepoint.graph.operations import Operation


def check_graph(graph_module: fx.GraphModule) -> None:
    """Check that a captured graph is consistent. A failure is a defect of scalepoint, not of the model.

    Args:
        graph_module: The graph.

    Raises:
        GraphError: The first inconsistency.
    """
    try:
        graph_module.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the graph is not valid: {error}") from error
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    owners = {id(module) for module in modules.values()}
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            module = modules.get(node.target)
            if module is None:
                raise GraphError(f"{node.name} calls {node.target!r}, which does not exist")
            _check_references(node.name, module, owners)


def _check_references(name: str, module: nn.Module, owners: set[int]) -> None:
    if not isinstance(module, Operation):
        return
    for argument, reference in module.references().items():
        if id(reference.owner) not in owners:
            raise GraphError(f"{name}: the owner of {argument} ({reference.name}) is not part of the graph module")
