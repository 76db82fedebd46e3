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
    """A PyTorch module that computes what an ONNX file computes. `scalepoint.load_onnx` returns it.

    Call it with the inputs of the file, in their order or by name. It returns a tensor or a tuple of tensors.

    Attributes:
        path: The file; "" for a model in memory.
        inputs: The inputs, by the name of their argument of `forward`.
        outputs: The outputs.
        metadata: The metadata of the file.
        fixed_inputs: Values of inputs that became constants.
        has_half_precision: Whether the file computes in float16 or bfloat16.
        digest: Digest of the file.
        is_requantized: Whether quantizers of the file were left out. The results then differ from those of the file.
        interface_names: Names of inputs and outputs in the file, for files that are exported from this model.
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
        """Make random inputs of the shapes in the file.

        Args:
            shapes: Shapes of inputs, by name. By default a free axis has the size 1 if it is the first axis, 224 in an
                image, and 64 otherwise. Axes with the same name have the same size.
            seed: Seed of the random numbers.

        Returns:
            The inputs by name: normally distributed numbers; for integer inputs zeros and ones, or pixels.
        """
        return example_inputs(self.inputs, shapes or {}, seed)

    def free_axes(self) -> dict[str, dict[int, str]]:
        """Return the free axes of each input after the first axis: {input: {axis: name}}."""
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
        """Convert an input of a half-precision file to float32 if the model computes in float32."""
        info = self.inputs.get(name)
        if info is not None and info.dtype != info.file_dtype and isinstance(value, Tensor):
            return value.to(info.dtype)
        return value

    def __reduce__(self) -> Any:
        # The class that make_model creates cannot be found by its name: unpickling creates it again.
        return make_model, (Graph("", (), self.graph_inputs, ()), tuple(self.inputs)), self.__dict__

    def extra_repr(self) -> str:
        parts = [f"file: {Path(self.path).name}"] if self.path else []
        parts += [f"digest: {self.digest}"] if self.digest else []
        parts += [f"{name}: {_describe(info)}" for name, info in self.inputs.items()]
        parts += [f"{name}={value.tolist()}" for name, value in self.fixed_inputs.items()]
        parts += ["requantized"] if self.is_requantized else []
        return ", ".join(parts)


def _as_output(value: Any) -> Any:
    return [_as_output(part) for part in value] if isinstance(value, list) else as_tensor(value)


def _describe(info: TensorInfo) -> str:
    sizes = "?" if info.shape is None else ", ".join(str(size) or "?" for size in info.shape)
    return f"{str(info.dtype).removeprefix('torch.')} [{sizes}]"


def make_model(graph: Graph, input_names: Sequence[str]) -> OnnxModel:
    """Make an empty model whose `forward` has these arguments: torch.export and dynamic_axes need their names."""

    def forward(self: OnnxModel, *args: Any, **kwargs: Any) -> Any:
        return OnnxModel.forward(self, *args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *input_names)]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    named_class = type("OnnxModel", (OnnxModel,), {"forward": forward, "__module__": OnnxModel.__module__})
    model: OnnxModel = named_class(graph)
    return model
