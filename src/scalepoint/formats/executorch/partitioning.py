"""A pass before a program is partitioned: no delegate reads a dequantized tensor that is also one of its outputs.

This module imports ExecuTorch at the top, so import it only inside functions that write a file.
"""

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch import fx
from torch.export import ExportedProgram


class SeparateOutputs(ExportedProgramPassBase):  # type: ignore[misc]
    """Copies a dequantize for its readers in other delegates, and for its readers outside of delegates.

    `prepare_program` has done this for the operations of the model, but some of them are decomposed later (Mish, CELU)
    and then read their input inside and outside of a delegate. The dequantized tensor becomes an output of the
    delegate, and ChannelsLastTaggedReshapePass (ExecuTorch 1.5) puts a transpose before the readers inside too: they
    get their values in the wrong order, or the pass raises KeyError 'val'.
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
    """Make one copy for each other delegate that reads the node, and one for all readers outside of delegates."""
    copies: dict[int | None, fx.Node] = {delegates[node]: node}
    for reader in list(node.users):
        delegate = delegates.get(reader)
        if delegate not in copies:
            with node.graph.inserting_after(node):
                copies[delegate] = node.graph.node_copy(node)
        reader.replace_input_with(node, copies[delegate])
    return len(copies) > 1
