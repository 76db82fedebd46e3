"""A quantized graph as single operations, in the order in which one batch ran them: groups are opened."""

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

FOREIGN = -1  # the number of a channel that is not the source's


@dataclass
class RecordedOperation:
    """One operation of one batch; `inputs` are the operations whose tensors it takes, in order."""

    index: int
    node: fx.Node
    name: str
    kind: str
    module: nn.Module | None
    inputs: tuple[int, ...]
    shape: tuple[int, ...] | None
    value: Any = None  # what it gave, when that was no tensor

    @property
    def operation(self) -> Any:
        """The module whose parameters it uses."""
        return self.module.operation if isinstance(self.module, QuantizedLayer) else self.module

    def argument(self, place: int) -> str:
        """The name (or number) of the argument that the input at this place is."""
        if isinstance(self.module, Operation):
            return next((n for n, v in self.module.arguments.items() if isinstance(v, Slot) and v.index == place), "")
        return str(place)


class RecordedGraph:
    """The operations of a model in the order in which they run, as one batch saw them."""

    def __init__(self, model: fx.GraphModule, inputs: Sequence[Any]) -> None:
        recorder = _OperationRecorder(model)
        recorder.run(*inputs, enable_io_processing=False)
        self.model, self.ops = model, recorder.ops
        self.readers: dict[int, list[RecordedOperation]] = {}
        for op in self.ops:
            for source in dict.fromkeys(op.inputs):
                self.readers.setdefault(source, []).append(op)
        self.uses = _count_uses(model, self.ops)

    def again(self, op: RecordedOperation, ids: Mapping[int, Any]) -> Any:
        """What an operation that moves values gives when some of its inputs are these, the others FOREIGN; None when
        it takes no such numbers."""
        try:
            return self._again(op, ids)
        except (RuntimeError, TypeError, ValueError, IndexError):  # torch's words for what an operation does not take
            return None

    def _again(self, op: RecordedOperation, ids: Mapping[int, Any]) -> Any:

        def given(index: int) -> Any:
            if index in ids:
                return ids[index]
            other = self.ops[index]
            return other.value if other.shape is None else torch.full(other.shape, FOREIGN)

        if op.module is not None:
            return op.module(*map(given, op.inputs))
        of = dict(zip(op.node.all_input_nodes, op.inputs, strict=True))
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda node: given(of[node]))
        return op.node.target(*args, **kwargs)  # type: ignore[operator]  # a function

    def is_shared(self, tensors: Sequence[Tensor]) -> bool:
        """Whether something else in the model computes with one of these."""
        return any(self.uses[tensor.data_ptr()] > 1 for tensor in tensors if tensor.numel())


class _OperationRecorder(fx.Interpreter):
    """Runs a graph and writes down every operation."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.ops: list[RecordedOperation] = []
        self.names = record_of(model).names
        self.of: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        inputs = [self.of[source] for source in n.all_input_nodes]
        if isinstance(module, Fused) and not isinstance(module, FusedNorm):
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = self._opened(n, module, args)
        else:
            result = super().run_node(n)
            kind = _norm_kind(module) if isinstance(module, FusedNorm) else _operation_kind(n, module)
            part = list(module.parts.values())[-1] if isinstance(module, FusedNorm) else module
            slots = [self.of[a] for a in n.args if isinstance(a, fx.Node)] if n.op == "call_module" else inputs
            self._add(n, kind, part, slots, result)
        self.of[n] = len(self.ops) - 1
        return result

    def _opened(self, node: fx.Node, group: Fused, args: Sequence[Any]) -> Any:
        value: Any = None
        for part, sources in zip(group.parts.values(), group.wiring, strict=True):
            behind = [len(self.ops) - 1 if k is None else self.of[node.args[k]] for k in sources]  # type: ignore[index]
            value = part(*(value if k is None else args[k] for k in sources))
            kind = part.kind if isinstance(part, QuantizedLayer) else get_part_kind(part)
            self._add(node, kind, part, behind, value)
        return value

    def _add(self, node: fx.Node, kind: str, module: nn.Module | None, inputs: Sequence[int], result: Any) -> None:
        name = self.names.get(node.name) or (str(node.target) if node.op == "get_attr" else get_layer_name(node))
        shape = tuple(result.shape) if isinstance(result, Tensor) else None
        value = None if shape is not None or _has_tensors(result) else result
        self.ops.append(RecordedOperation(len(self.ops), node, name, kind, module, tuple(inputs), shape, value))


def _operation_kind(node: fx.Node, module: nn.Module | None) -> str:
    """A stub whose range is given, not found, stands for the values as they are."""
    is_given = isinstance(module, QuantStub) and (
        module.fixed_calibration is not None or any(end is not None for end in module.spec.float_range)
    )
    return "quant of a given range" if is_given else get_kind(node)


def _norm_kind(group: FusedNorm) -> str:
    kind = get_part_kind(next(iter(group.parts.values())))
    return kind if len(group.parts) == 1 else "rms_norm"  # the one that is matched when it is written out


def _has_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value)


def _count_uses(model: fx.GraphModule, ops: Sequence[RecordedOperation]) -> Counter[int]:
    """How many operations compute with a tensor (by address), and how often a module without any runs (by id)."""
    count: Counter[int] = Counter()
    for op in ops:
        if op.node.op == "get_attr":
            owner, _, leaf = str(op.node.target).rpartition(".")
            held = [getattr(model.get_submodule(owner), leaf)]
        else:
            folded = op.module.norm if isinstance(op.module, QuantizedLayer) else None
            held = [tensor for module in (op.operation, folded) if module is not None for tensor in get_tensors(module)]
        count.update({tensor.data_ptr() for tensor in held if isinstance(tensor, Tensor) and tensor.numel()})
        count.update([] if op.module is None else [id(op.module)])
    return count
