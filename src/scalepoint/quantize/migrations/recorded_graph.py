"""The operations of a quantized model in the order in which one batch ran them. Fused groups are split into parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.graph import Operation
from scalepoint.graph.nodes import get_kind
from scalepoint.graph.operations import Slot, get_tensors
from scalepoint.patterns import Fused
from scalepoint.patterns.fused import FusedNorm
from scalepoint.patterns.language import get_layer_name
from scalepoint.quantize.operations import get_part_kind
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantStub
from scalepoint.quantize.record import record_of

FOREIGN = -1  # the number of a channel that does not come from the traced tensor


@dataclass
class RecordedOperation:
    """One operation of the recorded batch.

    Attributes:
        index: Its position in the order of the operations.
        node: The node that it belongs to.
        name: Name of its layer.
        kind: Its kind, such as "linear".
        module: The module that ran; None for a function.
        inputs: Indices of the operations whose results it reads, in order.
        shape: Shape of its result; None if the result is not a tensor.
        value: Its result, if that is not a tensor.
    """

    index: int
    node: fx.Node
    name: str
    kind: str
    module: nn.Module | None
    inputs: tuple[int, ...]
    shape: tuple[int, ...] | None
    value: Any = None

    @property
    def operation(self) -> Any:
        """The module that owns the parameters."""
        return self.module.operation if isinstance(self.module, QuantizedLayer) else self.module

    def argument_name(self, position: int) -> str:
        """Return the name of the argument for the input at a position; its number for plain modules and functions."""
        if not isinstance(self.module, Operation):
            return str(position)
        for name, value in self.module.arguments.items():
            if isinstance(value, Slot) and value.index == position:
                return name
        return ""


class RecordedGraph:
    """The operations that a model ran on one batch.

    Attributes:
        model: The model.
        operations: The operations in order.
        readers: The operations that read a result, by its index.
        uses: Number of operations that use a tensor, by its address; and number of runs of a module, by its id.
    """

    def __init__(self, model: fx.GraphModule, inputs: Sequence[Any]) -> None:
        recorder = _BatchRecorder(model)
        recorder.run(*inputs, enable_io_processing=False)
        self.model, self.operations = model, recorder.operations
        self.readers: dict[int, list[RecordedOperation]] = {}
        for op in self.operations:
            for source in dict.fromkeys(op.inputs):
                self.readers.setdefault(source, []).append(op)
        self.uses = _count_uses(model, self.operations)

    def rerun(self, op: RecordedOperation, numbers: Mapping[int, Any]) -> Any:
        """Run an operation on numbers instead of its inputs.

        Args:
            op: An operation that moves values.
            numbers: Index of the operation that computes an input -> channel numbers. Tensors of all other inputs are
                filled with FOREIGN.

        Returns:
            The numbers of its result; None if the operation fails on them, such as on a dtype that it does not support.
        """

        def get_input(index: int) -> Any:
            if index in numbers:
                return numbers[index]
            source = self.operations[index]
            return source.value if source.shape is None else torch.full(source.shape, FOREIGN)

        try:
            if op.module is not None:
                return op.module(*map(get_input, op.inputs))
            index_of = dict(zip(op.node.all_input_nodes, op.inputs, strict=True))
            args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda node: get_input(index_of[node]))
            return op.node.target(*args, **kwargs)  # type: ignore[operator]  # a function
        except (RuntimeError, TypeError, ValueError, IndexError):  # what torch raises for types it does not support
            return None

    def is_shared(self, tensors: Sequence[Tensor]) -> bool:
        """Whether more than one operation of the model uses one of these tensors."""
        return any(self.uses[tensor.data_ptr()] > 1 for tensor in tensors if tensor.numel())


class _BatchRecorder(fx.Interpreter):
    """Runs a graph and records every operation."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.operations: list[RecordedOperation] = []
        self.names = record_of(model).names
        self.result_index: dict[fx.Node, int] = {}  # node -> operation that computed its value

    def run_node(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if isinstance(module, Fused) and not isinstance(module, FusedNorm):
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = self._run_parts(n, module, args)
        else:
            result = super().run_node(n)
            kind, part = _operation_kind(n, module), module
            if isinstance(module, FusedNorm):  # one operation; its last part multiplies by the weight
                kind, part = _norm_kind(module), list(module.parts.values())[-1]
            sources = n.all_input_nodes
            if n.op == "call_module":  # by position: a node may be passed twice
                sources = [argument for argument in n.args if isinstance(argument, fx.Node)]
            self._add(n, kind, part, [self.result_index[source] for source in sources], result)
        self.result_index[n] = len(self.operations) - 1
        return result

    def _run_parts(self, node: fx.Node, group: Fused, args: Sequence[Any]) -> Any:
        """Run the parts of a group one by one. A wire of None is the result of the part before."""
        value: Any = None
        for part, wires in zip(group.parts.values(), group.wiring, strict=True):
            previous = len(self.operations) - 1
            inputs = [
                previous if wire is None else self.result_index[node.args[wire]]  # type: ignore[index]  # a node
                for wire in wires
            ]
            value = part(*(value if wire is None else args[wire] for wire in wires))
            kind = part.kind if isinstance(part, QuantizedLayer) else get_part_kind(part)
            self._add(node, kind, part, inputs, value)
        return value

    def _add(self, node: fx.Node, kind: str, module: nn.Module | None, inputs: Sequence[int], result: Any) -> None:
        name = self.names.get(node.name) or (str(node.target) if node.op == "get_attr" else get_layer_name(node))
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        value = None if shape is not None or _has_tensors(result) else result
        self.operations.append(
            RecordedOperation(len(self.operations), node, name, kind, module, tuple(inputs), shape, value)
        )


def _operation_kind(node: fx.Node, module: nn.Module | None) -> str:
    """Return the kind of a node. A quantizer with a fixed range has its own kind: its values must not be scaled."""
    has_fixed_range = isinstance(module, QuantStub) and (
        module.fixed_calibration is not None or any(end is not None for end in module.spec.float_range)
    )
    return "quant with a fixed range" if has_fixed_range else get_kind(node)


def _norm_kind(group: FusedNorm) -> str:
    kind = get_part_kind(next(iter(group.parts.values())))
    return kind if len(group.parts) == 1 else "rms_norm"  # the only norm that is matched in single operations


def _has_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value)


def _count_uses(model: fx.GraphModule, operations: Sequence[RecordedOperation]) -> Counter[int]:
    """Return how many operations use each tensor, by its address; and how often each module runs, by its id."""
    uses: Counter[int] = Counter()
    for op in operations:
        if op.node.op == "get_attr":
            owner, _, attribute = str(op.node.target).rpartition(".")
            tensors = [getattr(model.get_submodule(owner), attribute)]
        else:
            norm = op.module.norm if isinstance(op.module, QuantizedLayer) else None
            owners = [module for module in (op.operation, norm) if module is not None]
            tensors = [tensor for module in owners for tensor in get_tensors(module)]
        uses.update({tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel()})
        uses.update([] if op.module is None else [id(op.module)])
    return uses
