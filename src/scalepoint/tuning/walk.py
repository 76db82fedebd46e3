"""Both streams of a model, node after node: all batches up to a node, then the next one.

    exact[n] = f_n(exact inputs)         noisy[n] = q_n(noisy inputs), with what was chosen so far

A value goes when its last reader has run. Until the first quantizer both streams are one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.graph.operations import get_tensors
from scalepoint.quantize.feeding import Data, feed_data
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.shadow_models import copy_with_shared_parameters, wrap_with_signature
from scalepoint.tuning.activation_store import ActivationStore
from scalepoint.tuning.pieces import Piece


class _InputReached(BaseException):
    """The input of the layer is at hand: what comes after it need not run."""


class StreamWalk:
    """The two streams of one model over some batches."""

    def __init__(self, model: fx.GraphModule, *, memory: int, keeps_outputs: bool = True) -> None:
        self.graph, self.keeps_outputs = model.graph, keeps_outputs
        self.float_model, self.quantized_model = (
            copy_with_shared_parameters(model, quantizing=False),
            copy_with_shared_parameters(model, quantizing=True),
        )
        self._exact, self._noisy = (
            fx.Interpreter(each, graph=model.graph) for each in (self.float_model, self.quantized_model)
        )
        self.names = {id(module): name for name, module in self.quantized_model.named_modules()}
        self.samples_per_batch: list[int] = []  # in each batch of this rank
        self.first_samples: list[int] = []  # the number of the first sample of each, over all ranks
        self.sample_count = 0  # over all ranks
        self.batch_owners: list[tuple[int, int]] = []  # of every batch of all: its rank, and its number there
        self.activation_store = ActivationStore(memory)
        self.placeholders = [node for node in model.graph.nodes if node.op == "placeholder"]
        self.same_nodes = self._same()
        self.stored_nodes = set(self.placeholders)  # whose values are kept
        self.pinned: set[fx.Node] = set()
        self.stub_nodes: dict[int, list[fx.Node]] = {}  # where each activation quantizer stands
        for node in model.graph.nodes:
            if (stub := self.get_stub(node)) is not None:
                self.stub_nodes.setdefault(id(stub), []).append(node)

    @property
    def batch_count(self) -> int:
        """Batches of this rank."""
        return len(self.samples_per_batch)

    def read_data(self, model: fx.GraphModule, data: Data, **how: Any) -> None:
        """Take the flat inputs of every batch that the data gives; each is put away as it comes."""
        taker = wrap_with_signature(model, _BatchReceiver(self), gives_outputs=False)
        feed_data(taker, data, "reading the data", merge=lambda: None, **how)
        samples = distributed.gather_values("reading the data", self.samples_per_batch)
        self.first_samples, self.sample_count = distributed.batch_offsets(samples)
        self.batch_owners = distributed.interleave(
            [(rank, index) for index in range(len(part))] for rank, part in enumerate(samples)
        )

    def add_batch(self, inputs: Sequence[Any]) -> None:
        index = len(self.samples_per_batch)
        for node, value in zip(self.placeholders, inputs, strict=True):
            self.activation_store.put((False, node, index), value.detach() if isinstance(value, Tensor) else value)
        tensors = [each for each in inputs if isinstance(each, Tensor) and each.ndim]
        self.samples_per_batch.append(int(tensors[0].shape[0]) if tensors else 1)

    def get_layer(self, node: fx.Node) -> tuple[str, QuantizedLayer] | None:
        """The quantized layer of a node with its name in the model, when its quantizer is on."""
        for part in self.get_parts(node):
            if isinstance(part, QuantizedLayer) and part.kind != EMBEDDING and part.weight_quant.enabled:
                return self.names[id(part)], part
        return None

    def get_stub(self, node: fx.Node) -> QuantStub | None:
        """The quantizer that a node is."""
        found = self.get_module(node)
        return found if isinstance(found, QuantStub) else None

    def get_module(self, node: fx.Node) -> nn.Module | None:
        return self.quantized_model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def get_parameters(self, node: fx.Node) -> list[Tensor]:
        """The parameters that a node computes with."""
        if node.op == "get_attr":
            place, _, name = str(node.target).rpartition(".")
            found = getattr(self.quantized_model.get_submodule(place), name)
            return [found] if isinstance(found, Tensor) else []
        parts = [each for each in (self.get_module(node), *self.get_parts(node)) if each is not None]
        inner = [each for part in parts if isinstance(part, QuantizedLayer) for each in part.module_refs.values()]
        return [tensor for part in (*parts, *inner) if part is not None for tensor in get_tensors(part)]

    def get_quantized_layers(self, node: fx.Node) -> list[QuantizedLayer]:
        """The layers and tables with codes at a node."""
        return [each for each in self.get_parts(node) if isinstance(each, QuantizedLayer) and each.weight_quant.enabled]

    def get_parts(self, node: fx.Node) -> list[nn.Module]:
        """The parts of a group in their order."""
        return list(getattr(self.get_module(node), "parts", {}).values())

    def find_source(self, node: fx.Node, layer: QuantizedLayer) -> fx.Node | None:
        """The node whose value the layer of a node reads; None where it is what another part of its group gives."""
        if self.get_parts(node)[0] is not layer:
            return None
        place = getattr(self.get_module(node), "wiring", [[0]])[0][0]
        found = None if place is None else node.args[place]
        return found if isinstance(found, fx.Node) else None

    def inputs(self, node: fx.Node, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """What reaches the layer of a node, batch by batch, in both streams; nothing is advanced."""
        for index in range(self.batch_count):
            yield self.capture_input(node, name, index, noisy=False), self.capture_input(node, name, index, noisy=True)

    def advance(self, node: fx.Node) -> None:
        """Run a node on all batches in both streams."""
        if node.op in ("placeholder", "output"):
            return
        if node.op == "get_attr":  # read from the model whenever it is wanted: lent weights come and go
            self.stored_nodes.add(node)
            return
        stub, is_same = self.get_stub(node), node in self.same_nodes
        is_read = self._is_read(node)
        if is_read:
            self.stored_nodes.add(node)
        with torch.no_grad():
            for index in range(self.batch_count if is_read else 0):
                self.float_value(node, index)
                if not is_same:
                    self.activation_store.put(
                        (True, node, index), self._run(self._noisy, node, index, noisy=True), stub
                    )
        for done in self._exact.user_to_last_uses.get(node, []):
            if done not in self.pinned:
                self._drop(done)

    def float_value(self, node: fx.Node, index: int) -> Any:
        """What a node gives in one batch of the float stream: of the shelf, or run now and put there."""
        if node.op == "get_attr":
            return self.get_value(node, index, noisy=False)
        key = (False, node, index)
        if key in self.activation_store:
            return self.activation_store.get(key)
        with torch.no_grad():
            value = self._run(self._exact, node, index, noisy=False)
        if self._is_read(node):
            self.activation_store.put(key, value)
        return value

    def _is_read(self, node: fx.Node) -> bool:
        """Whether anybody will want the values of a node."""
        return self.keeps_outputs or any(user.op != "output" for user in node.users)

    def pin(self, nodes: Sequence[fx.Node]) -> None:
        """Keep the values of nodes beyond their last reader."""
        self.pinned.update(nodes)

    def unpin(self, nodes: Sequence[fx.Node], passed: set[fx.Node]) -> None:
        """Let go of them, where every reader is among those passed."""
        for node in nodes:
            self.pinned.discard(node)
            if all(user in passed for user in node.users):
                self._drop(node)

    def _drop(self, node: fx.Node) -> None:
        self.stored_nodes.discard(node)
        for index in range(self.batch_count):
            self.activation_store.drop((False, node, index))
            self.activation_store.drop((True, node, index))

    def has_value(self, node: fx.Node) -> bool:
        """Whether the walk has come past a node, and somebody will read it still."""
        return node in self.stored_nodes

    def get_value(self, node: fx.Node, index: int, *, noisy: bool) -> Any:
        if node.op == "get_attr":
            return (self._noisy if noisy else self._exact).fetch_attr(str(node.target))
        return self.activation_store.get((noisy and node not in self.same_nodes, node, index))

    def get_entries(self, piece: Piece, index: int, *, noisy: bool) -> dict[fx.Node, Any]:
        """What a piece reads."""
        return {node: self.get_value(node, index, noisy=noisy) for node in piece.entries}

    def run_piece(self, piece: Piece, entries: Mapping[fx.Node, Any], *, noisy: bool = True) -> list[Any]:
        """What the piece, quantized or not, gives for these inputs, of each of its exits."""
        runner, readers = self._noisy if noisy else self._exact, piece.last_reads
        with _node_environment(runner, dict(entries)) as env:
            for node in piece.nodes:
                env[node] = runner.run_node(node)
                for done in readers.get(node, ()):
                    env.pop(done, None)
            return [env[node] for node in piece.exits]

    def rerun_piece(self, piece: Piece) -> None:
        """Put the exits of a piece away anew, after what was chosen in it changed."""
        with torch.no_grad():
            for index in range(self.batch_count):
                found = self.run_piece(piece, self.get_entries(piece, index, noisy=True))
                for node, value in zip(piece.exits, found, strict=True):
                    if node not in self.same_nodes:
                        self.activation_store.put((True, node, index), value, self.get_stub(node))

    def _same(self) -> set[fx.Node]:
        """Nodes whose value is one in both streams."""
        found = set(self.placeholders)
        for node in self.graph.nodes:
            if all(each in found for each in node.all_input_nodes) and not self._quantizes(node):
                found.add(node)
        return found

    def _quantizes(self, node: fx.Node) -> bool:
        parts = [each for each in (self.get_module(node), *self.get_parts(node)) if each is not None]
        return any(isinstance(each, QuantizerBase) and each.enabled for part in parts for each in part.modules())

    def _run(self, runner: fx.Interpreter, node: fx.Node, index: int, *, noisy: bool) -> Any:
        with _node_environment(
            runner, {each: self.get_value(each, index, noisy=noisy) for each in node.all_input_nodes}
        ) as env:
            weights = [env[each] for each in node.all_input_nodes if each.op == "get_attr"]
            return _copy_if_view(runner.run_node(node), weights)

    def capture_input(self, node: fx.Node, name: str, index: int, *, noisy: bool) -> Tensor:
        """What reaches the layer of a node in one batch of one stream."""
        runner, owner = (self._noisy, self.quantized_model) if noisy else (self._exact, self.float_model)
        seen: list[Tensor] = []

        def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[0])
            raise _InputReached

        handle = owner.get_submodule(name).register_forward_pre_hook(stop)
        try:
            with torch.no_grad():
                self._run(runner, node, index, noisy=noisy)
        except _InputReached:
            pass
        finally:
            handle.remove()
        return seen[0]


class _BatchReceiver(nn.Module):
    """Hands the flat inputs of every batch to a walk."""

    def __init__(self, walk: StreamWalk) -> None:
        super().__init__()
        self.walk = [walk]  # in a list: no state of this module

    def forward(self, *inputs: Any) -> Any:
        self.walk[0].add_batch(inputs)


def _copy_if_view(value: Any, weights: Sequence[Any]) -> Any:
    """The value, copied where it is a view of a weight: the memory of lent weights is taken away after their piece."""
    storages = {each.untyped_storage().data_ptr() for each in weights if isinstance(each, Tensor)}
    is_view = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages
    return value.clone() if is_view else value


@contextmanager
def _node_environment(runner: fx.Interpreter, values: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """What an interpreter knows while it runs single nodes."""
    runner.env = values
    try:
        yield values
    finally:
        runner.env = {}
