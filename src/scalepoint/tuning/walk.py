"""Both streams of a model, node after node: all batches up to a node, then the next one.

    exact[n] = f_n(exact inputs)         noisy[n] = q_n(noisy inputs), with what was chosen so far

A value goes when its last reader has run. Until the first quantizer both streams are one. Beyond the memory limit
values lie in files of a temporary folder.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from scalepoint.quantize.feeding import Data, feed
from scalepoint.quantize.parts import TABLE
from scalepoint.quantize.stubs import Quantizing
from scalepoint.quantize.twins import driven, twin
from scalepoint.quantize.weighted import QuantizedWeighted


class Shelf:
    """Tensors by key, in memory as far as the limit goes, then on disk; what is no plain tensor stays in memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.most = limit, 0, 0
        self.values: dict[Any, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def put(self, key: Any, value: Any) -> None:
        size = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        if size and self.held + size > self.limit:
            value = self._spilled(value.contiguous())
        else:
            self.held += size
            self.most = max(self.most, self.held)
        self.values[key] = value

    def get(self, key: Any) -> Any:
        value = self.values[key]
        return value.read() if isinstance(value, _OnDisk) else value

    def drop(self, key: Any) -> None:
        value = self.values.pop(key, None)
        if isinstance(value, _OnDisk):
            value.path.unlink(missing_ok=True)
        elif isinstance(value, Tensor):
            self.held -= value.numel() * value.element_size()

    def _spilled(self, value: Tensor) -> "_OnDisk":
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="scalepoint-")
        self._count += 1
        path = Path(self._folder.name) / str(self._count)
        value.detach().reshape(-1).view(torch.uint8).numpy().tofile(path)
        return _OnDisk(path, value.dtype, value.shape)

    def close(self) -> None:
        self.values.clear()
        if self._folder is not None:
            self._folder.cleanup()


class _OnDisk:
    def __init__(self, path: Path, dtype: torch.dtype, shape: torch.Size) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape

    def read(self) -> Tensor:
        size = self.path.stat().st_size
        return torch.from_file(str(self.path), size=size, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


class _Inputs(nn.Module):
    """Takes the flat inputs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[Any, ...]] = []

    def forward(self, *inputs: Any) -> Any:
        self.batches.append(inputs)


class _Reached(BaseException):
    """The input of the layer is at hand: what comes after it need not run."""


class Walk:
    """The two streams of one model over some batches."""

    def __init__(self, model: fx.GraphModule, batches: Sequence[tuple[Any, ...]], *, memory: int) -> None:
        self.plain, self.live = twin(model, quantizing=False), twin(model, quantizing=True)
        self._exact, self._noisy = (fx.Interpreter(each, graph=model.graph) for each in (self.plain, self.live))
        self.count = len(batches)
        self.shelf = Shelf(memory)
        places = [node for node in model.graph.nodes if node.op == "placeholder"]
        for index, inputs in enumerate(batches):
            for node, value in zip(places, inputs, strict=True):
                self.shelf.put((False, node, index), value)
        self.same = set(places)  # nodes whose value is one in both streams

    def layer(self, node: fx.Node) -> tuple[str, QuantizedWeighted] | None:
        """The quantized layer of a node with its name in the model, when its quantizer is on."""
        if node.op != "call_module":
            return None
        group = self.live.get_submodule(str(node.target))
        for part in getattr(group, "parts", {}).values():
            if isinstance(part, QuantizedWeighted) and part.kind != TABLE and part.weight_quant.enabled:
                name = next(name for name, each in self.live.named_modules() if each is part)
                return name, part
        return None

    def inputs(self, node: fx.Node, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """What reaches the layer of a node, batch by batch, in both streams; nothing is advanced."""
        for index in range(self.count):
            yield (
                self._reached(self._exact, self.plain, node, name, index, noisy=False),
                self._reached(self._noisy, self.live, node, name, index, noisy=True),
            )

    def advance(self, node: fx.Node) -> None:
        """Run a node on all batches in both streams."""
        if node.op in ("placeholder", "output"):
            return
        is_same = all(each in self.same for each in node.all_input_nodes) and not self._quantizes(node)
        if is_same:
            self.same.add(node)
        with torch.no_grad():
            for index in range(self.count):
                self.shelf.put((False, node, index), self._run(self._exact, node, index, noisy=False))
                if not is_same:
                    self.shelf.put((True, node, index), self._run(self._noisy, node, index, noisy=True))
        for done in self._exact.user_to_last_uses.get(node, []):
            for index in range(self.count):
                self.shelf.drop((False, done, index))
                self.shelf.drop((True, done, index))

    def _quantizes(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        module = self.live.get_submodule(str(node.target))
        parts = [module, *getattr(module, "parts", {}).values()]
        return any(isinstance(each, Quantizing) and each.enabled for part in parts for each in part.modules())

    def _run(self, runner: fx.Interpreter, node: fx.Node, index: int, *, noisy: bool) -> Any:
        runner.env = {each: self._value(each, index, noisy) for each in node.all_input_nodes}
        try:
            return runner.run_node(node)
        finally:
            runner.env = {}

    def _value(self, node: fx.Node, index: int, noisy: bool) -> Any:
        return self.shelf.get((noisy and node not in self.same, node, index))

    def _reached(
        self, runner: fx.Interpreter, owner: fx.GraphModule, node: fx.Node, name: str, index: int, *, noisy: bool
    ) -> Tensor:
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


def inputs_of_batches(
    model: fx.GraphModule, data: Data, *, max_batches: int | None, skip_nan: bool, progress: bool | None
) -> list[tuple[Any, ...]]:
    """The flat inputs of every batch that the data gives."""
    taken = _Inputs()
    run = driven(model, taken, gives_outputs=False)
    feed(run, data, "reading the data", max_batches=max_batches, skip_nan=skip_nan, progress=progress)
    return taken.batches
