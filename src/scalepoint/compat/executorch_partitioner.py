"""A partitioner that decomposes a program once, where ExecuTorch would do it twice. Part of the patch `executorch`.

XNNPACK takes a few operations as they are that torch would decompose: linear, prelu, hardswish, max_pool2d. ExecuTorch
1.5 decomposes all others, asks the partitioner about each of these, and decomposes the program again for those that the
partitioner rejects. If it accepts all of them, the second time changes nothing. ExecuTorch skips it for a partitioner
without a filter.

This module imports ExecuTorch: import it where a file is written.
"""

from collections.abc import Callable
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch import fx
from torch.export import ExportedProgram

NodeFilter = Callable[[fx.Node], bool]


class NotDelegatedError(Exception):
    """A decomposition produced an operation that XNNPACK rejects: lower the program again with XnnpackPartitioner."""


class SingleDecompositionPartitioner(XnnpackPartitioner):  # type: ignore[misc]
    """Raises NotDelegatedError from `partition` where the result would differ from XnnpackPartitioner's.

    Attributes:
        uses_filter: Whether ExecuTorch gets the filter of XnnpackPartitioner, and so decomposes twice.
    """

    uses_filter = False

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], NodeFilter | None]:
        operations, is_accepted = super().ops_to_not_decompose(ep)
        self.uses_filter = self.uses_filter or not _accepts_all(ep, operations, is_accepted)
        return operations, is_accepted if self.uses_filter else None

    def partition(self, exported_program: ExportedProgram) -> Any:
        operations, is_accepted = super().ops_to_not_decompose(exported_program)
        if not self.uses_filter and not _accepts_all(exported_program, operations, is_accepted):
            raise NotDelegatedError
        return super().partition(exported_program)


def _accepts_all(program: ExportedProgram, operations: list[Any], is_accepted: NodeFilter) -> bool:
    """Whether XNNPACK accepts every node of a program that is one of these operations."""
    names = {name for operation in operations for name in (operation.__name__, str(operation))}  # in aten, and in edge
    return all(is_accepted(node) for node in program.graph.nodes if getattr(node.target, "__name__", "") in names)
