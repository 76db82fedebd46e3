"""Sizes that depend on values (`n.item()`, nonzero): symbols that no shape tells, seen in one run on the example."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.blame import user_level
from scalepoint.graph.dry_run import spared
from scalepoint.graph.nodes import set_info, tensor_of
from scalepoint.support.formatting import one_line


def note_sizes(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Store `NodeInfo.sizes` on every node of a graph that has such sizes; where the run fails they stay unknown, and
    that is told."""
    values = [tensor_of(node) for node in graph_module.graph.nodes]
    if not any(free_unbacked_symbols(value) for value in values if value is not None):
        return
    try:
        with spared(graph_module):
            _Noting(graph_module).run(*inputs, enable_io_processing=False)
    except MemoryError:
        raise
    except Exception as error:  # the model's own code may fail in any way, and only a count hangs on it
        said = one_line(str(error).strip().partition("\n")[0]) or type(error).__name__
        message = f"sizes that depend on values were not found, so MACs behind them do not count: a run failed: {said}"
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


class _Noting(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            set_info(n, sizes=tuple(value.shape))
        return value
