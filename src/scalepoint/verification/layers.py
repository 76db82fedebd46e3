"""verify_layers: every layer of the file on its own, in the real runtime, fed what the simulation feeds it.

End to end, roundings multiply from quantizer to quantizer (decision 8). Here the file is run with the input of every
DequantizeLinear replaced by the simulation's codes, and the output of every QuantizeLinear, or the float output of a
weighted layer that has none after it, is compared. Nothing carries over from layer to layer, the runtime's
optimisations are on, and all kernels run in the graph they will run in.
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
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.runtimes import Status, find_runtime
from scalepoint.runtimes.process import count_low_precision, exchange_files, run_task
from scalepoint.support.files import TemporaryFolder
from scalepoint.support.untrusted import LARGEST_PROTOBUF, check_file
from scalepoint.verification.simulation import build_feeds, simulate, to_file_array

WEIGHTED_OPERATORS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
FUSED_OPERATORS = frozenset(("Relu", "Clip"))
FORCED_INPUT_SUFFIX = "/given"
MIN_EQUAL_SHARE = 0.999
MAX_CODE_DIFFERENCE = 1
FLOAT_STEP = 2.0**-23  # of float32, relative
MAX_FLOAT_STEPS = 64.0

Calls = dict[str, list[np.ndarray]]


@dataclass(frozen=True)
class LayerAgreement:
    """Agreement of one layer: codes compared by value, floats in float32 steps of the layer's largest output."""

    where: str
    is_float: bool
    equal: float  # the share of codes that are the same; of a float output, the share within the limit
    largest: float  # difference

    @property
    def holds(self) -> bool:
        return (
            self.largest <= (MAX_FLOAT_STEPS if self.is_float else MAX_CODE_DIFFERENCE)
            and self.equal >= MIN_EQUAL_SHARE
        )

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
        return bool(self.layers) and all(layer.holds for layer in self.layers)

    @property
    def departing(self) -> tuple[LayerAgreement, ...]:
        return tuple(layer for layer in self.layers if not layer.holds)

    @property
    def least_equal(self) -> float:
        """The worst share of equal codes."""
        return min((layer.equal for layer in self.layers if not layer.is_float), default=1.0)

    @property
    def largest_codes(self) -> int:
        return int(max((layer.largest for layer in self.layers if not layer.is_float), default=0))

    @property
    def largest_steps(self) -> float:
        """The worst float output, in float32 steps."""
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
        model: The quantized model that it was written from.
        inputs: Inputs to run.
        kwargs: Keyword inputs of the model.
        threads: Threads of the runtime.
        seconds: Time limit of a run.

    Returns:
        Agreement per layer.
    """
    found = compare_layers(path, model, inputs, kwargs=kwargs, threads=threads, seconds=seconds)
    low, left = count_low_precision(found.executed)
    return LayerVerification(tuple(found.layers.values()), low, left)


@dataclass(frozen=True)
class ComparedLayers:
    """The file whose layers were fed codes, what it was fed, and what should have come out, by tensor."""

    proto: Any
    feeds: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    layers: Mapping[str, LayerAgreement]
    executed: list[dict[str, Any]]


def compare_layers(
    path: str | Path,
    model: fx.GraphModule,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    seconds: float = 600,
) -> ComparedLayers:
    """Every layer alone, and what it takes to see it again."""
    import onnx  # noqa: PLC0415  # only files need it

    given = as_inputs(inputs, kwargs)
    with _record_weighted_outputs(model) as floats:
        _, codes = simulate(model, given)
    feeds = build_feeds(model, given)
    check_file(Path(path), LARGEST_PROTOBUF)
    proto = onnx.load(path)
    free, _ = _run_file(str(path), feeds, threads, seconds, expose=True)
    known = _match_codes(
        proto.graph, {name: [to_file_array(each) for each in calls] for name, calls in codes.items()}, free
    )
    wanted = _match_float_outputs(proto.graph, floats)
    _force_inputs(proto, known, wanted)
    with TemporaryFolder() as folder:
        forced = folder / "forced.onnx"
        onnx.save(proto, forced)
        feeds |= {name + FORCED_INPUT_SUFFIX: value for name, value in known.items()}
        found, executed = _run_file(str(forced), feeds, threads, seconds)
    made_by = {name: node.name for node in proto.graph.node for name in node.output}
    layers = {name: _compare_codes(made_by[name], value, found[name]) for name, value in known.items()}
    layers |= {name: _compare_floats(made_by[name], value, found[name]) for name, value in wanted.items()}
    return ComparedLayers(proto, feeds, {**known, **wanted}, layers, executed)


def _run_file(
    path: str, feeds: Mapping[str, np.ndarray], threads: int, seconds: float, *, expose: bool = False
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    with exchange_files(feeds) as files:
        request = {"task": "run", "path": path, "options": {"threads": threads, "expose": expose}, "executed": True}
        answer = run_task(find_runtime("onnxruntime"), {**request, **files.files}, seconds=seconds)
        if answer.status != Status.OK:
            raise VerificationError(f"{path} in onnxruntime: {answer.status.value}: {answer.message}")
        return files.outputs(answer), list((answer.data or {})["executed"])


@contextmanager
def _record_weighted_outputs(model: fx.GraphModule) -> Iterator[Calls]:
    """What the weighted layers give, call by call, under the names that their scales have in the file."""
    kept: Calls = {}

    def recorder(calls: list[np.ndarray]) -> Any:
        return lambda module, inputs, output: calls.append(to_file_array(output))

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeighted):
            group, _, role = name.rpartition(".")
            calls = kept.setdefault(f"{group}.stored_{role}.scale", [])
            handles.append(module.register_forward_hook(recorder(calls)))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _match_codes(graph: Any, codes: Calls, free: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Output of a QuantizeLinear -> the simulation's codes: the calls of a stub in order, by shape.

    Where the exporter folded a padding away, the simulation has a call more than the file.
    """
    left = {name: list(calls) for name, calls in codes.items()}
    found = {}
    for node in graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        calls, tensor = left.get(node.name.rpartition("/")[0], []), node.output[0]
        given = [to_file_layout(tensor, value) for value in calls]
        place = next((index for index, value in enumerate(given) if value.shape == free[tensor].shape), None)
        if place is not None:
            found[tensor] = given[place].astype(free[tensor].dtype)
            del calls[: place + 1]
    return found


