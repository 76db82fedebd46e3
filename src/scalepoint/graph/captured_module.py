"""The class of a captured graph, and which names its code can have."""

import warnings
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

from torch import fx, nn


class CapturedGraph(fx.GraphModule):
    """A graph whose deepcopy is silent: torch's own warns of torch's own class."""

    writes_code = True

    def recompile(self) -> Any:
        return super().recompile() if CapturedGraph.writes_code else None

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            return super().__deepcopy__(memo)


@contextmanager
def code_generation_paused() -> Iterator[None]:
    """Inside, graphs are copied and changed without writing their code anew; `recompile` does it afterwards."""
    before, CapturedGraph.writes_code = CapturedGraph.writes_code, False
    try:
        yield
    finally:
        CapturedGraph.writes_code = before


def adopt_modules(graph_module: fx.GraphModule, owner: nn.Module) -> None:
    """Give the graph the modules, parameters and buffers of `owner`, in their order."""
    added = {name: child for name, child in graph_module._modules.items() if name not in owner._modules}
    constants = {name: value for name, value in graph_module._buffers.items() if name.startswith("constant_")}
    attributes = vars(graph_module)
    attributes["_modules"] = {**owner._modules, **added}
    attributes["_parameters"] = dict(owner._parameters)
    attributes["_buffers"] = {**owner._buffers, **constants}
    attributes["_non_persistent_buffers_set"] = owner._non_persistent_buffers_set | set(constants)


@cache
def get_reserved_names() -> frozenset[str]:
    """What torch keeps on a graph of its own, where a module of the model with that name would stand."""
    empty = fx.GraphModule(nn.Module(), fx.Graph())
    return frozenset(dir(empty)) - frozenset(dir(nn.Module()))


def is_valid_name(name: str) -> bool:
    """Whether torch.fx, which writes `.name` or `getattr(_, "name")`, gets the same name back when the code runs."""
    if name.isidentifier():
        return not iskeyword(name) and normalize("NFKC", name) == name
    try:
        return name.isdigit() or literal_eval(f'"{name}"') == name
    except (SyntaxError, ValueError):
        return False
