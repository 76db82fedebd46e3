"""Child program that runs a file in LiteRT on the CPU.

`child_loop.py` starts it, with `python -I`: the child loads only the runtime, so it imports nothing of scalepoint.
"""

import json
import re
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

METADATA_NAME = b"scalepoint"  # name of the metadata buffer that scalepoint writes
# Index of the weight and of the data among the operands of an operator with weights. The data is operand 0 by default.
WEIGHT_OPERANDS = {"CONV_2D": 1, "DEPTHWISE_CONV_2D": 1, "FULLY_CONNECTED": 1, "TRANSPOSE_CONV": 1}
DATA_OPERANDS = {"TRANSPOSE_CONV": 2}
OPERATOR_NAMES = {value: name for name, value in vars(schema.BuiltinOperator).items() if name.isupper()}
DTYPE_NAMES = {value: name.lower() for name, value in vars(schema.TensorType).items() if name.isupper()}
OWN_KERNEL_SUFFIX = " (own kernel)"  # marks operators that LiteRT runs itself because the delegate does not
STORED_WEIGHT_SUFFIX = re.compile(r"\.stored_\w+(\.\w+)?$")
AVERAGE_POOL_WEIGHT = re.compile(
    r"average_pool(_\d+)?$"
)  # average pools of up to 25 elements are written as convolutions with ones


class File:
    """A loaded file. Options: threads (0: LiteRT chooses), delegate (False: only LiteRT's own kernels, no XNNPACK)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        with open(path, "rb") as file:
            data = file.read()
        has_delegate = options.get("delegate", True)
        self.interpreter = Interpreter(
            model_content=data,
            num_threads=options.get("threads") or None,
            experimental_op_resolver_type=(
                OpResolverType.AUTO if has_delegate else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
            ),
        )
        self.model = schema.Model.GetRootAs(data, 0)
        self.interpreter.allocate_tensors()
        inputs, outputs = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        self.inputs = [details["name"] for details in inputs]
        self.input_indices = [details["index"] for details in inputs]
        self.signatures = [[int(size) for size in details["shape_signature"]] for details in inputs]  # -1: free
        self.shapes = [tuple(map(int, details["shape"])) for details in inputs]  # that memory is allocated for
        self.output_indices = [details["index"] for details in outputs]
        self.output_names = self._read_metadata().get("outputs") or [details["name"] for details in outputs]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        arrays = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        self._resize([array.shape for array in arrays])
        for index, array in zip(self.input_indices, arrays, strict=True):
            self.interpreter.set_tensor(index, array)
        self.interpreter.invoke()
        outputs = zip(self.output_names, self.output_indices, strict=True)
        return [(name, self.interpreter.get_tensor(index)) for name, index in outputs]

    def _resize(self, shapes: list[tuple[int, ...]]) -> None:
        """Allocate memory for inputs of these shapes."""
        if shapes == self.shapes:
            return
        for name, index, signature, shape in zip(self.inputs, self.input_indices, self.signatures, shapes, strict=True):
            fits = len(signature) == len(shape) and all(a in (-1, b) for a, b in zip(signature, shape, strict=True))
            if not fits:
                expected = [size if size >= 0 else "batch" for size in signature]
                raise SystemExit(f"input {name}: the file takes the shape {expected}, got {list(shape)}")
            self.interpreter.resize_tensor_input(index, list(shape))
        self.interpreter.allocate_tensors()
        self.shapes = shapes

    def executed(self) -> list[dict[str, Any]]:
        """Return the operators of the file, those with weights with their dtypes, and the delegates."""
        graph, details = self.model.Subgraphs(0), self.interpreter._get_ops_details()
        delegated = _find_delegated(details)
        nodes = []
        for index in range(graph.OperatorsLength()):
            operator = graph.Operators(index)
            code = self.model.OperatorCodes(operator.OpcodeIndex())
            # The older of the two fields is an int8: it holds 127 for all codes above.
            name = OPERATOR_NAMES[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
            node = _describe_operator(graph, operator, name)
            if index not in delegated:
                node["op"] += OWN_KERNEL_SUFFIX
            nodes.append(node)
        return nodes + [_describe_node("XNNPACK", "XNNPACK") for operation in details if _is_delegate(operation)]

    def _read_metadata(self) -> dict[str, Any]:
        for index in range(self.model.MetadataLength()):
            metadata = self.model.Metadata(index)
            if metadata.Name() == METADATA_NAME:
                return dict(json.loads(bytes(self.model.Buffers(metadata.Buffer()).DataAsNumpy())))
        return {}


def _find_delegated(details: list[dict[str, Any]]) -> set[int]:
    """Return the indices of the operators that delegates run: all between their outputs and their inputs."""
    producers = {
        int(output): index
        for index, operation in enumerate(details)
        for output in operation["outputs"]
        if not _is_delegate(operation)
    }
    delegated: set[int] = set()
    for delegate in filter(_is_delegate, details):
        inputs = set(map(int, delegate["inputs"]))
        pending = list(map(int, delegate["outputs"]))
        while pending:
            tensor = pending.pop()
            index = producers.get(tensor)
            if tensor not in inputs and index is not None and index not in delegated:
                delegated.add(index)
                pending += map(int, details[index]["inputs"])
    return delegated


def _is_delegate(operation: dict[str, Any]) -> bool:
    return bool(operation["op_name"] == "DELEGATE")


def _describe_operator(graph: Any, operator: Any, name: str) -> dict[str, Any]:
    """Describe an operator. Operators with weights get the name of their layer and their dtypes."""
    if name not in WEIGHT_OPERANDS:
        operand = graph.Tensors(operator.Inputs(0)) if operator.InputsLength() else None
        is_int8 = operand is not None and DTYPE_NAMES[operand.Type()] == "int8"
        return _describe_node(name, f"{name} int8" if is_int8 else name)
    weight = graph.Tensors(operator.Inputs(WEIGHT_OPERANDS[name]))
    layer = STORED_WEIGHT_SUFFIX.sub("", weight.Name().decode()).removesuffix(".weight")
    if AVERAGE_POOL_WEIGHT.match(layer):
        return _describe_node(layer, f"{name} int8 (average pool)")  # its ones are no weight of the model
    weight_dtype = DTYPE_NAMES[weight.Type()]
    data_dtype = DTYPE_NAMES[graph.Tensors(operator.Inputs(DATA_OPERANDS.get(name, 0))).Type()]
    is_low = weight_dtype in ("int8", "int4")
    dtypes = f"{data_dtype} x {weight_dtype}" if is_low and data_dtype != weight_dtype else weight_dtype
    return _describe_node(layer, f"{name} {dtypes}", is_low, "its weight is float")


def _describe_node(name: str, op: str, low: bool | None = None, why: str = "") -> dict[str, Any]:
    """Make the row of a node. `low`: whether its weight has low precision; None if it has no weights."""
    return {"name": name, "op": op, "low": low, "why": why if low is False else ""}
