"""The class of captured graphs, and the check for names that torch.fx can write as code."""

import warnings
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

from torch import fx, nn


class CapturedGraph(fx.GraphModule):
    """A GraphModule without the FutureWarning about LeafSpec that torch 2.13 issues in deepcopy."""

    writes_code = True  # False inside code_generation_paused()

    def recompile(self) -> Any:
        return super().recompile() if CapturedGraph.writes_code else None

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            return super().__deepcopy__(memo)


@contextmanager
def code_generation_paused() -> Iterator[None]:
    """Copy and change graphs without generating their code each time. Call `recompile` afterwards."""
    before, CapturedGraph.writes_code = CapturedGraph.writes_code, False
    try:
        yield
    finally:
        CapturedGraph.writes_code = before


def adopt_modules(graph_module: fx.GraphModule, owner: nn.Module) -> None:
    """Give the graph the modules, parameters and buffers of `owner`, in the same order."""
    added = {name: child for name, child in graph_module._modules.items() if name not in owner._modules}
    constants = {name: value for name, value in graph_module._buffers.items() if name.startswith("constant_")}
    attributes = vars(graph_module)
    attributes["_modules"] = {**owner._modules, **added}
    attributes["_parameters"] = dict(owner._parameters)
    attributes["_buffers"] = {**owner._buffers, **constants}
    attributes["_non_persistent_buffers_set"] = owner._non_persistent_buffers_set | set(constants)


def is_valid_name(name: str) -> bool:
    """Whether the code that torch.fx writes, `.name` or `getattr(_, "name")`, reads the attribute of that name."""
    if name.isidentifier():
        return not iskeyword(name) and normalize("NFKC", name) == name
    try:
        return name.isdigit() or literal_eval(f'"{name}"') == name
    except (SyntaxError, ValueError):
        return False
