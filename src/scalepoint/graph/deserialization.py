"""Build a captured graph from data. The code of the model is not needed, and no code from the file is run.

torch.fx writes names into Python code, so every name from the file is checked first. Operators and layers come from
fixed lists.
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
    LAYER_CLASSES,
    RNN_ARGUMENTS,
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
from scalepoint.support.interface_names import InterfaceNames

MAX_INPUT_ELEMENTS = 2**28  # only the shape of an example input is used, but torch allocates the tensor


def rebuild(data: GraphData, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """Build the graph that `data` describes over these tensors, in eval mode.

    Raises:
        StoreError: The data do not describe a valid graph.
    """
    try:
        with export_logs_silenced(), torch.no_grad():
            return _rebuild(data, tensors)
    except ScalepointError:
        raise
    except Exception as error:  # torch can raise any exception for an invalid graph
        first_line = str(error).partition("\n")[0]
        raise StoreError(f"the saved graph cannot be built: {type(error).__name__}: {first_line}") from error


def _rebuild(data: GraphData, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    model = CapturedGraph(nn.Module(), fx.Graph(), class_name=_check_name(data.name))
    modules = _build_modules(model, data)
    _fill_tensors(modules, data, tensors)
    for module_data in data.modules:
        if module_data.kind in ("operation", "computed"):
            _fill_operation(modules[module_data.path], module_data, modules)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for node in data.nodes:
        nodes[_check_name(node.name)] = _add_node(graph, node, nodes, modules)
    info = PyTreeInfo(
        [_check_name(name) for name in data.arguments], to_tree_spec(data.takes), to_tree_spec(data.gives)
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
        interface_names=InterfaceNames(tuple(data.input_names), tuple(data.output_names)),
    )
    _record_shapes(model, data.inputs)
    check_graph(model)
    constants = {path: tensors[path] for path, kind in data.tensors.items() if kind == "constant"}
    store_description(model, GraphDescription(data, constants))
    return model.eval()


def _check_name(text: str) -> str:
    if not text.isidentifier() or not is_valid_name(text):
        raise StoreError(f"the saved graph has an invalid name: {short_repr(text)}")
    return text


def _check_path(text: str) -> str:
    if text and not all(map(is_valid_name, text.split("."))):
        raise StoreError(f"the saved graph has an invalid path: {short_repr(text)}")
    return text


def _build_modules(root: nn.Module, data: GraphData) -> dict[str, nn.Module]:
    """Build all modules by path, parents first. Operations are empty until `_fill_operation`."""
    modules: dict[str, nn.Module] = {"": root}
    for module_data in data.modules:
        if module_data.path:
            parent, _, leaf = _check_path(module_data.path).rpartition(".")
            modules[module_data.path] = _build_layer(module_data)
            modules[parent].add_module(leaf, modules[module_data.path])
        for name in module_data.none:
            modules[module_data.path].register_parameter(_check_path(name), None)
    for path, original in data.shared.items():
        parent, _, leaf = _check_path(path).rpartition(".")
        if parent not in data.shared:
            modules[parent].add_module(leaf, modules[original])
        modules[path] = modules[original]
    return modules


def _build_layer(data: ModuleData) -> nn.Module:
    if data.kind == "":
        return nn.Module()
    if data.kind == "operation":
        return Operation("", torch.add, {})
    if data.kind == "computed":
        return ComputedTensor(())
    if data.kind not in LAYER_CLASSES:
        raise StoreError(
            f"{data.path} has the unknown class {short_repr(data.kind)}: it must be one of "
            f"{', '.join(sorted(LAYER_CLASSES))}"
        )
    layer_class = LAYER_CLASSES[data.kind]
    if issubclass(layer_class, nn.RNNBase):
        layer: nn.Module = layer_class(**{name: data.settings[name] for name in RNN_ARGUMENTS})
        layer._parameters.clear()
        return layer
    layer = layer_class.__new__(layer_class)  # __init__ would allocate and initialize weights
    nn.Module.__init__(layer)
    for name, value in data.settings.items():
        if hasattr(layer_class, name) or not name.isidentifier() or name in vars(layer):
            raise StoreError(f"{data.path}: {short_repr(name)} is not a setting of {data.kind}")
        vars(layer)[name] = decode(value, {}, {})
    return layer


def _fill_tensors(modules: Mapping[str, nn.Module], data: GraphData, tensors: Mapping[str, Tensor]) -> None:
    """Register parameters and buffers in their modules. Tied tensors are one tensor again."""
    built: dict[str, Tensor] = {}
    for path, kind in data.tensors.items():
        parent, _, name = _check_path(path).rpartition(".")
        owner, original = modules[parent], data.tied.get(path)
        if original is not None:
            value = built[original]
        elif path not in tensors:
            raise StoreError(f"the saved graph needs the tensor {short_repr(path)}, which was not saved")
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


def _fill_operation(module: nn.Module, data: ModuleData, modules: Mapping[str, nn.Module]) -> None:
    """Set function and arguments of an Operation or ComputedTensor, once all modules exist."""
    settings = data.settings
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
    graph: fx.Graph, data: NodeData, nodes: Mapping[str, fx.Node], modules: Mapping[str, nn.Module]
) -> fx.Node:
    args = tuple(decode(value, nodes, modules) for value in data.args)
    kwargs = {_check_name(name): decode(value, nodes, modules) for name, value in data.kwargs.items()}
    node = graph.create_node(data.op, _resolve_target(data, modules), args, kwargs, data.name)
    node.name = data.name
    sizes = None if data.sizes is None else tuple(data.sizes)
    set_info(node, kind=data.kind, path=data.place, sizes=sizes)
    if data.op not in ("placeholder", "output"):
        node.meta["nn_module_stack"] = {data.path: (data.path, "")}
    return node


def _resolve_target(data: NodeData, modules: Mapping[str, nn.Module]) -> Any:
    """Return the function, module path or attribute path that a node calls or reads."""
    if data.op == "call_function":
        return get_function(data.target)
    if data.op == "placeholder":
        return _check_name(data.target)
    if data.op == "call_module" and modules[_check_path(data.target)] is modules[""]:
        raise StoreError("the saved graph calls itself")
    if data.op not in ("call_module", "get_attr", "output"):
        raise StoreError(f"the saved graph has a node with the unknown op {short_repr(data.op)}")
    return _check_path(data.target)


def _record_shapes(model: fx.GraphModule, inputs: list[InputData]) -> None:
    """Store fake tensors on the nodes, as torch.export does, from a run without data.

    If an operator cannot run on sizes that may change, the sizes of the example are used.
    """
    try:
        _run_on_fake_tensors(model, inputs)
    except RuntimeError:
        _run_on_fake_tensors(model, [input_data.model_copy(update={"free": []}) for input_data in inputs])


def _run_on_fake_tensors(model: fx.GraphModule, inputs: list[InputData]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    values = [_make_fake_input(mode, input_data, f"input_{index}") for index, input_data in enumerate(inputs)]
    with mode, any_length_recurrent_shapes():
        _ShapeRecorder(model).run(*values, enable_io_processing=False)


def _make_fake_input(mode: FakeTensorMode, data: InputData, name: str) -> Any:
    if data.shape is None:
        return decode(data.value, {}, {})
    dtype = decode({"dtype": data.dtype}, {}, {})
    if min(data.shape, default=1) < 0 or prod(data.shape) > MAX_INPUT_ELEMENTS:
        raise StoreError(f"the saved graph has an example input of the invalid shape {data.shape}")
    return make_fake_input(mode, name, torch.empty(data.shape, dtype=dtype), set(data.free))


class _ShapeRecorder(fx.Interpreter):
    """Store the result of every node as its value."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value
