"""Write a mixture of experts as one QMoE node: a router chooses experts, one tensor holds the weights of all experts.

y = sum over the chosen e of p_e down_e(silu(gate_e(x)) up_e(x))       gate and up: alternating rows of one matrix
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scalepoint.errors import ExportError
from scalepoint.formats.genai.decoder import Decoder, DecoderExperts
from scalepoint.formats.genai.graph import INT8_ACTIVATIONS, MICROSOFT_DOMAIN, GraphBuilder
from scalepoint.formats.genai.layout import PackedMatrix, pack_matrix, stack_matrices, stored_block_size

AddGatedMlp = Callable[[str, dict[str, str], str], str]


@dataclass(frozen=True)
class StoredExperts:
    """The initializers with one or two projections of all experts."""

    codes: str
    scales: str
    zero_points: str  # "": none
    bits: int
    block_size: int


def add_mixture(graph: GraphBuilder, decoder: Decoder, value: str, index: int, add_gated_mlp: AddGatedMlp) -> str:
    """Add the mixture of a block and, if the model has one, the expert that all tokens share."""
    experts, names = decoder.experts, decoder.names
    if experts is None or decoder.activation != "silu":
        raise ExportError(f"experts must have the activation silu (QMoE has no other), got {decoder.activation!r}")
    prefix = names.block.format(block=index)
    _check_experts(graph, experts, prefix)
    logits = graph.add_linear(value, names.layer(index, "router"))
    logits = graph.add_node("Reshape", [logits, graph.add_constant([-1, experts.count])])
    routed = _add_routed_experts(graph, experts, value, logits, prefix)
    if not decoder.has_shared_expert:
        return routed
    parts = {part: names.layer(index, f"shared_{part}") for part in ("gate", "up", "down")}
    shared = add_gated_mlp(value, parts, f"{prefix}shared")
    share = graph.add_node("Sigmoid", [graph.add_linear(value, names.layer(index, "shared_router"))])
    return graph.add_node("Add", [routed, graph.add_node("Mul", [share, shared])])


def _check_experts(graph: GraphBuilder, experts: DecoderExperts, prefix: str) -> None:
    for index in range(experts.count):
        for part in experts.names:
            layer = _expert_layer_name(experts, prefix, part, index)
            if not graph.is_quantized(layer):
                raise ExportError(f"{layer} stays float, and QMoE needs quantized experts: quantize all experts")


def _add_routed_experts(graph: GraphBuilder, experts: DecoderExperts, value: str, logits: str, prefix: str) -> str:
    routing_weights = graph.add_node("Softmax", [logits], axis=-1)
    first_expert = [_expert_layer_name(experts, prefix, part, 0) for part in ("gate", "up", "down")]
    block_size = min(stored_block_size(graph.quantized_weight(layer)) for layer in first_expert)
    gate_up = _store_experts(graph, experts, prefix, ("gate", "up"), block_size)
    down = _store_experts(graph, experts, prefix, ("down",), block_size)
    if gate_up.bits != down.bits:
        raise ExportError(
            f"{prefix}: gate and up projections of {gate_up.bits} bits and down projections of {down.bits} bits: QMoE "
            "needs one width for all experts"
        )
    inputs = [value, logits]
    inputs += [gate_up.codes, gate_up.scales, "", down.codes, down.scales, "", "", "", ""]
    inputs += [gate_up.zero_points, down.zero_points, "", routing_weights]
    return graph.add_node(
        "QMoE",
        inputs,
        name=f"{prefix}experts",
        domain=MICROSOFT_DOMAIN,
        k=experts.active_count,
        activation_type="swiglu",
        activation_alpha=1.0,
        activation_beta=0.0,
        swiglu_fusion=1,
        normalize_routing_weights=int(experts.normalizes_weights),
        expert_weight_bits=gate_up.bits,
        block_size=gate_up.block_size,
        accuracy_level=INT8_ACTIVATIONS,
    )


def _store_experts(
    graph: GraphBuilder, experts: DecoderExperts, prefix: str, parts: Sequence[str], block_size: int
) -> StoredExperts:
    """Store these projections of all experts as initializers, one expert in memory at a time."""
    first = _pack_expert(graph, experts, prefix, parts, 0, block_size)
    scales: list[np.ndarray] = []
    zero_points: list[np.ndarray] = []

    def iterate_codes() -> Iterator[np.ndarray]:
        for index in range(experts.count):
            matrix = _pack_expert(graph, experts, prefix, parts, index, block_size)
            if matrix.layout != first.layout:
                raise ExportError(
                    f"{prefix}: experts {index} and 0 are quantized differently: QMoE needs one layout for all experts"
                )
            scales.append(matrix.scales)
            if matrix.zero_points is not None:
                zero_points.append(matrix.zero_points)
            yield matrix.codes

    name, initializers = f"{prefix}experts.{'_'.join(parts)}", graph.initializers
    shape = (experts.count, first.rows, first.codes[0].size)
    initializers.add_pieces(f"{name}.codes", shape, np.uint8, iterate_codes())
    initializers.add(f"{name}.scales", np.stack(scales))
    zeros_name = initializers.add(f"{name}.zeros", np.stack(zero_points)) if zero_points else ""
    return StoredExperts(f"{name}.codes", f"{name}.scales", zeros_name, first.bits, first.block_size)


def _expert_layer_name(experts: DecoderExperts, prefix: str, part: str, index: int) -> str:
    return f"{prefix}{experts.names[part].format(expert=index)}"


def _pack_expert(
    graph: GraphBuilder, experts: DecoderExperts, prefix: str, parts: Sequence[str], index: int, block_size: int
) -> PackedMatrix:
    """Return one matrix with the projections `parts` of an expert, whose rows alternate."""
    layers = [_expert_layer_name(experts, prefix, part, index) for part in parts]
    stacked = stack_matrices([pack_matrix(graph.quantized_weight(layer), block_size) for layer in layers])
    rows = torch.arange(stacked.rows).reshape(len(parts), -1).T.reshape(-1).numpy()
    return stacked.select_rows(rows)
