"""XNNPACK's partitioner, which decomposes a program once where ExecuTorch would do it twice.

XNNPACK takes a few operations whole that torch would decompose: linear, prelu, hardswish, max_pool2d. ExecuTorch
decomposes all others, asks the partitioner about each of these, and decomposes the program again for those that it does
not take. If it takes all of them, the second time changes nothing. A partitioner without a filter leaves it out.

This module imports ExecuTorch: import it where a file is written.
"""

from collections.abc import Callable
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch import fx
from torch.export import ExportedProgram

Filter = Callable[[fx.Node], bool]


class NotTakenError(Exception):
    """A decomposition made one of these operations, and XNNPACK does not take it: decompose the program again."""


class DecomposeOnce(XnnpackPartitioner):  # type: ignore[misc]
    """Raises NotTakenError from `partition` where the result would differ from XnnpackPartitioner's."""

    is_filtered = False  # True: ExecuTorch decomposes twice, and asks again in between

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Filter | None]:
        whole, is_taken = super().ops_to_not_decompose(ep)
        self.is_filtered = self.is_filtered or not _takes_all(ep, whole, is_taken)
        return whole, is_taken if self.is_filtered else None

    def partition(self, exported_program: ExportedProgram) -> Any:
        whole, is_taken = super().ops_to_not_decompose(exported_program)
        if not self.is_filtered and not _takes_all(exported_program, whole, is_taken):
            raise NotTakenError
        return super().partition(exported_program)


def _takes_all(program: ExportedProgram, whole: list[Any], is_taken: Filter) -> bool:
    """Whether XNNPACK takes every such operation of a program."""
    names = {name for operation in whole for name in (operation.__name__, str(operation))}  # in aten, and in edge
    return all(is_taken(node) for node in program.graph.nodes if getattr(node.target, "__name__", "") in names)