def _match_float_outputs(graph: Any, floats: Calls) -> dict[str, np.ndarray]:
    """Float output of a weighted layer that no QuantizeLinear follows -> what the simulation has there."""
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    left = {name: list(calls) for name, calls in floats.items()}
    found = {}
    for node in graph.node:
        weight = makers.get(node.input[1]) if node.op_type in WEIGHTED_OPERATORS else None
        if weight is None or weight.op_type != "DequantizeLinear" or not left.get(weight.input[1]):
            continue
        value = left[weight.input[1]].pop(0)
        end = _skip_bias_add(node, readers, makers)
        if not _is_quantized(end, readers):
            found[end.output[0]] = to_file_layout(end.output[0], value)
    return found


def _skip_bias_add(node: Any, readers: Mapping[str, Sequence[Any]], makers: Mapping[str, Any]) -> Any:
    """A linear layer is a MatMul and the Add of a constant."""
    after = readers.get(node.output[0], [])
    if node.op_type != "MatMul" or len(after) != 1 or after[0].op_type != "Add":
        return node
    other = next((name for name in after[0].input if name != node.output[0]), "")
    maker = makers.get(other)
    is_constant = maker is None or (maker.op_type == "DequantizeLinear" and maker.input[0] not in makers)
    return after[0] if is_constant else node


def _is_quantized(node: Any, readers: Mapping[str, Sequence[Any]]) -> bool:
    after = readers.get(node.output[0], [])
    while len(after) == 1 and after[0].op_type in FUSED_OPERATORS:
        after = readers.get(after[0].output[0], [])
    return len(after) == 1 and after[0].op_type == "QuantizeLinear"


def _force_inputs(proto: Any, known: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Who reads codes reads an input of the file instead; what is to be compared becomes an output."""
    import onnx  # noqa: PLC0415

    graph = proto.graph
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in known:
                node.input[index] = name + FORCED_INPUT_SUFFIX
    shapes = {each.name: each.type.tensor_type.shape.dim for each in graph.value_info}
    taken = {each.name for each in graph.output}
    for name, value in known.items():
        dims = [each.dim_value or each.dim_param or None for each in shapes.get(name, ())] or [None] * value.ndim
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(onnx.helper.make_tensor_value_info(name + FORCED_INPUT_SUFFIX, kind, dims))
    for name in (*known, *wanted):
        if name not in taken:
            graph.output.append(onnx.helper.make_empty_tensor_value_info(name))


def _compare_codes(where: str, expected: np.ndarray, found: np.ndarray) -> LayerAgreement:
    apart = np.abs(expected.astype(np.int32) - found.astype(np.int32))
    return LayerAgreement(where, False, float((apart == 0).mean()), int(apart.max(initial=0)))


def _compare_floats(where: str, expected: np.ndarray, found: np.ndarray) -> LayerAgreement:
    step = FLOAT_STEP * float(np.abs(expected).max(initial=np.finfo(np.float32).tiny))
    apart = np.abs(expected.astype(np.float64) - found.astype(np.float64)) / step
    return LayerAgreement(where, True, float((apart <= MAX_FLOAT_STEPS).mean()), float(apart.max(initial=0.0)))
