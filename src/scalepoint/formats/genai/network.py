"""A decoder as a graph: words to logits, with the keys and values of earlier words going in and out."""

from dataclasses import dataclass, field

import torch

from scalepoint.checkpoints import CacheScales
from scalepoint.formats.genai.decoder import Decoder, DecoderBlock
from scalepoint.formats.genai.expert_layout import write_mixture
from scalepoint.formats.genai.graph import MICROSOFT, GraphBuilder
from scalepoint.formats.genai.layout import pack_matrix
from scalepoint.formats.genai.rotary import Rotary

LAST = "last"  # the node that leaves the last word of every text
PAST, PRESENT = "past_key_values.{block}.{part}", "present.{block}.{part}"


@dataclass
class NetworkWriter:
    """What the blocks share while the graph is written."""

    graph: GraphBuilder
    decoder: Decoder
    lengths: tuple[str, str] = ("", "")  # of every text, less one; of the longest
    rotaries: list[Rotary] = field(default_factory=list)  # those with tables

    @property
    def cache(self) -> CacheScales | None:
        """How keys and values are kept, where not in float."""
        return self.graph.checkpoint.cache

    def write(self) -> None:
        """All of it: from input_ids to logits."""
        self.lengths = self._lengths()
        value = self._embed()
        for index, block in enumerate(self.decoder.blocks):
            value = self._block(value, index, block)
        self._head(self.norm(self._last(value), self.decoder.names.norm))

    def _lengths(self) -> tuple[str, str]:
        graph = self.graph
        counts = graph.node("ReduceSum", ["attention_mask", graph.constant([1])], keepdims=0)
        last = graph.node("Cast", [graph.node("Sub", [counts, graph.constant([1])])], to=6, name="last_positions")
        size = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), graph.constant(1)], axis=0)
        return last, graph.node("Cast", [size], to=6, name="total_length")

    def _embed(self) -> str:
        graph, decoder = self.graph, self.decoder
        value = self._look_up("input_ids", decoder.names.embedding)
        if decoder.embedding_scale != 1.0:
            value = graph.node("Mul", [value, graph.constant(decoder.embedding_scale, "float32")])
        if decoder.names.positions:
            value = graph.node("Add", [value, self._look_up("position_ids", decoder.names.positions)])
        return value

    def _look_up(self, indices: str, layer: str) -> str:
        """Rows of a table: only those that are read are dequantized."""
        graph = self.graph
        if not graph.is_packed(layer):
            table = graph.table(layer)
            return graph.to_float32(graph.node("Gather", [table, indices], name=f"{layer}.rows", axis=0), table)
        kept = graph.store_matrix(layer, pack_matrix(graph.packed(layer)))
        blocks = -(-kept.columns // kept.block)
        codes, *others = kept.names
        table = graph.store.add_view(f"{layer}.table", codes, (kept.rows, blocks * kept.block * kept.bits // 8))
        value = graph.node(
            "GatherBlockQuantized",
            [table, indices, *others],
            name=f"{layer}.rows",
            domain=MICROSOFT,
            bits=kept.bits,
            block_size=kept.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if blocks * kept.block == kept.columns:
            return value
        return graph.node("Slice", [value, *(graph.constant([each]) for each in (0, kept.columns, -1))])

    def _block(self, value: str, index: int, block: DecoderBlock) -> str:
        decoder, graph = self.decoder, self.graph
        named = f"blocks.{index}"
        given = self._write_norm(value, index, "before_attention")
        attended = self._write_norm(self._attention(given, index, block), index, "after_attention")
        if decoder.is_parallel:
            given = self._write_norm(value, index, "before_mlp") if decoder.names.has("before_mlp") else given
            both = graph.node("Add", [attended, self._mlp(given, index, block)])
            return graph.node("Add", [value, both], name=named)
        value = graph.node("Add", [value, attended], name=f"{named}.attended")
        made = self._mlp(self._write_norm(value, index, "before_mlp"), index, block)
        made = self._write_norm(made, index, "after_mlp")
        return graph.node("Add", [value, made], name=named)

    def _write_norm(self, value: str, index: int, part: str) -> str:
        names = self.decoder.names
        return self.norm(value, names.of(index, part)) if names.has(part) else value

    def norm(self, value: str, layer: str, label: str = "") -> str:
        """RMS or layer norm over the last axis, with or without weights."""
        graph, decoder, label = self.graph, self.decoder, label or layer
        name = f"{layer}.weight"
        size = decoder.hidden
        weight = graph.values(name) + decoder.norm_offset if graph.has(name) else torch.ones(size)
        inputs = [value, graph.floats(name, weight)]
        kind = "RMSNormalization" if decoder.norm == "rms" else "LayerNormalization"
        if graph.has(f"{layer}.bias"):
            inputs.append(graph.floats(f"{layer}.bias"))
        return graph.node(kind, inputs, name=f"{label}.normed", axis=-1, epsilon=decoder.epsilon)

    def _attention(self, value: str, index: int, block: DecoderBlock) -> str:
        graph, decoder, names = self.graph, self.decoder, self.decoder.names
        query, key, keyed = self._projections(value, index)
        past = [PAST.format(block=index, part=part) for part in ("key", "value")]
        present = [PRESENT.format(block=index, part=part) for part in ("key", "value")]
        tables = self._tables(block.rotary) if block.rotary else ["", ""]
        label = f"{names.block.format(block=index)}attention"
        attributes = {
            "num_heads": decoder.heads,
            "kv_num_heads": decoder.groups,
            "do_rotary": int(block.rotary is not None),
            "local_window_size": -1 if block.window is None else block.window,
            "softcap": decoder.softcap,
            "scale": decoder.head**-0.5 if decoder.scale is None else decoder.scale,
        }
        inputs = [query, key, keyed, *past, *self.lengths, *tables]
        if self.cache is not None:
            kinds = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            attributes |= {"kv_cache_bit_width": self.cache.bits, **kinds}
            inputs += ["", "", "", *self._scales(self.cache, index)]
        made = graph.node_of("GroupQueryAttention", inputs, [label, *present], domain=MICROSOFT, **attributes)
        return graph.linear(made[0], names.of(index, "o"), is_transposed=decoder.is_transposed)

    def _scales(self, cache: CacheScales, index: int) -> list[str]:
        parts = zip(("key", "value"), cache.scales[index], strict=True)
        return [self.graph.floats(f"cache.{index}.{part}_scale", scale) for part, scale in parts]

    def _projections(self, value: str, index: int) -> tuple[str, str, str]:
        """Queries, keys and values; all in the first, where they can be one product."""
        graph, decoder, names = self.graph, self.decoder, self.decoder.names
        if names.has("qkv"):
            together: str | None = graph.linear(
                value, names.of(index, "qkv"), rows=self._order(), is_transposed=decoder.is_transposed
            )
        else:
            layers = [names.of(index, part) for part in ("q", "k", "v")]
            together = graph.stack(value, layers, f"{names.block.format(block=index)}qkv")
        if together is not None and decoder.clip is not None:
            together = self._write_clip(together)
        if together is not None and not decoder.qk_norm:
            return together, "", ""
        if together is not None:
            sizes = graph.constant([decoder.heads * decoder.head, *[decoder.groups * decoder.head] * 2])
            parts = graph.node_of("Split", [together, sizes], [f"{together}.{part}" for part in "qkv"], axis=-1)
        else:
            parts = [graph.linear(value, layer) for layer in layers]
            parts = [self._write_clip(part) for part in parts] if decoder.clip is not None else parts
        if decoder.qk_norm:
            parts[:2] = [self._qk_norm(part, index, kind) for part, kind in zip(parts, "qk", strict=False)]
        return parts[0], parts[1], parts[2]

    def _order(self) -> torch.Tensor | None:
        """Rows of a product whose heads hold query, key and value together, as three blocks."""
        decoder = self.decoder
        if not decoder.is_mixed:
            return None
        rows = torch.arange(3 * decoder.heads * decoder.head).reshape(decoder.heads, 3, decoder.head)
        return rows.transpose(0, 1).reshape(-1)

    def _write_clip(self, value: str) -> str:
        limit = float(self.decoder.clip or 0.0)
        return self.graph.node("Clip", [value, *(self.graph.constant(each, "float32") for each in (-limit, limit))])

    def _qk_norm(self, value: str, index: int, part: str) -> str:
        """Over all channels, or over those of each head."""
        graph, layer = self.graph, self.decoder.names.of(index, f"{part}_norm")
        if self.decoder.qk_norm == "all":
            return self.norm(value, layer)
        heads = graph.node("Reshape", [value, graph.constant([0, 0, -1, self.decoder.head])])
        normed = self.norm(heads, layer)
        return graph.node("Reshape", [normed, graph.constant([0, 0, self._width(part)])])

    def _width(self, part: str) -> int:
        return self.decoder.head * (self.decoder.heads if part == "q" else self.decoder.groups)

    def _tables(self, rotary: Rotary) -> list[str]:
        if rotary not in self.rotaries:
            for part, table in zip(("cos", "sin"), rotary.tables(self.decoder.context), strict=True):
                self.graph.store.add(f"rotary.{len(self.rotaries)}.{part}", table.numpy())
            self.rotaries.append(rotary)
        return [f"rotary.{self.rotaries.index(rotary)}.{part}" for part in ("cos", "sin")]

    def _mlp(self, value: str, index: int, block: DecoderBlock) -> str:
        if block.has_experts:
            return write_mixture(self.graph, self.decoder, value, index, self.write_gated_mlp)
        names = self.decoder.names
        parts = {part: names.of(index, part) for part in ("gate", "up", "down", "gate_up") if names.has(part)}
        return self.write_gated_mlp(value, parts, f"{names.block.format(block=index)}mlp")

    def write_gated_mlp(self, value: str, parts: dict[str, str], label: str) -> str:
        """down(act(gate(x)) up(x)), or down(act(up(x))) where there is no gate."""
        graph, is_transposed = self.graph, self.decoder.is_transposed
        both = self._gate_and_up(value, parts, label)
        if both is not None:
            gate, up = graph.node_of("Split", [both], [f"{label}.gate", f"{label}.up"], axis=-1, num_outputs=2)
            made = graph.node("Mul", [self.act(gate), up], name=label)
        elif "gate" in parts:
            made = graph.node(
                "Mul", [self.act(graph.linear(value, parts["gate"])), graph.linear(value, parts["up"])], name=label
            )
        else:
            made = self.act(graph.linear(value, parts["up"], is_transposed=is_transposed))
        return graph.linear(made, parts["down"], is_transposed=is_transposed)

    def _gate_and_up(self, value: str, parts: dict[str, str], label: str) -> str | None:
        """Both in one product, where they are or can be one."""
        if "gate_up" in parts:
            return self.graph.linear(value, parts["gate_up"])
        return self.graph.stack(value, [parts["gate"], parts["up"]], f"{label}.gate_up") if "gate" in parts else None

    def act(self, value: str) -> str:
        graph, kind = self.graph, self.decoder.activation
        if kind == "silu":
            return graph.node("Mul", [value, graph.node("Sigmoid", [value])])
        if kind == "relu":
            return graph.node("Relu", [value])
        return graph.node("FastGelu" if kind == "gelu_tanh" else "Gelu", [value], domain=MICROSOFT)

    def _last(self, value: str) -> str:
        """The last word of every text: logits of the others are not asked for, and take much time and most memory."""
        graph = self.graph
        count = graph.node("Gather", [graph.node("Shape", ["input_ids"]), graph.constant(1)], axis=0)
        count = graph.node("Cast", [count], to=6)
        seen = graph.node("Sub", [self.lengths[1], count])
        zero, one = graph.constant(0, "int32"), graph.constant(1, "int32")
        place = graph.node("Max", [graph.node("Sub", [self.lengths[0], seen]), zero])
        place = graph.node("Min", [place, graph.node("Sub", [count, one])])
        place = graph.node("Cast", [graph.node("Reshape", [place, graph.constant([-1, 1, 1])])], to=7)
        return graph.node("GatherND", [value, place], name=LAST, batch_dims=1)

    def _head(self, value: str) -> None:
        graph, decoder = self.graph, self.decoder
        limit, head = decoder.logit_softcap, decoder.names.head
        if decoder.is_tied and not graph.is_packed(head):
            head = decoder.names.embedding
        made = graph.linear(value, head, name="" if limit else "logits")
        if limit:
            size = graph.constant(limit, "float32")
            graph.node("Mul", [graph.node("Tanh", [graph.node("Div", [made, size])]), size], name="logits")
