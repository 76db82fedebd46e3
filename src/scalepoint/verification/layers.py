"""verify_layers: compares every layer of a file in its runtime with the simulation, each with the simulation's inputs.

In an end-to-end comparison a rounding difference in one quantizer changes the inputs of all later ones. Here the input
of every DequantizeLinear is replaced by the codes of the simulation. Then the output of every QuantizeLinear is
compared, and the float output of every layer with weights that no QuantizeLinear follows. A difference in one layer
does not reach the next layer. The runtime's optimisations stay on, so the kernels are those of the deployed graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx

from scalepoint.errors import VerificationError
from scalepoint.formats.onnx.channels_first import to_file_layout
from scalepoint.graph.capture import as_inputs
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import count_low_precision, exchange_files, run_task
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.untrusted import LARGEST_PROTOBUF, check_file
from scalepoint.verification.simulation import build_feeds, simulate, to_file_array

WEIGHTED_OPERATORS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
FUSED_OPERATORS = frozenset(("Relu", "Clip"))
FORCED_INPUT_SUFFIX = "/given"  # name of a new input = name of the tensor that it replaces + this suffix
MIN_EQUAL_SHARE = 0.999
MAX_CODE_DIFFERENCE = 1
FLOAT_STEP = 2.0**-23  # relative rounding step of float32
MAX_FLOAT_STEPS = 64.0

Calls = dict[str, list[np.ndarray]]  # one array per call of a module


@dataclass(frozen=True)
class LayerAgreement:
    """Agreement of one layer: codes compared by value, floats in float32 steps of the layer's largest output."""

    where: str  # name of the node
    is_float: bool
    equal: float  # share of equal codes; for a float output, share of values within MAX_FLOAT_STEPS
    largest: float  # largest difference, in codes or float32 steps

    @property
    def holds(self) -> bool:
        """Whether the layer agrees with the simulation."""
        max_difference = MAX_FLOAT_STEPS if self.is_float else MAX_CODE_DIFFERENCE
        return self.largest <= max_difference and self.equal >= MIN_EQUAL_SHARE

    def __str__(self) -> str:
        unit = "float32 steps" if self.is_float else "codes"
        return f"{self.where}: {self.equal:.4%} equal, at most {self.largest:g} {unit} apart"


