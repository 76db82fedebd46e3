"""OnnxModel: an ONNX file as a module of torch."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from scalepoint.errors import OnnxReadError
from scalepoint.onnx_reader.example import TensorInfo, example_inputs
from scalepoint.onnx_reader.graph import Graph, GraphModule
from scalepoint.onnx_reader.names import identifier
from scalepoint.onnx_reader.values import as_tensor
from scalepoint.support.interface_names import InterfaceNames


class OnnxModel(GraphModule):
    """A model that was read from an ONNX file. `scalepoint.load_onnx` makes it.

    It is called with the file's inputs, in its order or by name, and returns a tensor or a tuple of tensors.

    Attributes:
        path: The file; "" for a model in memory.
        inputs: The inputs, by the name that `forward` gives them.
        outputs: The outputs.
        metadata: The metadata of the file.
        fixed_inputs: Values of inputs that became constants.
        has_half_precision: Whether the file computes in float16 or bfloat16.
        digest: Digest of the file.
        is_requantized: Whether quantizers were left out, so that the file computes something else.
        interface_names: Names in the file; a file that is made of this model gets them too.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.inputs, graph.outputs)
        self.path = ""
        self.inputs: Mapping[str, TensorInfo] = {}
        self.outputs: Sequence[TensorInfo] = ()
        self.metadata: Mapping[str, str] = {}
        self.fixed_inputs: Mapping[str, Tensor] = {}
        self.is_requantized = False
        self.has_half_precision = False
        self.digest = ""

    @property
    def interface_names(self) -> InterfaceNames:
        return InterfaceNames(
            tuple(info.name for info in self.inputs.values()), tuple(info.name for info in self.outputs)
        )

    def make_example(self, shapes: Mapping[str, Sequence[int]] | None = None, seed: int = 0) -> dict[str, Tensor]:
        """Make inputs of the shapes in the file: random numbers, and zeros and ones for whole numbers.

        Args:
            shapes: Shapes of inputs, by name, for those with free axes. By default a free axis has the size of
                `DEFAULT_SIZES`; axes with the same name have the same size.
            seed: Seed of the random numbers.
        """
        return example_inputs(self.inputs, shapes or {}, seed)

    def free_axes(self) -> dict[str, dict[int, str]]:
        """Return the axes after the first that may have any size in the file, with their names, by input."""
        axes: dict[str, dict[int, str]] = {}
        for name, info in self.inputs.items():
            for axis, size in enumerate(info.shape or ()):
                if axis and not isinstance(size, int):
                    axes.setdefault(name, {})[axis] = identifier(size, f"{name}_{axis}")
        return axes

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
        source = [f"file: {Path(self.path).name}"] if self.path else []
        fixed = [f"{name}={value.tolist()}" for name, value in self.fixed_inputs.items()]
        requantized = ["requantized"] if self.is_requantized else []
        inputs = [f"{name}: {_describe(info)}" for name, info in self.inputs.items()]
        return ", ".join([*source, *([f"digest: {self.digest}"] if self.digest else []), *inputs, *fixed, *requantized])


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
