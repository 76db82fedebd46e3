"""A mixture of experts as one QMoE node: a router chooses, the weights of all experts lie in one tensor.

y = sum over the chosen e of p_e down_e(silu(gate_e(x)) up_e(x))       gate and up: rows in turns in one matrix
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from scalepoint.errors import ExportError
from scalepoint.formats.genai.decoder import Decoder, DecoderExperts
from scalepoint.formats.genai.graph import INT8_ACTIVATIONS, MICROSOFT, GraphBuilder
from scalepoint.formats.genai.layout import PackedMatrix, pack_matrix, stack_matrices, stored_block_size

WriteGatedMlp = Callable[[str, dict[str, str], str], str]


def write_mixture(graph: GraphBuilder, decoder: Decoder, value: str, index: int, gated: WriteGatedMlp) -> str:
    """The mixture of a block, and the expert that all tokens share where there is one."""
    experts, names = decoder.experts, decoder.names
    if experts is None or decoder.activation != "silu":
        raise ExportError(f"experts with the activation {decoder.activation!r} cannot be written: QMoE has silu")
    prefix = names.block.format(block=index)
    _check_experts(graph, experts, prefix)
    logits = graph.linear(value, names.of(index, "router"))
    logits = graph.node("Reshape", [logits, graph.constant([-1, experts.count])])
    made = _write_router(graph, experts, value, logits, prefix)
    if not decoder.has_shared:
        return made
    parts = {part: names.of(index, f"shared_{part}") for part in ("gate", "up", "down")}
    shared = gated(value, parts, f"{prefix}shared")
    share = graph.node("Sigmoid", [graph.linear(value, names.of(index, "shared_router"))])
    return graph.node("Add", [made, graph.node("Mul", [share, shared])])


def _check_experts(graph: GraphBuilder, experts: DecoderExperts, prefix: str) -> None:
    for index in range(experts.count):
        for part in experts.names:
            if not graph.is_packed(layer := _expert_layer_name(experts, prefix, part, index)):
                raise ExportError(f"{layer} stays float: QMoE takes quantized experts; give every expert a width")


def _write_router(graph: GraphBuilder, experts: DecoderExperts, value: str, logits: str, prefix: str) -> str:
    weights = graph.node("Softmax", [logits], axis=-1)
    block = min(
        stored_block_size(graph.packed(_expert_layer_name(experts, prefix, part, 0))) for part in ("gate", "up", "down")
    )
    kind, *first = _store_experts(graph, experts, prefix, ("gate", "up"), block)
    other, *second = _store_experts(graph, experts, prefix, ("down",), block)
    if kind.bits != other.bits:
        raise ExportError(
            f"{prefix}: experts of {kind.bits} bits, but their down projections of {other.bits}: QMoE takes one for all"
        )
    inputs = [value, logits, *first[:2], "", *second[:2], "", "", "", "", first[2], second[2], "", weights]
    return graph.node(
        "QMoE",
        inputs,
        name=f"{prefix}experts",
        domain=MICROSOFT,
        k=experts.used,
        activation_type="swiglu",
        activation_alpha=1.0,
        activation_beta=0.0,
        swiglu_fusion=1,
        normalize_routing_weights=int(experts.is_normalized),
        expert_weight_bits=kind.bits,
        block_size=kind.block,
        accuracy_level=INT8_ACTIVATIONS,
    )


def _store_experts(
    graph: GraphBuilder, experts: DecoderExperts, prefix: str, parts: Sequence[str], block: int
) -> tuple[PackedMatrix, str, str, str]:
    """One of the matrices, and the names of the codes, scales and zero points ("": none) of all experts."""
    first = _read_expert(graph, experts, prefix, parts, 0, block)
    scales: list[np.ndarray] = []
    zeros: list[np.ndarray] = []

    def codes() -> Iterator[np.ndarray]:
        for index in range(experts.count):
            found = _read_expert(graph, experts, prefix, parts, index, block)
            if found.kind != first.kind:
                raise ExportError(f"{prefix}: experts {index} and 0 are quantized differently: QMoE takes one for all")
            scales.append(found.scales)
            if found.zeros is not None:
                zeros.append(found.zeros)
            yield found.codes

    name, store = f"{prefix}experts.{'_'.join(parts)}", graph.store
    shape = (experts.count, first.rows, first.codes[0].size)
    store.add_pieces(f"{name}.codes", shape, np.uint8, codes())
    store.add(f"{name}.scales", np.stack(scales))
    return first, f"{name}.codes", f"{name}.scales", store.add(f"{name}.zeros", np.stack(zeros)) if zeros else ""


def _expert_layer_name(experts: DecoderExperts, prefix: str, part: str, index: int) -> str:
    return f"{prefix}{experts.names[part].format(expert=index)}"


def _read_expert(
    graph: GraphBuilder, experts: DecoderExperts, prefix: str, parts: Sequence[str], index: int, block: int
) -> PackedMatrix:
    """The matrix of one expert; rows of several parts in turns."""
    found = stack_matrices(
        [pack_matrix(graph.packed(_expert_layer_name(experts, prefix, part, index)), block) for part in parts]
    )
    rows = torch.arange(found.rows).reshape(len(parts), -1).T.reshape(-1).numpy()
    return found.select_rows(rows)
