"""An exported file that is called as the model is: tensors in, the model's own output structure out."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scalepoint.errors import VerificationError
from scalepoint.graph.modes import evaluating


class RuntimeModel:
    """The file in ONNX Runtime, in this process. Verify it first: a runtime that crashes takes its process along."""

    def __init__(
        self, path: str | Path, like: nn.Module | None = None, example: Any = None, *, threads: int = 0
    ) -> None:
        import onnxruntime as ort  # noqa: PLC0415  # imported where it is needed

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise VerificationError(f"onnxruntime cannot load {path}: {error}") from error
        self.names = [each.name for each in self.session.get_inputs()]
        self.structure = None if like is None else _structure(like, example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        by_name = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        feeds = {
            name: (by_name[name] if name in by_name else leaves[index]).detach().cpu().numpy()
            for index, name in enumerate(self.names)
        }
        outputs = [torch.from_numpy(np.array(value)) for value in self.session.run(None, feeds)]
        if self.structure is not None and self.structure.num_leaves == len(outputs):
            return pytree.tree_unflatten(outputs, self.structure)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _itself(self) -> "RuntimeModel":
        return self

    eval = _itself  # as a model has it; a file has no other mode


def _structure(model: nn.Module, example: Any) -> Any:
    """How the model nests its outputs; its modes stay as they are."""
    args, kwargs = example
    with evaluating(model), torch.no_grad():
        return pytree.tree_structure(model(*args, **kwargs))
