"""Build the ONNX graph of a decoder: tokens to logits, with a cache of keys and values as inputs and outputs."""

from dataclasses import dataclass, field

import torch

from scalepoint.checkpoints import CacheScales
from scalepoint.formats.genai.decoder import Decoder, DecoderBlock
from scalepoint.formats.genai.expert_layout import add_mixture
from scalepoint.formats.genai.graph import MICROSOFT_DOMAIN, GraphBuilder
from scalepoint.formats.genai.layout import pack_matrix
from scalepoint.formats.genai.rotary import Rotary

LAST_TOKEN = "last"  # name of the node that selects the last token of every text  # noqa: S105
PAST, PRESENT = "past_key_values.{block}.{part}", "present.{block}.{part}"
LAST_POSITIONS, TOTAL_LENGTH = "last_positions", "total_length"  # tensors: see _add_lengths
ONNX_INT32, ONNX_INT64 = 6, 7  # TensorProto.INT32, TensorProto.INT64


@dataclass
class NetworkWriter:
    """Adds the nodes of a decoder to a graph, and keeps what its blocks share.

    Methods take and return names of tensors in the graph.
    """

    graph: GraphBuilder
    decoder: Decoder
    rotaries: list[Rotary] = field(default_factory=list)  # those whose tables are stored

    @property
    def cache(self) -> CacheScales | None:
        """How the cache of keys and values is quantized; None: it is float."""
        return self.graph.checkpoint.cache

    def write(self) -> None:
        """Add the whole network, from input_ids to logits."""
        self._add_lengths()
        value = self._add_embedding()
        for index, block in enumerate(self.decoder.blocks):
            value = self._add_block(value, index, block)
        self._add_head(self.add_norm(self._select_last_token(value), self.decoder.names.norm))

    def _add_lengths(self) -> None:
        """Add LAST_POSITIONS, the length - 1 of every text, and TOTAL_LENGTH, the length of the longest text."""
        graph = self.graph
        one = graph.add_constant([1])
        counts = graph.add_node("ReduceSum", ["attention_mask", one], keepdims=0)
        graph.add_node("Cast", [graph.add_node("Sub", [counts, one])], to=ONNX_INT32, name=LAST_POSITIONS)
        shape = graph.add_node("Shape", ["attention_mask"])
        size = graph.add_node("Gather", [shape, graph.add_constant(1)], axis=0)
        graph.add_node("Cast", [size], to=ONNX_INT32, name=TOTAL_LENGTH)

    def _add_embedding(self) -> str:
        graph, decoder = self.graph, self.decoder
        value = self._look_up("input_ids", decoder.names.embedding)
        if decoder.embedding_scale != 1.0:
            value = graph.add_node("Mul", [value, graph.add_constant(decoder.embedding_scale, "float32")])
        if decoder.names.positions:
            value = graph.add_node("Add", [value, self._look_up("position_ids", decoder.names.positions)])
        return value

    def _look_up(self, indices: str, layer: str) -> str:
        """Look up rows of an embedding; of a quantized one only these rows are dequantized."""
        graph = self.graph
        if not graph.is_quantized(layer):
            table = graph.add_float_matrix(layer)
            rows = graph.add_node("Gather", [table, indices], name=f"{layer}.rows", axis=0)
            return graph.add_cast_to_float32(rows, table)
        matrix = graph.add_matrix(layer, pack_matrix(graph.quantized_weight(layer)))
        blocks = -(-matrix.columns // matrix.block_size)
        codes, *scales_and_zeros = matrix.names
        # GatherBlockQuantized takes two axes. A tied head multiplies by the same bytes in the layout of MatMulNBits.
        row_bytes = blocks * matrix.block_size * matrix.bits // 8
        table = graph.initializers.add_view(f"{layer}.table", codes, (matrix.rows, row_bytes))
        value = graph.add_node(
            "GatherBlockQuantized",
            [table, indices, *scales_and_zeros],
            name=f"{layer}.rows",
            domain=MICROSOFT_DOMAIN,
            bits=matrix.bits,
            block_size=matrix.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if blocks * matrix.block_size == matrix.columns:
            return value
        start, end, axis = (graph.add_constant([number]) for number in (0, matrix.columns, -1))
        return graph.add_node("Slice", [value, start, end, axis])  # drops the padding of the last block

    def _add_block(self, value: str, index: int, block: DecoderBlock) -> str:
        decoder, graph = self.decoder, self.graph
        name = f"blocks.{index}"
        attention_input = self._add_block_norm(value, index, "before_attention")
        attended = self._add_block_norm(self._add_attention(attention_input, index, block), index, "after_attention")
        if decoder.is_parallel:
            has_mlp_norm = decoder.names.has("before_mlp")
            mlp_input = self._add_block_norm(value, index, "before_mlp") if has_mlp_norm else attention_input
            both = graph.add_node("Add", [attended, self._add_mlp(mlp_input, index, block)])
            return graph.add_node("Add", [value, both], name=name)
        value = graph.add_node("Add", [value, attended], name=f"{name}.attended")
        mlp_output = self._add_mlp(self._add_block_norm(value, index, "before_mlp"), index, block)
        mlp_output = self._add_block_norm(mlp_output, index, "after_mlp")
        return graph.add_node("Add", [value, mlp_output], name=name)

    def _add_block_norm(self, value: str, index: int, part: str) -> str:
        """Add a norm of a block, if the model has it."""
        names = self.decoder.names
        return self.add_norm(value, names.layer(index, part)) if names.has(part) else value

    def add_norm(self, value: str, layer: str) -> str:
        """Add an RMS or layer norm over the last axis, with or without weights."""
        graph, decoder = self.graph, self.decoder
        name = f"{layer}.weight"
        if graph.has_tensor(name):
            weight = graph.read_float32(name) + decoder.norm_offset
        else:
            weight = torch.ones(decoder.hidden_size)
        inputs = [value, graph.add_float32(name, weight)]
        kind = "RMSNormalization" if decoder.norm == "rms" else "LayerNormalization"
        if graph.has_tensor(f"{layer}.bias"):
            inputs.append(graph.add_float32(f"{layer}.bias"))
        return graph.add_node(kind, inputs, name=f"{layer}.normed", axis=-1, epsilon=decoder.norm_epsilon)

    def _add_attention(self, value: str, index: int, block: DecoderBlock) -> str:
        graph, decoder, names = self.graph, self.decoder, self.decoder.names
        # The key and value inputs are empty if the first input holds queries, keys and values.
        query, key, value_input = self._add_projections(value, index)
        past = [PAST.format(block=index, part=part) for part in ("key", "value")]
        present = [PRESENT.format(block=index, part=part) for part in ("key", "value")]
        tables = self._add_rotary_tables(block.rotary) if block.rotary else ["", ""]
        label = f"{names.block.format(block=index)}attention"
        attributes = {
            "num_heads": decoder.head_count,
            "kv_num_heads": decoder.kv_head_count,
            "do_rotary": int(block.rotary is not None),
            "local_window_size": -1 if block.window is None else block.window,
            "softcap": decoder.attention_softcap,
            "scale": decoder.head_size**-0.5 if decoder.attention_scale is None else decoder.attention_scale,
        }
        inputs = [query, key, value_input, *past, LAST_POSITIONS, TOTAL_LENGTH, *tables]
        if self.cache is not None:
            quant_types = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            attributes |= {"kv_cache_bit_width": self.cache.bits, **quant_types}
            # The three omitted inputs are position_ids, attention_bias and head_sink.
            inputs += ["", "", "", *self._add_cache_scales(self.cache, index)]
        outputs = [label, *present]
        attended = graph.add_multi_output_node(
            "GroupQueryAttention", inputs, outputs, domain=MICROSOFT_DOMAIN, **attributes
        )[0]
        return graph.add_linear(attended, names.layer(index, "o"), is_transposed=decoder.is_transposed)

    def _add_cache_scales(self, cache: CacheScales, index: int) -> list[str]:
        key_scale, value_scale = cache.scales[index]
        return [
            self.graph.add_float32(f"cache.{index}.key_scale", key_scale),
            self.graph.add_float32(f"cache.{index}.value_scale", value_scale),
        ]

    def _add_projections(self, value: str, index: int) -> list[str]:
        """Add queries, keys and values; as one product in the first result, with two empty names, where possible."""
        graph, decoder, names = self.graph, self.decoder, self.decoder.names
        qkv = self._add_joint_projection(value, index)
        if qkv is None:
            parts = [graph.add_linear(value, names.layer(index, part)) for part in "qkv"]
            parts = [self._add_clip(part) for part in parts]
        else:
            qkv = self._add_clip(qkv)
            if not decoder.qk_norm:
                return [qkv, "", ""]
            sizes = graph.add_constant([self._channels(part) for part in "qkv"])
            outputs = [f"{qkv}.{part}" for part in "qkv"]
            parts = graph.add_multi_output_node("Split", [qkv, sizes], outputs, axis=-1)
        if decoder.qk_norm:
            parts[0] = self._add_qk_norm(parts[0], index, "q")
            parts[1] = self._add_qk_norm(parts[1], index, "k")
        return parts

    def _add_joint_projection(self, value: str, index: int) -> str | None:
        """Add queries, keys and values as one product; return None if their weights cannot be stacked."""
        graph, names = self.graph, self.decoder.names
        if names.has("qkv"):
            rows, is_transposed = self._separate_qkv_rows(), self.decoder.is_transposed
            return graph.add_linear(value, names.layer(index, "qkv"), rows=rows, is_transposed=is_transposed)
        layers = [names.layer(index, part) for part in "qkv"]
        return graph.add_stacked_linear(value, layers, f"{names.block.format(block=index)}qkv")

    def _separate_qkv_rows(self) -> torch.Tensor | None:
        """Return the row order that makes separate queries, keys and values of interleaved ones; None: as stored."""
        decoder = self.decoder
        if not decoder.interleaves_qkv:
            return None
        rows = torch.arange(3 * decoder.head_count * decoder.head_size)
        return rows.reshape(decoder.head_count, 3, decoder.head_size).transpose(0, 1).reshape(-1)

    def _add_clip(self, value: str) -> str:
        """Clip queries, keys or values, if the model does."""
        limit = self.decoder.qkv_clip
        if limit is None:
            return value
        low, high = (self.graph.add_constant(bound, "float32") for bound in (-limit, limit))
        return self.graph.add_node("Clip", [value, low, high])

    def _add_qk_norm(self, value: str, index: int, part: str) -> str:
        """Add the norm of queries or keys, over all channels or over those of each head."""
        graph, layer = self.graph, self.decoder.names.layer(index, f"{part}_norm")
        if self.decoder.qk_norm == "all":
            return self.add_norm(value, layer)
        heads = graph.add_node("Reshape", [value, graph.add_constant([0, 0, -1, self.decoder.head_size])])
        normed = self.add_norm(heads, layer)
        return graph.add_node("Reshape", [normed, graph.add_constant([0, 0, self._channels(part)])])

    def _channels(self, part: str) -> int:
        """Return the number of channels of queries ("q"), keys ("k") or values ("v")."""
        return self.decoder.head_size * (self.decoder.head_count if part == "q" else self.decoder.kv_head_count)

    def _add_rotary_tables(self, rotary: Rotary) -> list[str]:
        """Return cosine and sine tables; blocks with equal angles share them."""
        if rotary not in self.rotaries:
            tables = rotary.build_tables(self.decoder.context_length)
            for part, table in zip(("cos", "sin"), tables, strict=True):
                self.graph.initializers.add(f"rotary.{len(self.rotaries)}.{part}", table.numpy())
            self.rotaries.append(rotary)
        return [f"rotary.{self.rotaries.index(rotary)}.{part}" for part in ("cos", "sin")]

    def _add_mlp(self, value: str, index: int, block: DecoderBlock) -> str:
        if block.has_experts:
            return add_mixture(self.graph, self.decoder, value, index, self.add_gated_mlp)
        names = self.decoder.names
        parts = {part: names.layer(index, part) for part in ("gate", "up", "down", "gate_up") if names.has(part)}
        return self.add_gated_mlp(value, parts, f"{names.block.format(block=index)}mlp")

    def add_gated_mlp(self, value: str, parts: dict[str, str], label: str) -> str:
        """Add down(act(gate(x)) up(x)), or down(act(up(x))) if `parts` has no gate."""
        graph, is_transposed = self.graph, self.decoder.is_transposed
        gate_up = self._add_gate_and_up(value, parts, label)
        if gate_up is not None:
            outputs = [f"{label}.gate", f"{label}.up"]
            gate, up = graph.add_multi_output_node("Split", [gate_up], outputs, axis=-1, num_outputs=2)
            hidden = graph.add_node("Mul", [self.add_activation(gate), up], name=label)
        elif "gate" in parts:
            gate = self.add_activation(graph.add_linear(value, parts["gate"]))
            hidden = graph.add_node("Mul", [gate, graph.add_linear(value, parts["up"])], name=label)
        else:
            hidden = self.add_activation(graph.add_linear(value, parts["up"], is_transposed=is_transposed))
        return graph.add_linear(hidden, parts["down"], is_transposed=is_transposed)

    def _add_gate_and_up(self, value: str, parts: dict[str, str], label: str) -> str | None:
        """Add gate and up as one product, if the checkpoint stores them as one matrix or their layouts are equal."""
        if "gate_up" in parts:
            return self.graph.add_linear(value, parts["gate_up"])
        if "gate" not in parts:
            return None
        return self.graph.add_stacked_linear(value, [parts["gate"], parts["up"]], f"{label}.gate_up")

    def add_activation(self, value: str) -> str:
        graph, kind = self.graph, self.decoder.activation
        if kind == "silu":
            return graph.add_node("Mul", [value, graph.add_node("Sigmoid", [value])])
        if kind == "relu":
            return graph.add_node("Relu", [value])
        return graph.add_node("FastGelu" if kind == "gelu_tanh" else "Gelu", [value], domain=MICROSOFT_DOMAIN)

    def _select_last_token(self, value: str) -> str:
        """Select the last token of every text: the logits of the others are not used, and need most of the memory.

        Its index among the new tokens is (text length - 1) - (number of cached tokens), clamped to the new tokens.
        """
        graph = self.graph
        shape = graph.add_node("Shape", ["input_ids"])
        count = graph.add_node("Gather", [shape, graph.add_constant(1)], axis=0)
        count = graph.add_node("Cast", [count], to=ONNX_INT32)
        cached = graph.add_node("Sub", [TOTAL_LENGTH, count])
        zero, one = graph.add_constant(0, "int32"), graph.add_constant(1, "int32")
        index = graph.add_node("Max", [graph.add_node("Sub", [LAST_POSITIONS, cached]), zero])
        index = graph.add_node("Min", [index, graph.add_node("Sub", [count, one])])
        index = graph.add_node("Reshape", [index, graph.add_constant([-1, 1, 1])])
        index = graph.add_node("Cast", [index], to=ONNX_INT64)
        return graph.add_node("GatherND", [value, index], name=LAST_TOKEN, batch_dims=1)

    def _add_head(self, value: str) -> None:
        graph, decoder = self.graph, self.decoder
        softcap, head = decoder.logit_softcap, decoder.names.head
        if decoder.has_tied_head and not graph.is_quantized(head):
            head = decoder.names.embedding
        logits = graph.add_linear(value, head, name="" if softcap else "logits")
        if softcap:
            limit = graph.add_constant(softcap, "float32")
            scaled = graph.add_node("Tanh", [graph.add_node("Div", [logits, limit])])
            graph.add_node("Mul", [scaled, limit], name="logits")
