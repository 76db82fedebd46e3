"""Write a program that also returns the codes of every static quantizer, so that verify can compare layer by layer.

Apart from these outputs XNNPACK gets the same graph, so it runs the same kernels.
"""

from collections import Counter
from pathlib import Path

from torch import Tensor, fx, nn

from scalepoint.compat.fast_export import flatten_inputs
from scalepoint.compat.torch_names import pytree
from scalepoint.formats.executorch.stored import XNNPACK_FACTORIES, XnnpackStoredStub
from scalepoint.formats.executorch.write import executorch_imported, write_program
from scalepoint.formats.format import ExportRequest
from scalepoint.formats.stored_graph import build_stored_graph


class StubHalf(nn.Module):
    """One of the two halves of a stub."""

    def __init__(self, stub: XnnpackStoredStub) -> None:
        super().__init__()
        self.stub = stub


class StubCodes(StubHalf):
    """The first half of a stub: values to codes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.stub.codes(x)


class StubValues(StubHalf):
    """The second half of a stub: codes to values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.stub.values(x)


def write_with_layer_outputs(model: fx.GraphModule, path: Path, request: ExportRequest) -> None:
    """Write the temporary program that verify runs."""
    with executorch_imported():
        stored = build_stored_graph(model, XNNPACK_FACTORIES)
        leaves = flatten_inputs(stored, *request.inputs)
        codes = _split_stubs(stored)
        output = next(node for node in stored.graph.nodes if node.op == "output")
        model_outputs = [value for value in pytree.tree_leaves(output.args[0]) if isinstance(value, fx.Node)]
        output.args = ((*model_outputs, *codes.values()),)
        # The code generator of the captured model would pack the outputs into the structure that the model returns,
        # which has no place for the codes. The plain one returns the tuple as it is.
        stored.graph.set_codegen(fx.graph.CodeGen())
        stored.recompile()
        names = [f"output_{index}" for index in range(len(model_outputs))]
        description = {"outputs": [*names, *codes], "quantizers": {name: name for name in codes}}
        write_program(stored, path, (leaves, {}), request.dynamic, description)


def _split_stubs(model: fx.GraphModule) -> dict[str, fx.Node]:
    """Split every call of a stub into two nodes; return the nodes with the codes by quantizer name.

    The names are those of quantizers in ONNX files: NAME/QuantizeLinear, with _1, _2, ... for further calls.
    """
    codes_by_name: dict[str, fx.Node] = {}
    call_counts: Counter[str] = Counter()
    for node in list(model.graph.nodes):
        stub = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(stub, XnnpackStoredStub):
            continue
        name = str(node.target)
        index = call_counts[name]
        call_counts[name] += 1
        codes_path, values_path = f"{name}_codes_{index}", f"{name}_values_{index}"
        model.add_submodule(codes_path, StubCodes(stub))
        model.add_submodule(values_path, StubValues(stub))
        with model.graph.inserting_before(node):
            codes = model.graph.call_module(codes_path, node.args)
            values = model.graph.call_module(values_path, (codes,))
        codes.meta, values.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(values)
        model.graph.erase_node(node)
        codes_by_name[f"{name}/QuantizeLinear" + (f"_{index}" if index else "")] = codes
    return codes_by_name