@dataclass(frozen=True)
class LayerVerification:
    """Agreement of all layers of a file, and how many layers with weights ran in low precision."""

    layers: tuple[LayerAgreement, ...]
    low_precision: int
    fallbacks: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all layers agree with the simulation."""
        return bool(self.layers) and all(layer.holds for layer in self.layers)

    @property
    def departing(self) -> tuple[LayerAgreement, ...]:
        """The layers that do not agree with the simulation."""
        return tuple(layer for layer in self.layers if not layer.holds)

    @property
    def least_equal(self) -> float:
        """Lowest share of equal codes in a layer."""
        return min((layer.equal for layer in self.layers if not layer.is_float), default=1.0)

    @property
    def largest_codes(self) -> int:
        """Largest difference between codes."""
        return int(max((layer.largest for layer in self.layers if not layer.is_float), default=0))

    @property
    def largest_steps(self) -> float:
        """Largest difference between float outputs, in float32 steps."""
        return max((layer.largest for layer in self.layers if layer.is_float), default=0.0)


def verify_layers(
    path: str | Path,
    model: fx.GraphModule,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    seconds: float = 600,
) -> LayerVerification:
    """Compare every layer of a file in ONNX Runtime with the simulation, both with the inputs of the simulation.

    Args:
        path: The file.
        model: The quantized model that the file was written from.
        inputs: Inputs to run.
        kwargs: Keyword inputs of the model.
        threads: Threads of the runtime.
        seconds: Time limit of a run.

    Returns:
        Agreement per layer.

    Raises:
        VerificationError: ONNX Runtime cannot run the file.
    """
    compared = compare_layers(path, model, inputs, kwargs=kwargs, threads=threads, seconds=seconds)
    low_precision, fallbacks = count_low_precision(compared.executed)
    return LayerVerification(tuple(compared.layers.values()), low_precision, fallbacks)


@dataclass(frozen=True)
class ComparedLayers:
    """A file that was changed to take the codes of the simulation, with its inputs and results."""

    proto: Any  # the changed onnx.ModelProto, cut at its quantizers
    feeds: Mapping[str, np.ndarray]  # by input, with the codes of the simulation
    expected: Mapping[str, np.ndarray]  # values of the simulation, by tensor
    layers: Mapping[str, LayerAgreement]  # by tensor
    executed: list[dict[str, Any]]  # nodes of the compiled graph


def compare_layers(
    path: str | Path,
    model: fx.GraphModule,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    seconds: float = 600,
) -> ComparedLayers:
    """Run the file once as it is and once with the codes of the simulation, and compare every layer."""
    import onnx  # noqa: PLC0415  # only files need it

    model_inputs = as_inputs(inputs, kwargs)
    with _record_weighted_outputs(model) as float_calls:
        _, stub_codes = simulate(model, model_inputs)
    code_calls = {name: [to_file_array(codes) for codes in calls] for name, calls in stub_codes.items()}
    feeds = build_feeds(model, model_inputs)
    check_file(Path(path), LARGEST_PROTOBUF)
    proto = onnx.load(path)
    unforced, _ = _run_file(str(path), feeds, threads, seconds, expose=True)  # shapes and dtypes of the codes
    codes = _match_codes(proto.graph, code_calls, unforced)
    floats = _match_float_outputs(proto.graph, float_calls)
    _force_inputs(proto, codes, floats)
    with TemporaryFolder() as folder:
        forced_path = folder / "forced.onnx"
        onnx.save(proto, forced_path)
        feeds |= {name + FORCED_INPUT_SUFFIX: value for name, value in codes.items()}
        outputs, executed = _run_file(str(forced_path), feeds, threads, seconds)
    node_names = {name: node.name for node in proto.graph.node for name in node.output}
    layers = {name: _compare_codes(node_names[name], value, outputs[name]) for name, value in codes.items()}
    layers |= {name: _compare_floats(node_names[name], value, outputs[name]) for name, value in floats.items()}
    return ComparedLayers(proto, feeds, {**codes, **floats}, layers, executed)


def _run_file(
    path: str, feeds: Mapping[str, np.ndarray], threads: int, seconds: float, *, expose: bool = False
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    with exchange_files(feeds) as files:
        request = {"task": "run", "path": path, "options": {"threads": threads, "expose": expose}, "executed": True}
        answer = run_task(find_runtime("onnxruntime"), {**request, **files.paths}, seconds=seconds)
        if answer.status != Status.OK:
            raise VerificationError(f"{path} in onnxruntime: {answer.status.value}: {answer.message}")
        return files.outputs(answer), list((answer.data or {})["executed"])


@contextmanager
def _record_weighted_outputs(model: fx.GraphModule) -> Iterator[Calls]:
    """Record the outputs of the layers with weights, under the names of their weight scales in the file."""
    outputs: Calls = {}

    def recorder(calls: list[np.ndarray]) -> Any:
        return lambda module, inputs, output: calls.append(to_file_array(output))

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            group, _, role = name.rpartition(".")
            calls = outputs.setdefault(f"{group}.stored_{role}.scale", [])
            handles.append(module.register_forward_hook(recorder(calls)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _match_codes(graph: Any, codes: Calls, unforced: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Map the output of each QuantizeLinear to the codes of the simulation.

    A quantizer that runs several times has several QuantizeLinear nodes, in the order of its calls. A call whose shape
    differs is skipped: if the exporter folds a padding into a convolution, the simulation has one call more.
    """
    remaining = {name: list(calls) for name, calls in codes.items()}
    matched = {}
    for node in graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        stub, tensor = node.name.rpartition("/")[0], node.output[0]
        calls = remaining.get(stub, [])
        arrays = [to_file_layout(tensor, value) for value in calls]
        index = next((i for i, value in enumerate(arrays) if value.shape == unforced[tensor].shape), None)
        if index is not None:
            matched[tensor] = arrays[index].astype(unforced[tensor].dtype)
            del calls[: index + 1]
    return matched


