"""Sizes that depend on tensor values (`n.item()`, nonzero): record them in one run on the example."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from scalepoint.errors import ScalepointWarning
from scalepoint.graph.dry_run import buffers_restored
from scalepoint.graph.nodes import get_fake_tensor, set_info
from scalepoint.graph.user_traceback import user_level
from scalepoint.support.formatting import to_one_line


def record_sizes(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Store `NodeInfo.sizes` on the nodes of a graph that has such sizes, or warn if the run fails."""
    values = [get_fake_tensor(node) for node in graph_module.graph.nodes]
    if not any(free_unbacked_symbols(value) for value in values if value is not None):
        return
    try:
        with buffers_restored(graph_module):
            _SizeRecorder(graph_module).run(*inputs, enable_io_processing=False)
    except MemoryError:
        raise
    except Exception as error:  # user code can raise any exception, and only the MAC counts need these sizes
        reason = to_one_line(str(error).strip().partition("\n")[0]) or type(error).__name__
        message = f"sizes that depend on values are unknown, so the MACs of these layers are not counted: {reason}"
        warnings.warn(ScalepointWarning(message), stacklevel=user_level())


class _SizeRecorder(fx.Interpreter):
    """Store the shape of every result."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            set_info(n, sizes=tuple(value.shape))
        return value
