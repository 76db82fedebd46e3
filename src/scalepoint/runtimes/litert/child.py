"""A file in LiteRT, on the CPU; started by `scalepoint.runtimes`, of which nothing is imported."""

import json
import re
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

ABOUT = b"scalepoint"  # the metadata in which a file says what it is
WEIGHTS = {"CONV_2D": 1, "DEPTHWISE_CONV_2D": 1, "FULLY_CONNECTED": 1, "TRANSPOSE_CONV": 1}  # the place of the weight
INPUTS = {"TRANSPOSE_CONV": 2}
NAMES = {value: name for name, value in vars(schema.BuiltinOperator).items() if name.isupper()}
TYPES = {value: name.lower() for name, value in vars(schema.TensorType).items() if name.isupper()}
OUTSIDE = " (own kernel)"  # of LiteRT: what the delegate does not take
STORED = re.compile(r"\.stored_\w+(\.\w+)?$")
ONES = re.compile(r"average_pool(_\d+)?$")  # the constant of a pool that is written as a convolution by ones


class File:
    """options: threads (0: it chooses), delegate (False: LiteRT's own kernels)."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        with open(path, "rb") as file:
            data = file.read()
        own = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        self.interpreter = Interpreter(
            model_content=data,
            num_threads=options.get("threads") or None,
            experimental_op_resolver_type=OpResolverType.AUTO if options.get("delegate", True) else own,
        )
        self.model = schema.Model.GetRootAs(data, 0)
        self.interpreter.allocate_tensors()
        details = self.interpreter.get_input_details()
        self.inputs = [each["name"] for each in details]
        self.places = [each["index"] for each in details]
        self.signatures = [[int(size) for size in each["shape_signature"]] for each in details]
        self.shapes = [tuple(map(int, each["shape"])) for each in details]
        self.outputs = [each["index"] for each in self.interpreter.get_output_details()]
        said = self._said().get("outputs")
        self.names = said or [each["name"] for each in self.interpreter.get_output_details()]

    def run(self, feeds: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        given = [np.ascontiguousarray(feeds[name]) for name in self.inputs]
        self._resize([value.shape for value in given])
        for place, value in zip(self.places, given, strict=True):
            self.interpreter.set_tensor(place, value)
        self.interpreter.invoke()
        return [(name, self.interpreter.get_tensor(at)) for name, at in zip(self.names, self.outputs, strict=True)]

    def _resize(self, shapes: list[tuple[int, ...]]) -> None:
        """To the batch that is given, where the file's is free."""
        if shapes == self.shapes:
            return
        for name, place, signature, shape in zip(self.inputs, self.places, self.signatures, shapes, strict=True):
            fits = len(signature) == len(shape) and all(a in (-1, b) for a, b in zip(signature, shape, strict=True))
            if not fits:
                takes = [size if size >= 0 else "batch" for size in signature]
                raise SystemExit(f"{name}: the file takes {takes}, {list(shape)} was given")
            self.interpreter.resize_tensor_input(place, list(shape))
        self.interpreter.allocate_tensors()
        self.shapes = shapes

    def executed(self) -> list[dict[str, Any]]:
        """The operators of the file, weighted ones with the types that they multiply, and delegates that run them."""
        graph, details = self.model.Subgraphs(0), self.interpreter._get_ops_details()
        taken = _taken(details)
        nodes = []
        for place in range(graph.OperatorsLength()):
            operator = graph.Operators(place)
            code = self.model.OperatorCodes(operator.OpcodeIndex())
            told = _node(graph, operator, NAMES[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())])
            nodes.append(told if place in taken else {**told, "op": f"{told['op']}{OUTSIDE}"})
        return [*nodes, *(_told("XNNPACK", "XNNPACK") for each in details if each["op_name"] == "DELEGATE")]

    def _said(self) -> dict[str, Any]:
        for place in range(self.model.MetadataLength()):
            each = self.model.Metadata(place)
            if each.Name() == ABOUT:
                return dict(json.loads(bytes(self.model.Buffers(each.Buffer()).DataAsNumpy())))
        return {}


def _taken(details: list[dict[str, Any]]) -> set[int]:
    """The places of the operators that delegates run: all from their outputs back to their inputs."""
    makers = {int(out): place for place, each in enumerate(details) for out in each["outputs"] if _is_plain(each)}
    taken: set[int] = set()
    for delegate in details:
        given = set(map(int, delegate["inputs"]))
        pending = [] if _is_plain(delegate) else list(map(int, delegate["outputs"]))
        while pending:
            tensor = pending.pop()
            place = makers.get(tensor)
            if tensor not in given and place is not None and place not in taken:
                taken.add(place)
                pending += map(int, details[place]["inputs"])
    return taken


def _is_plain(details: dict[str, Any]) -> bool:
    return bool(details["op_name"] != "DELEGATE")


def _node(graph: Any, operator: Any, name: str) -> dict[str, Any]:
    if name not in WEIGHTS:
        first = graph.Tensors(operator.Inputs(0)) if operator.InputsLength() else None
        kind = "" if first is None or TYPES[first.Type()] != "int8" else " int8"
        return _told(name, f"{name}{kind}")
    weight = graph.Tensors(operator.Inputs(WEIGHTS[name]))
    given = TYPES[graph.Tensors(operator.Inputs(INPUTS.get(name, 0))).Type()]
    kind = TYPES[weight.Type()]
    low = kind in ("int8", "int4")
    how = kind if given == kind or not low else f"{given} x {kind}"
    path = STORED.sub("", weight.Name().decode()).removesuffix(".weight")
    if ONES.match(path):
        return _told(path, f"{name} int8 (average pool)")
    return _told(path, f"{name} {how}", low, "its weight is float")


def _told(name: str, op: str, low: bool | None = None, why: str = "") -> dict[str, Any]:
    return {"name": name, "op": op, "low": low, "why": why if low is False else ""}
