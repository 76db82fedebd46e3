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
from scalepoint.quantize.feeding import Data, feed
from scalepoint.quantize.parts import TABLE
from scalepoint.quantize.stubs import Quantizing, QuantStub
from scalepoint.quantize.twins import driven, twin
from scalepoint.quantize.weighted import QuantizedWeighted
from scalepoint.tuning.pieces import Piece
from scalepoint.tuning.shelf import Shelf


class _Reached(BaseException):
    """The input of the layer is at hand: what comes after it need not run."""


class Walk:
    """The two streams of one model over some batches."""

    def __init__(self, model: fx.GraphModule, *, memory: int, keeps_outputs: bool = True) -> None:
        self.graph, self.keeps_outputs = model.graph, keeps_outputs
        self.plain, self.live = twin(model, quantizing=False), twin(model, quantizing=True)
        self._exact, self._noisy = (fx.Interpreter(each, graph=model.graph) for each in (self.plain, self.live))
        self.names = {id(module): name for name, module in self.live.named_modules()}
        self.samples: list[int] = []  # in each batch of this rank
        self.firsts: list[int] = []  # the number of the first sample of each, over all ranks
        self.sample_count = 0  # over all ranks
        self.owners: list[tuple[int, int]] = []  # of every batch of all: its rank, and its number there
        self.shelf = Shelf(memory)
        self.places = [node for node in model.graph.nodes if node.op == "placeholder"]
        self.same = self._same()
        self.there = set(self.places)  # whose values are kept
        self.held: set[fx.Node] = set()
        self.stub_nodes: dict[int, list[fx.Node]] = {}  # where each activation quantizer stands
        for node in model.graph.nodes:
            if (stub := self.stub(node)) is not None:
                self.stub_nodes.setdefault(id(stub), []).append(node)

    @property
    def count(self) -> int:
        """Batches of this rank."""
        return len(self.samples)

    def read(self, model: fx.GraphModule, data: Data, **how: Any) -> None:
        """Take the flat inputs of every batch that the data gives; each is put away as it comes."""
        taker = driven(model, _Inputs(self), gives_outputs=False)
        feed(taker, data, "reading the data", merge=lambda: None, **how)
        samples = distributed.gather_values("reading the data", self.samples)
        self.firsts, self.sample_count = distributed.batch_offsets(samples)
        self.owners = distributed.interleave(
            [(rank, index) for index in range(len(part))] for rank, part in enumerate(samples)
        )

    def take(self, inputs: Sequence[Any]) -> None:
        index = len(self.samples)
        for node, value in zip(self.places, inputs, strict=True):
            self.shelf.put((False, node, index), value.detach() if isinstance(value, Tensor) else value)
        tensors = [each for each in inputs if isinstance(each, Tensor) and each.ndim]
        self.samples.append(int(tensors[0].shape[0]) if tensors else 1)

    def layer(self, node: fx.Node) -> tuple[str, QuantizedWeighted] | None:
        """The quantized layer of a node with its name in the model, when its quantizer is on."""
        for part in self.parts(node):
            if isinstance(part, QuantizedWeighted) and part.kind != TABLE and part.weight_quant.enabled:
                return self.names[id(part)], part
        return None

    def stub(self, node: fx.Node) -> QuantStub | None:
        """The quantizer that a node is."""
        found = self.module(node)
        return found if isinstance(found, QuantStub) else None

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.live.get_submodule(str(node.target)) if node.op == "call_module" else None

    def tensors(self, node: fx.Node) -> list[Tensor]:
        """The parameters that a node computes with."""
        if node.op == "get_attr":
            place, _, name = str(node.target).rpartition(".")
            found = getattr(self.live.get_submodule(place), name)
            return [found] if isinstance(found, Tensor) else []
        parts = [each for each in (self.module(node), *self.parts(node)) if each is not None]
        inner = [each for part in parts if isinstance(part, QuantizedWeighted) for each in part.refers.values()]
        return [tensor for part in (*parts, *inner) if part is not None for tensor in get_tensors(part)]

    def quantized(self, node: fx.Node) -> list[QuantizedWeighted]:
        """The layers and tables with codes at a node."""
        return [each for each in self.parts(node) if isinstance(each, QuantizedWeighted) and each.weight_quant.enabled]

    def parts(self, node: fx.Node) -> list[nn.Module]:
        """The parts of a group in their order."""
        return list(getattr(self.module(node), "parts", {}).values())

    def source(self, node: fx.Node, layer: QuantizedWeighted) -> fx.Node | None:
        """The node whose value the layer of a node reads; None where it is what another part of its group gives."""
        if self.parts(node)[0] is not layer:
            return None
        place = getattr(self.module(node), "wiring", [[0]])[0][0]
        found = None if place is None else node.args[place]
        return found if isinstance(found, fx.Node) else None

    def inputs(self, node: fx.Node, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """What reaches the layer of a node, batch by batch, in both streams; nothing is advanced."""
        for index in range(self.count):
            yield self.input(node, name, index, noisy=False), self.input(node, name, index, noisy=True)

    def advance(self, node: fx.Node) -> None:
        """Run a node on all batches in both streams."""
        if node.op in ("placeholder", "output"):
            return
        if node.op == "get_attr":  # read from the model whenever it is wanted: lent weights come and go
            self.there.add(node)
            return
        stub, is_same = self.stub(node), node in self.same
        is_read = self._is_read(node)
        if is_read:
            self.there.add(node)
        with torch.no_grad():
            for index in range(self.count if is_read else 0):
                self.exact(node, index)
                if not is_same:
                    self.shelf.put((True, node, index), self._run(self._noisy, node, index, noisy=True), stub)
        for done in self._exact.user_to_last_uses.get(node, []):
            if done not in self.held:
                self._drop(done)

    def exact(self, node: fx.Node, index: int) -> Any:
        """What a node gives in one batch of the float stream: of the shelf, or run now and put there."""
        if node.op == "get_attr":
            return self.value(node, index, noisy=False)
        key = (False, node, index)
        if key in self.shelf:
            return self.shelf.get(key)
        with torch.no_grad():
            value = self._run(self._exact, node, index, noisy=False)
        if self._is_read(node):
            self.shelf.put(key, value)
        return value

    def _is_read(self, node: fx.Node) -> bool:
        """Whether anybody will want the values of a node."""
        return self.keeps_outputs or any(user.op != "output" for user in node.users)

    def hold(self, nodes: Sequence[fx.Node]) -> None:
        """Keep the values of nodes beyond their last reader."""
        self.held.update(nodes)

    def release(self, nodes: Sequence[fx.Node], passed: set[fx.Node]) -> None:
        """Let go of them, where every reader is among those passed."""
        for node in nodes:
            self.held.discard(node)
            if all(user in passed for user in node.users):
                self._drop(node)

    def _drop(self, node: fx.Node) -> None:
        self.there.discard(node)
        for index in range(self.count):
            self.shelf.drop((False, node, index))
            self.shelf.drop((True, node, index))

    def has(self, node: fx.Node) -> bool:
        """Whether the walk has come past a node, and somebody will read it still."""
        return node in self.there

    def value(self, node: fx.Node, index: int, *, noisy: bool) -> Any:
        if node.op == "get_attr":
            return (self._noisy if noisy else self._exact).fetch_attr(str(node.target))
        return self.shelf.get((noisy and node not in self.same, node, index))

    def entries(self, piece: Piece, index: int, *, noisy: bool) -> dict[fx.Node, Any]:
        """What a piece reads."""
        return {node: self.value(node, index, noisy=noisy) for node in piece.entries}

    def run(self, piece: Piece, entries: Mapping[fx.Node, Any], *, noisy: bool = True) -> list[Any]:
        """What the piece, quantized or not, gives for these inputs, of each of its exits."""
        runner, readers = self._noisy if noisy else self._exact, piece.last_reads
        with _environment(runner, dict(entries)) as env:
            for node in piece.nodes:
                env[node] = runner.run_node(node)
                for done in readers.get(node, ()):
                    env.pop(done, None)
            return [env[node] for node in piece.exits]

    def rerun(self, piece: Piece) -> None:
        """Put the exits of a piece away anew, after what was chosen in it changed."""
        with torch.no_grad():
            for index in range(self.count):
                found = self.run(piece, self.entries(piece, index, noisy=True))
                for node, value in zip(piece.exits, found, strict=True):
                    if node not in self.same:
                        self.shelf.put((True, node, index), value, self.stub(node))

    def _same(self) -> set[fx.Node]:
        """Nodes whose value is one in both streams."""
        found = set(self.places)
        for node in self.graph.nodes:
            if all(each in found for each in node.all_input_nodes) and not self._quantizes(node):
                found.add(node)
        return found

    def _quantizes(self, node: fx.Node) -> bool:
        parts = [each for each in (self.module(node), *self.parts(node)) if each is not None]
        return any(isinstance(each, Quantizing) and each.enabled for part in parts for each in part.modules())

    def _run(self, runner: fx.Interpreter, node: fx.Node, index: int, *, noisy: bool) -> Any:
        with _environment(runner, {each: self.value(each, index, noisy=noisy) for each in node.all_input_nodes}) as env:
            weights = [env[each] for each in node.all_input_nodes if each.op == "get_attr"]
            return _own(runner.run_node(node), weights)

    def input(self, node: fx.Node, name: str, index: int, *, noisy: bool) -> Tensor:
        """What reaches the layer of a node in one batch of one stream."""
        runner, owner = (self._noisy, self.live) if noisy else (self._exact, self.plain)
        seen: list[Tensor] = []

        def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[0])
            raise _Reached

        handle = owner.get_submodule(name).register_forward_pre_hook(stop)
        try:
            with torch.no_grad():
                self._run(runner, node, index, noisy=noisy)
        except _Reached:
            pass
        finally:
            handle.remove()
        return seen[0]


class _Inputs(nn.Module):
    """Hands the flat inputs of every batch to a walk."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = [walk]  # in a list: no state of this module

    def forward(self, *inputs: Any) -> Any:
        self.walk[0].take(inputs)


def _own(value: Any, weights: Sequence[Any]) -> Any:
    """The value, copied where it is a view of a weight: the memory of lent weights is taken away after their piece."""
    storages = {each.untyped_storage().data_ptr() for each in weights if isinstance(each, Tensor)}
    is_view = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages
    return value.clone() if is_view else value


@contextmanager
def _environment(runner: fx.Interpreter, values: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """What an interpreter knows while it runs single nodes."""
    runner.env = values
    try:
        yield values
    finally:
        runner.env = {}
