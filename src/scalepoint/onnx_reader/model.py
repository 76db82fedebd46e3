"""OnnxModel: an ONNX file as a module of torch."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.graph import Graph, GraphModule
from scalepoint.onnx_reader.names import identifier
from scalepoint.onnx_reader.values import as_tensor


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the file.

    Attributes:
        name: Its name in the file.
        dtype: Its type in the module.
        shape: Sizes; the name of the axis, or "" without one, for an axis that may have any size. None if unknown.
        file_dtype: Its type in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...] | None
    file_dtype: torch.dtype


class OnnxModel(GraphModule):
    """A model that was read from an ONNX file. `scalepoint.load_onnx` makes it.

    It is called with the file's inputs, in its order or by name, and returns a tensor or a tuple of tensors.

    Attributes:
        path: The file; "" for a model in memory.
        inputs: The inputs, by the name that `forward` gives them.
        outputs: The outputs.
        metadata: The metadata of the file.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.inputs, graph.outputs)
        self.path = ""
        self.inputs: Mapping[str, TensorInfo] = {}
        self.outputs: Sequence[TensorInfo] = ()
        self.metadata: Mapping[str, str] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        results = [_as_output(value) for value in self.run(values)]
        return results[0] if len(results) == 1 else tuple(results)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        names = list(self.inputs) or [identifier(name) for name in self.graph_inputs]
        values = dict(zip(names, args, strict=False)) | dict(kwargs)
        if len(args) > len(names) or set(values) != set(names):
            raise OnnxReadError(f"the model takes the inputs {', '.join(names)}; got {', '.join(map(str, values))}")
        return [self._as_input(name, values[name]) for name in names]

    def _as_input(self, name: str, value: Any) -> Any:
        """Half-precision inputs of a file that is computed in float32 may come as they are in the file."""
        info = self.inputs.get(name)
        if info is not None and info.dtype != info.file_dtype and isinstance(value, Tensor):
            return value.to(info.dtype)
        return value

    def __reduce__(self) -> Any:
        return make_model, (Graph("", (), self.graph_inputs, ()), tuple(self.inputs)), self.__dict__

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {_describe(info)}" for name, info in self.inputs.items())


def _as_output(value: Any) -> Any:
    return [_as_output(part) for part in value] if isinstance(value, list) else as_tensor(value)


def _describe(info: TensorInfo) -> str:
    sizes = "?" if info.shape is None else ", ".join(str(size) or "?" for size in info.shape)
    return f"{str(info.dtype).removeprefix('torch.')} [{sizes}]"


def make_model(graph: Graph, input_names: Sequence[str]) -> OnnxModel:
    """Make an empty model whose `forward` has these arguments: torch.export and dynamic_axes go by them."""

    def forward(self: OnnxModel, *args: Any, **kwargs: Any) -> Any:
        return OnnxModel.forward(self, *args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *input_names)]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    named_class = type("OnnxModel", (OnnxModel,), {"forward": forward, "__module__": OnnxModel.__module__})
    model: OnnxModel = named_class(graph)
    return model
