"""From data to a captured graph: no code of the model is needed, and none is run.

Names go into the code that torch.fx writes, so every one is looked at first; operators and layers come from lists.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scalepoint.compat.recurrent_shapes import any_length_recurrent_shapes
from scalepoint.compat.torch_names import FakeTensorMode, PyTreeCodeGen, PyTreeInfo, make_fake_input
from scalepoint.errors import ScalepointError, StoreError, short_repr
from scalepoint.graph.captured_module import CapturedGraph, is_valid_name
from scalepoint.graph.check import check_graph
from scalepoint.graph.dynamic_axes import parse_axes
from scalepoint.graph.nodes import set_info
from scalepoint.graph.operations import ComputationStep, ComputedTensor, Operation
from scalepoint.graph.origin import set_origin
from scalepoint.graph.serialization import (
    CLASSES,
    RECURRENT,
    GraphData,
    GraphDescription,
    InputData,
    ModuleData,
    NodeData,
    store_description,
    to_tree_spec,
)
from scalepoint.graph.torch_export import export_logs_silenced
from scalepoint.graph.values import decode, get_function

MOST_ELEMENTS = 2**28  # of an example input: only its shape is used


def rebuild(data: GraphData, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """The graph that was described, over these tensors, in eval mode."""
    try:
        with export_logs_silenced(), torch.no_grad():
            return _rebuild(data, tensors)
    except ScalepointError:
        raise
    except Exception as error:  # torch may say anything of a graph that makes no sense
        first = str(error).partition("\n")[0]
        raise StoreError(f"the saved graph cannot be built: {type(error).__name__}: {first}") from error


def _rebuild(data: GraphData, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    model = CapturedGraph(nn.Module(), fx.Graph(), class_name=_check_name(data.name))
    modules = _build_modules(model, data)
    _fill_tensors(modules, data, tensors)
    for each in data.modules:
        if each.kind in ("operation", "computed"):
            _connect(modules[each.path], each, modules)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in data.nodes:
        nodes[_check_name(node.name)] = _add_node(graph, node, nodes, modules)
    info = PyTreeInfo(
        [_check_name(each) for each in data.arguments], to_tree_spec(data.takes), to_tree_spec(data.gives)
    )
    graph.set_codegen(PyTreeCodeGen(info))
    model.graph = graph
    set_origin(
        model,
        fixed_batch=data.fixed_batch,
        is_widened=data.is_widened,
        axes=parse_axes(data.axes),
        size_steps=data.steps,
        compared_sizes=data.tried,
    )
    _record_shapes(model, data.inputs)
    check_graph(model)
    constants = {path: tensors[path] for path, kind in data.tensors.items() if kind == "constant"}
    store_description(model, GraphDescription(data, constants))
    return model.eval()


def _check_name(text: str) -> str:
    if not text.isidentifier() or not is_valid_name(text):
        raise StoreError(f"the graph has a name that is none: {short_repr(text)}")
    return text


def _check_path(text: str) -> str:
    if text and not all(map(is_valid_name, text.split("."))):
        raise StoreError(f"the graph has a path that is none: {short_repr(text)}")
    return text


def _build_modules(root: nn.Module, data: GraphData) -> dict[str, nn.Module]:
    """All modules by path, parents first; operations are connected later."""
    modules: dict[str, nn.Module] = {"": root}
    for each in data.modules:
        if each.path:
            parent, _, leaf = _check_path(each.path).rpartition(".")
            modules[each.path] = _build_layer(each)
            modules[parent].add_module(leaf, modules[each.path])
        for name in each.none:
            modules[each.path].register_parameter(_check_path(name), None)
    for path, original in data.shared.items():
        parent, _, leaf = _check_path(path).rpartition(".")
        if parent not in data.shared:
            modules[parent].add_module(leaf, modules[original])
        modules[path] = modules[original]
    return modules


def _build_layer(each: ModuleData) -> nn.Module:
    if each.kind == "":
        return nn.Module()
    if each.kind == "operation":
        return Operation("", torch.add, {})
    if each.kind == "computed":
        return ComputedTensor(())
    if each.kind not in CLASSES:
        raise StoreError(f"{each.path} is a {short_repr(each.kind)}: {', '.join(sorted(CLASSES))} are known")
    kind = CLASSES[each.kind]
    if issubclass(kind, nn.RNNBase):
        layer: nn.Module = kind(**{name: each.settings[name] for name in RECURRENT})
        layer._parameters.clear()
        return layer
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in each.settings.items():
        if hasattr(kind, name) or not name.isidentifier() or name in vars(layer):
            raise StoreError(f"{each.path}: {short_repr(name)} is no setting of {each.kind}")
        vars(layer)[name] = decode(value, {}, {})
    return layer


def _fill_tensors(modules: Mapping[str, nn.Module], data: GraphData, tensors: Mapping[str, Tensor]) -> None:
    """Parameters and buffers where they were; what is one tensor stays one."""
    built: dict[str, Tensor] = {}
    for path, kind in data.tensors.items():
        parent, _, name = _check_path(path).rpartition(".")
        owner, original = modules[parent], data.tied.get(path)
        if original is not None:
            value = built[original]
        elif path not in tensors:
            raise StoreError(f"the graph needs {short_repr(path)}, which is not among the saved tensors")
        else:
            value = tensors[path].clone()
            is_float = value.is_floating_point() or value.is_complex()
            value = nn.Parameter(value, kind == "parameter" and is_float) if kind in ("parameter", "frozen") else value
        built[path] = value
        if isinstance(value, nn.Parameter):
            owner.register_parameter(name, value)
        else:
            owner._parameters.pop(name, None)
            owner.register_buffer(name, value, persistent=kind == "buffer")
    for module in modules.values():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _connect(module: nn.Module, each: ModuleData, modules: Mapping[str, nn.Module]) -> None:
    settings = each.settings
    if isinstance(module, Operation):
        module.kind, module.function = str(settings["kind"]), get_function(settings["function"])
        module.arguments = {name: decode(value, {}, modules) for name, value in settings["arguments"].items()}
        module.in_train = {name: decode(value, {}, modules) for name, value in settings["in_train"].items()}
        module.positional = int(settings["positional"])
    elif isinstance(module, ComputedTensor):
        for step in settings["steps"]:
            args = [decode(value, {}, modules) for value in step["args"]]
            kwargs = {_check_name(name): decode(value, {}, modules) for name, value in step["kwargs"].items()}
            module.steps.append(ComputationStep(get_function(step["function"]), args, kwargs))


def _add_node(
    graph: fx.Graph, each: NodeData, nodes: Mapping[str, fx.Node], modules: Mapping[str, nn.Module]
) -> fx.Node:
    args = tuple(decode(value, nodes, modules) for value in each.args)
    kwargs = {_check_name(name): decode(value, nodes, modules) for name, value in each.kwargs.items()}
    node = graph.create_node(each.op, _resolve_target(each, modules), args, kwargs, each.name)
    node.name = each.name
    sizes = None if each.sizes is None else tuple(each.sizes)
    set_info(node, kind=each.kind, path=each.place, sizes=sizes)
    if each.op not in ("placeholder", "output"):
        node.meta["nn_module_stack"] = {each.path: (each.path, "")}
    return node


def _resolve_target(each: NodeData, modules: Mapping[str, nn.Module]) -> Any:
    """What a node calls or reads."""
    if each.op == "call_function":
        return get_function(each.target)
    if each.op == "placeholder":
        return _check_name(each.target)
    if each.op == "call_module" and modules[_check_path(each.target)] is modules[""]:
        raise StoreError("the graph calls itself")
    if each.op not in ("call_module", "get_attr", "output"):
        raise StoreError(f"the graph has a node of {short_repr(each.op)}")
    return _check_path(each.target)


def _record_shapes(model: fx.GraphModule, inputs: list[InputData]) -> None:
    """What torch.export left as values: shapes and types, from one run without data. Where an operator cannot run on
    sizes that may change, they are those of the example."""
    try:
        _run_on_fake_tensors(model, inputs)
    except RuntimeError:
        _run_on_fake_tensors(model, [each.model_copy(update={"free": []}) for each in inputs])


def _run_on_fake_tensors(model: fx.GraphModule, inputs: list[InputData]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    values = [_make_example(mode, each, f"input_{index}") for index, each in enumerate(inputs)]
    with mode, any_length_recurrent_shapes():
        _ShapeRecorder(model).run(*values, enable_io_processing=False)


def _make_example(mode: FakeTensorMode, each: InputData, name: str) -> Any:
    if each.shape is None:
        return decode(each.value, {}, {})
    dtype = decode({"dtype": each.dtype}, {}, {})
    if min(each.shape, default=1) < 0 or prod(each.shape) > MOST_ELEMENTS:
        raise StoreError(f"the graph has an example input of shape {each.shape}")
    return make_fake_input(mode, name, torch.empty(each.shape, dtype=dtype), set(each.free))


class _ShapeRecorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value
