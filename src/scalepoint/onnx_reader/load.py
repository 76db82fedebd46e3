"""load_onnx: reads an ONNX file as a PyTorch module.

file --read_model--> onnx_ir model --FileReader--> Graph of plain values --ModuleBuilder--> OnnxModel
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from google.protobuf.message import EncodeError
from onnx import ModelProto, defs, inliner, shape_inference
from torch import Tensor

from scalepoint.errors import OnnxReadError, ScalepointError, UsageError, short_repr
from scalepoint.onnx_reader import (  # noqa: F401  # importing these modules fills the table of operators
    attention,
    control_flow,
    elementwise,
    layers,
    quantized,
    recurrent,
    reductions,
    resizing,
    shapes,
    signals,
)
from scalepoint.onnx_reader.control_flow import CONTROL_FLOW
from scalepoint.onnx_reader.example import TensorInfo
from scalepoint.onnx_reader.graph import Graph, ModuleBuilder
from scalepoint.onnx_reader.model import OnnxModel, make_model
from scalepoint.onnx_reader.names import identifier, module_path_of
from scalepoint.onnx_reader.operators import OPERATORS, RANDOM_OPERATORS, Node
from scalepoint.onnx_reader.quantized import QUANTIZED_OPERATORS
from scalepoint.onnx_reader.requantize import without_quantizers
from scalepoint.onnx_reader.values import known_from_tensor, tensor_from_array, torch_dtype
from scalepoint.support.files import compute_digest
from scalepoint.support.onnx_file import OnnxFile, read_model, tensor_array
from scalepoint.support.torch_state import gc_paused

MIN_OPSET = 7
HALF_TYPES = (torch.float16, torch.bfloat16)
_STANDARD_DOMAINS = ("", "ai.onnx")


def load_onnx(
    path: str | os.PathLike[str] | ModelProto,
    *,
    fixed_inputs: Mapping[str, Any] | None = None,
    requantize: bool = False,
    half_as_float: bool = True,
) -> OnnxModel:
    """Read an ONNX file as a PyTorch module.

    The module can be trained, saved, printed and captured like any other. Its layers are named after the weights or
    nodes of the file. Only numbers are read: no code of the file runs, and external data must be in the file's folder.

    Args:
        path: The file, or a model in memory.
        fixed_inputs: Values for inputs that become constants, by name, such as {"sr": 16000}. This also chooses the
            branches that depend on these inputs.
        requantize: Read a file that is already quantized: its weights are dequantized, and its quantizers of
            activations are left out. By default such a file is refused.
        half_as_float: Compute in float32 where the file computes in float16 or bfloat16.

    Returns:
        The model, in eval mode.

    Raises:
        StoreError: The file is damaged, too large, or refers to files outside of its folder.
        OnnxReadError: An operator, a type or a setting is not supported. The message names operator and node.

    Example:
        model = scalepoint.load_onnx("model.onnx")
        output = model(torch.randn(1, 3, 224, 224))
    """
    return build_model(
        path, fixed_inputs or {}, quantizers="remove" if requantize else "refuse", half_as_float=half_as_float
    )


@gc_paused()  # a file is many objects, and each collection would walk over all of them
def build_model(
    source: str | os.PathLike[str] | ModelProto,
    fixed_inputs: Mapping[str, Any],
    *,
    quantizers: Literal["refuse", "remove", "keep"],
    half_as_float: bool,
) -> OnnxModel:
    """Read a file as `load_onnx` does. With quantizers="keep" the model also computes what quantizers compute."""
    file = _inline_missing_operators(read_model(source, min_opset=MIN_OPSET, infer_shapes=False))
    reader = FileReader(file, half_as_float=half_as_float)
    graph = reader.read_graph(file.model.graph)
    is_requantized = False
    if quantizers != "keep" and (layer_count := count_quantized_layers(graph)):
        if quantizers == "refuse":
            name = "the model" if isinstance(source, ModelProto) else str(source)
            raise OnnxReadError(
                f"{name} is already quantized: {layer_count} nodes quantize, or compute with integers. Pass the "
                "float model, or requantize=True to dequantize its weights and quantize them again"
            )
        graph, is_requantized = without_quantizers(graph), True
    graph = reader.fix_inputs(graph, file.model.graph.inputs, fixed_inputs)
    inputs = reader.describe(file.model.graph.inputs, graph.inputs)
    input_names = _argument_names(graph.inputs)
    model = make_model(graph, input_names)
    model.inputs = dict(zip(input_names, inputs, strict=True))
    model.outputs = reader.describe(file.model.graph.outputs, graph.outputs)
    model.metadata = {str(key): str(value) for key, value in file.model.metadata_props.items()}
    if not isinstance(source, ModelProto):
        model.path = str(Path(source).resolve())
        model.digest = compute_digest(Path(source))[:16]
    model.fixed_inputs = {name: graph.constants[name] for name in fixed_inputs}
    model.is_requantized = is_requantized
    model.has_half_precision = reader.has_half_precision
    builder = ModuleBuilder(graph, model)
    del graph, file, reader  # the builder frees weights of which the layers have copies
    builder.build()
    return model.eval()


def _argument_names(names: Sequence[str]) -> list[str]:
    """Return the names of the arguments of `forward`. They are in lower case, like torch.export's names of inputs."""
    unique: list[str] = []
    for name in names:
        argument = identifier(name, "input").lower()
        candidate, number = argument, 1
        while candidate in unique or candidate == "self":
            candidate, number = f"{argument}_{number}", number + 1
        unique.append(candidate)
    return unique


