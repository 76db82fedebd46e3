"""Count operations with weights: those that a model runs, those in matches, and those without a pattern.

Operations that a model runs are counted by a dispatch mode of torch, independently of capture and matching.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from scalepoint.graph import Operation
from scalepoint.patterns import get_kind
from scalepoint.patterns.language import get_layer_name
from scalepoint.transformation import TransformationResult

KINDS = ("conv", "linear", "embedding", "recurrent")
CONVOLUTIONS = ("conv", "conv_transpose")
RECURRENT = ("lstm", "gru", "rnn")
PRODUCTS = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "_grouped_mm", "grouped_mm_fallback")


def run(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def batch(inputs: Any, samples: list[int]) -> Any:
    """Return these samples of the inputs. Values that are not tensors stay."""
    return pytree.tree_map(lambda value: value[samples] if isinstance(value, Tensor) and value.ndim else value, inputs)


def relative_difference(expected: Any, actual: Any) -> float:
    """Return the largest max |difference| / max |output| of the outputs; infinity if their number or types differ."""
    expected_leaves, actual_leaves = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(expected_leaves) != len(actual_leaves):
        return float("inf")
    return max(map(_relative_difference_of_one, expected_leaves, actual_leaves))


def _relative_difference_of_one(expected: Any, actual: Any) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if expected == actual else float("inf")
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    if expected.numel() == 0 or torch.equal(expected, actual):
        return 0.0
    difference = float((expected - actual).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(difference) else difference


class _Counting(TorchDispatchMode):
    """Counts convolutions, recurrent cells, products with a parameter and embedding lookups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kind(function._schema.name.split("::")[-1], args)
        if kind:
            self.counts[kind] += 1
        return function(*args, **(kwargs or {}))

    def _kind(self, name: str, args: tuple[Any, ...]) -> str:
        if "convolution" in name:
            return "conv"
        if name == "embedding" and self._is_parameter(args[0]):
            return "embedding"
        factors = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        if name in PRODUCTS and any(map(self._is_parameter, factors)):
            return "linear"
        return "recurrent" if any(cell in name for cell in RECURRENT) else ""

    def _is_parameter(self, value: Tensor) -> bool:
        return value.untyped_storage().data_ptr() in self.storages


def count_executed(model: nn.Module, inputs: Any) -> dict[str, int]:
    """Count the operations with weights in one call, by kind. Gradients are enabled to avoid fused fast paths."""
    with _Counting(model) as counting, torch.enable_grad():
        run(model, inputs)
    return {kind: counting.counts[kind] for kind in KINDS}


def count_matched(result: TransformationResult) -> dict[str, int]:
    """Count the operations with weights in applied matches, by kind."""
    kinds = Counter(_group(get_kind(node)) for match in result.matches for node in match.nodes.values())
    return {kind: kinds[kind] for kind in KINDS}


def _group(kind: str) -> str:
    if kind in CONVOLUTIONS:
        return "conv"
    if kind in ("head", "grouped_linear"):  # a classifier turned into a convolution, the experts of a mixture
        return "linear"
    return "recurrent" if kind in RECURRENT else kind


def count_reported(result: TransformationResult) -> dict[str, int]:
    """Count the operations with weights that have no match and are named in the report, by kind."""
    names = {refusal.name for refusal in result.report.refusals if not refusal.pattern}
    kinds = Counter(_group(get_kind(node)) for node in result.model.graph.nodes if get_layer_name(node) in names)
    return {kind: kinds[kind] for kind in KINDS}


def unreported_operations(result: TransformationResult) -> list[str]:
    """List operations with weights that have no applied match and no refusal, as `name: target`."""
    names = {refusal.name for refusal in result.report.refusals if not refusal.pattern}
    nodes = [node for node in result.model.graph.nodes if _has_weight(result.model, node)]
    return [f"{node.name}: {node.target}" for node in nodes if get_layer_name(node) not in names]


def _has_weight(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node outside of fused modules is an operation with a weight."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return _group(get_kind(node)) in KINDS or (isinstance(module, Operation) and _multiplies_parameter(module))
    if node.op != "call_function":
        return False
    name = _base_name(node.target)
    if name.startswith("conv") and name[4:5] in ("1", "2", "3", "o", "_"):
        return True
    if name in PRODUCTS or name == "embedding" or name in RECURRENT:
        return any(_is_weight(model, source) for source in node.all_input_nodes)
    return False


def _multiplies_parameter(operation: Operation) -> bool:
    values = (reference.value for reference in operation.references().values())
    return operation.kind in PRODUCTS and any(isinstance(value, nn.Parameter) for value in values)


def _base_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def _is_weight(model: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a value is a parameter, or computed from parameters only (a transposed or cast weight)."""
    sources = list(_leaves([node]))
    if not sources or any(source.op != "get_attr" for source in sources):
        return False
    return any(isinstance(_attribute(model, str(source.target)), nn.Parameter) for source in sources)


def _leaves(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        if node.op == "call_function":
            yield from _leaves(node.all_input_nodes)
        else:
            yield node


def _attribute(model: fx.GraphModule, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
