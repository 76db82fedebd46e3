"""An exported file that is called as the model is: tensors in, the model's own output structure out."""

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

    threads=0 lets the runtime choose.
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
        found: tuple[list[Any], Any] = ([], None) if like is None else _read_output_structure(like, example)
        self.leaves, self.structure = found
        self.served = RuntimeSession(find_runtime(runtime), check_exists(path), threads=threads, memory=memory)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        by_name = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        feeds = {
            name: to_file_array(by_name[name] if name in by_name else leaves[index])
            for index, name in enumerate(self.served.inputs)
        }
        outputs = [torch.from_numpy(np.array(value)) for value in self.served(feeds)]
        given = iter(outputs)
        if self.structure is not None and sum(map(_is_file_output, self.leaves)) == len(outputs):
            whole = [next(given) if _is_file_output(leaf) else leaf for leaf in self.leaves]
            return pytree.tree_unflatten(whole, self.structure)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def close(self) -> None:
        """End the process."""
        self.served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _itself(self) -> Self:
        return self

    eval = _itself  # as a model has it; a file has no other mode


def _is_file_output(leaf: Any) -> bool:
    """Whether a file has it among its outputs: tensors and numbers, no None and no text."""
    return isinstance(leaf, Tensor | bool | int | float)


def _read_output_structure(model: nn.Module, example: Any) -> tuple[list[Any], Any]:
    """What the model gives, and how it nests it; its modes stay as they are."""
    args, kwargs = example
    with eval_mode(model), torch.no_grad(), caller_dtype():
        return pytree.tree_flatten(model(*args, **kwargs))