def _inline_missing_operators(file: OnnxFile) -> OnnxFile:
    """Replace operators that the table does not have by the nodes of their functions in the specification of ONNX."""
    previous: list[tuple[str, str]] = []
    while (missing := _list_inlinable(file)) and missing != previous:  # a function may contain such operators, too
        try:
            model = inliner.inline_selected_functions(ir.to_proto(file.model), missing, inline_schema_functions=True)
        except (RuntimeError, shape_inference.InferenceError):  # e.g. it depends on types that are not declared
            break  # the reader refuses the operator by name
        except EncodeError as error:  # protobuf cannot serialize 2 GB or more
            names = ", ".join(_operator_name(*operator) for operator in missing)
            raise OnnxReadError(
                f"{names}: a model in memory with such operators is limited to 2 GB, because they are replaced by "
                "their functions in the specification of ONNX: save it with external data and pass the path of the file"
            ) from error
        file, previous = file._replace(model=ir.from_proto(model)), missing
    return file


def _list_inlinable(file: OnnxFile) -> list[tuple[str, str]]:
    """Return domain and name of the operators that the table does not have, but that are functions of ONNX."""
    known = {*OPERATORS, *CONTROL_FLOW, *RANDOM_OPERATORS, "Constant"}
    missing = set()
    for node in file.model.graph.all_nodes():
        name = _operator_name(node.domain, node.op_type)
        if name not in known or (name == "Attention" and not attention.is_plain_attention(node)):
            missing.add((node.domain, node.op_type))
    return sorted(operator for operator in missing if _has_function(*operator, file))


def _has_function(domain: str, name: str, file: OnnxFile) -> bool:
    opset = file.model.opset_imports.get(domain, file.opset)
    if not defs.has(name, opset, domain):
        return False
    schema = defs.get_schema(name, opset, domain)
    # Both attributes are missing in the type stubs of onnx 1.23.
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _operator_name(domain: str, name: str) -> str:
    """Return the name of a row in the table of operators."""
    return name if domain in _STANDARD_DOMAINS else f"{domain}::{name}"


def iterate_nodes(graph: Graph) -> Iterator[Node]:
    """Yield all nodes, also those in the bodies of If, Loop and Scan."""
    for node in graph.nodes:
        yield node
        for value in node.attributes.values():
            if isinstance(value, Graph):
                yield from iterate_nodes(value)


def count_quantized_layers(graph: Graph) -> int:
    """Return how many quantizers and quantized layers a file has; 0 for a float file."""
    return sum(node.operator in QUANTIZED_OPERATORS for node in iterate_nodes(graph))


def _axis(size: int | ir.SymbolicDim) -> int | str:
    """Return a size, or the name of an axis that may have any. Some exporters write -1 or 0 for such an axis."""
    if isinstance(size, int):
        return size if size > 0 else ""
    return str(size.value or "")


