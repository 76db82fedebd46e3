"""The same program with the codes at every constant quantizer as further outputs: what verify compares, layer by layer.

XNNPACK's graph is the same but for these outputs, and so are its kernels.
"""

from pathlib import Path

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from scalepoint.formats.executorch.stored import XNNPACK_FACTORIES, XnnpackStoredStub
from scalepoint.formats.executorch.write import executorch_imported, write_program
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.stored_graph import build_stored_graph
from scalepoint.graph.program import leaves_of


class StubCodes(nn.Module):
    """The first half of a stub."""

    def __init__(self, stub: XnnpackStoredStub) -> None:
        super().__init__()
        self.stub = stub

    def forward(self, x: Tensor) -> Tensor:
        return self.stub.codes(x)


class StubValues(StubCodes):
    """The second half."""

    def forward(self, x: Tensor) -> Tensor:
        return self.stub.values(x)


def write_with_layer_outputs(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """To be run, not kept."""
    with executorch_imported():
        stored = build_stored_graph(model, XNNPACK_FACTORIES)
        leaves = leaves_of(stored, *request.inputs)
        codes = _split_stubs(stored)
        output = next(node for node in stored.graph.nodes if node.op == "output")
        given = [each for each in pytree.tree_leaves(output.args[0]) if isinstance(each, fx.Node)]
        output.args = ((*given, *codes.values()),)
        stored.graph.set_codegen(fx.graph.CodeGen())
        stored.recompile()
        names = [f"output_{place}" for place in range(len(given))]
        about = {"outputs": [*names, *codes], "quantizers": {name: name for name in codes}}
        write_program(stored, path, (leaves, {}), request.dynamic, about)


def _split_stubs(model: fx.GraphModule) -> dict[str, fx.Node]:
    """Every call of a stub as two; the codes by the names that a quantizer has in a file."""
    found: dict[str, fx.Node] = {}
    calls: dict[str, int] = {}
    for node in list(model.graph.nodes):
        stub = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(stub, XnnpackStoredStub):
            continue
        name = str(node.target)
        place = calls[name] = calls.get(name, -1) + 1
        first, second = f"{name}_codes_{place}", f"{name}_values_{place}"
        model.add_submodule(first, StubCodes(stub))
        model.add_submodule(second, StubValues(stub))
        with model.graph.inserting_before(node):
            codes = model.graph.call_module(first, node.args)
            values = model.graph.call_module(second, (codes,))
        codes.meta, values.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(values)
        model.graph.erase_node(node)
        found[f"{name}/QuantizeLinear" + (f"_{place}" if place else "")] = codes
    return found