def _match_float_outputs(graph: Any, floats: Calls) -> dict[str, np.ndarray]:
    """Map the float output of each weighted layer that no QuantizeLinear follows to its value in the simulation."""
    producers = {name: node for node in graph.node for name in node.output}
    consumers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    remaining = {name: list(calls) for name, calls in floats.items()}
    matched = {}
    for node in graph.node:
        weight = producers.get(node.input[1]) if node.op_type in WEIGHTED_OPERATORS else None
        if weight is None or weight.op_type != "DequantizeLinear":
            continue
        calls = remaining.get(weight.input[1])  # input 1 of DequantizeLinear is the scale
        if not calls:
            continue
        value = calls.pop(0)
        last_node = _skip_bias_add(node, consumers, producers)
        if not _is_quantized(last_node, consumers):
            tensor = last_node.output[0]
            matched[tensor] = to_file_layout(tensor, value)
    return matched


def _skip_bias_add(node: Any, consumers: Mapping[str, Sequence[Any]], producers: Mapping[str, Any]) -> Any:
    """Return the Add of the bias that follows a MatMul, else the node: a linear layer is MatMul + Add of a constant."""
    followers = consumers.get(node.output[0], [])
    if node.op_type != "MatMul" or len(followers) != 1 or followers[0].op_type != "Add":
        return node
    add = followers[0]
    operand = next((name for name in add.input if name != node.output[0]), "")
    producer = producers.get(operand)
    is_constant = producer is None or (producer.op_type == "DequantizeLinear" and producer.input[0] not in producers)
    return add if is_constant else node


def _is_quantized(node: Any, consumers: Mapping[str, Sequence[Any]]) -> bool:
    """Whether a QuantizeLinear follows, directly or after activations that the runtime fuses into the layer."""
    followers = consumers.get(node.output[0], [])
    while len(followers) == 1 and followers[0].op_type in FUSED_OPERATORS:
        followers = consumers.get(followers[0].output[0], [])
    return len(followers) == 1 and followers[0].op_type == "QuantizeLinear"


def _force_inputs(proto: Any, codes: Mapping[str, np.ndarray], floats: Mapping[str, np.ndarray]) -> None:
    """Change the graph: consumers of codes read new inputs instead, and all compared tensors become outputs."""
    import onnx  # noqa: PLC0415

    graph = proto.graph
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in codes:
                node.input[index] = name + FORCED_INPUT_SUFFIX
    shapes = {info.name: info.type.tensor_type.shape.dim for info in graph.value_info}
    output_names = {output.name for output in graph.output}
    for name, value in codes.items():
        dims = [dim.dim_value or dim.dim_param or None for dim in shapes.get(name, ())] or [None] * value.ndim
        dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(onnx.helper.make_tensor_value_info(name + FORCED_INPUT_SUFFIX, dtype, dims))
    for name in (*codes, *floats):
        if name not in output_names:
            graph.output.append(onnx.helper.make_empty_tensor_value_info(name))


def _compare_codes(node_name: str, expected: np.ndarray, output: np.ndarray) -> LayerAgreement:
    difference = np.abs(expected.astype(np.int32) - output.astype(np.int32))
    equal_share, largest = float((difference == 0).mean()), int(difference.max(initial=0))
    return LayerAgreement(node_name, is_float=False, equal=equal_share, largest=largest)


def _compare_floats(node_name: str, expected: np.ndarray, output: np.ndarray) -> LayerAgreement:
    step = FLOAT_STEP * float(np.abs(expected).max(initial=np.finfo(np.float32).tiny))
    steps_apart = np.abs(expected.astype(np.float64) - output.astype(np.float64)) / step
    share_within = float((steps_apart <= MAX_FLOAT_STEPS).mean())
    return LayerAgreement(node_name, is_float=True, equal=share_within, largest=float(steps_apart.max(initial=0.0)))
