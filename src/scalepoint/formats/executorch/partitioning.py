"""A pass and a partitioner for the division of a program into delegates of XNNPACK.

SeparateOutputs: no delegate reads a dequantized tensor that is also one of its outputs.

DecomposeOnce: a partitioner that decomposes a program once where ExecuTorch would do it twice. XNNPACK takes a few
operations whole that torch would decompose: linear, prelu, hardswish, max_pool2d. ExecuTorch decomposes all others,
asks the partitioner about each of these, and decomposes the program again for those that it does not take. If it takes
all of them, the second time changes nothing. A partitioner without a filter leaves it out.

This module imports ExecuTorch: import it where a file is written.
"""

from collections.abc import Callable
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch import fx
from torch.export import ExportedProgram

NodeFilter = Callable[[fx.Node], bool]


class SeparateOutputs(ExportedProgramPassBase):  # type: ignore[misc]
    """Gives readers of a dequantize in other delegates, or in none, a dequantize of their own.

    `graph.prepared` has done so for the operations of the model, but some are decomposed afterwards (Mish, CELU) and
    read their input inside and outside of a delegate. For such an output ChannelsLastTaggedReshapePass (ExecuTorch 1.5)
    puts a transpose before the readers inside too: they get their values in a wrong order, or it raises KeyError 'val'.
    """

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        shared = [node for node in exported_program.graph.nodes if _is_dequantize(node) and len(node.users) > 1]
        partitions = XnnpackPartitioner().generate_partitions(exported_program) if shared else []
        delegates = {node: partition.id for partition in partitions for node in partition.nodes}
        changed = [_copy_for_other_delegates(node, delegates) for node in shared if node in delegates]
        return ExportedProgramPassResult(exported_program, any(changed))


def _is_dequantize(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "quantized_decomposed.dequantize_per_tensor.default"


def _copy_for_other_delegates(node: fx.Node, delegates: dict[fx.Node, int]) -> bool:
    """One copy for each other delegate that reads it, and one for all readers in none."""
    copies: dict[int | None, fx.Node] = {delegates[node]: node}
    for reader in list(node.users):
        delegate = delegates.get(reader)
        if delegate not in copies:
            with node.graph.inserting_after(node):
                copies[delegate] = node.graph.node_copy(node)
        reader.replace_input_with(node, copies[delegate])
    return len(copies) > 1


class NotDelegatedError(Exception):
    """A decomposition made one of these operations, and XNNPACK does not take it: decompose the program again."""


class DecomposeOnce(XnnpackPartitioner):  # type: ignore[misc]
    """Raises NotTakenError from `partition` where the result would differ from XnnpackPartitioner's."""

    is_filtered = False  # True: ExecuTorch decomposes twice, and asks again in between

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], NodeFilter | None]:
        whole, is_taken = super().ops_to_not_decompose(ep)
        self.is_filtered = self.is_filtered or not _delegates_all(ep, whole, is_taken)
        return whole, is_taken if self.is_filtered else None

    def partition(self, exported_program: ExportedProgram) -> Any:
        whole, is_taken = super().ops_to_not_decompose(exported_program)
        if not self.is_filtered and not _delegates_all(exported_program, whole, is_taken):
            raise NotDelegatedError
        return super().partition(exported_program)


def _delegates_all(program: ExportedProgram, whole: list[Any], is_taken: NodeFilter) -> bool:
    """Whether XNNPACK takes every such operation of a program."""
    names = {name for operation in whole for name in (operation.__name__, str(operation))}  # in aten, and in edge
    return all(is_taken(node) for node in program.graph.nodes if getattr(node.target, "__name__", "") in names)
