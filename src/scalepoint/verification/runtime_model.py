"""RuntimeModel: an exported file that is called like the model and returns the same structure of tensors."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from scalepoint.compat.torch_names import pytree
from scalepoint.graph.module_state import eval_mode
from scalepoint.runtimes import Runtime, find_runtime
from scalepoint.runtimes.serving import RuntimeSession
from scalepoint.support.torch_state import caller_dtype
from scalepoint.verification.file_formats import check_exists
from scalepoint.verification.simulation import to_file_array


class RuntimeModel:
    """A file in its runtime, called like the model. It runs in a separate process until `close`.

    Args:
        path: The file.
        like: The model. Outputs get its structure; without it a tensor or a tuple of tensors is returned.
        example: Example inputs (args, kwargs), with which `like` is run once.
        runtime: A runtime or its name.
        threads: Threads of the runtime; 0 lets the runtime choose.
        memory: Memory limit in bytes; the memory of the machine by default.

    Example:
        with RuntimeModel("model.onnx") as run:
            logits = run(torch.randn(1, 3, 224, 224))
    """

    def __init__(
        self,
        path: str | Path,
        like: nn.Module | None = None,
        example: Any = None,
        *,
        runtime: str | Runtime = "onnxruntime",
        threads: int = 0,
        memory: int | None = None,
    ) -> None:
        self._leaves: list[Any] = []
        self._structure: Any = None
        if like is not None:
            self._leaves, self._structure = _read_output_structure(like, example)
        self.session = RuntimeSession(find_runtime(runtime), check_exists(path), threads=threads, memory=memory)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        by_name = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        feeds = {
            name: to_file_array(by_name[name] if name in by_name else leaves[index])
            for index, name in enumerate(self.session.inputs)
        }
        outputs = [torch.from_numpy(np.array(value)) for value in self.session(feeds)]
        if self._structure is not None and sum(map(_is_file_output, self._leaves)) == len(outputs):
            remaining = iter(outputs)
            merged = [next(remaining) if _is_file_output(leaf) else leaf for leaf in self._leaves]
            return pytree.tree_unflatten(merged, self._structure)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def close(self) -> None:
        """End the runtime's process."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _return_self(self) -> Self:
        """Return the model unchanged: a file has no training mode."""
        return self

    eval = _return_self  # an `evaluate` function may call model.eval(); a file has only this mode


def _is_file_output(leaf: Any) -> bool:
    """Whether this output of the model is also an output of the file: tensors and numbers are, None and text not."""
    return isinstance(leaf, Tensor | bool | int | float)


def _read_output_structure(model: nn.Module, example: Any) -> tuple[list[Any], Any]:
    """Return the outputs of the model as leaves and their pytree structure."""
    args, kwargs = example
    with eval_mode(model), torch.no_grad(), caller_dtype():
        return pytree.tree_flatten(model(*args, **kwargs))
