"""Describe a decoder-only language model: its blocks, and the names of its tensors in the checkpoint.

    pre       h = x + attention(norm(x));           y = h + mlp(norm(h))
    post      h = x + norm(attention(x));           y = h + norm(mlp(h))
    sandwich  h = x + norm(attention(norm(x)));     y = h + norm(mlp(norm(h)))
    parallel  y = x + attention(norm(x)) + mlp(norm(x))

A norm or layer without a name in `TensorNames.parts` does not exist in the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scalepoint.formats.genai.rotary import Rotary

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class DecoderBlock:
    """Settings that may differ between blocks."""

    rotary: Rotary | None = None
    window: int | None = None  # tokens that attention sees, including the current one; None: all
    has_experts: bool = False


@dataclass(frozen=True)
class DecoderExperts:
    """A mixture of experts: every token is sent to `active_count` of `count` experts."""

    count: int
    active_count: int
    normalizes_weights: bool  # whether the weights of the active experts are scaled to sum 1
    names: Mapping[str, str]  # of gate, up and down, with {expert}


@dataclass(frozen=True)
class TensorNames:
    """Names of layers in the checkpoint, without ".weight" or ".bias"; those of a block follow the prefix `block`."""

    embedding: str
    norm: str
    head: str
    block: str  # with {block}
    parts: Mapping[str, str]
    positions: str = ""  # learned position embedding; "": none

    def layer(self, block: int, part: str) -> str:
        """Return the name of a layer of a block."""
        return f"{self.block.format(block=block)}{self.parts[part]}"

    def has(self, part: str) -> bool:
        return part in self.parts


@dataclass(frozen=True)
class Decoder:
    """Everything that the graph is built from, except the weights."""

    model_type: str
    vocabulary_size: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int  # channels of a head
    context_length: int
    norm_epsilon: float
    names: TensorNames
    blocks: tuple[DecoderBlock, ...]
    has_tied_head: bool
    activation: Activation = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0  # added to the stored weight of a norm
    is_parallel: bool = False  # the formula "parallel" above
    qk_norm: Literal["", "head", "all"] = ""  # norm of queries and keys: none, over each head, over all heads together
    qkv_clip: float | None = None  # limit of queries, keys and values
    attention_scale: float | None = None  # None: 1 / sqrt(head_size)
    attention_softcap: float = 0.0  # c in c tanh(scores / c); 0: none
    logit_softcap: float = 0.0  # the same for logits
    embedding_scale: float = 1.0
    is_transposed: bool = False  # the checkpoint stores matrices as (in, out)
    interleaves_qkv: bool = False  # the rows of qkv are q, k, v of the first head, then of the second, ...
    experts: DecoderExperts | None = None
    has_shared_expert: bool = False  # an expert for all tokens, in addition to the routed ones

    def layers(self, block: int) -> list[str]:
        """Return the names of all matrices of a block in the checkpoint."""
        experts = self.experts if self.blocks[block].has_experts else None
        parts = ["q", "k", "v", "qkv", "o"]
        parts += ["router"] if experts else ["gate", "up", "gate_up", "down"]
        if experts and self.has_shared_expert:
            parts += ["shared_gate", "shared_up", "shared_down", "shared_router"]
        layers = [self.names.layer(block, part) for part in parts if self.names.has(part)]
        if experts:
            prefix = self.names.block.format(block=block)
            for expert in range(experts.count):
                layers += [prefix + name.format(expert=expert) for name in experts.names.values()]
        return layers
