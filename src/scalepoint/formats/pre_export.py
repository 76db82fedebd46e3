"""Changes to a graph that every format needs before it is exported.

views             become reshapes
returned numbers  become tensors; other returned constants (text) become None and are not outputs of the file
"""

from typing import Any

import torch
from torch import fx

from scalepoint.graph import Operation

aten = torch.ops.aten
RESHAPES: dict[Any, Any] = {aten.view.default: aten.reshape.default}


def prepare_graph(model: fx.GraphModule) -> fx.GraphModule:
    """Apply these changes in place. Only the graph changes, not its generated code."""
    for node in model.graph.nodes:
        node.target = RESHAPES.get(node.target, node.target)
    for module in model.modules():
        if isinstance(module, Operation):
            module.function = RESHAPES.get(module.function, module.function)
    output = next(node for node in model.graph.nodes if node.op == "output")

    def as_tensor(value: Any) -> Any:
        if value is None or isinstance(value, fx.Node):
            return value
        if not isinstance(value, bool | int | float):
            return None
        with model.graph.inserting_before(output):
            return model.graph.call_function(torch.full, ((), value))

    output.args = fx.node.map_aggregate(output.args, as_tensor)
    return model
