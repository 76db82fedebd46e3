"""Rewrite an exported program so that XNNPACK's partitioner delegates all of it.

dequantize with several readers    one dequantize for each reader
concat between Q/DQ                inputs requantized to the scale of the output
reshape with a dynamic batch       reshape with -1 for the batch
mean over height and width         mean with keepdim=True, then flatten
rrelu                              leaky_relu with the mean slope
unused weights and buffers         removed
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.passes.infra.pass_base import PassResult

aten = torch.ops.aten


def prepare_program(program: ExportedProgram) -> ExportedProgram:
    """Rewrite the program in place, before it is lowered, and return it."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "dequantize_per_" in str(node.target):
            _copy_for_each_reader(node)
        elif node.op == "call_function" and node.target is aten.mean.dim and _is_over_image_axes(node):
            _keep_pooled_axes(node)
        elif node.op == "call_function" and node.target is aten.cat.default:
            _concat_at_one_scale(node)
        elif node.op == "call_function" and node.target is aten.rrelu.default:
            _use_mean_slope(node)
    _remove_unused(program)
    graph.lint()
    program.graph_module.recompile()
    return program


def _remove_unused(program: ExportedProgram) -> None:
    """Remove float weights that codes replace and folded batch norms: the file would contain some of them."""
    tensor_kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    unused = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    specs = program.graph_signature.input_specs
    for spec in list(specs):
        if spec.kind not in tensor_kinds or spec.arg.name not in unused:
            continue
        specs.remove(spec)
        program.graph.erase_node(unused[spec.arg.name])
        program.state_dict.pop(spec.target, None)
        program.constants.pop(spec.target, None)


def _copy_for_each_reader(node: fx.Node) -> None:
    for reader in list(node.users)[1:]:
        reader.replace_input_with(node, _copy_quantizer(node))


def _concat_at_one_scale(cat: fx.Node) -> None:
    """Requantize the inputs of a concat between Q/DQ to the scale of its output.

    XNNPACK runs such a concat in int8, and does not load the program if an input has another scale than the output.
    Rounding the inputs before the concat gives the same codes as rounding its output.
    """
    readers, inputs = list(cat.users), cat.all_input_nodes
    if not readers or not all(_is_static(reader, "quantize") for reader in readers):
        return
    if not _have_same_parameters(readers) or not all(_is_static(source, "dequantize") for source in inputs):
        return
    quantize, parameters = readers[0], readers[0].args[1:]
    for source in inputs:
        if source.args[1:] != parameters:
            with cat.graph.inserting_before(cat):
                codes = cat.graph.node_copy(quantize)
                codes.args = (source, *parameters)
                values = cat.graph.node_copy(source)
                values.args = (codes, *parameters)
            codes.meta["val"] = quantize.meta["val"].new_empty(source.meta["val"].shape)
            cat.replace_input_with(source, values)


def _is_static(node: fx.Node, operation: str) -> bool:
    """Whether a node is a per-tensor `operation` ("quantize" or "dequantize") with a constant scale."""
    return node.op == "call_function" and str(node.target) == f"quantized_decomposed.{operation}_per_tensor.default"


def _have_same_parameters(quantizers: list[fx.Node]) -> bool:
    return len({quantizer.args[1:] for quantizer in quantizers}) == 1


def _copy_quantizer(node: fx.Node) -> fx.Node:
    """Copy a dequantize together with the per-row quantize and choose_qparams before it.

    Shared by several delegates, these would tie the delegates into cycles that the partitioner cannot break.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for source in _find_quantizer_chain(node):
        with node.graph.inserting_before(node):
            copies[source] = node.graph.node_copy(source, lambda argument: copies.get(argument, argument))
    return copies[node]


def _find_quantizer_chain(node: fx.Node) -> list[fx.Node]:
    """Return a dequantize and the per-row quantize and choose_qparams that it depends on, in graph order."""
    chain = [node]
    for member in chain:  # grows while it is iterated
        chain += [source for source in member.all_input_nodes if _is_per_row(source) and source not in chain]
    order = list(node.graph.nodes)
    return sorted(chain, key=order.index)


def _is_per_row(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_per_row(node.all_input_nodes[0])
    return any(name in str(node.target) for name in ("choose_qparams_per_token", ".quantize_per_token"))


def _is_over_image_axes(node: fx.Node) -> bool:
    """Whether a mean is a global average pool: over height and width of a 4-d tensor, without keepdim."""
    value: Any = node.args[0]
    axes: Any = node.args[1]
    has_keepdim = len(node.args) > 2 and bool(node.args[2])
    if value.meta["val"].ndim != 4 or has_keepdim or node.kwargs.get("dtype"):
        return False
    return sorted(axis % 4 for axis in axes) == [2, 3]


def _keep_pooled_axes(node: fx.Node) -> None:
    """Replace a global average pool by one with keepdim=True and a flatten: XNNPACK supports only keepdim=True."""
    value, axes = node.args[:2]
    with node.graph.inserting_before(node):
        pooled = node.graph.call_function(aten.mean.dim, (value, axes, True))
        flat = node.graph.call_function(aten.flatten.using_ints, (pooled, 1))
    pooled.meta = dict(node.meta) | {"val": node.meta["val"][:, :, None, None]}
    flat.meta = dict(node.meta)
    node.replace_all_uses_with(flat)
    node.graph.erase_node(node)


def _use_mean_slope(node: fx.Node) -> None:
    """Replace rrelu by leaky_relu, which equals it in eval mode.

    torch decomposes rrelu to an operation without an out variant, which ExecuTorch cannot write.
    """
    defaults = (1 / 8, 1 / 3, False)  # lower, upper, training
    settings: list[Any] = list(node.args[1:4])
    lower, upper, training = settings + list(defaults[len(settings) :])
    if not training:
        node.target, node.args = aten.leaky_relu.default, (node.args[0], (lower + upper) / 2)


def infer_batch(model: fx.GraphModule) -> PassResult:
    """Write -1 for the one dynamic size of a reshape: a pass over the lowered graph."""
    changed = False
    for node in model.graph.nodes:
        if node.op != "call_function" or "view_copy" not in str(node.target):
            continue
        sizes: Any = node.args[1]
        dynamic_axes = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
        if len(dynamic_axes) == 1 and -1 not in sizes:
            new_sizes = list(sizes)
            new_sizes[dynamic_axes[0]] = -1
            node.args = (node.args[0], new_sizes)
            changed = True
    model.graph.eliminate_dead_code()
    model.recompile()
    return PassResult(model, changed)
