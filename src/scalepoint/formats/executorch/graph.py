"""A graph in the shape that XNNPACK's partitioner takes whole.

a dequantize with several readers    one for each
a concat between Q/DQ                its inputs brought to the scale of its output, the one that XNNPACK joins by
a reshape to a free batch            to whatever is left (-1)
an average over the picture          to extents of one, and a reshape
a random leaky ReLU                  a leaky ReLU with the mean slope
what nobody reads                    gone
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
    """In place, before it is lowered."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "dequantize_per_" in str(node.target):
            _copy_for_each_reader(node)
        elif node.op == "call_function" and node.target is aten.mean.dim and _is_over_image_axes(node):
            _fix_pool_extents(node)
        elif node.op == "call_function" and node.target is aten.cat.default:
            _concat_at_one_scale(node)
        elif node.op == "call_function" and node.target is aten.rrelu.default:
            _use_mean_slope(node)
    _remove_unused(program)
    graph.lint()
    program.graph_module.recompile()
    return program


def _remove_unused(program: ExportedProgram) -> None:
    """Weights that codes took the place of, and batch norms that were folded: the file would hold some of them."""
    held = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    specs = program.graph_signature.input_specs
    for spec in [each for each in specs if each.kind in held and each.arg.name in nodes]:
        specs.remove(spec)
        program.graph.erase_node(nodes[spec.arg.name])
        program.state_dict.pop(spec.target, None)
        program.constants.pop(spec.target, None)


def _copy_for_each_reader(node: fx.Node) -> None:
    for reader in list(node.users)[1:]:
        reader.replace_input_with(node, _copy_quantizer(node))


def _concat_at_one_scale(cat: fx.Node) -> None:
    """XNNPACK takes a concat between Q/DQ for one of int8, and does not load it where a scale is not its output's. What
    is rounded before it is joined is what would be rounded after."""
    readers, joined = list(cat.users), cat.all_input_nodes
    is_between = readers and all(_is_static(each, "quantize") for each in readers) and _have_same_parameters(readers)
    if not is_between or not all(_is_static(each, "dequantize") for each in joined):
        return
    for given in joined:
        if given.args[1:] != readers[0].args[1:]:
            with cat.graph.inserting_before(cat):
                codes = cat.graph.node_copy(readers[0])
                codes.args = (given, *readers[0].args[1:])
                values = cat.graph.node_copy(given)
                values.args = (codes, *readers[0].args[1:])
            codes.meta["val"] = readers[0].meta["val"].new_empty(given.meta["val"].shape)
            cat.replace_input_with(given, values)


def _is_static(node: fx.Node, what: str) -> bool:
    """A quantizer with one constant scale."""
    return node.op == "call_function" and str(node.target) == f"quantized_decomposed.{what}_per_tensor.default"


def _have_same_parameters(quantizers: list[fx.Node]) -> bool:
    return len({each.args[1:] for each in quantizers}) == 1


def _copy_quantizer(node: fx.Node) -> fx.Node:
    """With all that finds the parameters of its rows: shared, they tie delegates into cycles that cannot be cut."""
    own: dict[fx.Node, fx.Node] = {}
    for each in _find_quantizer_chain(node):
        with node.graph.inserting_before(node):
            own[each] = node.graph.node_copy(each, lambda source: own.get(source, source))
    return own[node]


def _find_quantizer_chain(node: fx.Node) -> list[fx.Node]:
    """Its own quantize and choose_qparams, where there are such, in order, and itself."""
    found = [node]
    for each in found:
        found += [source for source in each.all_input_nodes if _is_per_row(source) and source not in found]
    order = list(node.graph.nodes)
    return sorted(found, key=order.index)


def _is_per_row(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_per_row(node.all_input_nodes[0])
    return any(name in str(node.target) for name in ("choose_qparams_per_token", ".quantize_per_token"))


def _is_over_image_axes(node: fx.Node) -> bool:
    value: Any = node.args[0]
    axes: Any = node.args[1]
    is_kept = len(node.args) > 2 and bool(node.args[2])
    rank = value.meta["val"].ndim
    return rank == 4 and not is_kept and sorted(axis % 4 for axis in axes) == [2, 3] and not node.kwargs.get("dtype")


def _fix_pool_extents(node: fx.Node) -> None:
    value, axes = node.args[:2]
    with node.graph.inserting_before(node):
        kept = node.graph.call_function(aten.mean.dim, (value, axes, True))
        flat = node.graph.call_function(aten.flatten.using_ints, (kept, 1))
    kept.meta = dict(node.meta) | {"val": node.meta["val"][:, :, None, None]}
    flat.meta = dict(node.meta)
    node.replace_all_uses_with(flat)
    node.graph.erase_node(node)


def _use_mean_slope(node: fx.Node) -> None:
    """torch decomposes RReLU to an operation without an out variant, which ExecuTorch cannot write."""
    settings: Any = (*node.args[:4], *(1 / 8, 1 / 3, False)[len(node.args) - 1 :])
    x, lower, upper, training = settings
    if not training:
        node.target, node.args = aten.leaky_relu.default, (x, (lower + upper) / 2)


def infer_batch(model: fx.GraphModule) -> PassResult:
    """Reshapes whose one free extent is what is left: a pass over the lowered graph."""
    changed = False
    for node in model.graph.nodes:
        if node.op != "call_function" or "view_copy" not in str(node.target):
            continue
        sizes: Any = node.args[1]
        free = [place for place, size in enumerate(sizes) if not isinstance(size, int)]
        if len(free) == 1 and -1 not in sizes:
            node.args = (node.args[0], [-1 if place == free[0] else size for place, size in enumerate(sizes)])
            changed = True
    model.graph.eliminate_dead_code()
    model.recompile()
    return PassResult(model, changed)
