"""Runs the float model and the quantized model side by side, node by node: all batches pass a node, then the next node.

    exact[n] = f_n(exact inputs)         noisy[n] = q_n(noisy inputs), with the codes that were chosen so far

    walk.read_data(model, batches)
    for node in walk.graph.nodes:
        ...                            # the inputs of the node are stored now, in both streams
        walk.advance(node)             # run the node, store its values, and drop values that nothing reads any more

So a layer can be solved at its node, and no node before it runs again. Nodes before the first quantizer have one value
for both streams ("same nodes"). A stub is the module of an activation quantizer; a part is a module of a fused group.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint import distributed
from scalepoint.graph.operations import get_tensors
from scalepoint.quantize.batches import Data
from scalepoint.quantize.feeding import feed_data
from scalepoint.quantize.operations import EMBEDDING
from scalepoint.quantize.quantized_layers import QuantizedLayer
from scalepoint.quantize.quantizers import QuantizerBase, QuantStub
from scalepoint.quantize.shadow_models import copy_with_shared_parameters, wrap_with_signature
from scalepoint.tuning.activation_store import ActivationStore
from scalepoint.tuning.pieces import Piece


@dataclass(frozen=True)
class LayerUse:
    """A quantized layer at one node of the graph; `path` is its path in the model."""

    node: fx.Node
    path: str
    layer: QuantizedLayer


class _InputReached(BaseException):
    """Ends a forward at the input of a layer. A BaseException, so that no `except Exception` of a module catches it."""


class StreamWalk:
    """Runs both streams of a model over the batches of this rank, and stores their values.

    Attributes:
        float_model, quantized_model: Copies that share the parameters; the first has no active quantizers.
        names: Path of every module of the quantized copy, by id.
        samples_per_batch: Number of samples in each batch of this rank.
        first_samples: Number of the first sample of each batch, counted over all ranks.
        sample_count: Samples of all ranks.
        batch_owners: For every batch of all ranks, its rank and its index on that rank.
        placeholders: The input nodes.
        same_nodes: Nodes with one value for both streams.
        stored_nodes: Nodes whose values are stored now.
        pinned: Nodes whose values are kept after their last reader.
        stub_nodes: The nodes of every activation quantizer.
    """

    def __init__(self, model: fx.GraphModule, *, memory: int, keeps_outputs: bool = True) -> None:
        self.graph, self.keeps_outputs = model.graph, keeps_outputs
        self.float_model = copy_with_shared_parameters(model, quantizing=False)
        self.quantized_model = copy_with_shared_parameters(model, quantizing=True)
        self._float_runner = fx.Interpreter(self.float_model, graph=model.graph)
        self._quantized_runner = fx.Interpreter(self.quantized_model, graph=model.graph)
        self.names = {id(module): name for name, module in self.quantized_model.named_modules()}
        self.samples_per_batch: list[int] = []
        self.first_samples: list[int] = []
        self.sample_count = 0
        self.batch_owners: list[tuple[int, int]] = []
        # Keys are (is_noisy, node, batch index). Nodes with one value for both streams are stored once, as not noisy.
        self.activation_store = ActivationStore(memory)
        self.placeholders = [node for node in model.graph.nodes if node.op == "placeholder"]
        self.same_nodes = self._find_same_nodes()
        self.stored_nodes = set(self.placeholders)
        self.pinned: set[fx.Node] = set()
        self.stub_nodes: dict[QuantStub, list[fx.Node]] = {}
        for node in model.graph.nodes:
            if (stub := self.get_stub(node)) is not None:
                self.stub_nodes.setdefault(stub, []).append(node)

    @property
    def batch_count(self) -> int:
        """Batches of this rank."""
        return len(self.samples_per_batch)

    def read_data(self, model: fx.GraphModule, data: Data, **options: Any) -> None:
        """Store the inputs of every batch. `options` are those of `feed_data`."""
        receiver = wrap_with_signature(model, _BatchReceiver(self), gives_outputs=False)
        feed_data(receiver, data, "reading the data", merge=lambda: None, **options)
        samples = distributed.gather_values("reading the data", self.samples_per_batch)
        self.first_samples, self.sample_count = distributed.batch_offsets(samples)
        self.batch_owners = distributed.interleave(
            [(rank, index) for index in range(len(part))] for rank, part in enumerate(samples)
        )

    def add_batch(self, inputs: Sequence[Any]) -> None:
        """Store the flat inputs of one batch."""
        index = len(self.samples_per_batch)
        for node, value in zip(self.placeholders, inputs, strict=True):
            self.activation_store.put((False, node, index), value.detach() if isinstance(value, Tensor) else value)
        tensors = [value for value in inputs if isinstance(value, Tensor) and value.ndim]
        self.samples_per_batch.append(int(tensors[0].shape[0]) if tensors else 1)

    # -- the modules and tensors of a node ----------------------------------------------------------------------------

    def get_layer(self, node: fx.Node) -> LayerUse | None:
        """Return the quantized layer of a node, if its quantizer is on. Embedding tables do not count."""
        for part in self.get_parts(node):
            if isinstance(part, QuantizedLayer) and part.kind != EMBEDDING and part.weight_quant.enabled:
                return LayerUse(node, self.names[id(part)], part)
        return None

    def get_stub(self, node: fx.Node) -> QuantStub | None:
        """Return the activation quantizer of a node, if it is one."""
        module = self.get_module(node)
        return module if isinstance(module, QuantStub) else None

    def get_module(self, node: fx.Node) -> nn.Module | None:
        return self.quantized_model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def get_parameters(self, node: fx.Node) -> list[Tensor]:
        """Return the tensors that a node computes with."""
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            value = getattr(self.quantized_model.get_submodule(path), name)
            return [value] if isinstance(value, Tensor) else []
        modules = [module for module in (self.get_module(node), *self.get_parts(node)) if module is not None]
        layers = [module for module in modules if isinstance(module, QuantizedLayer)]
        inner = [module for layer in layers for module in layer.module_refs.values() if module is not None]
        return [tensor for module in (*modules, *inner) for tensor in get_tensors(module)]

    def get_quantized_layers(self, node: fx.Node) -> list[QuantizedLayer]:
        """Return the layers and embedding tables with codes at a node."""
        return [part for part in self.get_parts(node) if isinstance(part, QuantizedLayer) and part.weight_quant.enabled]

    def get_parts(self, node: fx.Node) -> list[nn.Module]:
        """Return the parts of a fused group, in order; none for other nodes."""
        return list(getattr(self.get_module(node), "parts", {}).values())

    def find_source(self, node: fx.Node, layer: QuantizedLayer) -> fx.Node | None:
        """Return the node whose value a layer reads; None if it reads the result of another part of its group."""
        if self.get_parts(node)[0] is not layer:
            return None
        argument = getattr(self.get_module(node), "wiring", [[0]])[0][0]
        source = None if argument is None else node.args[argument]
        return source if isinstance(source, fx.Node) else None

    # -- values -------------------------------------------------------------------------------------------------------

    def advance(self, node: fx.Node) -> None:
        """Run a node on all batches in both streams, and drop the values that it was the last to read."""
        if node.op in ("placeholder", "output"):
            return
        if node.op == "get_attr":
            # Not stored but read from the model at every use: weights of a provider are loaded and released.
            self.stored_nodes.add(node)
            return
        stub, is_same = self.get_stub(node), node in self.same_nodes
        is_read = self._is_read(node)
        if is_read:
            self.stored_nodes.add(node)
        with torch.no_grad():
            for index in range(self.batch_count if is_read else 0):
                self.float_value(node, index)  # runs the node and stores its value
                if not is_same:
                    value = self._run_node(node, index, noisy=True)
                    # With the stub, the output of an activation quantizer is stored as codes.
                    self.activation_store.put((True, node, index), value, stub)
        # Interpreter lists for each node the values that no later node reads.
        for source in self._float_runner.user_to_last_uses.get(node, []):
            if source not in self.pinned:
                self._drop(source)

    def float_value(self, node: fx.Node, index: int) -> Any:
        """Return the value of a node in one batch of the float stream; run and stored if it is not stored yet."""
        if node.op == "get_attr":
            return self.get_value(node, index, noisy=False)
        # The collector reads targets from the value before the walk advances; `advance` then finds it stored.
        key = (False, node, index)
        if key in self.activation_store:
            return self.activation_store.get(key)
        with torch.no_grad():
            value = self._run_node(node, index, noisy=False)
        if self._is_read(node):
            self.activation_store.put(key, value)
        return value

    def _is_read(self, node: fx.Node) -> bool:
        """Whether the values of a node are needed later."""
        return self.keeps_outputs or any(user.op != "output" for user in node.users)

    def pin(self, nodes: Sequence[fx.Node]) -> None:
        """Keep the values of nodes after their last reader."""
        self.pinned.update(nodes)

    def unpin(self, nodes: Sequence[fx.Node], passed: set[fx.Node]) -> None:
        """Undo `pin`, and drop the values whose readers have all passed."""
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
        """Whether the values of a node are stored: it has run, and its last reader has not."""
        return node in self.stored_nodes

    def get_value(self, node: fx.Node, index: int, *, noisy: bool) -> Any:
        """Return the stored value of a node in one batch of the float stream, or of the quantized one if `noisy`."""
        if node.op == "get_attr":
            return self._runner(noisy=noisy).fetch_attr(str(node.target))
        return self.activation_store.get((noisy and node not in self.same_nodes, node, index))

    def capture_input(self, node: fx.Node, path: str, index: int, *, noisy: bool) -> Tensor:
        """Return the input of the layer at `path`, which is a part of `node`, in one batch of one stream.

        The layer may be in the middle of a fused group, so the node runs until a hook of the layer stops it.
        """
        model = self.quantized_model if noisy else self.float_model
        captured: list[Tensor] = []

        def stop(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            captured.append(inputs[0])
            raise _InputReached

        handle = model.get_submodule(path).register_forward_pre_hook(stop)
        try:
            with torch.no_grad():
                self._run_node(node, index, noisy=noisy)
        except _InputReached:
            pass
        finally:
            handle.remove()
        return captured[0]

    # -- pieces -------------------------------------------------------------------------------------------------------

    def get_entries(self, piece: Piece, index: int, *, noisy: bool) -> dict[fx.Node, Any]:
        """Return the values that a piece reads, in one batch of one stream."""
        return {node: self.get_value(node, index, noisy=noisy) for node in piece.entries}

    def run_piece(self, piece: Piece, entries: Mapping[fx.Node, Any], *, noisy: bool = True) -> list[Any]:
        """Run a piece, quantized or not, on these inputs. Returns the values of its exits; stores nothing."""
        runner = self._runner(noisy=noisy)
        with _node_environment(runner, dict(entries)) as env:
            for node in piece.nodes:
                env[node] = runner.run_node(node)
                # Without this the values of all nodes would stay until the end; gradients keep what they need.
                for source in piece.last_reads.get(node, ()):
                    env.pop(source, None)
            return [env[node] for node in piece.exits]

    def store_rerun(self, piece: Piece) -> None:
        """Store the exits of a piece again, after its modules were changed."""
        with torch.no_grad():
            for index in range(self.batch_count):
                values = self.run_piece(piece, self.get_entries(piece, index, noisy=True))
                for node, value in zip(piece.exits, values, strict=True):
                    if node not in self.same_nodes:
                        self.activation_store.put((True, node, index), value, self.get_stub(node))

    def _find_same_nodes(self) -> set[fx.Node]:
        """Return the nodes before any active quantizer: the start of the model, and masks computed from its inputs."""
        same = set(self.placeholders)
        for node in self.graph.nodes:
            if all(source in same for source in node.all_input_nodes) and not self._has_active_quantizer(node):
                same.add(node)
        return same

    def _has_active_quantizer(self, node: fx.Node) -> bool:
        parts = [part for part in (self.get_module(node), *self.get_parts(node)) if part is not None]
        modules = (module for part in parts for module in part.modules())
        return any(isinstance(module, QuantizerBase) and module.enabled for module in modules)

    def _run_node(self, node: fx.Node, index: int, *, noisy: bool) -> Any:
        inputs = {source: self.get_value(source, index, noisy=noisy) for source in node.all_input_nodes}
        weights = [value for source, value in inputs.items() if source.op == "get_attr"]
        runner = self._runner(noisy=noisy)
        with _node_environment(runner, inputs):
            return _copy_if_view(runner.run_node(node), weights)

    def _runner(self, *, noisy: bool) -> fx.Interpreter:
        return self._quantized_runner if noisy else self._float_runner


class _BatchReceiver(nn.Module):
    """Passes the flat inputs of every batch to a walk."""

    def __init__(self, walk: StreamWalk) -> None:
        super().__init__()
        self.walk = [walk]  # in a list, so that torch does not see the walk as state of this module

    def forward(self, *inputs: Any) -> Any:
        self.walk[0].add_batch(inputs)


def _copy_if_view(value: Any, weights: Sequence[Any]) -> Any:
    """Copy a value that is a view of a weight: the memory of provided weights is released after their piece."""
    storages = {weight.untyped_storage().data_ptr() for weight in weights if isinstance(weight, Tensor)}
    is_view = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages
    return value.clone() if is_view else value


@contextmanager
def _node_environment(runner: fx.Interpreter, values: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """A context in which an interpreter reads and stores these values, so that it can run single nodes."""
    runner.env = values
    try:
        yield values
    finally:
        runner.env = {}