def _shortest(number: float) -> float:
    """Return the shortest number with the same float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(number)))


class FileReader:
    """Converts the graphs of a file to Graphs: plain values that do not depend on the onnx package."""

    def __init__(self, file: OnnxFile, *, half_as_float: bool) -> None:
        self.file = file
        self.half_as_float = half_as_float
        self.has_half_precision = False

    def read_graph(self, graph: ir.Graph) -> Graph:
        constants = {
            name: self._read_tensor(value.const_value)
            for name, value in graph.initializers.items()
            if value.const_value is not None
        }
        return Graph(
            name=graph.name or "",
            nodes=tuple(self._read_node(node, index) for index, node in enumerate(graph)),
            inputs=tuple(value.name or "" for value in graph.inputs if value.name not in constants),
            outputs=tuple(value.name or "" for value in graph.outputs),
            constants=constants,
            parameters=frozenset(constants),
        )

    def describe(self, values: Sequence[ir.Value], names: Sequence[str]) -> list[TensorInfo]:
        """Describe those inputs or outputs that have one of the names."""
        by_name = {value.name: value for value in values}
        return [self._describe(by_name[name]) for name in names]

    def _describe(self, value: ir.Value) -> TensorInfo:
        try:
            file_dtype = torch.float32 if value.dtype is None else torch_dtype(int(value.dtype))
        except OnnxReadError as error:
            node = value.producer() or next((use.node for use in value.uses()), None)
            where = "" if node is None else f" of node {short_repr(node.name or '')} ({node.op_type})"
            raise OnnxReadError(f"tensor {short_repr(value.name)}{where}: {error.args[0]}") from error
        shape = None
        if value.shape is not None:
            shape = tuple(map(_axis, value.shape))
        return TensorInfo(value.name or "", self._dtype(file_dtype), shape, file_dtype)

    def fix_inputs(self, graph: Graph, inputs: Sequence[ir.Value], values: Mapping[str, Any]) -> Graph:
        """Turn inputs into constants."""
        if unknown := sorted(set(values) - set(graph.inputs)):
            names = ", ".join(graph.inputs)
            raise UsageError(f"fixed_inputs: the file has no input {unknown[0]!r}; it has {names}")
        constants = dict(graph.constants)
        for info in self.describe(inputs, list(values)):
            try:
                tensor = torch.as_tensor(values[info.name]).to(info.dtype)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"fixed_inputs: {short_repr(values[info.name])} for {info.name!r}: {error}") from error
            declared_shape = info.shape or ()
            if tensor.numel() == 1 and all(size == 1 for size in declared_shape):
                tensor = tensor.reshape([1] * len(declared_shape))  # 16000 for an input of shape [1]
            constants[info.name] = tensor
        return replace(graph, inputs=tuple(name for name in graph.inputs if name not in values), constants=constants)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that the module has for a type of the file."""
        return torch.float32 if self.half_as_float and dtype in HALF_TYPES else dtype

    def _read_tensor(self, tensor: ir.TensorProtocol) -> Tensor:
        values = tensor_from_array(tensor_array(tensor, self.file.folder))
        self.has_half_precision |= values.dtype in HALF_TYPES
        return values.to(self._dtype(values.dtype))

    def _read_node(self, node: ir.Node, index: int) -> Node:
        operator = _operator_name(node.domain, node.op_type)
        outputs = tuple(value.name or "" for value in node.outputs)
        name = node.name or next(filter(None, outputs), f"{node.op_type}_{index}")
        inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
        opset = self.file.model.opset_imports.get(node.domain, self.file.opset)
        try:
            attributes = {key: self._read_attribute(attribute) for key, attribute in node.attributes.items()}
        except ScalepointError as error:
            raise type(error)(f"node {short_repr(name)} ({operator}): {error.args[0]}") from error
        if operator == "ConstantOfShape" and "value" in attributes:
            attributes["value"] = known_from_tensor(attributes["value"])
        while inputs and not inputs[-1]:  # an omitted input at the end
            inputs = inputs[:-1]
        attributes = self._cast_attributes(operator, attributes)
        return Node(operator, name, inputs, outputs, attributes, opset, module_path_of(node.metadata_props))

    def _cast_attributes(self, operator: str, attributes: dict[str, Any]) -> dict[str, Any]:
        """Replace float16 and bfloat16 in attributes that contain a data type."""
        halves = (int(ir.DataType.FLOAT16), int(ir.DataType.BFLOAT16))
        if self.half_as_float:
            for key in ("to", "dtype", "output_datatype"):
                if attributes.get(key) in halves and operator != "BitCast":
                    attributes[key] = int(ir.DataType.FLOAT)
        return attributes

    def _read_attribute(self, attribute: ir.Attr) -> Any:
        kind = attribute.type
        if kind == ir.AttributeType.GRAPH:
            return self.read_graph(attribute.as_graph())
        if kind == ir.AttributeType.TENSOR:
            return self._read_tensor(attribute.as_tensor())
        if kind in (ir.AttributeType.INT, ir.AttributeType.STRING):
            return attribute.value
        if kind == ir.AttributeType.FLOAT:
            return _shortest(attribute.as_float())
        if kind in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
            return list(attribute.value)
        if kind == ir.AttributeType.FLOATS:
            return [_shortest(number) for number in attribute.as_floats()]
        raise OnnxReadError(f"attribute {attribute.name} of type {kind.name} is not supported")
